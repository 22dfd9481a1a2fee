"""One table of element types: by their Paddle names in the manifest, by safetensors' codes in the files."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import CheckpointError, UsageError

__all__ = ["CODES", "code_of", "dtype_name", "itemsize", "name_of_code", "numpy_dtype"]

CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_NAMES = {code: name for name, code in CODES.items()}


def dtype_name(dtype: Any, what: str) -> str:
    """``"float32"`` for ``paddle.float32`` or NumPy's; :class:`UsageError` for one that no file can hold.

    NumPy has no bfloat16: Paddle gives its bits as uint16, which therefore means bfloat16 here.
    """
    name = str(np.dtype(dtype)) if isinstance(dtype, (np.dtype, type)) else str(dtype).rpartition(".")[2]
    name = "bfloat16" if name == "uint16" else name
    if name not in CODES:
        raise UsageError(f"{what} has dtype {name}, which a checkpoint cannot hold; expected one of {sorted(CODES)}")
    return name


def code_of(name: str) -> str:
    """The code in a safetensors header."""
    return CODES[name]


def name_of_code(code: str, what: str) -> str:
    """The name for a code in a safetensors header."""
    if code not in _NAMES:
        raise CheckpointError(f"{what} has dtype {code!r}, expected one of {sorted(_NAMES)}")
    return _NAMES[code]


def numpy_dtype(name: str) -> Any:
    """The little-endian NumPy dtype that holds the bits of ``name``."""
    return np.dtype(np.uint16 if name == "bfloat16" else name).newbyteorder("<")


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return int(numpy_dtype(name).itemsize)
