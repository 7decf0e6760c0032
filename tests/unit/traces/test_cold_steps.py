"""Tests for cold first steps: output marks them, and statistics exclude them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from captured_runs import write_capture, write_run
from gpu_job import GpuJob
from profdeck_traces import load
from profdeck_traces.analysis.diff import diff_runs
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.cli.summary_screen import Screen, page
from profdeck_traces.cli.summary_tables import tables
from profdeck_traces.cli.trend_screen import page as trend_page
from profdeck_traces.findings.overview import Team, teams_of
from profdeck_traces.inputs.sources import recorded_sources
from profdeck_traces.report.role_section import role_section
from profdeck_traces.trend.model import Trend
from profdeck_traces.trend.points import read_points
from profdeck_traces.trend.trend import trend_of

COLD_US = 40_000.0
Summaries = Callable[..., RunSummary]


@pytest.fixture
def summary(tmp_path: Path) -> Summaries:
    """Write a capture of step 0 and return the summary of its run."""

    def make(name: str, *, cold: bool | None = None, stage: str | None = None, **job: Any) -> RunSummary:
        write_capture(tmp_path / name, 0, GpuJob(**job), cold=cold, stage=stage)
        return load(tmp_path / name).summary

    return make


@pytest.fixture
def cold(summary: Summaries) -> RunSummary:
    return summary("cold", cold=True, steps=5, cold_us=COLD_US)


@pytest.fixture
def warm(summary: Summaries) -> RunSummary:
    return summary("warm", cold=False, steps=4)


def team_of(run: RunSummary) -> Team:
    (team,) = teams_of(run)
    return team


def rules(run: RunSummary) -> list[str]:
    return [finding.rule for finding in run.findings]


def screen(run: RunSummary) -> str:
    return "\n".join(line.plain for line in page(run, [Path("run")], Screen(width=80, findings=None)))


def test_statistics_exclude_the_cold_step(cold: RunSummary, warm: RunSummary) -> None:
    actual, expected = team_of(cold), team_of(warm)
    assert actual.step_us == pytest.approx(expected.step_us)
    assert {row.name: row.mean_us for row in actual.stages} == pytest.approx(
        {row.name: row.mean_us for row in expected.stages}
    )
    for section in ("kernels", "operators"):
        rows, expected_rows = getattr(actual, section), getattr(expected, section)
        assert [(row.name, row.mean_us, row.calls) for row in rows] == [
            (row.name, pytest.approx(row.mean_us), pytest.approx(row.calls)) for row in expected_rows
        ]
    (steps,), (expected_steps,) = actual.steps, expected.steps
    assert (steps.count, steps.median_us, steps.max_us) == (
        4,
        pytest.approx(expected_steps.median_us),
        pytest.approx(expected_steps.max_us),
    )
    assert cold.ranks[0].iterations[0].count == 4
    assert rules(cold) == rules(warm)


def test_step_not_marked_in_the_manifest_is_counted(summary: Summaries) -> None:
    older = summary("older", cold=None, steps=5, cold_us=COLD_US)
    assert "unsteady-steps" in rules(older)
    assert team_of(older).steps[0].count == 5
    assert not any(step.cold for step in older.ranks[0].steps)


def test_cold_step_is_shown_and_marked(cold: RunSummary) -> None:
    assert [(step.step, step.cold) for step in cold.ranks[0].steps] == [
        (0, True),
        *((step, False) for step in range(1, 5)),
    ]
    assert "global step (without cold step 0)" in screen(cold)
    assert "ProfilerStep#0 (cold)" in "\n".join(line.plain for line in tables(cold, 200, None))
    assert role_section(team_of(cold), 0, 1)["steps"][0][0].text == "global step (without cold step 0)"


def test_totals_of_the_recording_include_the_cold_step(cold: RunSummary) -> None:
    (operator,) = cold.ranks[0].operators
    assert (operator.count, operator.cold_us) == (5 * 20, pytest.approx(COLD_US + 20 * 8))
    assert operator.self_us == pytest.approx(COLD_US + 5 * 20 * 8)
    (gemm,) = (category for category in cold.ranks[0].categories if category.category == "gemm")
    assert (gemm.total_us, gemm.cold_us) == (pytest.approx(5 * 20 * 400), pytest.approx(20 * 400))


@pytest.mark.parametrize("ranks", [1, 2])
def test_trace_with_only_a_cold_step_has_no_findings(summary: Summaries, ranks: int) -> None:
    job: dict[str, Any] = {"ranks": ranks, "slow_rank": ranks - 1, "steps": 1, "cold_us": COLD_US}
    assert {"host-bound", "slow-stage", "few-steps"} & {*rules(summary("unknown", **job))}
    run = summary("lone", cold=True, **job)
    assert rules(run) == ["cold-step"]
    text = run.findings[0].text
    assert text.startswith("The trace has only step 0, the" if ranks == 1 else "2 of 2 traces have only the")
    assert "recorder's first step, which takes longer than other steps; its times are not evaluated." in text
    assert {stage.slowest for stage in team_of(run).stages} == {None}
    assert "global step (cold)" in screen(run)


def test_findings_of_a_stage_with_a_cold_step_have_a_note(summary: Summaries) -> None:
    run = summary("stage", cold=True, stage="update", steps=1)
    assert rules(run)[-1] == "cold-step"
    assert "their times include the recorder's start-up" in run.findings[-1].text


def test_role_statistics_use_captures_without_a_cold_step(tmp_path: Path) -> None:
    jobs = (GpuJob(steps=1, cold_us=COLD_US), GpuJob(steps=3), GpuJob(steps=3))
    run = load(write_run(tmp_path / "run", 3, jobs.__getitem__, cold=lambda number: number == 0)).summary
    expected = load(write_run(tmp_path / "others", 2, lambda _: GpuJob(steps=3))).summary
    assert team_of(run).step_us == pytest.approx(team_of(expected).step_us)
    assert {row.name: row.mean_us for row in team_of(run).stages} == pytest.approx(
        {row.name: row.mean_us for row in team_of(expected).stages}
    )
    assert team_of(run).steps[0].count == 6
    assert run.findings[-1].text.startswith("1 of 3 traces have only step 0, the recorder's first step")


def test_skew_excludes_collectives_of_the_cold_step(summary: Summaries) -> None:
    job: dict[str, Any] = {"ranks": 2, "steps": 7}
    (warm_skew,), (full_skew,) = (
        summary(name, cold=is_cold, **job).skew for name, is_cold in (("a", True), ("b", None))
    )
    assert [rank.collectives for rank in warm_skew.ranks] == [6, 6]
    assert [rank.collectives for rank in full_skew.ranks] == [7, 7]
    assert warm_skew.note == full_skew.note


def test_cached_reading_is_equal(tmp_path: Path) -> None:
    write_capture(tmp_path / "run", 0, GpuJob(ranks=2, steps=7, cold_us=COLD_US), cold=True)
    first, second = (load(tmp_path / "run").summary for _ in range(2))
    assert first == second


# diff.


def test_diff_excludes_the_cold_step(cold: RunSummary, warm: RunSummary) -> None:
    (role,) = diff_runs(warm, cold).roles
    assert (role.steps_before, role.steps_after) == (4, 4)
    changes = (*role.iterations, *role.overall, *role.operators, *role.annotations, *role.kernels)
    assert {change.name: change.ratio for change in changes if change.name != "idle"} == {
        change.name: pytest.approx(0, abs=0.001) for change in changes if change.name != "idle"
    }
    assert {change.verdict for change in changes} == {"same"}
    assert "Excluded the recorder's first steps: step 0 after." in role.notes


def test_diff_omits_host_times_if_one_side_has_only_a_cold_step(summary: Summaries, warm: RunSummary) -> None:
    lone = summary("lone", cold=True, steps=1, cold_us=COLD_US)
    (role,) = diff_runs(warm, lone).roles
    assert role.iterations == role.operators == role.annotations == ()
    assert {change.name for change in role.overall} == {"kernels", "busy", "communication", "exposed communication"}
    assert role.regressions(0.05) == ()
    assert role.notes[-1].startswith("Host times are not compared: side 'after' has only the recorder's first step")


def test_diff_of_two_cold_steps_has_a_note(summary: Summaries) -> None:
    first, second = (summary(name, cold=True, steps=1, cold_us=COLD_US) for name in ("first", "second"))
    (role,) = diff_runs(first, second).roles
    assert role.iterations[0].verdict == "inconclusive"
    assert role.notes[-1].startswith("All steps are first steps of a recorder")


def test_diff_omits_traces_with_only_a_cold_step(tmp_path: Path, warm: RunSummary) -> None:
    jobs = (GpuJob(steps=1, cold_us=COLD_US), GpuJob(steps=4))
    run = load(write_run(tmp_path / "run", 2, jobs.__getitem__, cold=lambda number: number == 0)).summary
    (role,) = diff_runs(warm, run).roles
    assert (role.steps_after, role.iterations[0].verdict) == (4, "same")


# trend.


def trend(run: Path) -> Trend:
    points, left_out, errors = read_points(recorded_sources([run]))
    assert not errors
    return trend_of(points, left_out=left_out)


def trend_text(of: Trend) -> str:
    return "\n".join(line.plain for line in trend_page(of, 200, 0.05))


def test_trend_excludes_the_cold_step(tmp_path: Path) -> None:
    jobs = (GpuJob(steps=4, cold_us=COLD_US), GpuJob(steps=3))
    actual = trend(write_run(tmp_path / "run", 2, jobs.__getitem__, cold=lambda number: number == 0))
    for series in actual.series:
        if series.what in {"global step", "device busy"}:
            first, second = series.points
            assert first.value == pytest.approx(second.value, rel=1e-3)
    assert (actual.cold_left_out, actual.cold_excluded) == (0, 1)
    assert "recorder's first step excluded in 1 trace" in "\n".join(
        line.plain for line in trend_page(actual, 200, 0.05)
    )


def test_trend_omits_captures_with_only_a_cold_step(tmp_path: Path) -> None:
    job = GpuJob(steps=1, cold_us=COLD_US)
    mixed = trend(write_run(tmp_path / "mixed", 4, lambda _: job, cold=lambda number: number == 0))
    assert [point.first_step for point in mixed.series[0].points] == [50, 100, 150]
    assert mixed.cold_left_out == 1
    assert "1 trace skipped: only the recorder's first step" in "\n".join(
        line.plain for line in trend_page(mixed, 200, 0.05)
    )
    alike = trend(write_run(tmp_path / "alike", 4, lambda _: job, cold=lambda _: True))
    assert len(alike.series[0].points) == 4
    assert alike.cold_left_out == 0
