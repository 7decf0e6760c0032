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
    """Return the name and origin, such as ``aten::mm in step (train.py:3)``, or ``None`` if there is no name."""
    if owner.name is None:
        return None
    name = owner.name if parse_frame(owner.name) else cut_middle(owner.name, _LONGEST_NAME)
    if owner.origin in {None, owner.name}:
        return function_text(name)
    return f"{function_text(name)} in {function_text(owner.origin or '')}"


def function_text(name: str) -> str:
    """Format a Python frame as ``step (train.py:3)``. Return other names unchanged."""
    frame = parse_frame(name)
    return f"{frame[2]} ({frame[0]}:{frame[1]})" if frame else name


def title_text(title: str) -> str:
    """Return an owner's title for display. Replace the labels of kinds that need an explanation."""
    awaiting, colon, kind = title.rpartition(": ")
    return f"{awaiting}{colon}{KIND_TEXTS.get(kind, kind)}"


def location_heading(origins: Iterable[str | None]) -> str:
    """Return the heading for locations. If there are functions, it says which of their lines is meant."""
    return "location (line of def)" if any(parse_frame(origin) for origin in origins if origin) else "location"
