"""Static SVG plots: bars, steps over time and kernel durations. Texts are escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from profdeck_traces.analysis.detail_model import DurationBin, MemorySummary
from profdeck_traces.findings.overview import TimeRow
from profdeck_traces.report.rendering import Markup, escape

_ROW, _LABEL, _BAR, _NUMBER = 18, 190, 260, 130
_CELL_BAR = 120
_PLOT_WIDTH, _PLOT_HEIGHT, _MOST_POINTS = 900, 110, 1200


_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def bars(rows: Sequence[TimeRow]) -> Markup:
    """Return a bar chart of device time by class and idle cause."""
    if not rows:
        return Markup()
    longest = max(row.share for row in rows)
    parts = []
    for number, row in enumerate(rows):
        y = number * _ROW
        name = f"idle: {row.name}" if row.is_idle else row.name
        length = max(1.0, row.share / longest * _BAR)
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(_LABEL - 8, y + 13, name)
            + Markup('<rect class="{}" x="{}" y="{}" width="{:.1f}" height="12"/>').format(
                "idle" if row.is_idle else "bar", _LABEL, y + 3, length
            )
            + Markup('<text class="dim" x="{:.0f}" y="{}">{}</text>').format(
                _LABEL + length + 6, y + 13, f"{row.mean_us / 1000:,.3f} ms, {row.share:.1%}"
            )
        )
    return _svg(_LABEL + _BAR + _NUMBER, len(rows) * _ROW, "Device time by class and cause", parts)


def share(fraction: float) -> Markup:
    """Return a horizontal bar for a table cell. A fraction of 1 gives the full width."""
    width = max(1.0, fraction * _CELL_BAR)
    return Markup(
        '<svg width="{0}" height="12" viewBox="0 0 {0} 12" aria-hidden="true">'
        '<rect class="bar" width="{1:.1f}" height="12"/></svg>'
    ).format(_CELL_BAR, width)


def steps(series: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> Markup:
    """Return a plot of durations over time.

    Args:
        series: For each kind of step, its name and the (start, duration) of each step in microseconds.
    """
    points = [point for _, of_kind in series for point in of_kind]
    if len(points) < 4:  # noqa: PLR2004 - a table is enough
        return Markup()
    begin, end = min(start for start, _ in points), max(start for start, _ in points)
    most = max(duration for _, duration in points) or 1.0
    parts = _axis(lambda share: f"{share * most / 1000:,.1f}")
    for _, of_kind in series:
        every = -(-len(of_kind) // _MOST_POINTS)
        for at in range(0, len(of_kind), every):
            some = of_kind[at : at + every]
            start, duration = max(some, key=lambda point: point[1])  # if points overlap, show the slowest
            x = 64 + (start - begin) / (end - begin or 1.0) * (_PLOT_WIDTH - 70)
            parts.append(
                Markup('<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="2.2"/>').format(x, 92 - duration / most * 78)
            )
    parts.append(Markup('<text class="dim" x="64" y="107">{}</text>').format(f"ms, over {(end - begin) / 1e6:,.3f} s"))
    return _svg(_PLOT_WIDTH, _PLOT_HEIGHT, "Duration of steps over time", parts)


def levels(
    values: Sequence[float], changes: Sequence[tuple[int, float, float, str]], label: str, caption: str
) -> Markup:
    """Return a plot of one value per capture, with a line at each level.

    Args:
        values: Non-negative values in the order of the captures.
        changes: For each change, the index of the first value after it, the levels before and after, and its label.
        label: Accessible name of the plot.
        caption: Unit and extent of the values.
    """
    most = max(values) or 1.0
    width = (_PLOT_WIDTH - 70) / max(1, len(values) - 1)

    def place(index: float, value: float) -> tuple[float, float]:
        return 64 + index * width, 92 - value / most * 78

    parts = _axis(lambda share: f"{share * most:,.4g}")
    every = -(-len(values) // _MOST_POINTS)
    for index in range(0, len(values), every):
        some = values[index : index + every]
        x, height = place(index, max(some))  # if points overlap, show the slowest
        parts.append(
            Markup('<circle class="dot" fill-opacity="0.5" cx="{:.1f}" cy="{:.1f}" r="2.2"/>').format(x, height)
        )
    edges = [0, *(index for index, *_ in changes), len(values)]
    of_edges = [before for _, before, _, _ in changes[:1]] + [after for _, _, after, _ in changes]
    for begin, end, level in zip(edges, edges[1:], of_edges, strict=False):
        (left, height), (right, _) = place(begin - 0.5 if begin else 0, level), place(end - 0.5, level)
        parts.append(
            Markup('<path class="plot" d="M{:.1f} {:.1f}H{:.1f}"/>').format(left, height, min(right, _PLOT_WIDTH - 6))
        )
    for index, _, _, since in changes:
        x, _ = place(index - 0.5, 0)
        anchor = "end" if x > _PLOT_WIDTH / 2 else "start"
        parts.append(Markup('<line class="axis" x1="{0:.1f}" x2="{0:.1f}" y1="8" y2="92"/>').format(x))
        parts.append(
            Markup('<text x="{:.1f}" y="88" text-anchor="{}">{}</text>').format(
                x + (4 if anchor == "start" else -4), anchor, since
            )
        )
    parts.append(Markup('<text class="dim" x="64" y="107">{}</text>').format(caption))
    return _svg(_PLOT_WIDTH, _PLOT_HEIGHT, label, parts)


def histogram(bins: Sequence[DurationBin]) -> Markup:
    """Return a histogram of kernel durations."""
    if not bins:
        return Markup()
    most = max(one.count for one in bins)
    width = 58
    parts = []
    for number, one in enumerate(bins):
        height = max(1.0, one.count / most * 60)
        x = number * width + 4
        parts.append(
            Markup('<rect class="bar" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>').format(
                x, 74 - height, width - 8, height
            )
            + Markup('<text class="dim" x="{}" y="{:.0f}" text-anchor="middle">{}</text>').format(
                x + width / 2 - 4, 70 - height, f"{one.count:,}"
            )
            + Markup('<text class="dim" x="{}" y="88" text-anchor="middle">{}</text>').format(
                x + width / 2 - 4, f"<{_us(one.to_us)}"
            )
        )
    return _svg(len(bins) * width + 8, 94, "Number of kernels by duration", parts)


def memory(summary: MemorySummary) -> Markup:
    """Return a plot of allocated and reserved memory over time."""
    most = max(summary.peak_allocated_bytes, summary.peak_reserved_bytes) or 1
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if most >= scale), (1.0, "B"))
    begin_us, span_us = summary.points[0].start_us, (summary.points[-1].start_us - summary.points[0].start_us) or 1.0

    def line(values: Sequence[int]) -> str:
        places = [64 + (point.start_us - begin_us) / span_us * (_PLOT_WIDTH - 70) for point in summary.points]
        heights = [92 - value / most * 78 for value in values]
        steps = [f"H{x:.1f}V{y:.1f}" for x, y in zip(places[1:], heights[1:], strict=True)]
        return f"M{places[0]:.1f} {heights[0]:.1f}{''.join(steps)}"

    parts = _axis(lambda share: f"{share * most / scale:,.1f}")
    if summary.peak_reserved_bytes:
        reserved = line([point.reserved_bytes for point in summary.points])
        parts.append(Markup('<path class="plot reserved" d="{}"/>').format(reserved))
    parts.append(
        Markup('<path class="plot" d="{}"/>').format(line([point.allocated_bytes for point in summary.points]))
    )
    label = f"Memory of {summary.device} over time"
    parts.append(Markup('<text class="dim" x="64" y="107">{}, over {}</text>').format(unit, f"{span_us / 1e6:,.3f} s"))
    return _svg(_PLOT_WIDTH, _PLOT_HEIGHT, label, parts)


def _axis(label: Callable[[float], str]) -> list[Markup]:
    """Return the horizontal axis and the labels at 100, 50 and 0 % of the plot's height."""
    line = Markup('<line class="axis" x1="60" x2="{}" y1="{}" y2="{}"/>').format(_PLOT_WIDTH, 92, 92)
    text = Markup('<text class="dim" x="54" y="{}" text-anchor="end">{}</text>')
    return [line, *(text.format(y + 4, label(share)) for share, y in ((1.0, 14), (0.5, 53), (0.0, 92)))]


def _us(time_us: float) -> str:
    return f"{time_us / 1000:,.3g} ms" if time_us >= 1000 else f"{time_us:.3g} us"  # noqa: PLR2004 - the unit


def _svg(width: float, height: float, label: str, parts: Sequence[Markup]) -> Markup:
    head = Markup('<svg width="{0}" height="{1}" viewBox="0 0 {0} {1}" role="img" aria-label="{2}">').format(
        round(width), round(height), escape(label)
    )
    return (
        Markup('<div class="wide" tabindex="0" role="region" aria-label="{}">').format(label)
        + head
        + Markup().join(parts)
        + Markup("</svg></div>")
    )
