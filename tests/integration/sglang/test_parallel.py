"""Tests of engines with pipeline or data parallelism. SGLang forwards only the replies of the first ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from sglang_traces import processes, spans, steps

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


@pytest.fixture(scope="module", params=[pytest.param("pp", marks=pytest.mark.long), "dp"])
def job(request: pytest.FixtureRequest, run_job: Callable[..., Any]) -> Any:
    job = run_job("parallel", f"{request.param}_size", SGLANG_PLUGINS="profdeck,torchcpu")
    job.results["dimension"] = request.param
    return job


def test_each_rank_records_and_is_expected(job: Any) -> None:
    window = job.results["window"]
    assert (window["status"], window["problems"], window["expected"]) == ("complete", [], [0, 1])
    dimension = job.results["dimension"]
    folder = job.output / "run" / "step_000000" / "rollout"
    traces = sorted(folder.glob("rank_*.trace.json.gz"))
    assert [trace.name for trace in traces] == [
        f"rank_0000_{dimension}0.step0.trace.json.gz",
        f"rank_0001_{dimension}1.step0.trace.json.gz",
    ]
    for rank, trace in enumerate(traces):
        assert steps(trace) == [0, 1, 2, 3]
        assert len(spans(trace)) == 4
        manifest = json.loads((folder / f"rank_{rank:04d}_{dimension}{rank}.step0.json").read_text())
        assert (manifest["rank"], manifest["world_size"], manifest["parallel"]) == (rank, 2, {dimension: rank})


def test_merged_file_has_both_ranks(job: Any) -> None:
    (merged,) = (job.output / "run" / "step_000000" / "rollout").glob("target.*.merged.json.gz")
    assert len(spans(merged)) == 8
    for rank in range(2):
        prefix = f"rollout rank {rank} {job.results['dimension']}{rank}:"
        assert any(process.startswith(prefix) for process in processes(merged))


def test_tokenizer_and_detokenizer_record_once(job: Any) -> None:
    for process in ("tokenizer", "detokenizer"):
        assert len([*job.output.glob(f"run/step_000000/rollout-{process}/rank_*.trace.json.gz")]) == 1


def test_rank_without_forwarded_replies_can_be_selected(job: Any) -> None:
    # A trace is optional, because the other replica may have processed the only request.
    assert job.results["one"]["expected"] == [1]
    folder = job.output / "run" / "step_000001" / "rollout"
    assert [path.name for path in folder.glob("rank_*.step1.json")] == [
        f"rank_0001_{job.results['dimension']}1.step1.json"
    ]


def test_nonexistent_rank_is_refused_without_affecting_the_engine(job: Any) -> None:
    assert job.results["no_rank"] == {"status": None, "same_tokens": True}
    assert job.results["after_all"]


def test_run_report_is_complete(job: Any) -> None:
    report = read_run(job.output / "run")
    assert report.problems == ()
    assert {target.status for target in report.targets if target.first_step == 0} == {Status.COMPLETE}
