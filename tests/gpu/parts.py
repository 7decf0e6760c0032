"""Parts of `make gpu`, sorted by importance."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

VLLM = {
    "HF_HUB_OFFLINE": "1",
    # The parts call torch.cuda.is_available(), and a process forked after that cannot use CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "profdeck",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=100")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@attrs.frozen(kw_only=True)
class Part:
    """A program that the runner starts with a time limit."""

    name: str
    backend: str
    """Backend under test, as listed in docs/hardware.md."""
    feature: str
    """Feature under test, as listed in docs/hardware.md."""
    command: tuple[str, ...]
    """Arguments of the Python interpreter. The runner replaces ``{out}`` with the part's directory."""
    limit_s: float
    needs: tuple[str, ...] = ("torch",)
    """Required modules, or ``cuda`` for a CUDA device. If a requirement is missing, the runner skips the part."""
    alone: bool = True
    """True if the part measures time and must run alone."""
    environment: Mapping[str, str] = attrs.field(factory=dict)


PARTS = (
    Part(
        name="probe", backend="torch", feature="Peak rates of matrix multiplications and copies", limit_s=40,
        command=("-m", "gpu.probe"),
    ),
    Part(
        name="cuda_tests", backend="torch", feature="Tests marked `cuda`", limit_s=75,
        needs=("torch", "cuda", "pytest"), command=(*PYTEST, "-m", "cuda", "tests/integration/test_cuda.py"),
    ),
    Part(
        name="training", backend="torch", feature="bf16 training with stacks, memory snapshots and windows", limit_s=90,
        command=("-m", "gpu.training", "bf16", "rich", "accumulation"),
    ),
    Part(
        name="device_features", backend="torch", feature="CUDA graphs, streams, Triton, device-only captures",
        limit_s=70, needs=("torch", "cuda"),
        command=("-m", "gpu.training", "device_only", "graph", "graph_inside", "streams", "triton_kernel"),
    ),
    Part(
        name="faults", backend="torch", feature="Findings report known faults", limit_s=90,
        command=("-m", "gpu.faults"),
    ),
    Part(
        name="captured_step", backend="torch", feature="Cost of a captured step", limit_s=120,
        command=("-m", "gpu.cost", "captured_step"),
    ),
    Part(
        name="idle_step", backend="torch", feature="Cost of an idle step", limit_s=60,
        command=("-m", "gpu.cost", "idle_step"),
    ),
    Part(
        name="slow_rank", backend="torch", feature="Findings report the slow rank of two", limit_s=100,
        command=(*TORCHRUN, "2", "-m", "gpu.distributed", "slow"),
    ),
    # The remaining parts do not measure time, so the runner runs several of them at the same time.
    Part(
        name="nccl", backend="torch", feature="NCCL with one rank", limit_s=60, needs=("torch", "cuda"), alone=False,
        command=(*TORCHRUN, "1", "-m", "gpu.distributed", "nccl"),
    ),
    Part(
        name="shared_gpu", backend="torch", feature="Two ranks share a GPU and take turns", limit_s=100, alone=False,
        needs=("torch", "cuda"), command=(*TORCHRUN, "2", "-m", "gpu.distributed", "shared"),
    ),
    Part(
        name="host_ranks", backend="torch", feature="Two ranks on the CPU of a GPU host", limit_s=100, alone=False,
        command=(*TORCHRUN, "2", "-m", "gpu.distributed", "host"),
    ),
    Part(
        name="leases", backend="torch", feature="Recording after the lease holder is killed", limit_s=100, alone=False,
        command=("-m", "gpu.leases"),
    ),
    Part(
        name="vllm_eager", backend="vllm", feature="Captures with Triton attention, without CUDA graphs", limit_s=170,
        alone=False, needs=("torch", "vllm"), command=("-m", "gpu.engine", "eager"), environment=VLLM,
    ),
    Part(
        name="compile", backend="torch", feature="torch.compile in default and reduce-overhead modes", limit_s=110,
        alone=False, needs=("torch", "cuda", "triton"),
        command=("-m", "gpu.training", "compiled", "reduce_overhead"),
    ),
    Part(
        name="vllm_graphs", backend="vllm", feature="Captures with torch.compile and CUDA graphs", limit_s=170,
        alone=False, needs=("torch", "cuda", "vllm"), command=("-m", "gpu.engine", "graphs"), environment=VLLM,
    ),
    Part(
        name="demo", backend="torch", feature="`profdeck demo`", limit_s=180, alone=False,
        command=("-m", "profdeck", "demo", "--output", "{out}/demo"),
    ),
    Part(
        name="nsys", backend="torch", feature="Nsight Systems ranges", limit_s=60, alone=False,
        needs=("torch", "cuda"), command=("-m", "gpu.nsys"),
    ),
    Part(
        name="torch_tests", backend="torch", feature="Tests marked `torch`", limit_s=200, alone=False,
        needs=("torch", "cuda", "pytest", "xdist"),
        command=(
            *PYTEST, "-n", "6", "--dist", "loadfile", "-m", "torch and not long", "--ignore",
            "tests/integration/test_cuda.py", "--ignore", "tests/integration/test_chaos.py", "--ignore",
            "tests/integration/test_readme.py", "--ignore-glob", "*/tests/integration/*/*", "tests/integration",
        ),
    ),
)  # fmt: skip
