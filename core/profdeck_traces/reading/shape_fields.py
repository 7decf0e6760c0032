"""How often operators ran with which shapes, where a recorder says that: torch's ``record_shapes``.

Format: ``Input Dims`` in the args of Kineto's operators (``torch/csrc/profiler/collection.cpp``): a list with the sizes
of each input, ``[]`` for what is no tensor, and a list of such lists for a list of tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from profdeck_traces.base.byte_search import stringzilla
from profdeck_traces.reading.column_builder import MAX_NAME_LENGTH
from profdeck_traces.reading.columns import OPERATOR
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.json_patterns import decode_leniently
from profdeck_traces.reading.kineto_events import EventWithArgs, OperatorArgs
from profdeck_traces.reading.times import exact_nanoseconds

_SPACE = b" \t\n\r"
DIMS = b'"Input Dims"'
_MOST_SHAPES = 20_000
_MAX_LENGTH = 400
_NOTHING = msgspec.Raw(b"")


class _Event(msgspec.Struct, gc=False):
    cat: str = ""
    name: str = ""
    dur: msgspec.Raw = _NOTHING
    args: OperatorArgs | None = None


_decode = msgspec.json.Decoder(list[_Event]).decode
_decimal = msgspec.json.Decoder(Decimal | None).decode


class StatedShapes:
    """Calls and times by operator and shapes. Of more than 20,000 such, the others are left out."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, str], list[int]] = {}
        """By name and the JSON of the shapes: how many calls, their time in nanoseconds, and that of the longest."""
        self._by_text: dict[tuple[str, bytes], tuple[str, str]] = {}  # the keys of these, by the bytes of the file
        self.left_out = 0
        """How many calls are not among them."""

    def add(self, events: memoryview | bytes) -> None:
        """Take the operators among some events, which are a JSON array."""
        if stringzilla.find(events, DIMS) < 0:
            return
        try:
            found: list[Any] = _decode(events)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = list(filter(None, map(_leniently, decode_leniently(events) or ())))
        self._count((event, _exact(event.dur)) for event in found if event.args is not None and event.args.dims)

    def take(self, complete: Sequence[EventWithArgs], durations_ns: Int, expected: int) -> bool:
        """Take the operators among events in Kineto's form.

        Args:
            complete: Those that are complete.
            durations_ns: How long each took, negative for what is no time.
            expected: How many must state shapes, operators or not.

        Returns:
            Whether so many do. None was taken otherwise.
        """
        stating = [
            (event, duration_ns)
            for event, duration_ns in zip(complete, durations_ns.tolist(), strict=True)
            if event.args is not None and event.args.dims
        ]
        if len(stating) != expected:
            return False
        self._count(stating)
        return True

    def extend(self, following: StatedShapes) -> bool:
        """Take what the next part of the file says; return whether there was room for all of it."""
        for key, sums in following.times.items():
            self._sum_up(key, *sums)
        return len(self.times) < _MOST_SHAPES and not following.left_out

    def _count(self, stating: Iterable[tuple[Any, int | None]]) -> None:
        """Count those that are operators, of events that state shapes, each with its time in nanoseconds."""
        times: defaultdict[tuple[str, bytes], list[int]] = defaultdict(list)
        for event, duration_ns in stating:
            if event.cat == OPERATOR and duration_ns is not None and duration_ns >= 0:
                times[event.name, bytes(event.args.dims)].append(duration_ns)
        for text, of_text in times.items():
            self._sum_up(self._by_text.get(text) or self._key_of(*text), len(of_text), sum(of_text), max(of_text))

    def _sum_up(self, key: tuple[str, str], count: int, total_ns: int, longest_ns: int) -> None:
        sums = self.times.get(key)
        if sums is None and len(self.times) >= _MOST_SHAPES:
            self.left_out += count
            return
        before, before_ns, longest_before_ns = sums or (0, 0, 0)
        self.times[key] = [before + count, before_ns + total_ns, max(longest_before_ns, longest_ns)]

    def _key_of(self, name: str, text: bytes) -> tuple[str, str]:
        dims = text.translate(None, _SPACE).replace(b",", b", ").decode("utf-8", "replace")
        key = name[:MAX_NAME_LENGTH], dims[:_MAX_LENGTH]
        if len(self._by_text) < _MOST_SHAPES:
            self._by_text[name, text] = key
        return key


def _exact(text: msgspec.Raw) -> int | None:
    try:
        return exact_nanoseconds(_decimal(text)) if text else None
    except msgspec.DecodeError:
        return None


def _leniently(event: Any) -> _Event | None:
    """Take an event of which some members have other types."""
    args = event.get("args") if isinstance(event, dict) else None
    if not isinstance(args, dict) or "Input Dims" not in args:
        return None
    try:
        return msgspec.convert(
            {name: event[name] for name in ("cat", "name") if name in event}
            | {"dur": msgspec.Raw(msgspec.json.encode(event["dur"])) if "dur" in event else _NOTHING}
            | {"args": {"Input Dims": msgspec.Raw(msgspec.json.encode(args["Input Dims"]))}},
            _Event,
        )
    except (msgspec.ValidationError, msgspec.EncodeError):
        return None
