"""Tests for capturing with SGLang's own profiler in engines that do not load profdeck.

`test_native_server` tests the captures that profdeck refuses.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_traces import names, processes, spans

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

pytestmark = pytest.mark.long

TOKENS = 10


@pytest.fixture(scope="module")
def job(run_job: Callable[..., Any]) -> Any:
    return run_job("native", SGLANG_PLUGINS="torchcpu")


def folder(job: Any, step: int) -> Path:
    return Path(job.output / "run" / f"step_{step:06d}" / "rollout")


def traces(job: Any, step: int) -> list[Path]:
    return sorted(folder(job, step).glob("rank_*.trace.json.gz"))


@pytest.mark.parametrize("name", ["whole", "window", "all_ranks", "stacks", "manager_whole", "manager_window"])
def test_what_it_can_do_is_complete(job: Any, name: str) -> None:
    found = job.results[name]
    assert (found["status"], found["problems"], found["same_tokens"]) == ("complete", [], True)
    assert found["expected"] == ([0, 1] if name in {"all_ranks", "stacks"} else [0])
    assert found["notes"] == ["Recorded by SGLang's own profiler, on all ranks of the engine."]


@pytest.mark.parametrize(("step", "expected"), [(0, TOKENS), (1, 3), (2, 4), (21, TOKENS), (30, TOKENS), (31, 3)])
def test_windows_are_exact(job: Any, step: int, expected: int) -> None:
    for trace in traces(job, step):
        assert spans(trace) == ["EXTEND", *["DECODE"] * (expected - 1)]


def test_the_files_of_both_ranks_are_brought_in(job: Any) -> None:
    assert [trace.name for trace in traces(job, 0)] == ["rank_0000_tp0.step0.trace.json.gz"]
    for step in (2, 21):
        assert [trace.name for trace in traces(job, step)] == [
            f"rank_000{rank}_tp{rank}.step{step}.trace.json.gz" for rank in range(2)
        ]
    for rank in range(2):
        manifest = json.loads((folder(job, 2) / f"rank_000{rank}_tp{rank}.step2.json").read_text())
        assert (manifest["backend"], manifest["world_size"], manifest["parallel"]) == ("sglang", 2, {"tp": rank})
    (merged,) = folder(job, 2).glob("target.*.merged.json.gz")
    assert len(spans(merged)) == 8
    assert {"rank 0 tp0", "rank 1 tp1"} <= {
        name.partition(":")[0].removeprefix("rollout ") for name in processes(merged)
    }


def test_options_are_those_of_the_capture(job: Any) -> None:
    # SGLang records stacks and shapes unless it is told otherwise.
    shapes = [b'"Input Dims"' in gzip.decompress(traces(job, step)[0].read_bytes()) for step in (0, 1, 21)]
    assert shapes == [False, True, False]
    stacks = [any(".py(" in name for name in names(traces(job, step)[0])) for step in (0, 1, 21)]
    assert stacks == [False, False, True]


def test_nothing_but_captures_is_left_in_the_run(job: Any) -> None:
    others = {path.name for path in (job.output / "run").iterdir() if not path.name.startswith("step_")}
    assert others == {"processes", "run.json"}


def test_ls_reads_it_back(job: Any) -> None:
    report = read_run(job.output / "run")
    assert {capture.first_step for capture in report.captures} == {0, 1, 2, 21, 30, 31}
    assert {capture.status for capture in report.captures} == {Status.COMPLETE}
    assert report.problems == ()
