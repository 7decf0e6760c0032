"""Let SGLang run on the CPU in torch alone; its own CPU platform needs compiled kernels that PyPI does not have."""


def activate() -> str:
    """Return where the platform is; SGLang imports it from there."""
    return "sglang_torchcpu.platform.TorchCpuPlatform"
