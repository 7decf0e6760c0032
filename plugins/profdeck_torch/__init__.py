"""The PyTorch backend: `torch.profiler` on CUDA and CPU."""

from __future__ import annotations

from profdeck.identity import distributed_identity as identity
from profdeck_torch.backend import TorchBackend
from profdeck_torch.options import TorchOptions

__all__ = ["TorchBackend", "TorchOptions", "identity"]
