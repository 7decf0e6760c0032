"""Tests of captures of an `AsyncLLM` under load, in its event loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


@pytest.fixture(scope="module")
def job(run_job: Callable[..., Any]) -> Any:
    return run_job("async_llm", VLLM_PLUGINS="profdeck")


def test_requests_succeed_during_captures(job: Any) -> None:
    assert job.results["failed"] == []
    assert [capture["status"] for capture in job.results["captures"]] == ["complete"] * 4


def test_captures_do_not_change_the_output(job: Any) -> None:
    assert job.results["same"] >= job.results["same_without_capture"]


def test_captures_are_complete(job: Any) -> None:
    report = read_run(job.output / "run")
    assert {target.status for target in report.targets if target.first_step < 4} == {Status.COMPLETE}
    assert {capture.role for capture in report.captures} == {"rollout", "rollout-frontend"}
    assert all(rank.events for capture in report.captures if capture.first_step < 4 for rank in capture.ranks)


def test_capture_after_a_cancelled_start_is_complete(job: Any) -> None:
    assert job.results["cancelled"] == ["CancelledError"]
    assert job.results["after_cancelled"]["status"] == "complete"


def test_sync_calls_in_the_event_loop_are_refused(job: Any) -> None:
    assert job.results["sync"] == {"status": None}
    manifest = json.loads((job.output / "run" / "step_000012" / "rollout" / "target.step12.json").read_text())
    assert "await profiler.astart" in manifest["problems"][0]


def test_engine_shutdown_during_a_capture_keeps_its_trace(job: Any) -> None:
    assert job.results["shut_down"]["status"] == "partial"
    (path,) = (job.output / "run" / "step_000020" / "rollout").glob("rank_*.json")
    manifest = json.loads(path.read_text())
    assert manifest["status"] == "partial"
    assert "shut down during the capture" in manifest["problems"][0]
    assert manifest["artifacts"][0]["whole"]
