"""Formats the changes in a trend as sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from profdeck_traces.analysis.formatting import ms, relative
from profdeck_traces.trend.change_points import MIN_VALUES
from profdeck_traces.trend.model import Trend, TrendChange, TrendPart, TrendPoint, TrendSeries
from profdeck_traces.trend.rank_numbers import EXPOSED

_MIN_P = 0.0001
TOO_FEW = f"Too few captures to detect changes: at least {2 * MIN_VALUES} are required, and 20 for small changes."
_KINDS = {"stage": "stage", "owner": "owner", "class": "kernels of class", "idle": "idle time,"}


def runs_of(trend: Trend) -> dict[str, str]:
    """Return display names of the runs by run directory, sorted by start time."""
    points = sorted((point for series in trend.series for point in series.points), key=lambda point: point.started_ns)
    directories = list(dict.fromkeys(point.run for point in points))
    names = [directory.rpartition("/")[2] for directory in directories]
    return dict(zip(directories, names if len(set(names)) == len(names) else directories, strict=True))


def team_of(series: TrendSeries) -> str:
    """Return the role, replica and stage of a series, such as ``rollout/2, decode``."""
    role = series.role if series.replica is None else f"{series.role}/{series.replica}"
    return f"{role}, {series.stage}" if series.stage else role


def value_of(series: TrendSeries, value: float) -> str:
    """Format a value with its unit."""
    if series.unit == "us":
        return f"{ms(value)} ms"
    return f"{value:.1%}" if series.unit == "share" else f"{value:,.0f}/s"


def is_long_enough(series: TrendSeries) -> bool:
    """Return True if the series has enough captures to detect a change."""
    return len(series.points) >= 2 * MIN_VALUES


def usual(series: TrendSeries) -> tuple[float, float]:
    """Return the levels at the beginning and end: the medians before the first and after the last change.

    Without changes, return the medians of the first and last five points.
    """
    values = [point.value for point in series.points]
    if series.changes:
        return series.changes[0].before, series.changes[-1].after
    return statistics.median(values[:MIN_VALUES]), statistics.median(values[-MIN_VALUES:])


def since(series: TrendSeries, change: TrendChange, runs: dict[str, str]) -> str:
    """Format the position of a change: the step, and the run if there are several."""
    before, after = series.points[change.index - 1], series.points[change.index]
    if before.run != after.run:
        return f"since run {runs[after.run]}"
    of_run = f" of {runs[after.run]}" if len(runs) > 1 else ""
    if before.first_step == after.first_step:  # captures of servers have no steps
        return f"since {after.capture}{of_run}"
    return f"since step {after.first_step:,}{of_run}"


def sentence(series: TrendSeries, change: TrendChange, runs: dict[str, str]) -> str:
    """Format a change: ``trainer is slower since step 1,200: global step 101.2 ms, before 93.4 ms, +8.4%``.

    For a series of a part of the step, the sentence names the part: ``trainer: stage reward of rank 1 is slower ...``.
    """
    slower = series.unit == "us" and series.what != EXPOSED
    word = ("slower" if change.is_worse else "faster") if slower else ("worse" if change.is_worse else "better")
    if not change.is_conclusive:
        word = "inconclusive"
    subject = team_of(series) if series.kind == "metric" else f"{team_of(series)}: {label_of(series)}"
    what = series.what if series.kind == "metric" else "it takes"
    busy = f"; the machine was busy in {change.busy_after} captures after the change and in {change.busy_before} before"
    ratio = "" if change.ratio is None else f", {relative(change.ratio)}"
    chance = "p < 0.0001" if change.p_value < _MIN_P else f"p {change.p_value:.2g}"
    return (
        f"{subject} is {word} {since(series, change, runs)}: {what} {value_of(series, change.after)}, "
        f"before {value_of(series, change.before)}{ratio} ({chance}){'' if change.is_conclusive else busy}."
    )


def label_of(series: TrendSeries) -> str:
    """Return the name of a series within its role, such as ``global step`` or ``stage reward of rank 1``."""
    return series.what if series.rank is None else f"{series.what} of rank {series.rank}"


def explanation(change: TrendChange) -> str:
    """Format the parts of a change: ``With it: stage reward of rank 1 +7.7 ms, ...``. Empty if there are none."""
    return f"With it: {', '.join(map(_part, change.parts))}." if change.parts else ""


def _part(part: TrendPart) -> str:
    of_rank = f" of rank {part.rank}" if part.rank is not None else ""
    return f"{_KINDS[part.kind]} {part.name}{of_rank} {'+' if part.delta_us > 0 else '-'}{ms(abs(part.delta_us))} ms"


def headings(trend: Trend) -> list[tuple[TrendSeries, TrendChange]]:
    """Return one change for each position and each role, replica and stage.

    Several metrics often change at the same capture. The first series is kept, because step durations come first. A
    part that changes in the opposite direction to the step is also kept.
    """
    headings: list[tuple[TrendSeries, TrendChange]] = []
    for series in trend.series:
        for change in series.changes:
            point = series.points[change.index]
            is_known = any(
                team_of(other) == team_of(series)
                and (series.kind == "metric" or other_change.is_worse == change.is_worse)
                and _are_near(point, other.points[other_change.index], series.points)
                for other, other_change in headings
            )
            if not is_known:
                headings.append((series, change))
    return headings


def _are_near(point: TrendPoint, other: TrendPoint, points: Sequence[TrendPoint]) -> bool:
    indexes = {(point.run, point.capture): index for index, point in enumerate(points)}
    index = indexes.get((other.run, other.capture))
    return index is not None and abs(indexes[point.run, point.capture] - index) < MIN_VALUES


def shown_series(trend: Trend) -> list[TrendSeries]:
    """Return the series to show: all metrics, and the parts of the step that `headings` returns."""
    named = [series for series, _ in headings(trend)]
    return [series for series in trend.series if series.kind == "metric" or any(series is one for one in named)]


def inconclusive_reason(trend: Trend) -> str | None:
    """Return the reason why a trend is inconclusive, or ``None`` if it is conclusive."""
    if trend.series and not any(map(is_long_enough, trend.series)):
        return TOO_FEW
    worse = [change for series in trend.series for change in series.changes if change.is_worse]
    if worse and not any(change.is_conclusive for change in worse):
        return "The machine has been busy since each slowdown, but was not before. Record again on an idle machine."
    return None


def document_of(trend: Trend) -> dict[str, Any]:
    """Return the JSON document for a trend, including the sentences shown in the terminal."""
    runs = runs_of(trend)
    return {
        "headlines": [" ".join(filter(None, (sentence(*one, runs), explanation(one[1])))) for one in headings(trend)],
        "inconclusive": inconclusive_reason(trend),
        **trend.to_dict(),
    }
