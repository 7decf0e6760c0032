"""Data-parallel engines behind one frontend, which answers for the first of them only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profdeck.records.status import Status
from profdeck.verification.reading import read_run


def test_every_data_parallel_engine_records_and_is_expected(run_job: Callable[..., Any]) -> None:
    job = run_job("parallel", "data_parallel_size", VLLM_PLUGINS="profdeck", VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert (job.results["status"], job.results["expected"]) == ("complete", [0, 1])
    report = read_run(job.output / "run")
    assert report.status is Status.COMPLETE
    (capture,) = report.captures
    assert [rank.parallel for rank in capture.ranks] == [{"dp": 0}, {"dp": 1}]
