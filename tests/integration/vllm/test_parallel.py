"""Test of data-parallel engines with one frontend. vLLM's client returns only the reply of the first engine."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


def test_each_data_parallel_engine_replies_records_and_is_merged(run_job: Callable[..., Any]) -> None:
    job = run_job("parallel", VLLM_PLUGINS="profdeck", VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert job.results["refused"] == {"status": None}
    assert "rank 1 on" in job.log
    assert "while capture other is armed in this engine" in job.log
    assert (job.results["status"], job.results["expected"]) == ("complete", [0, 1])
    report = read_run(job.output / "run")
    capture = report.captures[-1]
    assert capture.status is Status.COMPLETE
    assert [rank.parallel for rank in capture.ranks] == [{"dp": 0}, {"dp": 1}]
    (merged,) = (job.output / "run" / "step_000002" / "rollout").glob("target.step2.merged.json.gz")
    events = json.loads(gzip.decompress(merged.read_bytes()))["traceEvents"]
    titles = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {title[:14] for title in titles} == {"rollout rank 0", "rollout rank 1"}
