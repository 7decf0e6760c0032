"""Text output of `profdeck trend`: the changes, followed by a table of all series."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from profdeck_traces.analysis.formatting import relative
from profdeck_traces.base.text import plural, printable
from profdeck_traces.cli import text_layout
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
    team_of,
    usual,
    value_of,
)

_SPARKS = "▁▂▃▄▅▆▇█"
_MIN_SPARKLINE, _MAX_SPARKLINE = 9, 40
_GAP = 2
_MIN_POINTS = 2


def page(trend: Trend, width: int, least: float) -> list[Text]:
    """Format a trend for the terminal.

    Args:
        trend: The trend.
        width: Line width in terminal columns.
        least: Threshold, as a fraction, below which changes were ignored.
    """
    runs = runs_of(trend)
    lines: list[Text] = []
    for series, change in headings(trend):
        style = f"bold {'yellow' if not change.is_conclusive else 'red' if change.is_worse else 'green'}"
        lines += text_layout.wrapped(sentence(series, change, runs), width, style=style)
        if text := explanation(change):
            lines += text_layout.wrapped(text, width, indent="  ")
        lines.append(Text())
    if reason := inconclusive_reason(trend):
        lines += [*text_layout.wrapped(f"Inconclusive: {reason}", width, style="bold yellow"), Text()]
    elif not any(series.changes for series in trend.series):
        lines += [*text_layout.wrapped(_no_change(least), width), Text()]
    shown = [series for series in shown_series(trend) if len(series.points) >= _MIN_POINTS]
    header = ["role", "number", "captures", "first", "last", "change"]
    rows = [
        [
            team_of(series),
            label_of(series),
            str(len(series.points)),
            *(value_of(series, value) for value in usual(series)),
            _ratio(series),
        ]
        for series in shown
    ]
    columns = zip(header, *rows, strict=True)
    remaining = width - sum(max(cell_len(printable(cell)) for cell in column) + _GAP for column in columns)
    if remaining >= _MIN_SPARKLINE:
        header.append("over time")
        for row, series in zip(rows, shown, strict=True):
            row.append(spark([point.value for point in series.points], min(remaining, _MAX_SPARKLINE)))
    return [
        *lines,
        Text(_overview(trend, runs)),
        Text(),
        *text_layout.aligned(header, rows, width, left=("role", "number")),
    ]


def spark(values: Sequence[float], width: int) -> str:
    """Draw a sparkline of at most `width` characters. Each character shows the median of consecutive values."""
    count = min(width, len(values))
    cuts = [len(values) * index // count for index in range(count + 1)]
    blocks = [sorted(values[begin:end])[(end - begin) // 2] for begin, end in itertools.pairwise(cuts)]
    least, most = min(blocks), max(blocks)
    if most - least <= abs(most) * 1e-9:
        return _SPARKS[len(_SPARKS) // 2] * count
    return "".join(_SPARKS[round((block - least) / (most - least) * (len(_SPARKS) - 1))] for block in blocks)


def _overview(trend: Trend, runs: dict[str, str]) -> str:
    captures = {(point.run, point.capture) for series in trend.series for point in series.points}
    steps = [point.first_step for series in trend.series for point in series.points]
    text = f"{plural(len(captures), 'capture')}"
    text += f" of {plural(len(runs), 'run')}" if len(runs) > 1 else ""
    text += f", steps {min(steps):,} to {max(steps):,}" if len(set(steps)) > 1 else ""
    if trend.left_out:
        text += f"; {plural(trend.left_out, 'trace')} skipped: incomplete or without a step"
    if trend.cold_left_out:
        text += f"; {plural(trend.cold_left_out, 'trace')} skipped: only the recorder's first step"
    if trend.cold_excluded:
        text += f"; recorder's first step excluded in {plural(trend.cold_excluded, 'trace')}"
    return text


def _no_change(least: float) -> str:
    or_small = f", or are smaller than {least * 100:g}%" if least else ""
    return f"No change: all differences may be random{or_small}."


def _ratio(series: TrendSeries) -> str:
    before, after = usual(series)
    if not series.changes:
        return "same" if is_long_enough(series) else ""
    return relative(after / before - 1) if before else "new"
