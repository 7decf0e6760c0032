"""The complete events of a trace as columns of numbers: what a report needs of them, in a fortieth of their text.

Categories are those of Kineto (``libkineto/src/ActivityType.cpp`` in pytorch/kineto). Ascend's ``trace_view.json``
has events without one; there the name of the process tells what its events are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int

OPERATOR = "cpu_op"
ANNOTATION = "user_annotation"
DEVICE_ANNOTATION = "gpu_user_annotation"
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "hpu_op"})
"""Categories whose events are work on a device; the process of such an event is the device."""
MARKS = frozenset({ANNOTATION, DEVICE_ANNOTATION})
"""Categories that may mark steps."""
DEVICE_PROCESSES = frozenset({"Ascend Hardware"})
"""Processes whose events without a category are work on a device; the name then stands for the category."""


@attrs.frozen
class Tables:
    """What the codes in columns stand for. The lists grow while a trace is read."""

    names: list[str] = attrs.field(factory=list)
    """The same name has one code for each category in which it occurs."""
    name_category: list[int] = attrs.field(factory=list)
    """The category of each name: an index into ``categories``."""
    categories: list[str] = attrs.field(factory=list)
    tracks: list[tuple[Id, Id]] = attrs.field(factory=list)
    """Process and thread; of a device, device and stream."""

    def category_of_names(self) -> NDArray[np.int16]:
        """Return ``name_category`` as an array."""
        return np.array(self.name_category, dtype=np.int16)

    def names_of_categories(self, wanted: frozenset[str]) -> NDArray[np.bool_]:
        """Return which names are of one of these categories."""
        codes = [code for code, category in enumerate(self.categories) if category in wanted]
        return np.isin(self.category_of_names(), codes)


@attrs.frozen
class Columns:
    """Complete events (``ph`` "X"): parallel arrays of one value each."""

    tables: Tables
    name: NDArray[np.int32]
    """Index into ``tables.names``."""
    track: NDArray[np.int32]
    """Index into ``tables.tracks``."""
    start_ns: Int
    end_ns: Int

    @property
    def names(self) -> list[str]:
        """What the codes in ``name`` stand for."""
        return self.tables.names

    @property
    def categories(self) -> list[str]:
        """What the codes in ``category`` stand for."""
        return self.tables.categories

    @property
    def tracks(self) -> list[tuple[Id, Id]]:
        """What the codes in ``track`` stand for."""
        return self.tables.tracks

    @property
    def category(self) -> NDArray[np.int16]:
        """Index into ``categories``."""
        return self.tables.category_of_names()[self.name]

    def of_categories(self, wanted: frozenset[str]) -> Int:
        """Return the indices of the events in these categories."""
        return np.flatnonzero(self.tables.names_of_categories(wanted)[self.name])

    def __len__(self) -> int:
        return len(self.name)

    def __getitem__(self, which: Any) -> Columns:
        """Return some of the events: a slice, indices or a mask."""
        return Columns(self.tables, self.name[which], self.track[which], self.start_ns[which], self.end_ns[which])


def concatenated(tables: Tables, parts: Sequence[Columns]) -> Columns:
    """Return the events of all parts, which have these tables."""
    empty = np.empty(0, dtype=np.int32)
    none = np.empty(0, dtype=np.int64)
    if len(parts) == 1:
        return parts[0]
    return Columns(
        tables,
        np.concatenate([empty, *(part.name for part in parts)]),
        np.concatenate([empty, *(part.track for part in parts)]),
        np.concatenate([none, *(part.start_ns for part in parts)]),
        np.concatenate([none, *(part.end_ns for part in parts)]),
    )
