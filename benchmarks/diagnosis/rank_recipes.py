"""Recipes of several ranks on the CPU, started by torchrun with gloo. The default is two ranks."""

from __future__ import annotations

import torch
from benchmarks.diagnosis.recipe import Kind, Recipes
from benchmarks.diagnosis.training_job import TrainingJob

RECIPES = Recipes(Kind.RANKS)


@RECIPES.planted(
    "slow-host", rules="straggler slow-rank python python-code", cure="rank|vectori|native|compiled", stacks=True
)
def agate(job: TrainingJob) -> None:
    """One rank runs pure Python in each step."""
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
    """One rank processes a second, larger batch."""
    rank = job.draw(0, 1)
    extra = torch.rand(job.batch_size * job.draw(2, 4), job.features)

    def facet() -> None:
        job.model(extra).mean().backward()  # planted

    job.plant(1, facet, rank=rank)


@RECIPES.control("even-ranks")
def topaz(_: TrainingJob) -> None:
    """Both ranks do the same."""
