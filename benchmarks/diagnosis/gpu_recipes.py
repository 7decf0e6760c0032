"""Recipes of generated GPU traces: training steps of one or several ranks, and iterations of an engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import attrs
from benchmarks.diagnosis.recipe import Kind, Recipe, Recipes, Truth
from benchmarks.diagnosis.simulated_gpu import (
    COMMUNICATION,
    COMPUTE,
    ELEMENTWISE,
    FOREACH,
    GEMMS,
    Gpu,
    Program,
    mean_step_us,
    simulate,
    write,
)

RECIPES = Recipes(Kind.GPU)
PINNED, PAGEABLE = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"
STAGES = (
    ("ready", "predict", "learn", "adapt"),
    ("one", "two", "three", "four"),
    ("intake", "net", "slopes", "weights"),
)
Hook = Callable[[Gpu], None]


@attrs.define(eq=False)
class Training:
    """Training step of a model. Recipes change its sizes or add functions."""

    random: random.Random
    ranks: int = 1
    products: tuple[str, ...] = GEMMS
    """Kernels of the matrix products, used in turn."""
    product_us: tuple[float, float] = (120, 240)
    """Range of the mean duration of a matrix product."""
    gemm_us: float = attrs.field(init=False)
    elementwise_us: float = 15.0
    layers: int = 0
    upload: str = PINNED
    upload_us: float = 80.0
    reduce_us: float = 0.0
    """Transfer time of the gradients of one layer, if there are several ranks."""
    stages: tuple[str, ...] = STAGES[0]
    hooks: dict[str, list[Hook]] = attrs.field(factory=dict)
    """Functions by position: ``data``, ``layer``, ``forward``, ``backward`` and ``update``."""
    overlaps: bool = True
    """Whether gradients are averaged during the backward pass."""
    buckets: int = 0
    """Collectives per step. 0 for one per layer."""
    places: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Draw the sizes."""
        self.layers = self.random.randint(12, 20)
        self.gemm_us = self.random.uniform(*self.product_us)
        self.reduce_us = self.gemm_us * 0.8
        self.stages = self.random.choice(STAGES)

    def at(self, position: str, hook: Hook, *, rank: int | None = None) -> None:
        """Run a function at a position, on one rank or on all."""
        if rank is not None:
            self.places = (f"rank {rank}", f"rank{rank}")
        self.hooks.setdefault(position, []).append(lambda gpu: hook(gpu) if rank in {None, gpu.rank} else None)

    def _run(self, position: str, gpu: Gpu) -> None:
        for hook in self.hooks.get(position, ()):
            hook(gpu)

    def step(self, gpu: Gpu) -> Program:
        """Run one step of one rank."""
        with gpu.mark(self.stages[0]):
            gpu.op("aten::slice", 12)
            self._run("data", gpu)
            gpu.copy(self.upload, self.upload_us, waits=self.upload == PAGEABLE)
        with gpu.mark(self.stages[1]):
            for _ in range(self.layers):
                self._layer(gpu, 1)
                self._run("layer", gpu)
            self._run("forward", gpu)
        with gpu.mark(self.stages[2]):
            for _ in range(self.layers):
                self._layer(gpu, 2)
                if gpu.ranks > 1 and self.overlaps:
                    yield from self._reduce(gpu, self.reduce_us)
            self._run("backward", gpu)
            if gpu.ranks > 1 and not self.overlaps:
                buckets = self.buckets or self.layers
                for _ in range(buckets):
                    yield from self._reduce(gpu, self.reduce_us * self.layers / buckets)
        with gpu.mark(self.stages[3]):
            if gpu.ranks > 1:
                gpu.depend(COMPUTE, COMMUNICATION)
            for _ in range(3):
                gpu.launch(FOREACH, 90, op="aten::_fused_adam_")
            self._run("update", gpu)
            gpu.item()

    def _layer(self, gpu: Gpu, products: int) -> None:
        for _ in range(products):
            gpu.launch(gpu.random.choice(self.products), self.gemm_us * gpu.random.uniform(0.97, 1.03))
            gpu.launch(ELEMENTWISE, self.elementwise_us, op="aten::gelu")

    @staticmethod
    def _reduce(gpu: Gpu, transfer_us: float) -> Program:
        yield from gpu.collective("allreduce", transfer_us, transfer_us / 25)


