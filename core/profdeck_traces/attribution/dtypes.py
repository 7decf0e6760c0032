"""Tensor data types, by their C++ names in ``Input type`` (``torch/csrc/profiler/util.cpp`` in pytorch/pytorch)."""

from __future__ import annotations

_TORCH_NAMES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short int": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


def torch_dtype(name: str) -> str | None:
    """Return the torch name of a C++ element type, or ``None`` for other input types such as ``Scalar`` or a list."""
    if not name[:1].islower():
        return None
    return _TORCH_NAMES.get(name, name.removeprefix("c10::").lower())


def bytes_of(dtype: str) -> int | None:
    """Return the size of an element in bytes, or ``None`` if the type is unknown."""
    return 1 if dtype.startswith("float8") else _BYTES.get(dtype)
