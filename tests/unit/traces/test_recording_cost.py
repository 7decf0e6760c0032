"""Tests of the comparison of recorded steps with the steps before the capture."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import attrs
import pytest
from invented_summaries import run as invented_run, trace
from test_account_rules import Job, frame

from captured_runs import write_run
from gpu_job import GpuJob
from profdeck_traces import load
from profdeck_traces.analysis.detail_model import RecordingCost
from profdeck_traces.analysis.diff import diff_runs
from profdeck_traces.analysis.model import RankSummary, RunSummary
from profdeck_traces.findings.finding import with_findings
from profdeck_traces.findings.overview import notes_of, teams_of, verdict_of


def run_with(directory: Path, job: GpuJob, unrecorded_step_s: float | None) -> RunSummary:
    """Write a run whose manifests contain the duration of unrecorded steps, and return its summary."""
    run = write_run(directory / "run", 1, lambda _: job)
    for manifest in run.rglob("rank_*.step0.json"):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"unrecorded_step_s": unrecorded_step_s}))
    return load(run).summary


def step_us(directory: Path, job: GpuJob) -> float:
    """Return the time between the starts of two recorded steps of a job."""
    starts_us = [step.start_us for step in run_with(directory / "plain", job, None).ranks[0].steps]
    (duration_us,) = {round(after - before, 3) for before, after in pairwise(starts_us)}
    return duration_us


def cost(ratio: float) -> RecordingCost:
    return RecordingCost(recorded_step_us=ratio * 163_000, unrecorded_step_us=163_000.0, ratio=ratio)


def test_recorded_steps_are_measured_from_start_to_start(tmp_path: Path) -> None:
    recorded_us = step_us(tmp_path, GpuJob())
    (rank,) = run_with(tmp_path, GpuJob(), recorded_us / 1.6e6).ranks
    assert rank.recording_cost is not None
    assert attrs.astuple(rank.recording_cost) == pytest.approx((recorded_us, recorded_us / 1.6, 1.6))


@pytest.mark.parametrize("unrecorded_step_s", [None, 0.0, -1.0, 1e-12, 1e300])
def test_unknown_and_implausible_durations_are_not_compared(tmp_path: Path, unrecorded_step_s: float | None) -> None:
    (rank,) = run_with(tmp_path, GpuJob(), unrecorded_step_s).ranks
    assert rank.recording_cost is None


def test_two_recorded_steps_are_not_compared(tmp_path: Path) -> None:
    assert run_with(tmp_path / "two", GpuJob(steps=2), 0.001).ranks[0].recording_cost is None
    assert run_with(tmp_path / "three", GpuJob(steps=3), 0.001).ranks[0].recording_cost is not None


@pytest.mark.parametrize(
    ("ratio", "is_note", "is_in_headline"), [(1.1, False, False), (1.2, True, False), (1.6, True, True)]
)
def test_slow_recorded_steps_are_a_note(tmp_path: Path, ratio: float, is_note: bool, is_in_headline: bool) -> None:
    job = GpuJob(items=10)
    run = run_with(tmp_path, job, step_us(tmp_path, job) / ratio / 1e6)
    phrase = f"take {ratio:.1f} times as long as the steps before the capture ("
    notes = [note for note in notes_of(run, advice=False) if phrase in note]
    assert bool(notes) == is_note
    assert "times as long" not in verdict_of(run, teams_of(run))
    (team,) = teams_of(run)
    assert (f", {ratio:.1f} times as long as the steps before the capture; critical" in team.headline) == is_in_headline


def test_measured_slowdown_replaces_the_recorded_overhead(tmp_path: Path) -> None:
    events = [frame("train.py(9): work", 3_000), ("overhead", "PROFILER_INIT", 4_000)]
    run = Job().write(tmp_path / "job.json", events)
    assert [finding.rule for finding in run.findings] == ["profiler", "python-code"]
    slow = with_findings(attrs.evolve(run, ranks=(attrs.evolve(run.ranks[0], recording_cost=cost(1.6)),)))
    assert [finding.rule for finding in slow.findings] == ["python-code", "profiler"]
    (note,) = notes_of(slow, advice=True)
    assert note == (
        "Recorded steps take 1.6 times as long as the steps before the capture (163 ms). The recording of stacks or "
        "different work can be the reason; recording lengthens Python code and small operators most. To measure times, "
        "record without stacks: pass with_stack=False to torch.profiler.profile."
    )


def test_note_names_the_slowest_rank() -> None:
    ranks = [
        trace({"gemm": [100] * 5}, rank=rank, path=f"{rank}.json", recording_cost=cost(ratio))
        for rank, ratio in enumerate((1.2, 1.4, 1.0))
    ]
    (note,) = (one for one in with_findings(invented_run(*ranks)).findings if one.rule == "profiler")
    assert note.text.startswith("Recorded steps of trainer rank 1 take 1.4 times as long as the steps before the ")
    assert note.ranks == ("trainer rank 1", "trainer rank 0")


@pytest.mark.parametrize(("after", "has_note"), [(1.1, False), (1.6, True), (None, False)])
def test_diff_notes_different_costs_of_recording(after: float | None, has_note: bool) -> None:
    def side(ratio: float | None) -> RunSummary:
        rank: RankSummary = trace({"gemm": [100.0] * 5}, recording_cost=None if ratio is None else cost(ratio))
        return invented_run(rank)

    (role,) = diff_runs(side(1.2), side(after)).roles
    assert (
        any("take 1.2 times as long as unrecorded steps in the run before, and" in note for note in role.notes)
        == has_note
    )
