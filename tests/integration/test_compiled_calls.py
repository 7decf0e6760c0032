"""Tests for profiler calls in functions that ``torch.compile`` traces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from profdeck import Profiler  # noqa: E402  # after importorskip

pytestmark = pytest.mark.torch


@pytest.fixture
def profiler(tmp_path: Path) -> Iterator[Profiler]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = {"output": str(tmp_path), "run": "run", "steps": ["2..3"], "trainer.backend": "torch"}
    with Profiler.from_config(settings=settings) as profiler:
        yield profiler
    torch._dynamo.reset()


def train(profiler: Profiler, function: Callable[[object], object], *, fullgraph: bool = True) -> tuple[int, int]:
    """Call the compiled function in captured and uncaptured steps. Return the number of graphs and of graph breaks."""
    compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
    for step in range(6):
        with profiler.capture(step) as capture, profiler.stage("eager"):
            result = compiled(torch.ones(4))
            assert torch.equal(result, torch.full((4,), 2.0))
        assert (capture is not None) is (step in {1, 2, 3})  # step 1 warms up
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def double_in_stage(profiler: Profiler, x: object) -> object:
    with profiler.stage("inner"):
        return x * 2


def double_in_local_function(profiler: Profiler, x: object) -> object:
    @profiler.stage("inner")
    def double(x: object) -> object:
        return x * 2

    return double(x)


def double_in_invalid_stage(profiler: Profiler, x: object) -> object:
    with profiler.stage("not a name"):
        return x * 2


def double_in_capture(profiler: Profiler, x: object) -> object:
    with profiler.capture(2):
        return x * 2


def double_after_start(profiler: Profiler, x: object) -> object:
    profiler.start(2)
    return x * 2


def double_and_close(profiler: Profiler, x: object) -> object:
    y = x * 2
    profiler.close()
    return y


@pytest.mark.parametrize(
    "function",
    [
        double_in_stage,
        double_in_local_function,
        double_in_invalid_stage,
        double_in_capture,
        double_after_start,
        double_and_close,
    ],
)
def test_calls_in_compiled_code_cause_no_graph_break(
    profiler: Profiler, function: Callable[[Profiler, object], object], tmp_path: Path
) -> None:
    assert train(profiler, lambda x: function(profiler, x)) == (1, 0)
    (manifest,) = tmp_path.rglob("*.step2.json")
    assert '"complete"' in manifest.read_text()


def test_decorated_method_of_a_compiled_module_is_compiled(profiler: Profiler) -> None:
    @profiler.stage("forward")
    def forward(x: object) -> object:
        return x * 2

    assert train(profiler, forward) == (1, 0)


def test_reports_of_steps_and_stops_in_compiled_code_cause_no_graph_break(profiler: Profiler) -> None:
    def double(x: object) -> object:
        profiler.step(0, "mini_batch")
        y = x * 2
        profiler.stop()
        return y

    # The flags that idle steps read change after the first step and when a capture starts: three compilations.
    assert train(profiler, double) == (3, 0)


def test_code_around_a_graph_break_in_a_stage_is_compiled(profiler: Profiler) -> None:
    def double(x: object) -> object:
        with profiler.stage("inner"):
            y = x + 1
            torch._dynamo.graph_break()
            return y + x - 1

    assert train(profiler, double, fullgraph=False) == (2, 1)


SCRIPT = """
import torch
from profdeck import Profiler

profiler = Profiler.from_config(settings={"steps": [100], "trainer.backend": "torch"})

@torch.compile(backend="eager", dynamic=False)
def double(x):
    profiler.start(2)
    return x * 2

double(torch.ones(4))
double(torch.ones(5))
"""


def test_call_is_reported_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=240)
    message = "profiler.start has no effect in code compiled by torch.compile. Call it outside the compiled function."
    assert result.stderr.count(message) == 1
