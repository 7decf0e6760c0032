"""Tests of the statistics per role."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path

import pytest

from captured_runs import write_run
from gpu_job import GpuJob
from profdeck_traces import load
from profdeck_traces.analysis.formatting import ms, relative
from profdeck_traces.findings.overview import Team, about, teams_of
from profdeck_traces.findings.rank_view import views_of
from profdeck_traces.report.role_section import role_section

STEPS = (1, 3, 5, 2, 4)


def team_and_line(run: Path) -> tuple[Team, str]:
    summary = load(run).summary
    (team,) = teams = teams_of(summary)
    return team, about(summary, teams)


def test_captures_of_a_rank_are_counted_as_one_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5, lambda number: GpuJob(steps=STEPS[number], load_us=100.0 * (number + 1)))

    team, line = team_and_line(run)

    assert line.startswith("5 captures, 1 rank of trainer, ")
    assert (team.name, team.rank_labels, len(team.views)) == ("trainer", ["trainer rank 0"], 5)
    assert {(stage.slowest, stage.spread) for stage in team.stages} == {(None, 0.0)}


def test_means_weight_captures_by_their_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 5, lambda number: GpuJob(steps=STEPS[number], load_us=100.0 * (number + 1)))

    team, _ = team_and_line(run)

    loads = [100.0 * (number + 1) for number, steps in enumerate(STEPS) for _ in range(steps)]
    loading = next(stage for stage in team.stages if stage.name == "data_loading")
    assert loading.mean_us == pytest.approx(statistics.fmean(loads))
    # Without its load, each step takes the same time.
    assert team.step_us - statistics.fmean(loads) == pytest.approx(20 * 400 + 300, rel=0.002)
    (products,) = (row for row in team.kernels if "gemm" in row.name)
    assert (products.count, products.calls) == (20 * sum(STEPS), pytest.approx(20))
    assert products.mean_us == pytest.approx(20 * 400)
    assert team.steps[0].count == sum(STEPS)


def test_spread_is_between_ranks(tmp_path: Path) -> None:
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


def test_finding_counts_ranks_instead_of_captures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, lambda _: GpuJob(ranks=2, steps=4, load_us=2_000.0))

    loading = next(finding for finding in load(run).summary.findings if finding.rule == "data-loading")

    assert "(both ranks, most on trainer rank " in loading.text
    assert loading.ranks == ("trainer rank 0", "trainer rank 1")


def test_finding_has_the_capture_of_its_values(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, lambda number: GpuJob(steps=4, load_us=1_000.0 * (number + 1)))

    (loading,) = (finding for finding in load(run).summary.findings if finding.rule == "data-loading")

    assert "(2.00 ms) in data_loading" in loading.text
    assert loading.text.endswith("(capture step50).")


def test_cycles_of_a_window_are_counted_as_one_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, lambda _: GpuJob(steps=2))
    directory = run / "step_000000" / "trainer"
    manifest = directory / "rank_0000.step0.json"
    trace = directory / "rank_0000.step0.trace.json.gz"
    record = json.loads(manifest.read_text())
    (artifact,) = record["artifacts"]
    second = trace.with_name("rank_0000.step0.cycle1.trace.json.gz")
    second.write_bytes(trace.read_bytes())
    record["artifacts"] = [artifact, artifact | {"name": second.name}]
    manifest.write_text(json.dumps(record))

    team, line = team_and_line(run)

    assert line.startswith("1 capture, 1 rank of trainer, ")
    assert (len(team.views), team.rank_labels, team.steps[0].count) == (2, ["trainer rank 0"], 4)
    assert {stage.slowest for stage in team.stages} == {None}


def test_kernels_and_their_classes_have_the_same_ranks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, lambda _: GpuJob(ranks=3, steps=2))
    trace = run / "step_000000" / "trainer" / "rank_0001.step0.trace.json.gz"
    document = json.loads(gzip.decompress(trace.read_bytes()))
    document["traceEvents"] = [event for event in document["traceEvents"] if event["pid"] != 0]
    trace.write_bytes(gzip.compress(json.dumps(document).encode()))

    team, _ = team_and_line(run)

    (products,) = (row for row in team.kernels if "gemm" in row.name)
    (gemm,) = (row for row in team.device if row.name == "gemm")
    assert products.calls == pytest.approx(20)
    assert products.mean_us == pytest.approx(gemm.mean_us)


def test_page_has_one_column_per_rank_or_no_columns(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, lambda _: GpuJob(ranks=2, steps=2))
    (team,) = teams_of(load(run).summary)

    section = role_section(team, 0, 2)

    assert {len(row) for row in section["stages"]} == {len(section["stage_columns"])}
    assert [column.name for column in section["stage_columns"]][3:5] == ["trainer rank 0", "trainer rank 1"]


def test_the_rank_with_the_longest_step_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for number, load_us in enumerate((0.0, 3_000.0)):
        job = GpuJob(load_us=load_us).write(tmp_path / f"job{number}") / "rank0.trace.json.gz"
        document = json.loads(gzip.decompress(job.read_bytes()))
        document["distributedInfo"] = {"rank": number, "world_size": 2}
        job.rename(run / f"rank{number}.trace.json.gz").write_bytes(gzip.compress(json.dumps(document).encode()))

    (team,) = teams_of(load(run).summary)

    assert team.longest is not None
    assert team.longest.label == "rank 1"
    assert team.longest.step_us == pytest.approx(team.longest.mean_us + 1_500)
    shown, _ = team.largest_owners(8)
    *_, uneven = team.captions(shown)
    row = shown[int(uneven.split("Row ")[1].split()[0]) - 1]
    assert [time_us for _, time_us in row.of_ranks_us] == pytest.approx([0.0, 2 * row.mean_us], abs=0.1)
    assert uneven.endswith(f"takes {ms(2 * row.mean_us)} ms on rank 1.")


def test_ranks_with_equal_steps_have_no_longest_step(tmp_path: Path) -> None:
    (team,) = teams_of(load(GpuJob(ranks=2).write(tmp_path / "job")).summary)
    assert team.longest is None


def test_small_owners_of_a_function_share_a_row(tmp_path: Path) -> None:
    names = [f"aten::op{number}" for number in range(300)]
    begin = 0.0
    events = [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0.0, "dur": 1000.0}]
    for function, count in (("encode", 200), ("decode", 100)):
        frame = f"train.py({count}): {function}"
        events.append({"ph": "X", "cat": "python_function", "name": frame, "ts": begin, "dur": 3.0 * count})
        for _ in range(count):
            events.append({"ph": "X", "cat": "cpu_op", "name": names.pop(), "ts": begin, "dur": 3.0})
            begin += 3.0
    trace = tmp_path / "a.json"
    trace.write_text(json.dumps({"traceEvents": [event | {"pid": 1, "tid": 1} for event in events]}))

    (team,) = teams_of(load(trace).summary)
    shown, others = team.largest_owners(8)

    sums = {row.origin: (row.title, row.mean_us) for row in shown if row.name is None and row.origin}
    assert sums.keys() <= {"train.py(200): encode", "train.py(100): decode"}
    title, time_us = sums["train.py(200): encode"]
    assert title.endswith(" others")
    listed = sum(row.origin == "train.py(200): encode" for row in team.account)
    assert (title, time_us) == (f"{listed} others", pytest.approx(3.0 * listed))
    assert sum(row.mean_us for row in [*shown, *others]) == pytest.approx(1000.0)
    assert not {row.origin for row in others} & sums.keys()
    assert shown[0].name is None
    assert not any("next limit" in text for text in team.captions(shown))  # it is known only for single owners


@pytest.mark.parametrize(("ratio", "text"), [(0.663, "+66.3%"), (-1.0, "-100.0%"), (9.99, "+999.0%"), (204.13, "x205")])
def test_large_ratios_are_factors(ratio: float, text: str) -> None:
    assert relative(ratio) == text


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_means_include_idle_time_before_the_first_and_after_the_last_device_work(tmp_path: Path, steps: int) -> None:
    # The device is idle only while a batch is loaded. The host waits for the device at the end of each step.
    job = GpuJob(steps=steps, load_us=20_000.0)
    summary = load(job.write(tmp_path / "job")).summary
    (view,) = views_of(summary)
    step_us = job.load_us + job.products * job.product_us + job.reduce_us
    assert view.step_us == pytest.approx(step_us, rel=0.01)
    assert view.idle_us == pytest.approx(job.load_us, rel=0.01)
    assert view.of_devices("busy_us") == pytest.approx(step_us - job.load_us, rel=0.01)
    finding = next(finding for finding in summary.findings if finding.where.stage == "data_loading")
    assert finding.gain_us == pytest.approx(job.load_us, rel=0.01)
    (team,) = teams_of(summary)
    assert sum(row.mean_us for row in team.device) == pytest.approx(step_us, rel=0.01)
