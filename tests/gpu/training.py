"""Capture training steps and other work on the device: ``python -m gpu.training NAME...``.

`CAPTURES` lists the names. Each summary is checked against an independent count of the events in the trace.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpu.report import CUDA, DEVICE, OUT, Report, compare, count, summarize, synchronize, traces
from profdeck import Profiler

FIRST, LAST, STEPS = 4, 6, 8
WIDTH, LAYERS, HEADS, SEQUENCE, BATCH, WORDS = (1024, 8, 16, 1024, 8, 8192) if CUDA else (64, 2, 4, 32, 2, 128)
REPLAYS = 5
TRITON = """
import triton
import triton.language as tl


@triton.jit
def double_kernel(x, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + index, tl.load(x + index, index < n) * 2, index < n)
"""


class Block(nn.Module):
    """A transformer decoder block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        attention = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


class Decoder(nn.Module):
    """A language model. Its forward pass returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.head(self.blocks(self.embed(tokens)))
        return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def step_flops() -> float:
    """Return the FLOPs of the linear layers and of causal attention in one training step.

    The backward pass of a linear layer needs twice the FLOPs of its forward pass. That of attention needs 2.5 times as
    many, because it recomputes the scores.
    """
    linear = 2 * BATCH * SEQUENCE * WIDTH * (LAYERS * 12 * WIDTH + WORDS)
    attention = 4 * BATCH * LAYERS * WIDTH * SEQUENCE * (SEQUENCE + 1) / 2
    return 3.0 * linear + 3.5 * attention


def profiler(name: str, **role: Any) -> Profiler:
    """Return a profiler for the run `name` that captures steps 4 to 6."""
    settings = {"output": str(OUT), "run": name, "steps": [f"{FIRST}..{LAST}"], "on_error": "raise"}
    role_settings = {f"trainer.{key.replace('__', '.')}": value for key, value in role.items()}
    return Profiler.from_config(settings={**settings, "trainer.backend": "torch", **role_settings})


def train(report: Report, name: str, model: nn.Module, **role: Any) -> None:
    """Train for eight steps with bf16 autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    tokens = torch.randint(WORDS, (BATCH, SEQUENCE), device=DEVICE)
    times_ms = []
    with profiler(name, **role) as prof:
        for step in range(STEPS):
            begin = time.perf_counter()
            with prof.capture(step):
                with prof.stage("forward"), torch.autocast(DEVICE, torch.bfloat16):
                    loss = model(tokens)
                with prof.stage("backward"):
                    loss.backward()
                with prof.stage("update"):
                    optimizer.step()
                    optimizer.zero_grad()
                synchronize()
            times_ms.append((time.perf_counter() - begin) * 1e3)
    report.figure(f"{name} plain step ms", round(statistics.median([*times_ms[2:FIRST], times_ms[-1]]), 1))
    report.figure(f"{name} captured step ms", round(times_ms[FIRST + 1], 1))  # the middle step of the capture


def repeat(name: str, work: Callable[[int], object]) -> None:
    """Call `work` with the step number in each of eight steps."""
    with profiler(name) as prof:
        for step in range(STEPS):
            with prof.capture(step):
                work(step)
                synchronize()


def bf16(report: Report) -> None:
    """Capture shapes and FLOPs, and check the FLOP count."""
    train(report, "bf16", Decoder().to(DEVICE), options__record_shapes=True, options__with_flops=True)
    (rank,) = summarize("bf16")["ranks"]
    expected = step_flops() * (LAST - FIRST + 1)
    flops = rank.get("product_flops") or 0.0
    detail = f"{flops / 1e12:.4g} TFLOP, expected {expected / 1e12:.4g}"
    report.check("bf16 product_flops", abs(flops - expected) < 0.02 * expected, detail)


def rich(report: Report) -> None:
    """Capture stacks, modules and memory events. On a GPU, also capture an allocator snapshot."""
    options = {f"options__{name}": True for name in ("record_shapes", "with_stack", "with_modules", "profile_memory")}
    train(report, "rich", Decoder().to(DEVICE), **options, **({"options__memory_snapshot": True} if CUDA else {}))
    if CUDA:
        (path,) = OUT.glob("rich/step_*/trainer/*.memory.pickle")
        snapshot = pickle.loads(path.read_bytes())  # noqa: S301  # written by this process
        entries = sum(map(len, snapshot["device_traces"]))
        report.check("memory snapshot", entries > 0, f"{entries} entries, {path.stat().st_size} bytes")


