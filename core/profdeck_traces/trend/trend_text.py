"""A trend in words: what changed, since when, by how much, and what changed with it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from profdeck_traces.analysis.formatting import ms
from profdeck_traces.trend.change_points import FEWEST
from profdeck_traces.trend.model import Trend, TrendChange, TrendPart, TrendPoint, TrendSeries
from profdeck_traces.trend.rank_numbers import EXPOSED

_LEAST_P = 0.0001
TOO_FEW = f"Nothing can be said of changes: that takes {2 * FEWEST} captures at least, and 20 for small ones."
_KINDS = {"stage": "stage", "class": "kernels of class", "idle": "idle time,"}


def runs_of(trend: Trend) -> dict[str, str]:
    """Return by directory what the runs are called, in the order in which they began."""
    points = sorted((point for series in trend.series for point in series.points), key=lambda point: point.started_ns)
    directories = list(dict.fromkeys(point.run for point in points))
    names = [directory.rpartition("/")[2] for directory in directories]
    return dict(zip(directories, names if len(set(names)) == len(names) else directories, strict=True))


def team_of(series: TrendSeries) -> str:
    """Return whose numbers they are: ``rollout/2, decode``."""
    who = series.role if series.replica is None else f"{series.role}/{series.replica}"
    return f"{who}, {series.stage}" if series.stage else who


def value_of(series: TrendSeries, value: float) -> str:
    """Write a value with its unit."""
    if series.unit == "us":
        return f"{ms(value)} ms"
    return f"{value:.1%}" if series.unit == "share" else f"{value:,.0f}/s"


def is_long_enough(series: TrendSeries) -> bool:
    """Tell whether it has captures enough to find a change between them."""
    return len(series.points) >= 2 * FEWEST


def usual(series: TrendSeries) -> tuple[float, float]:
    """Return the level in the beginning and at the end: medians up to the first and from the last change.

    Without a change, of the first and the last five.
    """
    values = [point.value for point in series.points]
    if series.changes:
        return series.changes[0].before, series.changes[-1].after
    return statistics.median(values[:FEWEST]), statistics.median(values[-FEWEST:])


def since(series: TrendSeries, change: TrendChange, runs: dict[str, str]) -> str:
    """Say from which capture on: by its step, and its run where there are several."""
    before, after = series.points[change.index - 1], series.points[change.index]
    if before.run != after.run:
        return f"since run {runs[after.run]}"
    of_run = f" of {runs[after.run]}" if len(runs) > 1 else ""
    if before.first_step == after.first_step:  # of a server, whose captures have no steps
        return f"since {after.capture}{of_run}"
    return f"since step {after.first_step:,}{of_run}"


def sentence(series: TrendSeries, change: TrendChange, runs: dict[str, str]) -> str:
    """Say what changed: ``trainer is slower since step 1,200: global step 101.2 ms, before 93.4 ms, +8.4%``."""
    slower = series.unit == "us" and series.what != EXPOSED
    word = ("slower" if change.is_worse else "faster") if slower else ("worse" if change.is_worse else "better")
    ratio = "" if change.ratio is None else f", {change.ratio:+.1%}"
    chance = "p < 0.0001" if change.p_value < _LEAST_P else f"p {change.p_value:.2g}"
    return (
        f"{team_of(series)} is {word} {since(series, change, runs)}: {series.what} "
        f"{value_of(series, change.after)}, before {value_of(series, change.before)}{ratio} ({chance})."
    )


def explanation(change: TrendChange) -> str:
    """Say what changed with it: ``With it: stage reward of rank 1 +7.7 ms, ...``; nothing where nothing did."""
    return f"With it: {', '.join(map(_part, change.parts))}." if change.parts else ""


def _part(part: TrendPart) -> str:
    of_rank = f" of rank {part.rank}" if part.rank is not None else ""
    return f"{_KINDS[part.kind]} {part.name}{of_rank} {'+' if part.delta_us > 0 else '-'}{ms(abs(part.delta_us))} ms"


def headings(trend: Trend) -> list[tuple[TrendSeries, TrendChange]]:
    """Return the changes that people are told first: of each team and place the first of its series that has one.

    What a step takes decides; what changes at the same capture beside it is the same change, seen in another number.
    """
    found: dict[tuple[object, ...], tuple[TrendSeries, TrendChange]] = {}
    for series in trend.series:
        for change in series.changes:
            key = (series.role, series.replica, series.stage)
            point = series.points[change.index]
            if not any(
                of == key and _are_near(point, other.points[one.index], series.points)
                for (of, _), (other, one) in found.items()
            ):
                found[key, len(found)] = series, change
    return list(found.values())


def _are_near(one: TrendPoint, other: TrendPoint, points: Sequence[TrendPoint]) -> bool:
    places = {(point.run, point.capture): place for place, point in enumerate(points)}
    at = places.get((other.run, other.capture))
    return at is not None and abs(places[one.run, one.capture] - at) < FEWEST
