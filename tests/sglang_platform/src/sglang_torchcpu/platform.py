"""The platform, apart from the entry point: it imports SGLang, which is about to import the entry point."""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out of tree and without capabilities: SGLang then takes what is written in torch, in each of its operations."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:  # noqa: ARG002  # SGLang names it
        return "eager"

    # SGLang's second profiler makes one torch profiler for the host and one for the device: were both of them CPU, the
    # second start would end the engine.
    def get_torch_profiler_activity_str(self) -> str:
        return "PrivateUse1"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.PrivateUse1
