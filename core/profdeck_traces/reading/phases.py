"""The phases of trace events, as types for a decoder.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. The
phase, ``ph``, is the tag by which the decoder tells the types apart.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

PHASES = "BEXiICbneSTpFstfPNODMVvRc(),"


def phase_type(phase: str, fields: Sequence[tuple[str, Any]] = ()) -> type[msgspec.Struct]:
    """Return a type for the events of a phase; one without fields costs no string."""
    return msgspec.defstruct(f"_Event{ord(phase)}", fields, tag_field="ph", tag=phase, gc=False)


def any_of(types: Iterable[Any]) -> Any:
    """Return the type of events that are of one of some types."""
    return functools.reduce(operator.or_, types)


def any_with(complete: type[msgspec.Struct]) -> Any:
    """Return the type of events of any phase, where complete ones (``X``) are of a type that has fields."""
    return any_of([complete, *(phase_type(phase) for phase in PHASES if phase != "X")])
