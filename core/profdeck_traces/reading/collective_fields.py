"""What kernels of collectives say of themselves in their args: the collective, its process group and its size."""

from __future__ import annotations

from array import array
from decimal import Decimal
from typing import Any

import attrs
import msgspec
import numpy as np

from profdeck_traces.base.byte_search import stringzilla
from profdeck_traces.reading.column_builder import MAX_NAME_LENGTH, MAX_NAMES
from profdeck_traces.reading.columns import DEVICE_CATEGORIES, Columns
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.times import exact_nanoseconds

_COLLECTIVE = b'"Collective name"'
_MAX_COLLECTIVES = 1_000_000
_MAX_COUNT = 2**62
# The types of elements as torch writes them (c10/core/ScalarType.h), by size in bytes; a complex one has two numbers.
_BYTES_OF_TYPE = {
    name: size
    for size, names in {
        1: "Byte Char Bool Float8_e4m3fn Float8_e5m2 Float8_e4m3fnuz Float8_e5m2fnuz Float8_e8m0fnu",
        2: "Short UInt16 Half BFloat16",
        4: "Int UInt32 Float ComplexHalf",
        8: "Long UInt64 Double ComplexFloat",
        16: "ComplexDouble",
    }.items()
    for name in names.split()
}


@attrs.frozen
class StatedCollective:
    """What is the same for all calls of one collective with one size in one process group."""

    name: str
    group: str
    """Name and ranks of the process group."""
    group_size: int | None = None
    size_bytes: int | None = None
    """The larger of what goes in and what comes out on this rank, as nccl-tests counts it."""


class _Args(msgspec.Struct, gc=False):
    collective: str = msgspec.field(name="Collective name")
    group: Any = msgspec.field(default="", name="Process Group Name")
    ranks: Any = msgspec.field(default="", name="Process Group Ranks")
    group_size: Any = msgspec.field(default=None, name="Group size")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None

    def stated(self) -> StatedCollective | None:
        """Return what it says; ``None`` without a process group, which nothing could be matched by."""
        group = f"{self.group} {self.ranks}".strip()
        if not group:
            return None
        elements = [count for count in (self.elements_in, self.elements_out) if _is_count(count)]
        of_type = _BYTES_OF_TYPE.get(self.dtype) if isinstance(self.dtype, str) else None
        return StatedCollective(
            self.collective[:MAX_NAME_LENGTH],
            group[:MAX_NAME_LENGTH],
            self.group_size if _is_count(self.group_size) and self.group_size else None,
            max(elements) * of_type if elements and of_type else None,
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT


class _Event(msgspec.Struct, gc=False):
    cat: str
    pid: int | str
    tid: int | str
    ts: Decimal
    args: _Args


_decode = msgspec.json.Decoder(_Event).decode


class StatedCollectives:
    """What collectives the kernels of a trace are part of, where their args say it.

    Torch has written that since 2.3, but not for kernels of captured graphs (``CollectiveMetadataFields`` in
    pytorch/kineto). Of more than a million such kernels the others count as those that say nothing.
    """

    def __init__(self) -> None:
        self.stated: list[StatedCollective] = []
        """Distinct ones."""
        self._codes: dict[StatedCollective, int] = {}
        self._of_track: dict[tuple[Id, Id], array[int]] = {}  # the start of a kernel, its code, the next start ...
        self._count = 0

    def add(self, text: memoryview | bytes) -> None:
        """Take the kernels among some events."""
        at = stringzilla.find(text, _COLLECTIVE)
        while at >= 0:
            # Around the args and the event; with other braces among them, this is no JSON.
            begin = stringzilla.rfind(text, b"{", 0, max(0, stringzilla.rfind(text, b"{", 0, at)))
            end = stringzilla.find(text, b"}", stringzilla.find(text, b"}", at) + 1) + 1
            self._add(text[max(0, begin) : end])
            at = stringzilla.find(text, _COLLECTIVE, max(at + 1, end))

    def extend(self, following: StatedCollectives) -> bool:
        """Take what the next part of the file says; return whether there was room for all of it."""
        codes = []
        for stated in following.stated:
            if stated not in self._codes:
                self._codes[stated] = len(self.stated)
                self.stated.append(stated)
            codes.append(self._codes[stated])
        for track, values in following._of_track.items():
            rows = np.array(values).reshape(-1, 2)
            rows[:, 1] = np.array(codes)[rows[:, 1]]
            self._of_track.setdefault(track, array("q")).frombytes(rows.tobytes())
        self._count += following._count
        return self._count < _MAX_COLLECTIVES and len(self.stated) < MAX_NAMES

    def of(self, kernels: Columns) -> Int:
        """Return which of ``stated`` each kernel is part of; where it does not say, how many there are."""
        unknown = len(self.stated)
        which = np.full(len(kernels), unknown, dtype=np.int64)
        for code, track in enumerate(kernels.tracks):
            if track in self._of_track:
                rows = np.array(self._of_track[track]).reshape(-1, 2)
                rows = rows[np.argsort(rows[:, 0], kind="stable")]
                mine = np.flatnonzero(kernels.track == code)
                nearest = np.searchsorted(rows[:-1, 0], kernels.start_ns[mine])
                which[mine] = np.where(rows[nearest, 0] == kernels.start_ns[mine], rows[nearest, 1], unknown)
        return which

    def _add(self, event: memoryview | bytes) -> None:
        try:
            found = _decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        start_ns, stated = exact_nanoseconds(found.ts), found.args.stated()
        if found.cat not in DEVICE_CATEGORIES or start_ns is None or stated is None or self._count >= _MAX_COLLECTIVES:
            return
        if stated not in self._codes:
            if len(self.stated) >= MAX_NAMES:
                return
            self._codes[stated] = len(self.stated)
            self.stated.append(stated)
        self._of_track.setdefault((found.pid, found.tid), array("q")).extend((start_ns, self._codes[stated]))
        self._count += 1
