"""Tests for capturing a tokenizer manager while its event loop is serving requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

pytestmark = pytest.mark.long

TOKENS = 6
"""Number of tokens that each request of the job generates."""


FRONTENDS = {"rollout-tokenizer"}
"""The requests and responses of the job contain tokens, so its engine has no detokenizer."""


@pytest.fixture(scope="module")
def job(run_job: Callable[..., Any]) -> Any:
    return run_job("tokenizer_manager", SGLANG_PLUGINS="profdeck,torchcpu")


def test_requests_succeed_during_captures(job: Any) -> None:
    assert job.results["failed"] == []
    assert [(capture["status"], capture["problems"]) for capture in job.results["captures"]] == [("complete", [])] * 3


def test_captures_do_not_change_the_output(job: Any) -> None:
    assert job.results["same"] >= job.results["same_without_capture"]


def test_captures_do_not_block_the_event_loop(job: Any) -> None:
    for capture in job.results["captures"]:
        assert max(capture["blocked_s"]) < 1


def test_captures_are_complete(job: Any) -> None:
    report = read_run(job.output / "run")
    assert {target.status for target in report.targets if target.first_step < 3} == {Status.COMPLETE}
    captures = [capture for capture in report.captures if capture.first_step < 3]
    assert all(rank.events for capture in captures for rank in capture.ranks)
    assert {capture.role for capture in captures if capture.first_step < 2} == {"rollout"}
    assert {capture.role for capture in captures if capture.first_step == 2} == {"rollout"} | FRONTENDS


@pytest.mark.parametrize("step", [10, 12])
def test_cancelled_start_stops_all_recordings(job: Any, step: int) -> None:
    assert job.results[f"cancelled_{step}"] == ["CancelledError"]
    after = job.results[f"after_cancelled_{step}"]
    assert (after["status"], after["problems"]) == ("complete", [])
    for path in (job.output / "run" / f"step_{step:06d}").glob("*/rank_*[!e].json"):
        assert json.loads(path.read_text())["problems"] == ["The start failed or was cancelled."]


def test_capture_after_cancelled_starts_is_complete(job: Any) -> None:
    assert (job.results["after_all"]["status"], job.results["after_all"]["problems"]) == ("complete", [])
    roles = {path.name for path in (job.output / "run" / "step_000016").iterdir()}
    assert roles == {"rollout"} | FRONTENDS


def test_sync_calls_work_in_another_thread(job: Any) -> None:
    assert (job.results["other_thread"]["status"], job.results["other_thread"]["problems"]) == ("complete", [])


def test_engine_shutdown_in_the_loop_ends_the_capture(job: Any) -> None:
    result = job.results["shut_down"]
    assert result["status"] == "partial"
    assert result["stop_s"] < 10  # the stop does not wait for an engine that has exited
    assert result["problems"] == ["The engine was shut down."]
    folder = job.output / "run" / "step_000020" / "rollout"
    assert not [*folder.glob("rank_*.trace.json.gz")]


def test_all_tasks_are_awaited(job: Any) -> None:
    assert "was destroyed" not in job.log
    assert "never awaited" not in job.log
    assert "never retrieved" not in job.log
