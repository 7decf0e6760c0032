"""How often operators ran with which shapes, where a recorder says that: torch's ``record_shapes``.

Format: ``Input Dims`` in the args of Kineto's operators (``torch/csrc/profiler/collection.cpp``): a list with the sizes
of each input, ``[]`` for what is no tensor, and a list of such lists for a list of tensors.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import stringzilla

from profdeck.traces.reading.column_builder import MAX_NAME_LENGTH
from profdeck.traces.reading.columns import OPERATOR
from profdeck.traces.reading.json_patterns import decode_leniently
from profdeck.traces.reading.times import exact_nanoseconds

_SPACE = b" \t\n\r"
_DIMS = b'"Input Dims"'
_MOST_SHAPES = 20_000
_MAX_LENGTH = 400


class _Args(msgspec.Struct, gc=False):
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))


class _Event(msgspec.Struct, gc=False):
    cat: str = ""
    name: str = ""
    dur: Decimal | None = None
    args: _Args | None = None


_decode = msgspec.json.Decoder(list[_Event]).decode


class StatedShapes:
    """Calls and times by operator and shapes. Of more than 20,000 such, the others are left out."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, str], list[int]] = {}
        """By name and the JSON of the shapes: how many calls, their time in nanoseconds, and that of the longest."""
        self.left_out = 0
        """How many calls are not among them."""

    def add(self, events: memoryview | bytes) -> None:
        """Take the operators among some events, which are a JSON array."""
        if stringzilla.find(events, _DIMS) < 0:
            return
        try:
            found: list[Any] = _decode(events)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = list(filter(None, map(_leniently, decode_leniently(events) or ())))
        for event in found:
            if event.cat == OPERATOR and event.args is not None and event.args.dims:
                self._add(event)

    def extend(self, following: StatedShapes) -> bool:
        """Take what the next part of the file says; return whether there was room for all of it."""
        for key, (count, duration_ns, longest_ns) in following.times.items():
            sums = self.times.setdefault(key, [0, 0, 0])
            sums[0] += count
            sums[1] += duration_ns
            sums[2] = max(sums[2], longest_ns)
        return len(self.times) < _MOST_SHAPES and not following.left_out

    def _add(self, event: _Event) -> None:
        assert event.args is not None  # noqa: S101 - the caller has looked
        duration_ns = exact_nanoseconds(event.dur)
        if duration_ns is None or duration_ns < 0:
            return
        dims = bytes(event.args.dims).translate(None, _SPACE).replace(b",", b", ").decode("utf-8", "replace")
        key = event.name[:MAX_NAME_LENGTH], dims[:_MAX_LENGTH]
        if key not in self.times and len(self.times) >= _MOST_SHAPES:
            self.left_out += 1
            return
        sums = self.times.setdefault(key, [0, 0, 0])
        sums[0] += 1
        sums[1] += duration_ns
        sums[2] = max(sums[2], duration_ns)


def _leniently(event: Any) -> _Event | None:
    """Take an event of which some members have other types."""
    args = event.get("args") if isinstance(event, dict) else None
    if not isinstance(args, dict) or "Input Dims" not in args:
        return None
    try:
        return msgspec.convert(
            {name: event[name] for name in ("cat", "name", "dur") if name in event}
            | {"args": {"Input Dims": msgspec.Raw(msgspec.json.encode(args["Input Dims"]))}},
            _Event,
        )
    except (msgspec.ValidationError, msgspec.EncodeError):
        return None
