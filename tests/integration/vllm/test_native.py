"""Tests for capturing with vLLM's own profiler in engines that do not load profdeck.

`test_server` tests the captures that profdeck refuses.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def job(run_job: Callable[..., Any]) -> Any:
    return run_job("native", VLLM_PLUGINS="")


def iterations(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("ph") == "X" and event["name"].startswith("execute_")]


def trace(job: Any, step: int) -> Path:
    (path,) = (job.output / "run" / f"step_{step:06d}" / "rollout").glob("rank_0000.*.trace.json.gz")
    return Path(path)


@pytest.mark.parametrize("name", ["whole", "window", "later_window", "as_launched"])
def test_supported_capture_is_complete(job: Any, name: str) -> None:
    result = job.results[name]
    assert (result["status"], result["problems"]) == ("complete", [])
    assert result["notes"] == ["Recorded by vLLM's own profiler, with the options of its launch."]


def test_window_contains_the_selected_iterations(job: Any) -> None:
    window, later = iterations(trace(job, 1)), iterations(trace(job, 2))
    assert [name.startswith("execute_context_1") for name in window] == [True, False, False]
    assert [name.startswith("execute_context_1") for name in later] == [False, False, False]
    assert len(iterations(trace(job, 0))) in {12, 13}  # async scheduling can run an additional empty batch


def test_run_report_has_the_status_of_each_capture(job: Any) -> None:
    report = read_run(job.output / "run")
    assert {capture.first_step for capture in report.captures} == {0, 1, 2, 3}
    assert {capture.status for capture in report.captures} == {Status.COMPLETE}
    assert report.problems == ()
