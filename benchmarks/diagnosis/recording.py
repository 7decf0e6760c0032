"""Recording of recipes. `record` writes the traces of a recipe to a directory and returns the recipe's `Truth`."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.diagnosis import gpu_recipes, training_job
from benchmarks.diagnosis.recipe import Kind, Recipe, Truth

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300
RUN = "run"
"""Trace directory, relative to the directory of the recording."""
BEFORE = f"before/{RUN}"
"""Directory of the traces without the planted cause, for `Kind.DIFF`."""


def record(recipe: Recipe, directory: Path, seed: int) -> Truth:
    """Record a recipe. The traces are stored below ``directory / RUN``.

    Recipes for the training job can have these options:

    - ``stacks``: whether to record Python stacks
    - ``settings``: profdeck settings
    - ``ranks``: number of ranks
    - ``has_cost``: whether the planted cause has a known cost
    - ``compare``: ``cpu`` or ``wall`` if the cost is the difference from a job without the cause, in CPU or wall time
    - ``in_turn``: whether the cost is the sum over the ranks

    Raises:
        RuntimeError: The job failed. With torchrun, the message ends with the job's stderr.
    """
    if recipe.kind is Kind.GPU:
        return gpu_recipes.record(recipe, directory / RUN, seed)
    if recipe.options.get("of") is Kind.GPU:
        return gpu_recipes.record(recipe, directory / RUN, seed, directory / BEFORE)
    if recipe.kind is Kind.DIFF:
        _run_job(recipe, directory / "before", seed, with_cause=False)
    ranks = _run_job(recipe, directory, seed)
    measured = max(ranks, key=lambda rank: float(rank["planted_us"]))
    cost_us = sum(rank["planted_us"] for rank in ranks) if recipe.options.get("in_turn") else measured["planted_us"]
    if compared := recipe.options.get("compare"):
        (without,) = _run_job(recipe, directory / "without", seed, with_cause=False)
        # On a shared machine, a ratio of CPU times varies less than a difference between wall times.
        key = "cpu_us" if compared == "cpu" else "step_us"
        cost_us = measured["step_us"] * (1 - without[key] / measured[key])
    has_cost = recipe.answer and recipe.options.get("has_cost", True)
    return Truth(
        cost_us=cost_us if has_cost else None,
        step_us=measured["step_us"],
        places=tuple(measured["places"]),
        lines=recipe.lines() if recipe.options.get("stacks") else None,
    )


def _run_job(recipe: Recipe, directory: Path, seed: int, *, with_cause: bool = True) -> list[dict[str, Any]]:
    """Run the training job and return the measured values of each rank."""
    ranks = recipe.options.get("ranks", 2) if recipe.kind is Kind.RANKS else 1
    if ranks == 1:
        _run_in_fork(recipe, directory, seed, with_cause=with_cause)
    else:
        _run_with_torchrun(recipe, directory, seed, ranks)
    return [json.loads((directory / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def _run_in_fork(recipe: Recipe, directory: Path, seed: int, *, with_cause: bool) -> None:
    """Run the job in a fork of this process, which avoids importing torch again."""
    process = multiprocessing.get_context("fork").Process(
        target=training_job.run_recipe, args=(recipe.id, directory, seed), kwargs={"with_cause": with_cause}
    )
    process.start()
    process.join(LIMIT_S)
    if process.exitcode != 0:
        process.kill()
        process.join()
        raise RuntimeError(f"The job of {recipe.id} exited with {process.exitcode}, see stderr.")


def _run_with_torchrun(recipe: Recipe, directory: Path, seed: int, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "benchmarks.diagnosis.training_job", recipe.id, str(directory), "--seed", str(seed)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PROFDECK")}
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"},
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if result.returncode:
        raise RuntimeError(f"The job of {recipe.id} exited with {result.returncode}:\n{result.stderr[-3000:]}")
