"""Simulated GPU jobs for the recipes: training, pipelines, mixtures of experts, and inference engines.

Recipes change a job's sizes, or add hooks at given points in its step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import attrs
from benchmarks.diagnosis.simulated_gpu import (
    COMMUNICATION,
    COMPUTE,
    ELEMENTWISE,
    FOREACH,
    GEMMS,
    Gpu,
    Program,
)

PINNED, PAGEABLE = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"
SAMPLER = "void at::native::sbtopk::gatherTopK<float, unsigned int, 1, false>(at::cuda::detail::TensorInfo<float>)"
_SHAPES = {"Input Dims": [[2048, 1024], [1024, 1024]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
_STAGES = (
    ("ready", "predict", "learn", "adapt"),
    ("one", "two", "three", "four"),
    ("intake", "net", "slopes", "weights"),
)
Hook = Callable[[Gpu], None]


@attrs.define(eq=False, kw_only=True)
class GpuJob:
    """Base class for simulated jobs. Subclasses draw their sizes from `random`."""

    random: random.Random
    ranks: int = 1
    places: tuple[str, ...] = ()
    """Accepted places. A diagnosis has the correct place if its text contains one of them."""
    is_even: bool = False
    """True if the additional work of the selected ranks is divided evenly among all ranks."""
    hooks: dict[str, list[Hook]] = attrs.field(factory=dict)
    after_last_step: Hook = attrs.field(default=lambda _: None)
    """Hook that changes a rank's events before they are written."""
    prefix: ClassVar[str] = "ProfilerStep#"
    """Prefix of step names."""

    def at(self, position: str, hook: Hook, *, rank: int | None = None) -> None:
        """Add a hook at a given point in the step, on one rank or on all ranks."""
        if rank is not None:
            self.be_at_rank(rank)
        elif stage := self.stage_of(position):
            self.places = (stage,)
        self.hooks.setdefault(position, []).append(lambda gpu: hook(gpu) if rank in {None, gpu.rank} else None)

    def stage_of(self, position: str) -> str | None:  # noqa: ARG002  # jobs with stages override this method
        """Return the stage that contains a position, or None if the job has no stages."""
        return None

    def be_at_rank(self, rank: int) -> None:
        """Set the rank that the planted cause affects."""
        self.places = (f"rank {rank}", f"rank{rank}")

    def run(self, position: str, gpu: Gpu) -> None:
        """Run the hooks at a position."""
        for hook in self.hooks.get(position, ()):
            hook(gpu)

    def step(self, gpu: Gpu) -> Program:
        """Return the program for one step of one rank."""
        raise NotImplementedError


