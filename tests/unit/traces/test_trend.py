"""Tests of trends: simulated slowdowns, false alarms, and the series of a run."""

from __future__ import annotations

import html
import itertools
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from captured_runs import FIRST_NS, write_capture, write_run
from gpu_job import GpuJob
from processes import until
from profdeck_traces import load
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.result_keys import identity_of
from profdeck_traces.inputs.sources import find_sources, recorded_sources
from profdeck_traces.loading import summarise
from profdeck_traces.report.trend_page import write_trend_page
from profdeck_traces.trend import points as reading
from profdeck_traces.trend.change_points import MIN_VALUES, change_points
from profdeck_traces.trend.model import Trend, TrendSeries
from profdeck_traces.trend.points import RankPoint, points_of, read_points
from profdeck_traces.trend.rank_numbers import RankNumbers
from profdeck_traces.trend.trend import trend_of
from profdeck_traces.trend.trend_text import (
    explanation,
    headings,
    inconclusive_reason,
    runs_of,
    sentence,
    shown_series,
)

Job = dict[str, Any]
JOBS = 200


def noisy(seed: int, **changes: Any) -> GpuJob:
    chance = random.Random(seed)  # noqa: S311 - no secret
    defaults: Job = {"ranks": 2, "steps": 3, "products": 6, "product_us": 400 * chance.gauss(1, 0.01)}
    return GpuJob(**defaults | {"load_us": 30 * chance.gauss(1, 0.1)} | changes)


def slowing_job(number: int) -> GpuJob:
    """Return the job of a capture. From the 12th capture, data loading of one rank is slower."""
    return noisy(number, slow_rank=1, slow_load_us=300) if number >= 12 else noisy(number)


def read(*paths: Path, **options: Any) -> Trend:
    points, left_out, errors = read_points(recorded_sources(paths), **options)
    assert not errors
    return trend_of(points, left_out=left_out)


def sentences(trend: Trend) -> list[str]:
    runs = runs_of(trend)
    return [f"{sentence(series, change, runs)} {explanation(change)}" for series, change in headings(trend)]


def series(trend: Trend, label: str) -> TrendSeries:
    return next(entry for entry in trend.series if entry.what == label)


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "slower", 24, slowing_job)


# Output.


def test_change_has_its_step_stage_and_rank(slower: Path) -> None:
    (text,) = sentences(read(slower))
    assert text.startswith("trainer is slower since step 600: global step ")
    assert "With it: stage data_loading of rank 1 +0.26" in text  # 0.27 minus the noise of the other captures
    assert "kernels of class communication +" in text  # the other rank waits


def test_points_equal_the_medians_of_the_summary(slower: Path) -> None:
    step_series = series(read(slower), "global step")
    for point in step_series.points:
        summary, _ = summarise([slower / f"step_{point.first_step:06d}"])
        medians = [
            statistics.median(
                device.duration_us for step in rank.steps for device in step.devices if device.is_followed
            )
            for rank in summary.ranks
        ]
        assert (point.value, point.ranks) == (statistics.fmean(medians), 2)
        assert point.run == str(slower)
    assert [point.first_step for point in step_series.points] == list(range(0, 24 * 50, 50))


def test_change_of_all_ranks_names_no_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 24, lambda number: noisy(number, load_us=300.0 if number >= 12 else 30.0))
    (text,) = sentences(read(run))
    assert "With it: stage data_loading +0.27" in text


def test_changes_are_found_across_runs(tmp_path: Path, slower: Path) -> None:
    after = write_run(tmp_path / "after", 24, noisy, first_ns=FIRST_NS + 10**12)
    slow, fast = sentences(read(slower.parent, after))
    assert slow.startswith("trainer is slower since step 600 of slower: ")
    assert fast.startswith("trainer is faster since run after: ")
    assert "stage data_loading of rank 1 -0.26" in fast


def test_traces_without_manifests_are_rejected(tmp_path: Path) -> None:
    GpuJob().write(tmp_path)
    with pytest.raises(TraceError, match="No trace with a manifest found"):
        read(tmp_path)


def test_engine_iterations_are_grouped_by_stage(tmp_path: Path) -> None:
    def event(name: str, start: float, duration: float) -> dict[str, Any]:
        times = {"ts": start, "dur": duration}
        return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, **times}

    for number in range(2):
        write_capture(tmp_path / "run", number, GpuJob(ranks=1, steps=1), FIRST_NS + number)
        (trace,) = (tmp_path / "run" / f"step_{number:06d}").rglob("*.trace.json.gz")
        events = [event("execute_context_1(64)_generation_0(0)", 0, 500)]
        events += [event("execute_context_0(0)_generation_4(4)", 1000 * index, 100) for index in (1, 2, 3, 5)]
        trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    series_by_name = {entry.what: entry for entry in read(tmp_path).series}
    assert {name: (entry.unit, entry.points[0].value) for name, entry in series_by_name.items()} == {
        "decode iteration": ("us", 100.0),
        "prefill iteration": ("us", 500.0),
        "decode tokens": ("tokens/s", pytest.approx(16 / 4100e-6, rel=0.01)),
        "prefill tokens": ("tokens/s", pytest.approx(64 / 1000e-6, rel=0.01)),
    }


