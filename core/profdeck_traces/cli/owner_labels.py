"""Table columns for owners on the critical path and their locations."""

from __future__ import annotations

from collections.abc import Sequence

from profdeck_traces.analysis.short_names import cut_middle, full_name, short_kernel
from profdeck_traces.attribution.frames import parse_frame
from profdeck_traces.base.text import printable
from profdeck_traces.findings.overview import owner_text

_ON_DEVICE = frozenset({"kernel", "collective", "launch latency", "device gap", "device held"})
_BUILT_IN = ("<built-in method ", "<built-in function ")
_GAP = 2
_LEAST_OWNER, _LEAST_LOCATION, _LEAST_FILE = 18, 28, 8
"""Columns and file names are not shortened below these widths."""


def owner_columns(
    rows: Sequence[tuple[str, str | None, str | None]], width: int, *, full: bool
) -> list[tuple[str, str]]:
    """Return the owner cell and the location cell of each row. Locations get at least half of the width.

    Args:
        rows: Title, name and origin of each owner, as in `profdeck_traces.account.model.OwnerIdentity`.
        width: Width of both columns and the gap between them.
        full: If True, do not shorten names.
    """
    if full:
        return [(_owner(*row, None), location(row[2], None)) for row in rows]
    longest = max((len(_owner(*row, width)) for row in rows), default=0)
    room = max(_LEAST_LOCATION, width // 2, width - _GAP - longest)
    locations = [location(origin, room) for _, _, origin in rows]
    room = max(_LEAST_OWNER, width - _GAP - max(map(len, locations), default=0))
    return [(_owner(*row, room), shown) for row, shown in zip(rows, locations, strict=True)]


def _owner(title: str, name: str | None, origin: str | None, width: int | None) -> str:
    if name is None or (name == origin and parse_frame(name)):  # the location is the function
        return owner_text(title, None)
    *_, kind = title.rpartition(": ")
    room = None if width is None else width - (len(owner_text(title, name)) - len(name))
    if parse_frame(name):
        return owner_text(title, location(name, room))
    for prefix in _BUILT_IN:
        name = name.removeprefix(prefix).removesuffix(">") if name.startswith(prefix) else name
    return owner_text(title, printable(short_event(name, room, is_kernel=kind in _ON_DEVICE)))


def short_event(name: str, width: int | None, *, is_kernel: bool) -> str:
    """Shorten an event name to `width` characters, unless `width` is ``None``."""
    if width is None:
        return full_name(name)
    return short_kernel(name, width) if is_kernel else cut_middle(name, width)


def location(origin: str | None, width: int | None) -> str:
    """Format a location for a table: a function as ``step (train.py:3)``, or the module, annotation or operator.

    The file is shown without its directories. If the text is too long, the file and the function are cut on the left,
    which keeps the line number.
    """
    frame = parse_frame(origin or "")
    if frame is None:
        text = printable(origin or "-")
        return text if width is None else cut_middle(text, width)
    file, line, function = frame
    place, function = printable(f"{file.rpartition('/')[2]}:{line}"), printable(function)
    if width is not None:
        place = _cut_left(place, max(_LEAST_FILE, width - len(function) - 3))
        function = _cut_left(function, width - len(place) - 3)
    return f"{function} ({place})"


def _cut_left(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[len(text) - max(0, width - 1) :]}"
