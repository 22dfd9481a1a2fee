"""Real images to train on: the 1,797 handwritten digits that scikit-learn ships, enlarged to what AlexNet needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["SIZE", "Digits", "load_digits"]

SIZE = 32  # pixels of a side; the smallest that leaves one pixel after AlexNet's strides and pools
_HELD_OUT = 5  # one image of so many is for testing


class Digits(NamedTuple):
    """Images float32 [n, 3, 32, 32] from -1 to 1, and their digits int64 [n]."""

    images: np.ndarray
    digits: np.ndarray


def load_digits() -> tuple[Digits, Digits]:
    """Images to train on, and others to test with; the same ones on every call and machine.

    Every fifth image of each digit is for testing.  Raises ImportError without scikit-learn (extra ``plot``).
    """
    from sklearn import datasets

    found = datasets.load_digits()  # 8 x 8 pixels from 0 to 16; nothing is downloaded
    images = enlarge(found.images.astype("float32") / 8 - 1, SIZE)
    digits = found.target.astype("int64")
    nth = np.zeros(len(digits), "int64")  # of its digit
    for digit in range(10):
        nth[digits == digit] = np.arange((digits == digit).sum())
    held_out = nth % _HELD_OUT == _HELD_OUT - 1
    coloured = np.repeat(images[:, None], 3, axis=1)
    return Digits(coloured[~held_out], digits[~held_out]), Digits(coloured[held_out], digits[held_out])


def enlarge(images: np.ndarray, size: int) -> np.ndarray:
    """[n, h, w] to [n, size, size], bilinear; the outermost pixels keep their values."""
    for axis in (1, 2):
        length = images.shape[axis]
        places = np.linspace(0, length - 1, size, dtype="float32")
        low = np.minimum(places.astype("int64"), length - 2)
        share = (places - low).reshape([-1 if index == axis else 1 for index in range(3)])
        images = np.take(images, low, axis) * (1 - share) + np.take(images, low + 1, axis) * share
    return np.ascontiguousarray(images, "float32")
