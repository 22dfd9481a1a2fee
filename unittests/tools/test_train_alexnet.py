"""The second job as a user starts it: AlexNet as a pipeline on real images of digits."""

# ctest: timeout=600

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from unittests.tools import run_tool  # runs a subprocess

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None or importlib.util.find_spec("matplotlib") is None,
    reason="needs the extra plot",
)


def run(folder: Path, ranks: int, *arguments: str) -> tuple[int, str]:
    return run_tool("train_alexnet.py", folder, ranks, "--output", str(folder), *arguments, timeout=500)


def test_two_stages_learn_the_digits(tmp_path: Path) -> None:
    """Two of the four passes that the script makes by default are enough for 95 %."""
    status, output = run(tmp_path, 2, "--epochs", "2")
    assert status == 0, output
    assert output.count("segment with method: uniform; result: 0, 7, 15") == 1
    assert "stage=1, global_rank=0 ,layer_number=8" in output
    accuracies = [float(value) for value in re.findall(r"test accuracy ([0-9.]+) %", output)]
    assert len(accuracies) == 2 and accuracies[-1] >= 95.0, output
    assert "bubble planned" in output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "AlexNet, 1f1b, 2 stages" in (tmp_path / "timeline.svg").read_text(encoding="utf-8")


def test_stages_see_what_one_process_sees(tmp_path: Path) -> None:
    few = "--epochs 1 --images 48 --batch 24 --micro-batches 2".split()
    lines = []
    for ranks in (1, 2):
        status, output = run(tmp_path, ranks, *few, "--chunks", str(3 - ranks), "--schedule", "interleaved")
        assert status == 0, output
        lines.append(re.findall(r"loss ([0-9.]+), test loss ([0-9.]+), test accuracy ([0-9.]+)", output))
    np.testing.assert_allclose(np.array(lines[0], float), np.array(lines[1], float), rtol=0, atol=2e-4)


def test_mistakes_end_with_one_line(tmp_path: Path) -> None:
    status, output = run(tmp_path, 1, "--stages", "2")
    assert status == 1 and "train_alexnet.py: error: expected a number of ranks that 2 stages divide" in output
    assert "Traceback" not in output


def test_digits() -> None:
    """Of each digit every fifth image is held out; enlarging keeps the corners and is linear in between."""
    from digits import SIZE, enlarge, load_digits

    train, test = load_digits()
    assert len(train.digits) + len(test.digits) == 1797
    assert np.bincount(test.digits).min() >= 34 and np.bincount(test.digits).max() <= 36
    assert train.images.shape[1:] == (3, SIZE, SIZE) and train.images.min() == -1 and train.images.max() == 1
    ramp = np.add.outer(np.arange(4.0), 10 * np.arange(3.0)).astype("float32")[None]
    expected = np.add.outer(np.linspace(0, 3, 7), 10 * np.linspace(0, 2, 7))
    np.testing.assert_allclose(enlarge(ramp, 7)[0], expected, atol=1e-5)
