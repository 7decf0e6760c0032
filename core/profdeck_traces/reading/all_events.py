"""Takes all complete events of a trace from a scanner."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from profdeck_traces.base.byte_search import stringzilla
from profdeck_traces.reading.column_builder import (
    MAX_NAME_LENGTH,
    ColumnBuilder,
    DecimalEvent,
    FastEvent,
)
from profdeck_traces.reading.columns import Columns, Tables
from profdeck_traces.reading.event_fields import Stated
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.json_patterns import decode_leniently
from profdeck_traces.reading.kineto_events import AS_WRITTEN, DECODERS, WITH_ARGS, Complete, KinetoType
from profdeck_traces.reading.shape_fields import DIMS, StatedShapes
from profdeck_traces.reading.times import LostDigitsError

PROCESS_NAME, _THREAD_NAME = b'"process_name"', b'"thread_name"'
_LOOSE_EVENTS = 4096
# After so many batches that were not in Kineto's form none is taken to be any more.
_PATIENCE = 8
_decode_fast = msgspec.json.Decoder(list[FastEvent]).decode
_decode_digits = msgspec.json.Decoder(list[DecimalEvent]).decode


class AllEvents:
    """Collects all complete events, and members of the trace's top-level object, from a scanner.

    Args:
        keys: The members to collect.
        tables: For the columns; complete at the end.
        sink: Takes the events in blocks, in the order of the file.
    """

    wants_text = True

    def __init__(self, keys: frozenset[str], tables: Tables, sink: Callable[[Columns], None]) -> None:
        self.keys = keys
        self.stated = Stated()
        self.collector = ColumnBuilder(tables, sink)
        self._kineto = KinetoForm(self.collector, Complete, shapes=self.stated.shapes)
        self._decode: Callable[[memoryview], list[Any]] = _decode_fast
        self._patience = _PATIENCE
        self._loose: list[DecimalEvent] = []

    def finish(self) -> None:
        """Hand on what is held back; to be called once, at the end."""
        self.flush()
        self.collector.finish(self.stated.process_names)

    def batch(self, text: memoryview) -> int | None:
        """Process a JSON array of events. See :meth:`profdeck_traces.reading.handler.TraceHandler.batch`."""
        self.flush()
        events = self._take_kineto(text)
        if events is None:
            events = self._take_any(text)
            if events is not None:
                self.stated.shapes.add(text)
        if events is not None:
            self._look_for_names(text)
            self._take_args(text)
        return events

    def event(self, text: bytes) -> None:
        """Take one event."""
        decoded = decode_leniently(b"[%b]" % text)
        if decoded is None and b'"ph"' in text:
            self.stated.undecodable += 1
        self._take(decoded or [])
        self.stated.shapes.add(b"[%b]" % text)
        self._take_args(text)

    def member(self, key: str, text: bytes) -> None:
        """Keep the value."""
        decoded = decode_leniently(b"[%b]" % text)
        if decoded:
            self.stated.members[key] = decoded[0]

    def _take_kineto(self, text: memoryview) -> int | None:
        """Return how many events there are; ``None``: they have another form, and none was taken."""
        if not self._patience:
            return None
        events = self._kineto.take(text)
        self._patience = _PATIENCE if events is not None else self._patience - 1
        return events

    def _take_any(self, text: memoryview) -> int | None:
        try:
            events = self._decode(text)
            try:
                self.collector.add(events)
            except LostDigitsError:
                self._decode = _decode_digits
                events = self._decode(text)
                self.collector.add(events)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            decoded = decode_leniently(text)
            if decoded is None:
                return None
            objects = [event for event in decoded if isinstance(event, dict)]
            self._take(objects)
            return sum("ph" in event for event in objects)
        return len(events)

    def _take_args(self, text: memoryview | bytes) -> None:
        stated = self.stated
        stated.collectives.add(text)
        stated.memory.add(text)
        stated.annotations.add(text)
        events = b"[%b]" % text if isinstance(text, bytes) else text
        stated.copies.add(events)

    def _look_for_names(self, text: memoryview) -> None:
        for needle in (PROCESS_NAME, _THREAD_NAME):
            if stringzilla.find(text, needle) >= 0:
                found = named(bytes(text), needle)
                self._take_names(decode_leniently(text) or [] if found is None else found)

    def flush(self) -> None:
        """Bring the events that came one by one into the columns, in their place in the file."""
        self.collector.add(self._loose)
        self._loose.clear()

    def _take(self, objects: list[dict[str, Any]]) -> None:
        self._loose += map(_normal, objects)
        self._take_names(objects)
        if len(self._loose) >= _LOOSE_EVENTS:
            self.flush()

    def _take_names(self, objects: list[Any]) -> None:
        for event in objects:
            args = event.get("args") if isinstance(event, dict) and event.get("ph") == "M" else None
            if not isinstance(args, dict) or not self.stated.has_room_for_names:
                continue
            name, pid = str(args.get("name"))[:MAX_NAME_LENGTH], _id(event.get("pid"))
            if event.get("name") == "process_name":
                self.stated.process_names[pid] = name
            elif event.get("name") == "thread_name":
                self.stated.thread_names[pid, _id(event.get("tid"))] = name


class KinetoForm:
    """Takes events in Kineto's form; by the text of their times once floats have lost digits of one.

    Args:
        collector: Takes those that are complete.
        complete: Their type.
        categories: Of which they are taken; ``None``: of all.
        shapes: Takes what the operators among them state of their inputs.
    """

    def __init__(
        self,
        collector: ColumnBuilder,
        complete: KinetoType,
        categories: frozenset[str] | None = None,
        shapes: StatedShapes | None = None,
    ) -> None:
        self._collector = collector
        self._categories = categories
        self._shapes = shapes
        self._complete = complete

    def take(self, text: memoryview | bytes, expected: int | None = None) -> int | None:
        """Take an array of events.

        Args:
            text: All of it, in brackets.
            expected: How many there must be.

        Returns:
            How many there are; ``None``: another number, or one has another form, and none was taken.
        """
        stating = 0 if self._shapes is None else int(stringzilla.count(text, DIMS))
        kind = WITH_ARGS[self._complete] if stating else self._complete
        try:
            events = DECODERS[kind](text)
            if expected not in (None, len(events)):
                return None
            complete: list[Any] = [event for event in events if event.__class__ is kind]
            if (categories := self._categories) is not None:
                complete = [event for event in complete if event.cat in categories]
            durations_ns = self._collector.add_kineto(complete, as_written=self._complete not in AS_WRITTEN)
        except LostDigitsError:
            if self._complete not in AS_WRITTEN:
                return None
            self._complete = AS_WRITTEN[self._complete]
            return self.take(text, expected)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if self._shapes is not None and stating and not self._shapes.take(complete, durations_ns, stating):
            self._shapes.add(text)
        return len(events)


def named(data: bytes, needle: bytes) -> list[Any] | None:
    """Cut out the metadata events of a kind; ``None`` if one is not where it is looked for.

    Args:
        data: Whole events.
        needle: The name of the kind, in quotes.
    """
    events = []
    at = stringzilla.find(data, needle)
    while at >= 0:
        begin = data.rfind(b"{", 0, at)
        end = data.find(b"}", data.find(b"}", at) + 1) + 1  # that of its args, and its own
        decoded = decode_leniently(b"[%b]" % data[begin:end])
        if not decoded or decoded[0].get("name") != needle[1:-1].decode():
            return None
        events += decoded
        at = stringzilla.find(data, needle, max(at + 1, end))  # once for an event, however often it says so
    return events


def _normal(event: dict[str, Any]) -> DecimalEvent:
    """Bring an event whose members may have any type into the form that well-formed traces have."""
    return DecimalEvent(
        ph=str(event.get("ph")),
        name=str(event.get("name", "")),
        cat=str(event.get("cat", "")),
        pid=_id(event.get("pid")),
        tid=_id(event.get("tid")),
        ts=_time(event.get("ts")),
        dur=_time(event.get("dur")),
    )


def _id(value: Any) -> Id:
    return value if value is None or isinstance(value, int | str) else str(value)


def _time(value: Any) -> Decimal | None:
    try:
        return Decimal(value) if isinstance(value, int | str) else None
    except InvalidOperation:
        return None
