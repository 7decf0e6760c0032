"""Recipes for `profdeck diff` and `profdeck trend`, with a cause in one of two runs or only in the later captures."""

from __future__ import annotations

import torch
from benchmarks.diagnosis import gpu_recipes, job_recipes
from benchmarks.diagnosis.recipe import Kind, Recipes
from benchmarks.diagnosis.training_job import TrainingJob

DIFF, TREND = Recipes(Kind.DIFF), Recipes(Kind.TREND)
_PAIRS = {
    gpu_recipes.RECIPES: {
        "loader-wait": "DataLoader|data.loading",
        "loader-wait-bursts": "DataLoader|data.loading",
        "collection": "GC|garbage",
        "python-code": "edit_ratio",
        "unfused-activations": "elementwise|vectorized_elem|aten::mul|Gelu",
        "throttling": "clock|throttl|kernels? slower|all kernels",
        "slow-link": "AllReduce|allreduce|[Cc]ommunication|collective",
        "device-bound": "",
    },
    job_recipes.RECIPES: {
        "full-collection": "GC|garbage|gc.collect",
        "loader-bursts": "",
        "tiny-operators": "aten::(mean|std|sub|div|select|unbind)|nut",
        "checkpoint": "save|checkpoint|bloom",
        "plain-training": "",
    },
}
"""Recipes to record both with and without the cause. Each pattern matches the owners that a verdict may name instead of
the stage."""
_WITH_STACKS = {"gpu/collection", "gpu/python-code"}
"""Recipes that plant a Python frame. Their traces without the cause need stacks too."""

for _recipes, _names in _PAIRS.items():
    for _name, _pattern in _names.items():
        _recipe = _recipes.by_id[f"{_recipes.kind}/{_name}"]
        _options = {**_recipe.options, "of": _recipes.kind, "pattern": _pattern}
        if _recipe.id in _WITH_STACKS:
            _options["sizes"] = {"function": "train.py(9): train"}
        if _recipe.answer:
            DIFF.planted(f"{_recipes.kind}-{_name}", rules="slower", cure="", **_options)(_recipe.plant)
        else:
            DIFF.control(f"{_recipes.kind}-{_name}", **_options)(_recipe.plant)


@TREND.planted("later-sorting", rules="slower", cure="", captures=20)
def azure(job: TrainingJob) -> None:
    """Sort numbers in one stage, starting halfway through the job."""
    numbers = torch.rand(job.draw(250_000, 400_000))
    job.plant(1, numbers.sort)


@TREND.planted("later-forward", rules="slower", cure="", captures=20)
def blue(job: TrainingJob) -> None:
    """Run the model on additional data, starting halfway through the job."""
    others = torch.rand(job.batch_size * job.draw(2, 3), job.features)
    job.plant(3, lambda: job.model(others))


@TREND.control("steady", captures=20)
def cyan(_: TrainingJob) -> None:
    """Change nothing."""
