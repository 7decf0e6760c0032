"""How often operators ran with which shapes, where a recorder says that: torch's ``record_shapes``.

Format: ``Input Dims`` in the args of Kineto's operators (``torch/csrc/profiler/collection.cpp``): a list with the sizes
of each input, ``[]`` for what is no tensor, and a list of such lists for a list of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
import stringzilla

from profdeck.traces.reading.column_builder import MAX_NAME_LENGTH
from profdeck.traces.reading.columns import OPERATOR
from profdeck.traces.reading.json_patterns import decode_leniently
from profdeck.traces.reading.times import LostDigitsError, exact_nanoseconds, written_nanoseconds

_SPACE = b" \t\n\r"
_DIMS = b'"Input Dims"'
_MOST_SHAPES = 20_000
_MAX_LENGTH = 400
_NOTHING = msgspec.Raw(b"")


class _Args(msgspec.Struct, gc=False):
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=_NOTHING)


class _Event(msgspec.Struct, gc=False):
    cat: str = ""
    name: str = ""
    dur: msgspec.Raw = _NOTHING
    args: _Args | None = None


_decode = msgspec.json.Decoder(list[_Event]).decode
_decimal = msgspec.json.Decoder(Decimal | None).decode


class StatedShapes:
    """Calls and times by operator and shapes. Of more than 20,000 such, the others are left out."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, str], list[int]] = {}
        """By name and the JSON of the shapes: how many calls, their time in nanoseconds, and that of the longest."""
        self._by_text: dict[tuple[str, bytes], list[int]] = {}  # the same, by the bytes of the file
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
        operators = [event for event in found if event.cat == OPERATOR and event.args is not None and event.args.dims]
        known = self._by_text
        for event, duration_ns in zip(operators, _durations(operators), strict=True):
            if duration_ns is None or duration_ns < 0:
                continue
            text = event.name, bytes(event.args.dims)
            sums = known[text] if text in known else self._sums_of(*text)
            if sums is not None:
                sums[0] += 1
                sums[1] += duration_ns
                sums[2] = max(sums[2], duration_ns)

    def extend(self, following: StatedShapes) -> bool:
        """Take what the next part of the file says; return whether there was room for all of it."""
        for key, (count, duration_ns, longest_ns) in following.times.items():
            sums = self.times.setdefault(key, [0, 0, 0])
            sums[0] += count
            sums[1] += duration_ns
            sums[2] = max(sums[2], longest_ns)
        return len(self.times) < _MOST_SHAPES and not following.left_out

    def _sums_of(self, name: str, text: bytes) -> list[int] | None:
        """Return what is summed up of an operator with some shapes; ``None``: there is no room for it."""
        dims = text.translate(None, _SPACE).replace(b",", b", ").decode("utf-8", "replace")
        key = name[:MAX_NAME_LENGTH], dims[:_MAX_LENGTH]
        if key not in self.times and len(self.times) >= _MOST_SHAPES:
            self.left_out += 1
            return None
        sums = self.times.setdefault(key, [0, 0, 0])
        if len(self._by_text) < _MOST_SHAPES:
            self._by_text[name, text] = sums
        return sums


def _durations(events: Sequence[_Event]) -> list[int] | list[int | None]:
    """Return whole nanoseconds; ``None`` for what is no time."""
    texts = [event.dur for event in events]
    try:
        return written_nanoseconds(texts).tolist() if texts else []
    except LostDigitsError:
        return [_exact(text) for text in texts]


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
