"""What is lost when a part of an engine dies: only what that part had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


def test_a_killed_worker_is_named_and_the_other_rank_keeps_its_trace(run_job: Callable[..., Any]) -> None:
    job = run_job("killed_worker", VLLM_PLUGINS="profdeck", VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert job.results["capture"]["status"] == "partial"
    assert "does not answer" in " ".join(job.results["capture"]["problems"])
    report = read_run(job.output / "run")
    (capture,) = report.captures
    alive, killed = capture.ranks
    assert (killed.rank, killed.status) == (1, Status.MISSING)
    assert alive.status is Status.PARTIAL
    assert alive.artifacts[0].whole
