"""Training job for recipes that run on the CPU, as one process or as several ranks that average gradients with gloo.

python -m benchmarks.diagnosis.training_job RECIPE DIRECTORY [--seed N] [--without]

Each step has four stages. Recipes add functions to stages, or replace the batches, the model or the optimizer. The job
records some steps with profdeck, measures the time spent in planted functions, and writes the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from benchmarks.diagnosis.recipe import Recipe
from torch import Tensor, nn

from profdeck import Profiler

FIRST, RECORDED = 4, 12
EVERY, PER_CAPTURE = 6, 3
"""For jobs with several captures: number of steps from one capture start to the next, and in each capture."""
NAMES = (
    ("ready", "predict", "learn", "adapt"),
    ("first", "second", "third", "fourth"),
    ("intake", "net", "slopes", "weights"),
)
Batch = tuple[Tensor, Tensor]


@attrs.define(eq=False)
class TrainingJob:
    """One process of the job. Its sizes and stage names are drawn at random from the seed."""

    random: random.Random
    scratch: Path
    """Directory for the job's working files."""
    stages: tuple[str, ...]
    rank: int = 0
    ranks: int = 1
    features: int = 0
    batch_size: int = 0
    model: Any = None
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss
    optimizer: Any = None
    batches: Iterator[Batch] = attrs.field(init=False)
    batch: Batch = attrs.field(init=False)
    """Batch of the current step."""
    captures: int = 1
    step: int = 0
    begins: int = 0
    """First step with the planted cause."""
    place: tuple[str, ...] = ()
    tail_ns: int = 0
    """Time in the current step during which only the last conversation of a rollout was running."""
    children: list[subprocess.Popen[bytes]] = attrs.field(factory=list)
    """Processes to kill after the last step."""
    planted_ns: list[int] = attrs.field(factory=list)
    """Time spent in planted functions in each recorded step."""
    step_ns: list[int] = attrs.field(factory=list)
    cpu_ns: list[int] = attrs.field(factory=list)
    _hooks: list[list[Callable[[], object]]] = attrs.field(factory=lambda: [[], [], [], []])
    _this_step_ns: int = 0

    def __attrs_post_init__(self) -> None:
        """Create the model, the optimizer and the data."""
        torch.manual_seed(self.random.randrange(1000) + self.rank)
        self.features = self.random.choice((192, 256, 320))
        self.batch_size = self.random.choice((96, 128, 160))
        layers: list[nn.Module] = []
        for _ in range(self.random.choice((4, 5, 6))):
            layers += [nn.Linear(self.features, self.features), nn.GELU()]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        inputs = torch.rand(self.batch_size * 8, self.features)
        self.batches = self._slices(inputs, inputs.flip(0))

    def _slices(self, inputs: Tensor, targets: Tensor) -> Iterator[Batch]:
        while True:
            for begin in range(0, len(inputs), self.batch_size):
                end = begin + self.batch_size
                yield inputs[begin:end], targets[begin:end]

    def draw(self, low: float, high: float) -> int:
        """Draw a random integer between `low` and `high`, both inclusive."""
        return self.random.randint(int(low), int(high))

    def plant(self, stage: int, hook: Callable[[], object], *, rank: int | None = None) -> None:
        """Add a function to the end of a stage, on one rank or all ranks. Its time counts as the cost of the cause."""
        self.place = (f"rank {rank}",) if rank is not None else (self.stages[stage],)
        if rank is None or rank == self.rank:
            self._hooks[stage].append(lambda: self.timed(hook) if self.step >= self.begins else None)

    def add(self, stage: int, hook: Callable[[], object]) -> None:
        """Add a function to the end of a stage. Its time does not count as cost."""
        self._hooks[stage].append(hook)

    def count(self, time_ns: int) -> None:
        """Add time to the cost of the current step."""
        self._this_step_ns += time_ns

    def feed(self, batches: Iterable[Batch], *, rank: int | None = None) -> None:
        """Replace the batches on one rank or all ranks. The time to fetch them counts as the cost of the cause."""
        self.place = (f"rank {rank}",) if rank is not None else (self.stages[0], "DataLoader")
        if rank is None or rank == self.rank:
            iterator = iter(batches)
            self.batches = iter(lambda: self.timed(lambda: next(iterator)), None)

    def timed(self, function: Callable[[], Any]) -> Any:
        """Call a function and add its time to the cost of the current step."""
        begin_ns = time.perf_counter_ns()
        try:
            return function()
        finally:
            self.count(time.perf_counter_ns() - begin_ns)

    def train(self, profiler: Profiler) -> None:
        """Run one step."""
        with profiler.stage(self.stages[0]):
            self.batch = next(self.batches)
            self._run_hooks(0)
        with profiler.stage(self.stages[1]):
            value = self.loss(self.model(self.batch[0]), self.batch[1])
            self._run_hooks(1)
        with profiler.stage(self.stages[2]):
            value.backward()
            self._run_hooks(2)
        with profiler.stage(self.stages[3]):
            if self.ranks > 1:
                self.average()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._run_hooks(3)

    def average(self) -> None:
        """Average the gradients of all ranks in one collective."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient)).div_(self.ranks)

    def _run_hooks(self, stage: int) -> None:
        for hook in self._hooks[stage]:
            hook()

    def recorded_steps(self) -> list[int]:
        """Return the numbers of the recorded steps."""
        if self.captures == 1:
            return [*range(FIRST, FIRST + RECORDED)]
        return [FIRST + EVERY * capture + step for capture in range(self.captures) for step in range(PER_CAPTURE)]

    def run(self, profiler: Profiler) -> None:
        """Run all steps, and measure the recorded ones."""
        recorded = self.recorded_steps()
        for self.step in range(recorded[-1] + 2):
            self._this_step_ns = 0
            with profiler.capture(self.step):
                begin_ns, begin_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
                self.train(profiler)
                step_ns, cpu_ns = time.perf_counter_ns() - begin_ns, time.thread_time_ns() - begin_cpu_ns
            if self.step in recorded and self.step >= self.begins:
                self.step_ns.append(step_ns)
                self.cpu_ns.append(cpu_ns)
                self.planted_ns.append(self._this_step_ns)


def find_recipe(identifier: str) -> Recipe:
    """Return the recipe with the given ID. It must use this job."""
    from benchmarks.diagnosis import agent_recipes, comparison_recipes, job_recipes, rank_recipes

    registries = (
        job_recipes.RECIPES, rank_recipes.RECIPES, agent_recipes.RECIPES, comparison_recipes.DIFF,
        comparison_recipes.TREND,
    )  # fmt: skip
    return next(registry.by_id[identifier] for registry in registries if identifier in registry.by_id)


def run_recipe(identifier: str, directory: Path, seed: int, *, with_cause: bool) -> None:
    """Run the job for one recipe in this process, standalone or as one rank under torchrun."""
    recipe = find_recipe(identifier)
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    generator = recipe.generator(seed)
    scratch = directory / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    job = TrainingJob(
        random=generator,
        scratch=scratch,
        stages=generator.choice(NAMES),
        rank=int(os.environ.get("RANK", "0")),
        ranks=ranks,
        captures=recipe.options.get("captures", 1),
    )
    if job.captures > 1:
        job.begins = FIRST + EVERY * (job.captures // 2) - 1
    if with_cause:
        recipe.plant(job)
    settings = {
        "output": str(directory),
        "run": "run",
        "steps": job.recorded_steps(),
        "on_demand": False,
        "trainer.backend": "torch",
        "trainer.ranks": "all",
        "trainer.warmup_steps": 1,
        "trainer.options.analyse": False,
        "trainer.options.with_stack": bool(recipe.options.get("stacks")),
        **recipe.options.get("settings", {}),
    }
    with Profiler.from_config(role="trainer", settings=settings) as profiler:
        job.run(profiler)
    for child in job.children:
        child.kill()
        child.wait()
    result = {
        "planted_us": statistics.fmean(job.planted_ns) / 1000,
        "step_us": statistics.fmean(job.step_ns) / 1000,
        "cpu_us": statistics.fmean(job.cpu_ns) / 1000,
        "places": job.place,
    }
    (directory / f"rank{job.rank}.json").write_text(json.dumps(result), encoding="utf-8")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Run the job for one recipe from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", action="store_true", help="do not plant the cause")
    chosen = parser.parse_args()
    run_recipe(chosen.recipe, chosen.directory, chosen.seed, with_cause=not chosen.without)


if __name__ == "__main__":
    main()
