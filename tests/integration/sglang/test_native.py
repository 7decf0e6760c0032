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
def test_supported_capture_is_complete(job: Any, name: str) -> None:
    result = job.results[name]
    assert (result["status"], result["problems"], result["same_tokens"]) == ("complete", [], True)
    assert result["expected"] == ([0, 1] if name in {"all_ranks", "stacks"} else [0])
    assert result["notes"] == ["Recorded by SGLang's own profiler, on all ranks of the engine."]


@pytest.mark.parametrize(("step", "expected"), [(0, TOKENS), (1, 3), (2, 4), (21, TOKENS), (30, TOKENS), (31, 3)])
def test_window_contains_the_selected_batches(job: Any, step: int, expected: int) -> None:
    for trace in traces(job, step):
        assert spans(trace) == ["EXTEND", *["DECODE"] * (expected - 1)]


def test_files_of_both_ranks_are_collected(job: Any) -> None:
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


def test_each_capture_has_its_options(job: Any) -> None:
    # By default, SGLang records stacks and shapes.
    shapes = [b'"Input Dims"' in gzip.decompress(traces(job, step)[0].read_bytes()) for step in (0, 1, 21)]
    assert shapes == [False, True, False]
    stacks = [any(".py(" in name for name in names(traces(job, step)[0])) for step in (0, 1, 21)]
    assert stacks == [False, False, True]


def test_run_contains_only_captures_and_run_records(job: Any) -> None:
    other_names = {path.name for path in (job.output / "run").iterdir() if not path.name.startswith("step_")}
    assert other_names == {"processes", "run.json"}


def test_run_report_has_the_status_of_each_capture(job: Any) -> None:
    report = read_run(job.output / "run")
    assert {capture.first_step for capture in report.captures} == {0, 1, 2, 21, 30, 31}
    assert {capture.status for capture in report.captures} == {Status.COMPLETE}
    assert report.problems == ()
