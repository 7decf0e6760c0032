"""What the args of some events say, which are not decoded otherwise: sizes of copies, and ids of annotations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np

from profdeck_traces.base.byte_search import stringzilla
from profdeck_traces.reading.column_builder import MAX_NAME_LENGTH
from profdeck_traces.reading.columns import ANNOTATION, DEVICE_ANNOTATION, Columns
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.json_patterns import decode_leniently
from profdeck_traces.reading.times import exact_nanoseconds

_COPY = b'"gpu_mem'
_SPACE = rb"[ \t\n\r]*"
# Kineto's order of members: the size is one of the event's own args.
_BEFORE_BYTES, _BEGIN = 64, b"{"


def _member(key: bytes) -> bytes:
    """Return a pattern for the rest of an object up to the value of a key, with no other object between."""
    return rb'(?:[^{}"]*+"(?!%b")[^"]*+")*+[^{}"]*+"%b"%b:%b' % (key, key, _SPACE, _SPACE)


_match_copy = re.compile(
    rb'%b\{%b"ph"%b:%b"X"%b,%b"cat"%b:%b"(gpu_mem[a-z]+)"%b,%b"name"%b:%b("[^"\\]*")' % ((_SPACE,) * 12)
    + rb"%b\{%b([0-9]{1,18})\b" % (_member(b"args"), _member(b"bytes"))
).match
_MAX_COPIES = 1000

_ANNOTATION, _EXTERNAL_ID = b'user_annotation"', b'"External id"'
_ANNOTATIONS = frozenset({ANNOTATION, DEVICE_ANNOTATION})
_MAX_IDS = 100_000
_NO_ID = 2**62


class _CopyEvent(msgspec.Struct, gc=False):
    ph: Any = None
    cat: Any = None
    name: Any = None
    args: Any = None


_decode_copies = msgspec.json.Decoder(list[_CopyEvent]).decode


class Copies:
    """How much copies and fills moved."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, str], tuple[int, int]] = {}
        """How many of each category and name said what they moved, and how many bytes in all."""

    def extend(self, following: Copies) -> bool:
        """Take what the next part of the file says; return whether there was room for all of it."""
        self._take(following.told)
        return len(self.told) < _MAX_COPIES

    def add(self, events: memoryview | bytes, begins: Iterable[int] | None = None) -> None:
        """Take those among some events.

        Args:
            events: A JSON array.
            begins: Where they begin, if that is known.
        """
        found = _copies_of_kineto(events, _begins(events) if begins is None else begins)
        self._take(_copies_of_any(events) if found is None else found)

    def _take(self, found: _Told) -> None:
        for kind, (count, size_bytes) in found.items():
            if kind in self.told or len(self.told) < _MAX_COPIES:
                count_before, bytes_before = self.told.get(kind, (0, 0))
                self.told[kind] = count_before + count, bytes_before + size_bytes


_Told = dict[tuple[str, str], tuple[int, int]]


def _begins(text: memoryview | bytes) -> Iterator[int]:
    """Yield where the events begin that have the category of copies, in Kineto's order of members."""
    at = stringzilla.find(text, _COPY)
    while at >= 0:
        yield stringzilla.rfind(text, _BEGIN, max(0, at - _BEFORE_BYTES), at)
        at = stringzilla.find(text, _COPY, at + 1)


def _copies_of_kineto(text: memoryview | bytes, begins: Iterable[int]) -> _Told | None:
    """Return category and name, how many there are and their size; ``None`` if one is written in another way."""
    found: dict[tuple[bytes, bytes], list[int]] = {}
    for begin in begins:
        copy = _match_copy(text, begin) if begin >= 0 else None
        if copy is None:
            return None
        kind, name, size = copy.groups()
        found.setdefault((kind, name), []).append(int(size))
    return {(kind.decode(), json.loads(name)): (len(sizes), sum(sizes)) for (kind, name), sizes in found.items()}


def _copies_of_any(text: memoryview | bytes) -> _Told:
    """Do the same by decoding all of the text."""
    try:
        events: list[Any] = _decode_copies(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        events = [_CopyEvent(*map(event.get, _CopyEvent.__struct_fields__)) for event in _objects(text)]
    told: _Told = {}
    for event in events:
        size = event.args.get("bytes") if isinstance(event.args, dict) else None
        is_copy = event.ph == "X" and isinstance(event.cat, str) and event.cat.startswith("gpu_mem")
        if is_copy and isinstance(size, int) and not isinstance(size, bool) and size >= 0:
            count, size_bytes = told.get((event.cat, str(event.name)), (0, 0))
            told[event.cat, str(event.name)] = count + 1, size_bytes + size
    return told


def _objects(text: memoryview | bytes) -> list[dict[str, Any]]:
    return [event for event in decode_leniently(text) or () if isinstance(event, dict)]


class _AnnotationArgs(msgspec.Struct, gc=False):
    external_id: int = msgspec.field(name="External id")


class _AnnotationEvent(msgspec.Struct, gc=False):
    cat: str
    name: str
    pid: int | str
    tid: int | str
    ts: Decimal
    args: _AnnotationArgs


class AnnotationIds:
    """The ``External id`` of annotations: the same for one of the host and for what shows it on devices (Kineto)."""

    def __init__(self) -> None:
        self._ids: dict[tuple[Id, Id, str, int], int] = {}

    def add(self, text: memoryview | bytes) -> None:
        """Take the annotations among some events."""
        at = stringzilla.find(text, _ANNOTATION)
        while at >= 0:
            following = stringzilla.find(text, _ANNOTATION, at + 1)
            id_at = stringzilla.find(text, _EXTERNAL_ID, at, following if following >= 0 else len(text))
            if id_at >= 0 and len(self._ids) < _MAX_IDS:
                # Around the event; with other braces in it, this is no JSON.
                begin = stringzilla.rfind(text, b"{", 0, at)
                end = stringzilla.find(text, b"}", stringzilla.find(text, b"}", id_at) + 1) + 1
                self._add(text[max(0, begin) : end])
            at = following

    def extend(self, following: AnnotationIds) -> bool:
        """Take what the next part of the file says; return whether there was room for all of it."""
        self._ids |= following._ids
        return len(self._ids) < _MAX_IDS

    def of(self, annotations: Columns) -> Int:
        """Return the id of each annotation, -1 where it has none."""
        if not self._ids:
            return np.full(len(annotations), -1, dtype=np.int64)
        names, tracks, find = annotations.names, annotations.tracks, self._ids.get
        rows = zip(annotations.track.tolist(), annotations.name.tolist(), annotations.start_ns.tolist(), strict=True)
        return np.array([find((*tracks[track], names[name], start), -1) for track, name, start in rows], dtype=np.int64)

    def _add(self, event: memoryview | bytes) -> None:
        try:
            found = _decode_annotation(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        start_ns = exact_nanoseconds(found.ts)
        if start_ns is not None and found.cat in _ANNOTATIONS and 0 <= found.args.external_id < _NO_ID:
            self._ids[found.pid, found.tid, found.name[:MAX_NAME_LENGTH], start_ns] = found.args.external_id


_decode_annotation = msgspec.json.Decoder(_AnnotationEvent).decode
