"""Static SVG flame graph. The width of a box is its fraction of the total time."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from profdeck_traces.analysis.detail_model import StackFrame
from profdeck_traces.report.rendering import Markup

_WIDTH, _ROW, _MOST_ROWS, _COLORS = 1100, 17, 60, 6
_LEAST_PIXELS, _MOST_BOXES = 2.0, 500
_LETTER_PIXELS = 6.2
_MOST_TITLE = 200


def flame_graph(frames: Sequence[StackFrame], label: str) -> Markup:
    """Return the SVG of a call tree. The tooltip of each box contains its name and times."""
    all_us = sum(frame.total_us for frame in frames if frame.parent is None)
    if not all_us:
        return Markup()
    left, depth = [0.0] * len(frames), [0] * len(frames)
    used = [0.0] * len(frames)
    top_us = 0.0
    drawn = []
    for place in sorted(range(len(frames)), key=lambda place: (_depth(frames, place), -frames[place].total_us, place)):
        frame = frames[place]
        if frame.parent is None:
            left[place], top_us = top_us, top_us + frame.total_us
        else:
            left[place] = left[frame.parent] + used[frame.parent]
            used[frame.parent] += frame.total_us
            depth[place] = depth[frame.parent] + 1
        if frame.total_us / all_us * _WIDTH >= _LEAST_PIXELS and depth[place] < _MOST_ROWS:
            drawn.append(place)
    drawn = sorted(drawn, key=lambda place: -frames[place].total_us)[:_MOST_BOXES]
    boxes = [_box(frames[at], left[at] / all_us * _WIDTH, depth[at], all_us) for at in drawn]
    height = (max(depth[place] for place in drawn) + 1) * _ROW
    head = Markup('<svg class="flame" width="{0}" height="{1}" viewBox="0 0 {0} {1}" role="img" aria-label="{2}">')
    return (
        Markup('<div class="wide" tabindex="0" role="region" aria-label="{}">').format(label)
        + head.format(_WIDTH, height, label)
        + Markup().join(boxes)
        + Markup("</svg></div>")
    )


def _depth(frames: Sequence[StackFrame], place: int) -> int:
    found = 0
    while (parent := frames[place].parent) is not None:
        found, place = found + 1, parent
    return found


def _box(frame: StackFrame, x: float, row: int, all_us: float) -> Markup:
    width = frame.total_us / all_us * _WIDTH
    letters = int((width - 6) / _LETTER_PIXELS)
    text = frame.name if len(frame.name) <= letters else f"{frame.name[: letters - 1]}…"
    name = Markup('<text x="{:.1f}" y="{}">{}</text>').format(x + 3, row * _ROW + 12, text) if letters > 2 else ""  # noqa: PLR2004
    times = f"{frame.total_us / 1000:,.3f} ms, {frame.total_us / all_us:.1%}; by itself {frame.self_us / 1000:,.3f} ms"
    return (
        Markup('<g><rect class="f{}" x="{:.1f}" y="{}" width="{:.1f}" height="16"/>').format(
            zlib.crc32(frame.name.encode("utf-8", "replace")) % _COLORS, x, row * _ROW, max(0.5, width - 0.5)
        )
        + name
        + Markup("<title>{}</title></g>").format(f"{frame.name[:_MOST_TITLE]}: {times}")
    )
