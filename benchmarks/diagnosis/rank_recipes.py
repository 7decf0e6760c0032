"""Recipes for multi-rank jobs on the CPU, started by torchrun with the gloo backend. The default is two ranks."""

from __future__ import annotations

import gc

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.diagnosis.recipe import Kind, Recipes
from benchmarks.diagnosis.training_job import Batch, TrainingJob

RECIPES = Recipes(Kind.RANKS)


@RECIPES.planted(
    "slow-host", rules="straggler slow-rank python python-code", cure="rank|vectori|native|compiled", stacks=True
)
def agate(job: TrainingJob) -> None:
    """Run pure Python on one rank in each step."""
    text = job.random.randbytes(job.draw(200_000, 400_000))
    rank = job.draw(0, 1)

    def facet() -> int:
        total = 0
        for symbol in text:  # planted
            total ^= symbol
        return total

    job.plant(1, facet, rank=rank)


@RECIPES.planted("larger-batches", rules="straggler imbalance slow-rank data-imbalance", cure="same|balance|even|equal")
def beryl(job: TrainingJob) -> None:
    """Process a second, larger batch on one rank."""
    rank = job.draw(0, 1)
    extra = torch.rand(job.batch_size * job.draw(2, 4), job.features)

    def facet() -> None:
        job.model(extra).mean().backward()  # planted

    job.plant(1, facet, rank=rank)


@RECIPES.planted("collection-on-one", rules="garbage-collection straggler slow-rank", cure="gc", stacks=True, ranks=3)
def citrine(job: TrainingJob) -> None:
    """Collect garbage on one of three ranks in each step."""
    kept = [[number] for number in range(job.draw(80_000, 150_000))]

    def shard() -> None:
        assert kept
        gc.collect()  # planted

    job.plant(1, shard, rank=job.draw(0, 2))


@RECIPES.planted(
    "checkpoint-on-one", rules="checkpoint straggler slow-rank", cure="async|background|less often", stacks=True
)
def diamond(job: TrainingJob) -> None:
    """Write a checkpoint on rank 0 in each step, while the other rank waits."""
    extra = torch.rand(job.draw(4_000_000, 8_000_000))

    def cut() -> None:
        torch.save({"a": job.model.state_dict(), "b": extra}, job.scratch / "stone")  # planted

    job.plant(0, cut, rank=0)


@RECIPES.planted(
    "late-data", rules="data-loading straggler slow-rank", cure="num_workers|background|prefetch|ahead", stacks=True
)
def emerald(job: TrainingJob) -> None:
    """Read the batches of one rank from a compressed file."""
    path = job.scratch / f"vein{job.rank}"
    rows = job.draw(5000, 8000)
    np.savez_compressed(path, x=np.random.default_rng(0).random((rows, 64), dtype=np.float32))

    def seam() -> Batch:
        with np.load(path.with_suffix(".npz")) as document:  # planted
            flat = torch.from_numpy(document["x"]).flatten()[: job.batch_size * job.features]
        batch = flat.view(job.batch_size, job.features)
        return batch, batch

    job.feed(iter(seam, None), rank=job.draw(0, 1))


@RECIPES.planted(
    "large-collective",
    rules="slow-collective exposed-communication",
    cure="bucket|overlap|compress|smaller|bf16|network|link",
)
def garnet(job: TrainingJob) -> None:
    """Average a large tensor in each step. The result is not needed until later."""
    large = torch.rand(job.draw(6_000_000, 10_000_000))
    job.plant(3, lambda: dist.all_reduce(large))
    job.place = ()


@RECIPES.planted("many-collectives", rules="small-collectives", cure="bucket|one|flatten|larger|fuse", stacks=True)
def jasper(job: TrainingJob) -> None:
    """Average many small tensors in each step, each in its own collective."""
    small = [torch.rand(16) for _ in range(job.draw(60, 120))]

    def grains() -> None:
        for tensor in small:
            dist.all_reduce(tensor)  # planted

    job.plant(3, grains)


@RECIPES.planted(
    "alternating-work", rules="imbalance data-imbalance uneven-batches", cure="balance|even|same|equal", in_turn=True
)
def onyx(job: TrainingJob) -> None:
    """Run extra work on a different rank in each step."""
    extra = torch.rand(job.batch_size * job.draw(3, 5), job.features)

    def band() -> None:
        if job.step % job.ranks == job.rank:
            job.model(extra).mean().backward()

    job.plant(1, band)
    job.place = ()


@RECIPES.planted("needless-barriers", rules="small-collectives barrier barriers", cure="barrier|remove", stacks=True)
def opal(job: TrainingJob) -> None:
    """Run many barriers in each step."""
    count = job.draw(40, 80)

    def fire() -> None:
        for _ in range(count):
            dist.barrier()  # planted

    job.plant(2, fire)


@RECIPES.control("even-ranks", tolerates="exposed-communication")
def topaz(_: TrainingJob) -> None:
    """Do the same work on both ranks. The collective isn't overlapped, so a finding about it is allowed."""


@RECIPES.control(
    "three-even-ranks",
    stacks=True,
    ranks=3,
    tolerates="profiler-overhead profiler exposed-communication oversubscription",
)
def zircon(_: TrainingJob) -> None:
    """Do the same work on three ranks and record stacks. A machine with two cores is overloaded."""
