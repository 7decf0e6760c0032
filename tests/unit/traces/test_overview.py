"""Tests of the statistics per role."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from captured_runs import write_run
from gpu_job import GpuJob
from profdeck.traces import load
from profdeck.traces.overview import Team, about, teams_of

STEPS = (1, 3, 5, 2, 4)


def team_and_line(run: Path) -> tuple[Team, str]:
    summary = load(run).summary
    (team,) = teams = teams_of(summary)
    return team, about(summary, teams)


def test_captures_of_one_rank_count_as_one_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5, lambda number: GpuJob(steps=STEPS[number], load_us=100.0 * (number + 1)))

    team, line = team_and_line(run)

    assert line.startswith("5 captures, 1 rank of trainer, ")
    assert (team.name, team.ranks, len(team.views)) == ("trainer", 1, 5)
    assert {(stage.slowest, stage.spread) for stage in team.stages} == {(None, 0.0)}


def test_means_weight_captures_by_their_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5, lambda number: GpuJob(steps=STEPS[number], load_us=100.0 * (number + 1)))

    team, _ = team_and_line(run)

    loads = [100.0 * (number + 1) for number, steps in enumerate(STEPS) for _ in range(steps)]
    loading = next(stage for stage in team.stages if stage.name == "data_loading")
    assert loading.mean_us == pytest.approx(statistics.fmean(loads))
    durations = [
        max(device.duration_us for device in step.devices)
        for view in team.views
        for step in view.rank.steps
        if step.devices
    ]
    assert team.step_us == pytest.approx(statistics.fmean(durations))
    (products,) = (row for row in team.kernels if "gemm" in row.name)
    assert (products.count, products.calls) == (20 * sum(STEPS), pytest.approx(20))
    assert products.mean_us == pytest.approx(20 * 400)
    assert team.steps[0].count == sum(STEPS)


def test_the_spread_compares_ranks(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        3,
        lambda number: GpuJob(ranks=2, steps=number + 1, slow_rank=1, load_us=100.0, slow_load_us=300.0),
    )

    team, line = team_and_line(run)

    assert line.startswith("3 captures, 2 ranks of trainer, ")
    loading = next(stage for stage in team.stages if stage.name == "data_loading")
    assert loading.of_ranks_us == pytest.approx((100.0, 300.0))
    assert (loading.slowest, loading.spread) == ("trainer rank 1", pytest.approx(0.5))


def test_a_finding_counts_ranks_instead_of_captures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, lambda _: GpuJob(ranks=2, steps=4, load_us=2_000.0))

    loading = next(finding for finding in load(run).summary.findings if finding.rule == "data-loading")

    assert "(both ranks, most on trainer rank " in loading.text
    assert loading.ranks == ("trainer rank 0", "trainer rank 1")
