"""Recipes of one training process on the CPU. Names of functions are arbitrary: rules must recognise causes."""

from __future__ import annotations

import gc
import json
import logging
import time
import zlib

import numpy as np
import torch
from benchmarks.diagnosis.recipe import Kind, Recipes
from benchmarks.diagnosis.training_job import Batch, TrainingJob
from torch import Tensor

RECIPES = Recipes(Kind.JOB)
_LOADING = {"rules": "data-loading", "cure": "num_workers | background | prefetch | ahead"}


def _pack(job: TrainingJob, kilobytes: int) -> list[bytes]:
    """Return one compressed JSON document per batch."""
    numbers = [job.random.random() for _ in range(kilobytes * 50)]
    return [zlib.compress(json.dumps(numbers).encode())] * 4


@RECIPES.planted("loader-in-process", stacks=True, **_LOADING)
def alder(job: TrainingJob) -> None:
    """A DataLoader without workers decodes each batch in the main process."""
    documents = _pack(job, job.draw(200, 400))
    features, size = job.features, job.batch_size

    class Leaves:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Batch:
            first = json.loads(zlib.decompress(documents[index % 4]))[0]  # planted
            return torch.full((size, features), first), torch.ones(size, features)

    job.feed(torch.utils.data.DataLoader(Leaves(), batch_size=None))


@RECIPES.planted("file-reads", stacks=True, **_LOADING)
def birch(job: TrainingJob) -> None:
    """Each step reads and decompresses its batch from a file, without a DataLoader."""
    path = job.scratch / "leaf"
    rows = job.draw(3000, 6000)
    np.savez_compressed(path, x=np.random.default_rng(0).random((rows, 64), dtype=np.float32))

    def catkin() -> Batch:
        with np.load(path.with_suffix(".npz")) as document:  # planted
            rows = torch.from_numpy(document["x"])
        flat = rows.flatten()[: job.batch_size * job.features].view(job.batch_size, job.features)
        return flat, flat

    job.feed(iter(catkin, None))


@RECIPES.planted("loader-bursts", **_LOADING)
def cedar(job: TrainingJob) -> None:
    """The batches of four steps are decoded together."""
    documents = _pack(job, job.draw(1000, 1500))

    def cone() -> None:
        if job.step % 4 == 1:
            json.loads(zlib.decompress(documents[0]))  # planted

    job.plant(0, cone)


@RECIPES.planted("full-collection", rules="garbage-collection", cure="gc", stacks=True)
def elm(job: TrainingJob) -> None:
    """Each step collects garbage, with many live objects."""
    kept = [[number] for number in range(job.draw(60_000, 120_000))]

    def twig() -> None:
        assert kept
        gc.collect()  # planted

    job.plant(3, twig)


@RECIPES.planted("python-loop", rules="python python-code", cure="vectori|C\\+\\+|compiled|numpy|native", stacks=True)
def fir(job: TrainingJob) -> None:
    """Pure Python counts symbols of a text."""
    text = job.random.randbytes(job.draw(150_000, 300_000))

    def needle() -> int:
        total = 0
        for symbol in text:  # planted
            total = (total * 31 + symbol) % 65_521
        return total

    job.plant(1, needle)


@RECIPES.planted(
    "tiny-operators", rules="tiny-operators python-loop small-operators", cure="vectori|batch|compile|one", stacks=True
)
def hazel(job: TrainingJob) -> None:
    """A loop normalises each row with operators of its own."""
    times = job.draw(1, 3)

    def nut() -> Tensor:
        for _ in range(times):
            rows = [(row - row.mean()) / (row.std() + 1e-6) for row in job.batch[0]]  # planted
        return torch.stack(rows)

    job.plant(1, nut)


@RECIPES.planted("checkpoint", rules="checkpoint", cure="async|background|less often|thread", stacks=True)
def iris(job: TrainingJob) -> None:
    """Each step writes the model and the optimizer to a file."""
    size = job.draw(3_000_000, 6_000_000)
    extra = torch.rand(size)

    def bloom() -> None:
        torch.save({"a": job.model.state_dict(), "b": extra}, job.scratch / "petal")  # planted

    job.plant(3, bloom)


@RECIPES.planted("log-lines", rules="logging", cure="less often|fewer|level|every", stacks=True)
def juniper(job: TrainingJob) -> None:
    """Each step writes thousands of log lines to a file."""
    log = logging.getLogger("berry")
    log.addHandler(logging.FileHandler(job.scratch / "berry.txt"))
    log.setLevel(logging.INFO)
    log.propagate = False
    count = job.draw(300, 600)

    def berry() -> None:
        for number in range(count):
            log.info("%d %s", number, job.step)  # planted

    job.plant(3, berry)


@RECIPES.planted(
    "float64", rules="float64", cure="float32", compare=True, settings={"trainer.options.record_shapes": True}
)
def larch(job: TrainingJob) -> None:
    """The model and the batches are float64."""
    job.model.double()
    batches = job.batches
    job.batches = ((inputs.double(), targets.double()) for inputs, targets in batches)


@RECIPES.planted("second-forward", rules="duplicated-work repeated-work", cure="once|reuse|keep", stacks=True)
def maple(job: TrainingJob) -> None:
    """The model runs a second time on the same batch for a metric."""
    with_gradients = job.model

    def sap() -> Tensor:
        value: Tensor = with_gradients(job.batch[0]).mean()  # planted
        return value

    job.plant(1, sap)


@RECIPES.planted("sleep", rules="waiting idle sleep", cure="remove|wait|event|poll", stacks=True)
def oak(job: TrainingJob) -> None:
    """Each step polls for a file."""
    count = job.draw(4, 9)

    def acorn() -> None:
        for _ in range(count):
            if not (job.scratch / "none").exists():
                time.sleep(0.004)  # planted

    job.plant(3, acorn)


@RECIPES.control("plain-training")
def yew(_: TrainingJob) -> None:
    """Only the common job."""


@RECIPES.control("plain-training-with-stacks", stacks=True, tolerates="profiler-overhead")
def zelkova(_: TrainingJob) -> None:
    """Only the common job, with stacks."""
