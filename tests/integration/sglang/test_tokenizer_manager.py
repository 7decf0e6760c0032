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


def test_no_request_fails_while_captures_start_and_stop(job: Any) -> None:
    assert job.results["failed"] == []
    assert [(capture["status"], capture["problems"]) for capture in job.results["captures"]] == [("complete", [])] * 3


def test_the_output_is_the_same_as_without_captures(job: Any) -> None:
    assert job.results["same"] >= job.results["same_without_capture"]


def test_the_loop_is_never_blocked_for_long(job: Any) -> None:
    for capture in job.results["captures"]:
        assert max(capture["blocked_s"]) < 1


def test_the_captures_are_whole(job: Any) -> None:
    report = read_run(job.output / "run")
    assert {target.status for target in report.targets if target.first_step < 3} == {Status.COMPLETE}
    found = [capture for capture in report.captures if capture.first_step < 3]
    assert all(rank.events for capture in found for rank in capture.ranks)
    assert {capture.role for capture in found if capture.first_step < 2} == {"rollout"}
    assert {capture.role for capture in found if capture.first_step == 2} == {"rollout"} | FRONTENDS


@pytest.mark.parametrize("step", [10, 12])
def test_a_cancelled_start_leaves_nothing_recording(job: Any, step: int) -> None:
    assert job.results[f"cancelled_{step}"] == ["CancelledError"]
    after = job.results[f"after_cancelled_{step}"]
    assert (after["status"], after["problems"]) == ("complete", [])
    for path in (job.output / "run" / f"step_{step:06d}").glob("*/rank_*[!e].json"):
        assert json.loads(path.read_text())["problems"] == ["The start failed or was cancelled."]


def test_captures_go_on_after_all_that(job: Any) -> None:
    assert (job.results["after_all"]["status"], job.results["after_all"]["problems"]) == ("complete", [])
    roles = {path.name for path in (job.output / "run" / "step_000016").iterdir()}
    assert roles == {"rollout"} | FRONTENDS


def test_another_thread_than_the_loops_may_use_the_sync_calls(job: Any) -> None:
    assert (job.results["other_thread"]["status"], job.results["other_thread"]["problems"]) == ("complete", [])


def test_an_engine_that_is_shut_down_in_the_loop_ends_the_capture_at_once(job: Any) -> None:
    found = job.results["shut_down"]
    assert found["status"] == "partial"
    assert found["stop_s"] < 10  # nobody waits for an engine that is gone
    assert found["problems"] == ["The engine was shut down."]
    folder = job.output / "run" / "step_000020" / "rollout"
    assert not [*folder.glob("rank_*.trace.json.gz")]


def test_no_task_is_left(job: Any) -> None:
    assert "was destroyed" not in job.log
    assert "never awaited" not in job.log
    assert "never retrieved" not in job.log