def test_windows_are_labelled_as_mini_batches(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2, noisy)
    for manifest in run.rglob("*.step*.json"):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"window": {"active": 3}}))
    assert read(run).series[0].what == "mini-batch"


def test_page_has_a_plot_of_each_series_and_no_external_resources(slower: Path) -> None:
    trend = read(slower)
    page = write_trend_page(trend, ["<b>slower</b>"])
    assert page.count("<svg ") == len(shown_series(trend))
    assert "&lt;b&gt;slower" in page
    assert "since step 600" in page
    assert not {"<script", "http://", "https://", "<link"} & set(page.split())


def test_report_contains_the_trend(slower: Path, tmp_path: Path) -> None:
    summary, _ = summarise([slower])
    assert trend_of(points_of([summary], find_sources([slower]))) == read(slower)
    page = load(slower, cache=False).report(tmp_path / "report.html")
    (sentence_and_parts,) = sentences(read(slower))
    assert all(html.escape(text) in page for text in sentence_and_parts.split(" With it: "))
    assert page.count(" captures, steps 0 to 1,150</text>") == len(shown_series(read(slower)))


def test_page_of_few_captures_requests_more_captures(tmp_path: Path) -> None:
    page = write_trend_page(read(write_run(tmp_path / "run", 2 * MIN_VALUES - 1, noisy)), ["run"])
    assert "at least 10 are required" in page
    assert "No significant change" not in page


@pytest.mark.parametrize("captures", [1, 2 * MIN_VALUES - 1])
def test_report_of_few_captures_has_no_trend(tmp_path: Path, captures: int) -> None:
    assert "Over time" not in load(write_run(tmp_path / "run", captures, noisy), cache=False).report()


def test_report_of_traces_without_manifests_has_no_trend(tmp_path: Path) -> None:
    assert "Over time" not in load(GpuJob(ranks=2).write(tmp_path), cache=False).report()


# Cached results.


def test_cached_results_are_used(slower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ResultCache(tmp_path)
    until(lambda: all(map(identity_of, slower.rglob("*.gz"))))  # recently modified files are not cached
    first = read(slower, cache=cache)
    with monkeypatch.context() as patched:
        patched.setattr(reading, "summarise_run", None)
        assert read(slower, cache=cache) == first
    assert first == read(slower)


def test_truncated_trace_is_omitted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, noisy)
    (cut, *_) = sorted((run / "step_000050").rglob("*.gz"))
    cut.write_bytes(cut.read_bytes()[:-200])
    trend = read(run)
    assert (trend.left_out, [point.ranks for point in series(trend, "global step").points]) == (1, [2, 1, 2])


@pytest.mark.parametrize("stall_s", [1e308, -5.0, 1e7])
def test_implausible_stall_is_ignored(tmp_path: Path, stall_s: float) -> None:
    run = write_run(tmp_path / "run", 2, noisy)
    for manifest in run.rglob("*.step*.json"):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"stall_s": stall_s}))
    assert "stall" not in {entry.what for entry in read(run).series}


# Parts of the step.

OWNERS = ("aten::mm in train.py(3): step", "open in data.py(9): load", "print in log.py(2): log")