def record(recipe: Recipe, directory: Path, seed: int) -> Truth:
    """Write the traces of a recipe. The cost is the difference to the same job without the cause."""
    steps = []
    for planted in (False, True):
        job = Training(
            random=recipe.generator(seed), ranks=recipe.options.get("ranks", 1), **recipe.options.get("sizes", {})
        )
        if planted:
            recipe.plant(job)
        gpus = simulate(job.step, seed=seed, ranks=job.ranks, steps=recipe.options.get("steps", 10))
        steps.append(mean_step_us(gpus))
    write(gpus, directory)
    cost_us = steps[1] - steps[0] if recipe.answer and recipe.options.get("has_cost", True) else None
    return Truth(cost_us=cost_us, step_us=steps[1], places=job.places)


@RECIPES.planted(
    "item-per-layer", rules="synchronisation host-sync", cure="\\.item|once|avoid", sizes={"product_us": (15, 25)}
)
def amber(job: Training) -> None:
    """Each layer reads a value of a tensor."""
    job.at("layer", Gpu.item)


@RECIPES.planted("pageable-upload", rules="pageable-copies", cure="pin")
def coral(job: Training) -> None:
    """The batch is copied from pageable memory."""
    job.upload, job.upload_us = PAGEABLE, job.random.uniform(900, 2500)


@RECIPES.planted("loader-wait", rules="data-loading", cure="num_workers | background | prefetch")
def ebony(job: Training) -> None:
    """The loader's workers are too slow."""
    wait_us = job.random.uniform(3000, 6000)

    def wait(gpu: Gpu) -> None:
        with gpu.mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            gpu.idle(wait_us)

    job.at("data", wait)


@RECIPES.planted("collection", rules="garbage-collection", cure="gc")
def fawn(job: Training) -> None:
    """Garbage collection between forward and backward pass."""
    pause_us = job.random.uniform(6000, 9000)

    def pause(gpu: Gpu) -> None:
        with gpu.frame("train.py(44): advance"), gpu.frame("Python GC"):
            gpu.idle(pause_us)

    job.at("forward", pause)


@RECIPES.planted("allocator-churn", rules="allocation allocator", cure="expandable_segments|alloc")
def gold(job: Training) -> None:
    """Each layer frees and allocates device memory."""
    free_us, allocate_us = job.random.uniform(150, 300), job.random.uniform(200, 400)

    def churn(gpu: Gpu) -> None:
        gpu.allocate("cudaFree", free_us)
        gpu.allocate("cudaMalloc", allocate_us)

    job.at("layer", churn)


@RECIPES.planted("small-kernels", rules="small-kernels host-bound launch-bound", cure="compile|fuse|graph")
def ivory(job: Training) -> None:
    """Each layer launches many kernels of a few microseconds."""
    count = job.random.randint(40, 70)

    def flock(gpu: Gpu) -> None:
        for _ in range(count):
            gpu.launch(ELEMENTWISE, 2.5, op="aten::add")

    job.at("layer", flock)


@RECIPES.planted("late-rank", rules="straggler slow-rank", cure="rank", ranks=4)
def jade(job: Training) -> None:
    """The host of one rank is late."""
    late_us, rank = job.random.uniform(4000, 7000), job.random.randrange(4)
    job.at("data", lambda gpu: gpu.op("aten::sort", late_us), rank=rank)


@RECIPES.planted(
    "no-overlap", rules="exposed-communication little-overlap no-overlap", cure="overlap|bucket|earlier", ranks=2
)
def lapis(job: Training) -> None:
    """Gradients are averaged after the backward pass."""
    job.overlaps = False


@RECIPES.control("device-bound")
def white(_: Training) -> None:
    """The device is always busy."""


@RECIPES.control("overlapped-ranks", ranks=4)
def wheat(_: Training) -> None:
    """Communication overlaps with compute, and the ranks are even."""