@attrs.define(eq=False, kw_only=True)
class Training(GpuJob):
    """Training step: upload, forward pass, backward pass with gradient averaging, and update.

    Positions: ``data``, ``layer``, ``forward``, ``backward layer``, ``backward`` and ``update``.
    """

    products: tuple[str, ...] = GEMMS
    """Kernel names for matrix products."""
    product_us: tuple[float, float] = (120, 240)
    """Range from which the mean duration of a matrix product is drawn."""
    elementwise_us: float = 15.0
    upload: str = PINNED
    upload_us: float = 80.0
    overlaps: bool = True
    """True if gradients are averaged during the backward pass instead of after it."""
    buckets: int = 0
    """Number of collectives after the backward pass; 0 for one per layer."""
    bytes_per_us: float = 25_000.0
    """Bandwidth of a collective."""
    collective_us: float = 20.0
    """Fixed part of a collective's duration, added to the time for its data."""
    extra_us: float = 0.0
    """Additional work per layer on the ranks that `has_extra` selects."""
    has_extra: Callable[[Gpu], bool] = attrs.field(default=lambda _: True)
    length: float = 1.0
    """Sequence length relative to the mean."""
    has_modules: bool = False
    """True if module frames, shapes and autograd sequence numbers are recorded."""
    function: str | None = None
    """Python frame around each step. None: no stacks are recorded."""
    reads_loss: bool = True
    broadcasts: int = 0
    """Number of broadcasts after the update. Each one sends the weights of one layer."""
    layers: int = attrs.field(init=False)
    gemm_us: float = attrs.field(init=False)
    gradient_bytes: float = attrs.field(init=False)
    """Size of one layer's gradients."""
    stages: tuple[str, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Draw the sizes."""
        self.layers = self.random.randint(8, 12)
        self.gemm_us = self.random.uniform(*self.product_us)
        self.gradient_bytes = 0.7 * self.gemm_us * 25_000
        self.stages = self.random.choice(_STAGES)

    def step(self, gpu: Gpu) -> Program:
        """Return the program for one step."""
        with gpu.frame(self.function) if self.function else nullcontext():
            yield from self._stages(gpu)

    def _stages(self, gpu: Gpu) -> Program:
        with gpu.mark(self.stages[0]):
            gpu.op("aten::slice", 12)
            self.run("data", gpu)
            gpu.copy(self.upload, self.upload_us, waits=self.upload == PAGEABLE)
        first = gpu.sequence
        with gpu.mark(self.stages[1]):
            self.forward(gpu, lambda: self.run("layer", gpu))
            self.run("forward", gpu)
        with gpu.mark(self.stages[2]):
            for layer in reversed(range(self.layers)):
                self.backward(gpu, first + layer)
                self.run("backward layer", gpu)
                if gpu.ranks > 1 and self.overlaps:
                    yield from self._reduce(gpu, self.gradient_bytes)
            self.run("backward", gpu)
            if gpu.ranks > 1 and not self.overlaps:
                buckets = self.buckets or self.layers
                for _ in range(buckets):
                    yield from self._reduce(gpu, self.gradient_bytes * self.layers / buckets)
        with gpu.mark(self.stages[3]):
            yield from self._update(gpu)

    def _update(self, gpu: Gpu) -> Program:
        if gpu.ranks > 1:
            gpu.depend(COMPUTE, COMMUNICATION)
        for _ in range(3):
            gpu.launch(FOREACH, 90, op="aten::_fused_adam_")
        self.run("update", gpu)
        for _ in range(self.broadcasts):
            yield from gpu.collective("broadcast", self.collective_us + self.gradient_bytes / 10_000, 4)
        if self.broadcasts:
            gpu.depend(COMPUTE, COMMUNICATION)
        if self.reads_loss:
            gpu.item()

    def stage_of(self, position: str) -> str | None:
        """Return the stage that contains a position, or None for positions inside a layer."""
        index = {"data": 0, "forward": 1, "backward": 2, "update": 3}.get(position)
        return None if index is None else self.stages[index]

    def forward(self, gpu: Gpu, after_layer: Callable[[], None] = lambda: None) -> None:
        """Run the forward pass of all layers."""
        with gpu.frame("nn.Module: Model_0") if self.has_modules else nullcontext():
            for _ in range(self.layers):
                about = {**_SHAPES, "Sequence number": gpu.sequence} if self.has_modules else {}
                gpu.sequence += 1
                self.layer(gpu, 1, **about)
                if self.extra_us and (self.is_even or self.has_extra(gpu)):
                    gpu.launch(GEMMS[4], self.extra_us / (gpu.ranks if self.is_even else 1))
                after_layer()

    def backward(self, gpu: Gpu, sequence: int) -> None:
        """Run the backward pass of the layer with this sequence number."""
        self.layer(gpu, 2, **({"Sequence number": sequence, "Fwd thread id": 1} if self.has_modules else {}))

    def layer(self, gpu: Gpu, products: int, **about: Any) -> None:
        """Run one layer with `products` matrix products. Pass the keyword arguments to their operators."""
        for _ in range(products):
            time_us = self.gemm_us * self.length * gpu.random.uniform(0.97, 1.03)
            gpu.launch(gpu.random.choice(self.products), time_us, blocks=self.gemm_us * self.length, **about)
            gpu.launch(ELEMENTWISE, self.elementwise_us * self.length, op="aten::gelu")

    def _reduce(self, gpu: Gpu, size_bytes: float) -> Program:
        duration_us = self.collective_us + size_bytes / self.bytes_per_us
        yield from gpu.collective("allreduce", duration_us, size_bytes / 1e6)


@attrs.define(eq=False, kw_only=True)
class Experts(Training):
    """Training step in which each layer exchanges tokens with experts on other ranks."""

    exchange_us: float = 20.0
    """Duration of one token exchange."""
    loads: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    """Load of each rank's experts, relative to the mean."""

    def step(self, gpu: Gpu) -> Program:
        """Return the program for one step."""
        with gpu.mark(self.stages[1]):
            for _ in range(self.layers):
                self.layer(gpu, 1)
                yield from gpu.collective("all_to_all", self.exchange_us, 2)
                gpu.depend(COMPUTE, COMMUNICATION)
                for _ in range(2):
                    gpu.launch(gpu.random.choice(GEMMS), self.gemm_us * self.loads[gpu.rank] / 2)
                yield from gpu.collective("all_to_all", self.exchange_us, 2)
                gpu.depend(COMPUTE, COMMUNICATION)
        with gpu.mark(self.stages[3]):
            gpu.launch(FOREACH, 90, op="aten::_fused_adam_")
            gpu.item()


@attrs.define(eq=False, kw_only=True)
class Pipeline(Training):
    """Pipeline-parallel step. The forward passes of all microbatches run before the backward passes."""

    microbatches: int = 32
    work_us: float = 12_000.0
    """Total time of one rank's forward passes per step, over all microbatches."""

    def step(self, gpu: Gpu) -> Program:
        """Return the program for one step."""
        last = gpu.ranks - 1
        share_us = self.work_us / self.microbatches
        for factor, source, target in ((1, gpu.rank - 1, gpu.rank + 1), (2, gpu.rank + 1, gpu.rank - 1)):
            for _ in range(self.microbatches):
                if 0 <= source <= last:
                    yield from gpu.collective("sendrecv", 15, 1, (min(source, gpu.rank), max(source, gpu.rank)))
                    gpu.depend(COMPUTE, COMMUNICATION)
                gpu.launch(GEMMS[0], share_us * factor * 0.6)
                gpu.launch(GEMMS[1], share_us * factor * 0.4)
                if 0 <= target <= last:
                    yield from gpu.collective("sendrecv", 15, 1, (min(target, gpu.rank), max(target, gpu.rank)))
        gpu.launch(FOREACH, 90, op="aten::_fused_adam_")
        gpu.item()


@attrs.define(eq=False, kw_only=True)
class Engine(GpuJob):
    """Inference engine that decodes with a CUDA graph. Positions: ``before``, ``sample`` and ``after``."""

    prefix: ClassVar[str] = "execute_context_"
    graphs: bool = True
    prefill_every: int = 0
    """Interval, in iterations, at which a prefill joins the decode batch; 0 for no prefills."""
    prefill_tokens: int = 0
    drafts: int = 0
    """Number of draft tokens per request."""
    rejected: int = 0
    """Number of draft tokens rejected per request."""
    kernel_us: float = attrs.field(init=False)
    kernels: int = attrs.field(init=False)
    requests: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Draw the sizes."""
        self.kernel_us = self.random.uniform(18, 30)
        self.kernels = self.random.randint(90, 140)
        self.requests = self.random.randint(8, 32)

    def step(self, gpu: Gpu) -> Program:
        """Return the program for one iteration."""
        self.run("before", gpu)
        prefill = bool(self.prefill_every) and gpu.step % self.prefill_every == self.prefill_every - 1
        context = f"1({self.prefill_tokens})" if prefill else "0(0)"
        tokens = self.requests * (1 + self.drafts)
        drafted = f"_draft_{self.requests * self.drafts}" if self.drafts else ""
        drafted += f"_rejected_{self.requests * self.rejected}" if self.rejected else ""
        with gpu.mark(f"execute_context_{context}_generation_{self.requests}({tokens}){drafted}"):
            gpu.op("aten::index_copy_", 30)
            factor = 1 + self.prefill_tokens / 100 if prefill else 1
            kernels = [(GEMMS[number % len(GEMMS)], self.kernel_us * factor) for number in range(self.kernels)]
            if self.graphs and not prefill:
                gpu.graph(kernels)
            else:
                for name, duration in kernels:
                    gpu.launch(name, duration, host=45)
            gpu.launch(SAMPLER, 40, op="aten::topk")
            self.run("sample", gpu)
            gpu.copy("Memcpy DtoH (Device -> Pinned)", 2)
            gpu.sync(COMPUTE)
        self.run("after", gpu)
        gpu.idle(40)
        yield from ()
