"""The Ascend NPU backend: `torch_npu.profiler`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profdeck.plugin import library_identity as identity
    from profdeck_npu.backend import NpuBackend
    from profdeck_npu.options import NpuOptions

__all__ = ["NpuBackend", "NpuOptions", "identity"]


def __getattr__(name: str) -> Any:
    # Imported lazily: profdeck imports this package to read any trace, and reading does not need the backend.
    if name == "NpuBackend":
        from profdeck_npu.backend import NpuBackend

        return NpuBackend
    if name == "NpuOptions":
        from profdeck_npu.options import NpuOptions

        return NpuOptions
    if name == "identity":
        from profdeck.plugin import library_identity

        return library_identity
    raise AttributeError(f"module 'profdeck_npu' has no attribute '{name}'")
