"""Tests of an engine in the host's process: an idle worker is not patched, and batches have vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from profdeck.records.manifest import read_manifest
from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


@pytest.fixture(scope="module")
def job(run_job: Callable[..., Any]) -> Any:
    return run_job("in_process", VLLM_PLUGINS="profdeck", VLLM_ENABLE_V1_MULTIPROCESSING="0")


def test_idle_worker_is_not_patched(job: Any) -> None:
    assert job.results["idle_before"] == []
    assert job.results["armed"] == ["execute_model", "sample_tokens", "shutdown"]
    assert job.results["idle_after_window"] == []
    assert job.results["capture"]["status"] == "complete"


def test_iterations_have_vllms_names(job: Any) -> None:
    for ours, theirs in job.results["names"]:
        assert [name.partition("_waiting_")[0] for name in ours] == theirs
        assert len(ours) > 10


def test_job_runs_all_batch_kinds(job: Any) -> None:
    assert job.results["kinds"] == ["decode", "mixed", "prefill"]


def test_engine_and_trainer_in_one_process_record_in_turn(job: Any) -> None:
    report = read_run(job.output / "together")
    assert report.status is Status.COMPLETE, report
    for step, first, second in ((1, "trainer", "rollout"), (3, "rollout", "trainer")):
        role_manifests = {}
        for role in (first, second):
            (path,) = (job.output / "together").glob(f"step_{step:06d}/{role}/rank_*.step{step}.json")
            role_manifests[role] = read_manifest(path)
        assert (role_manifests[first].waited_s, role_manifests[first].notes) == (None, ())
        assert role_manifests[second].waited_s is not None
        assert (
            f"s for torch, held by this process ({first}, step{step}), and started " in role_manifests[second].notes[0]
        )
