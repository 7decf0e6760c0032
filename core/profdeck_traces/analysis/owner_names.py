"""Owner names for use in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from profdeck_traces.account.model import OwnerIdentity
from profdeck_traces.account.owner_kinds import KIND_TEXTS
from profdeck_traces.analysis.short_names import cut_middle
from profdeck_traces.attribution.frames import parse_frame

OWNER = "critical path"
"""Heading for owners."""
_LONGEST_NAME = 48


def name_of_owner(owner: OwnerIdentity) -> str | None:
    """Return an owner's name and origin, such as ``aten::mm in step (train.py:3)``, or ``None`` if it has no name."""
    return located_name(owner.name, owner.origin)


def located_name(name: str | None, origin: str | None) -> str | None:
    """Format a name and its origin as ``aten::mm in step (train.py:3)``. If `name` is ``None``, return ``None``."""
    if name is None:
        return None
    text = function_text(name) if parse_frame(name) else cut_middle(name, _LONGEST_NAME)
    return text if origin in {None, name} else f"{text} in {function_text(origin or '')}"


def function_text(name: str) -> str:
    """Format a Python frame as ``step (train.py:3)``. Return other names unchanged."""
    frame = parse_frame(name)
    return f"{frame[2]} ({frame[0]}:{frame[1]})" if frame else name


def title_text(title: str) -> str:
    """Return an owner's title for display. Labels that need an explanation are replaced."""
    awaiting, colon, kind = title.rpartition(": ")
    return f"{awaiting}{colon}{KIND_TEXTS.get(kind, kind)}"


def location_heading(origins: Iterable[str | None]) -> str:
    """Return the heading for locations. If any of them is a function, explain that the line is that of its ``def``."""
    return "location (line of def)" if any(parse_frame(origin) for origin in origins if origin) else "location"
