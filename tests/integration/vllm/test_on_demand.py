"""Test of on-demand captures of engines at the global step of their host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

pytestmark = pytest.mark.long


def test_two_engines_and_their_host_are_captured_on_demand(run_job: Callable[..., Any]) -> None:
    job = run_job("on_demand", VLLM_PLUGINS="profdeck")
    assert job.results["status"] == 0, job.results["stderr"]
    document = job.results["document"]
    first = document["first_step"]
    assert (document["complete"], document["last_step"]) == (True, first + 1)
    assert [(process["role"], process["replica"], process["captures"]) for process in document["processes"]] == [
        ("rollout", 0, [f"step{first}"]),
        ("rollout", 1, [f"step{first}"]),
        ("trainer", None, [f"step{first}"]),
    ]
    report = read_run(job.output / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(capture.role, capture.replica, capture.first_step) for capture in report.captures] == [
        ("rollout", 0, first),
        ("rollout", 1, first),
        ("trainer", None, first),
    ]
