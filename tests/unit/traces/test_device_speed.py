"""Tests for slow devices: kernels that take longer for the same work, in some steps or on one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.loading import summarise

STEP_US = 10_000.0
KERNELS = {"gemm": 3_000.0, "gelu": 1_500.0, "norm": 500.0, "adam": 200.0}


def write(
    path: Path,
    factor: Callable[[int, str], float],
    grid: Callable[[int, str], int] | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Path:
    """Write a trace of ten steps.

    Args:
        path: File to write.
        factor: Returns the factor by which to multiply a kernel's duration in a step.
        grid: Returns the number of blocks of a kernel in a step. Default: no grids are recorded.
        rank: Rank of the trace.
        ranks: Number of ranks. With several ranks, the step ends with an all-reduce.
    """
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, tid: int, begin: float, duration: float, **args: Any) -> None:
        times = {"ts": begin, "dur": duration}
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": int(tid == 1), "tid": tid, "args": args} | times
        )

    for step in range(10):
        begin = step * STEP_US
        now = begin + 50
        for index, (name, duration) in enumerate(KERNELS.items()):
            about: dict[str, Any] = {"correlation": 10 * step + index, "stream": 7}
            add("cuda_runtime", "cudaLaunchKernel", 1, begin + 10 * index, 5, correlation=about["correlation"])
            if grid is not None:
                about["grid"] = [grid(step, name), 1, 1]
            add("kernel", name, 7, now, duration * factor(step, name), **about)
            now += duration * factor(step, name)
        if ranks > 1:
            number = 10 * step + len(KERNELS)
            about = {"Collective name": "allreduce", "Process Group Name": "0", "correlation": number, "stream": 7}
            add("cuda_runtime", "cudaLaunchKernel", 1, begin + 45, 5, correlation=number)
            add("kernel", "ncclDevKernel_AllReduce_Sum_f32()", 7, now, begin + 9_500 - now, **about)
            now = begin + 9_500
        add("cuda_runtime", "cudaDeviceSynchronize", 1, begin + 100, now - begin - 100)
        add("user_annotation", f"ProfilerStep#{step}", 1, begin, STEP_US)
    document = {"distributedInfo": {"rank": rank, "world_size": ranks, "pg_count": 1}, "traceEvents": events}
    path.write_text(json.dumps(document))
    return path


def read(path: Path) -> RunSummary:
    run, errors = summarise([path])
    assert not errors
    return run


def state_of(run: RunSummary, cause: str) -> tuple[str, str | None]:
    (state,) = [one for one in run.causes if one.cause == cause]
    return state.state, state.reason


def throttled(step: int, _: str) -> float:
    return 1.4 if step >= 6 else 1.0


@pytest.mark.parametrize("grid", [None, lambda _step, _name: 64], ids=["without grids", "with grids"])
def test_throttling(tmp_path: Path, grid: Callable[[int, str], int] | None) -> None:
    run = read(write(tmp_path / "trace.json", throttled, grid))
    (finding,) = [one for one in run.findings if one.rule == "throttling"]
    assert finding.text == (
        "In 4 of 10 steps, first in step 6, the device is slower: the same kernels take up to 1.40 times as long."
    )
    assert finding.gain_us == pytest.approx(0.4 * 0.4 * 5_200)
    assert "unsteady-steps" not in {one.rule for one in run.findings}


def test_longer_inputs_are_not_throttling(tmp_path: Path) -> None:
    def longer(step: int, name: str) -> float:
        return 1.0 if name == "adam" else throttled(step, name)

    run = read(write(tmp_path / "grids.json", longer, lambda step, name: round(64 * longer(step, name))))
    assert state_of(run, "throttling")[0] != "found"
    run = read(write(tmp_path / "without_grids.json", lambda step, name: 1 + 0.1 * step * (name == "gemm")))
    assert state_of(run, "throttling") == ("not_judged", "the sizes of kernels differ or were not recorded")


def test_longer_contexts_are_not_throttling(tmp_path: Path) -> None:
    """Attention takes longer in each step because it reads more of the KV cache, although its grid stays the same."""
    run = read(write(tmp_path / "trace.json", lambda step, name: 1 + 0.1 * step * (name == "gelu"), lambda *_: 64))
    assert state_of(run, "throttling")[0] != "found"


def test_single_slow_step_is_not_throttling(tmp_path: Path) -> None:
    run = read(write(tmp_path / "trace.json", lambda step, _: 1.4 if step == 6 else 1.0, lambda *_: 64))
    assert state_of(run, "throttling") == ("clear", None)


@pytest.mark.parametrize(
    ("factor", "grid", "text", "cure"),
    [
        (lambda *_: 1.4, lambda *_: 64, "its device runs the same work more slowly", "check clocks"),
        (lambda *_: 1.4, None, "its device runs the same work more slowly", "check clocks"),
        (
            lambda _step, name: 1.4 if name == "gemm" else 1.0,
            lambda _step, name: 90 if name == "gemm" else 64,
            "it has 1.23 times as much work, by the calls and grids of kernels",
            "the same amount of work",
        ),
        (lambda _step, name: 1.4 if name == "gemm" else 1.0, None, "gemm takes 4.20 ms instead of 3.00 ms", "gemm"),
    ],
)
def test_cause_of_a_slow_rank(
    tmp_path: Path,
    factor: Callable[[int, str], float],
    grid: Callable[[int, str], int] | None,
    text: str,
    cure: str,
) -> None:
    write(tmp_path / "rank0.trace.json", lambda *_: 1.0, grid and (lambda *_: 64), ranks=2)
    write(tmp_path / "rank1.trace.json", factor, grid, rank=1, ranks=2)
    (finding,) = [one for one in read(tmp_path).findings if one.rule == "straggler"]
    assert text in finding.text
    assert cure in finding.do
