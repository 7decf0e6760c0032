"""The Ascend NPU backend: `torch_npu.profiler`."""

from __future__ import annotations

from profdeck.base.identity import distributed_identity as identity
from profdeck_npu.backend import NpuBackend
from profdeck_npu.options import NpuOptions

__all__ = ["NpuBackend", "NpuOptions", "identity"]
