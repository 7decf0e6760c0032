"""Tests of the duration of unrecorded steps in manifests, with the backend `tally`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from profdeck import Profiler
from profdeck.lifecycle import role

Run = Callable[..., dict[str, float | None]]


@pytest.fixture
def run_job(tally: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Function that runs a job with given step durations, and returns the manifests' `unrecorded_step_s` by capture."""
    now_s = 1000.0
    monkeypatch.setattr(role, "monotonic", lambda: now_s)

    def run(durations_s: Iterable[tuple[int, float]], stage: str | None = None, **settings: Any) -> dict[str, Any]:
        nonlocal now_s
        profiler = Profiler.from_config(
            settings={"output": str(tmp_path), "run": "run", "trainer.backend": "tally", **settings}
        )
        for step, duration_s in durations_s:
            with profiler.capture(step), profiler.stage(stage or "work"):
                now_s += duration_s
        manifests = [
            json.loads(file.read_text())
            for file in tmp_path.glob("run/step_*/**/rank_*.json")
            if not file.name.endswith(".trace.json")
        ]
        return {manifest["capture"]: manifest["unrecorded_step_s"] for manifest in manifests}

    return run


def test_manifest_has_the_median_duration_of_unrecorded_steps(run_job: Run) -> None:
    durations_s = [(step, 60.0 if step == 0 else 2.0 + step / 1000) for step in range(6)]
    assert run_job(durations_s, steps=[5]) == {"step5": pytest.approx(2.0025)}


def test_only_the_last_steps_count(run_job: Run) -> None:
    durations_s = [(step, 2.0 if step < 80 else 5.0) for step in range(101)]
    assert run_job(durations_s, steps=[100]) == {"step100": pytest.approx(5.0)}


def test_first_step_does_not_count(run_job: Run) -> None:
    assert run_job([(step, 2.0) for step in range(5)], steps=[3]) == {"step3": None}


@pytest.mark.parametrize(("every", "warmup_steps"), [(2, 0), (3, 1)])
def test_recorded_steps_and_their_warm_up_do_not_count(run_job: Run, every: int, warmup_steps: int) -> None:
    durations_s = [(step, 2.0 if step % every == 1 else 1000.0) for step in range(19)]
    captures = run_job(durations_s, steps=[f"every {every}"], **{"trainer.warmup_steps": warmup_steps})
    assert captures["step18"] == pytest.approx(2.0)


def test_only_adjacent_steps_count(run_job: Run) -> None:
    assert run_job([(step, 2.0) for step in range(0, 60, 2)], steps=[58]) == {"step58": None}


def test_stages_have_no_unrecorded_duration(run_job: Run) -> None:
    captures = run_job([(step, 2.0) for step in range(10)], stage="update", steps=[9], mode="discrete")
    assert captures == {"step9-update": None}
