"""An engine in this process: its worker runs its own untouched code while idle, and batches are named as by vLLM."""

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


def test_an_idle_worker_is_untouched(job: Any) -> None:
    assert job.results["idle_before"] == []
    assert job.results["armed"] == ["execute_model", "sample_tokens", "shutdown"]
    assert job.results["idle_after_window"] == []
    assert job.results["capture"]["status"] == "complete"


def test_iterations_are_named_as_vllm_names_them(job: Any) -> None:
    for ours, theirs in job.results["names"]:
        assert ours == theirs
        assert len(ours) > 10


def test_all_kinds_of_batches_were_met(job: Any) -> None:
    assert job.results["kinds"] == ["decode", "mixed", "prefill"]


def test_it_takes_turns_with_a_trainer_in_the_same_process(job: Any) -> None:
    report = read_run(job.output / "together")
    assert report.status is Status.COMPLETE, report
    for step, first, second in ((1, "trainer", "rollout"), (3, "rollout", "trainer")):
        found = {}
        for role in (first, second):
            (path,) = (job.output / "together").glob(f"step_{step:06d}/{role}/rank_*.step{step}.json")
            found[role] = read_manifest(path)
        assert (found[first].waited_s, found[first].notes) == (None, ())
        assert found[second].waited_s is not None
        assert f"s for torch, held by this process ({first}, step{step}), and started " in found[second].notes[0]