def accumulation(report: Report) -> None:
    """Capture two mini-batches with a window of two cycles."""
    model = Decoder().to(DEVICE)
    tokens = torch.randint(WORDS, (BATCH, SEQUENCE), device=DEVICE)
    with profiler("accumulation", window={"warmup": 1, "active": 1, "repeat": 2}) as prof:
        for step in range(STEPS):
            with prof.capture(step):
                for number in range(4):
                    with torch.autocast(DEVICE, torch.bfloat16):
                        model(tokens).backward()
                    prof.step(number, "mini_batch")
    trace_count = len(traces("accumulation"))
    report.check("accumulation wrote two traces", trace_count == 2, trace_count)


def device_only(report: Report) -> None:
    """Capture device activity without host activity."""
    train(report, "device_only", Decoder().to(DEVICE), options__activities=["cuda"])


def graph(report: Report) -> None:
    """Replay a CUDA graph and check the number of graph launches."""
    matrix, result = (torch.randn(512, 512, device="cuda") for _ in range(2))

    def work() -> None:
        x = matrix
        for _ in range(20):
            x = torch.relu(x @ matrix * 0.01)
        result.copy_(x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # cuBLAS must allocate its workspace before graph capture
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        work()
    repeat("graph", lambda _: [captured.replay() for _ in range(REPLAYS)])
    launches = summarize("graph")["ranks"][0]["graph_launches"]
    report.check("graph launches", launches == REPLAYS * (LAST - FIRST + 1), launches)


def graph_inside(report: Report) -> None:
    """Create a CUDA graph while profdeck records."""
    matrix = torch.randn(256, 256, device="cuda")
    matrix @ matrix
    captured = torch.cuda.CUDAGraph()

    def work(step: int) -> None:
        if step == FIRST:
            torch.cuda.synchronize()
            with torch.cuda.graph(captured):
                matrix @ matrix
        if step >= FIRST:
            captured.replay()

    repeat("graph_inside", work)


def streams(report: Report) -> None:
    """Copy from pinned memory on a second stream during matrix multiplications."""
    side, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    host = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(2**26, dtype=torch.uint8, device="cuda")

    def work(_: int) -> None:
        with torch.cuda.stream(side):
            target.copy_(host, non_blocking=True)
        for _ in range(10):
            matrix @ matrix

    repeat("streams", work)
    stream_count = count(traces("streams")[0])["streams"]
    report.check("trace contains both streams", stream_count >= 2, stream_count)


def triton_kernel(report: Report) -> None:
    """Run a custom Triton kernel and check its name in the summary."""
    try:
        import triton  # noqa: F401
    except ImportError:
        report.figure("triton_kernel", "triton is not installed")
        return
    (OUT / "double.py").write_text(TRITON)
    sys.path.insert(0, str(OUT))
    from double import double_kernel

    x = torch.ones(2**22, device="cuda")
    repeat("triton_kernel", lambda _: double_kernel[(2**12,)](x, x.numel(), BLOCK=1024))
    names = {kernel["name"] for kernel in summarize("triton_kernel")["ranks"][0]["kernels"]}
    report.check("summary contains the Triton kernel", any("double_kernel" in name for name in names), names)


def compiled(report: Report) -> None:
    """Capture a model compiled with the default mode of torch.compile."""
    train(report, "compiled", torch.compile(Decoder().to(DEVICE)))


def reduce_overhead(report: Report) -> None:
    """Capture a model compiled with CUDA graphs."""
    torch._dynamo.reset()
    train(report, "reduce_overhead", torch.compile(Decoder().to(DEVICE), mode="reduce-overhead"))
    launches = summarize("reduce_overhead")["ranks"][0]["graph_launches"]
    report.check("reduce_overhead launches graphs", launches > 0, launches)


CAPTURES = (
    bf16, rich, accumulation, device_only, graph, graph_inside, streams, triton_kernel, compiled, reduce_overhead,
)  # fmt: skip


def main() -> None:
    report = Report()
    torch.manual_seed(0)
    for capture in CAPTURES:
        if capture.__name__ in sys.argv[1:]:
            with report.attempt(capture.__name__):
                capture(report)
                if traces(capture.__name__):
                    compare(report, capture.__name__)
    report.finish()


if __name__ == "__main__":
    main()