def parts_of_steps(
    seed: int,
    *,
    ranks: int = 4,
    captures: int = 40,
    slow: dict[tuple[str, int], float] | None = None,
    busy: int = 10**9,
) -> list[RankPoint]:
    """Return points whose times have 3 % Gaussian noise.

    Args:
        seed: Seed for the noise.
        ranks: Number of ranks.
        captures: Number of captures.
        slow: Slowdown factors by stage or owner and rank, for the second half of the captures.
        busy: Index of the first capture in which the machine is busy.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    points = []
    for capture in range(captures):
        times = {
            (name, rank): chance.gauss(10_000, 300)
            * ((slow or {}).get((name, rank), 1) if 2 * capture >= captures else 1)
            for name in ("data", "forward", "loss", *OWNERS)
            for rank in range(ranks)
        }
        for rank in range(ranks):
            numbers = RankNumbers(
                values={"global step": chance.gauss(100_000, 3000)},
                stages={name: times[name, rank] for name in ("data", "forward", "loss")},
                classes={},
                idle={},
                owners={name: times[name, rank] for name in OWNERS},
            )
            point = RankPoint(
                run="/runs/job",
                capture=f"step{50 * capture}",
                role="trainer",
                replica=None,
                stage=None,
                rank=rank,
                first_step=50 * capture,
                started_ns=capture,
                stall_s=None,
                is_machine_busy=capture >= busy,
                numbers=numbers,
            )
            points.append(point)
    return points


def test_parts_that_do_not_change_the_step_are_found_on_their_rank() -> None:
    trend = trend_of(parts_of_steps(1, slow={("data", 2): 1.5, (OWNERS[1], 2): 1.5}))
    assert trend.tested == 31  # the step, plus 3 stages and 3 owners on each of 4 ranks and over all ranks
    (text,) = sentences(trend)
    assert text.startswith("trainer: stage data is slower since step 1,000: it takes 11.")
    assert "With it: stage data of rank 2 +4.884 ms, owner" in text
    assert "owner open in data.py(9): load of rank 2 +" in text
    assert {series.rank for series in trend.series} == {None, 2}


def test_stage_that_replaces_another_one_is_found() -> None:
    slow = {(name, rank): factor for rank in range(4) for name, factor in (("data", 1.2), ("loss", 0.8))}
    slower, faster = sentences(trend_of(parts_of_steps(2, slow=slow)))
    assert slower.startswith(
        "trainer: stage data is slower since step 1,000: it takes 11.99 ms, before 10.01 ms, +19.8%"
    )
    assert faster.startswith("trainer: stage loss is faster since step 1,000: it takes 7.979 ms")
    assert "With it" not in slower + faster


def test_false_alarms_over_all_parts_are_few() -> None:
    """The significance level of 1 % applies to all 19 series together."""
    assert sum(bool(headings(trend_of(parts_of_steps(seed, ranks=2)))) for seed in range(40)) <= 2


def test_slowdown_on_a_busy_machine_is_inconclusive() -> None:
    slow = {("data", rank): 1.5 for rank in range(4)}
    trend = trend_of(parts_of_steps(3, slow=slow, busy=20))
    (text,) = sentences(trend)
    assert "stage data is inconclusive since step 1,000" in text
    assert "the machine was busy in 20 captures after the change and in 0 before." in text
    assert "The machine has been busy since each slowdown" in str(inconclusive_reason(trend))
    assert inconclusive_reason(trend_of(parts_of_steps(3, slow=slow, busy=0))) is None
    assert inconclusive_reason(trend_of(parts_of_steps(3, slow=slow, busy=30))) is None


def test_new_owner_is_found_among_many_series() -> None:
    """An owner missing from the first half of 20 captures is detected as new, however many other series are tested."""
    points = []
    for point in parts_of_steps(4, ranks=1, captures=20):
        owners = {f"owner {index}": time for index in range(20) for time in [point.numbers.owners[OWNERS[0]]]}
        owners["new"] = 0.0 if point.first_step < 500 else owners["owner 0"]
        points.append(attrs.evolve(point, numbers=attrs.evolve(point.numbers, owners=owners)))
    (text,) = sentences(trend_of(points))
    assert text.startswith("trainer: owner new is slower since step 500: it takes ")


# Change detection.


def wandering(chance: np.random.Generator, count: int, correlation: float, *, heavy: bool) -> list[float]:
    """Return times with autocorrelated noise of 3 % around 100."""
    noise: NDArray[np.float64] = chance.standard_t(3, count) if heavy else chance.standard_normal(count)
    values = list(
        itertools.accumulate(noise.tolist(), lambda previous, noise_value: correlation * previous + noise_value)
    )
    return [100 + 3 * value for value in values]


@pytest.mark.parametrize(
    ("count", "correlation", "heavy", "most"),
    [(40, 0.0, False, 2), (40, 0.0, True, 2), (20, 0.3, True, 4), (40, 0.5, False, 12), (100, 0.3, False, 6)],
)
def test_false_alarms_are_few(count: int, correlation: float, heavy: bool, most: int) -> None:
    """The significance level is 1 %: two of 200 jobs. Autocorrelated times have slightly more false alarms."""
    chance = np.random.default_rng(count)
    alarms = [change_points(wandering(chance, count, correlation, heavy=heavy), min_change=0) for _ in range(JOBS)]
    assert sum(map(bool, alarms)) <= most


@pytest.mark.parametrize(("count", "change_index"), [(40, 24), (24, 12), (60, 48)])
def test_slowdown_of_an_eighth_is_found_at_its_index(count: int, change_index: int) -> None:
    chance = np.random.default_rng(change_index)
    results = []
    for _ in range(JOBS // 4):
        values = wandering(chance, count, 0.0, heavy=False)
        results.append(change_points([*values[:change_index], *(value * 1.125 for value in values[change_index:])]))
    hits = [changes for changes in results if len(changes) == 1 and abs(changes[0].index - change_index) <= 1]
    assert len(hits) >= 0.9 * len(results)
    assert statistics.median(change.after / change.before for (change,) in hits) == pytest.approx(1.125, abs=0.01)


def test_small_changes_and_short_series_have_no_change() -> None:
    assert change_points([100.0] * 20 + [101.0] * 20) == []
    assert [change.index for change in change_points([100.0] * 20 + [103.0] * 20)] == [20]
    assert change_points([]) == change_points([1.0]) == change_points([5.0] * 50) == []


@given(
    st.lists(st.floats(0, 1e12), max_size=60),
    st.lists(st.floats(0, 1e12), max_size=60),
)
def test_changes_of_any_series_are_sorted_and_inside(before: Sequence[float], after: Sequence[float]) -> None:
    values = [*before, *after]
    indices = [change.index for change in change_points(values)]
    assert indices == sorted(set(indices))
    edges = [0, *indices, len(values)]
    assert not indices or min(later - earlier for earlier, later in itertools.pairwise(edges)) >= MIN_VALUES
    assert [change.index for change in change_points([value * 8 for value in values])] == indices
