"""Report section about performance changes across captures, with sentences and plots."""

from __future__ import annotations

from typing import Any

from profdeck_traces.base.text import plural
from profdeck_traces.report import svg
from profdeck_traces.trend.model import Trend, TrendSeries
from profdeck_traces.trend.trend_text import (
    explanation,
    headings,
    inconclusive_reason,
    is_long_enough,
    label_of,
    runs_of,
    sentence,
    shown_series,
    since,
    team_of,
    usual,
    value_of,
)

_MIN_POINTS = 2


def has_trend(trend: Trend) -> bool:
    """Return True if any series has enough captures to detect a change."""
    return any(map(is_long_enough, trend.series))


def trend_section(trend: Trend) -> dict[str, Any]:
    """Return the template context: sentences about changes, and plots of all series.

    Series with a change and the first series of each role come first; ``other_plots`` contains the remaining series.
    """
    runs = runs_of(trend)
    shown = [series for series in shown_series(trend) if len(series.points) >= _MIN_POINTS]
    firsts = {(series.role, series.replica, series.stage): series for series in reversed(shown)}
    main = [series for series in shown if series.changes or series in firsts.values()]
    return {
        "changes": [
            {"text": sentence(series, change, runs), "with": explanation(change), "is_worse": change.is_worse}
            for series, change in headings(trend)
        ],
        "no_change": inconclusive_reason(trend) or "No significant change.",
        "main_plots": [_plot(series, runs) for series in main],
        "other_plots": [_plot(series, runs) for series in shown if series not in main],
    }


def _plot(series: TrendSeries, runs: dict[str, str]) -> dict[str, Any]:
    scale, unit = {"us": (1e-3, "ms"), "share": (100.0, "%")}.get(series.unit, (1.0, series.unit))
    first, last = usual(series)
    return {
        "team": team_of(series),
        "what": label_of(series),
        "levels": f"{value_of(series, first)} to {value_of(series, last)}",
        "plot": svg.levels(
            [point.value * scale for point in series.points],
            [
                (change.index, change.before * scale, change.after * scale, since(series, change, runs))
                for change in series.changes
            ],
            f"{team_of(series)}: {label_of(series)}",
            f"{unit}, {_extent(series)}",
        ),
    }


def _extent(series: TrendSeries) -> str:
    points = series.points
    captures = plural(len(points), "capture")
    if (runs := len({point.run for point in points})) > 1:
        return f"{captures} of {runs:,} runs"
    first, last = points[0].first_step, points[-1].first_step
    return captures if first == last else f"{captures}, steps {first:,} to {last:,}"
