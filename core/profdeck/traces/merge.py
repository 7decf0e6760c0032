"""Merge the traces of several processes into one that Perfetto and chrome://tracing open, in bounded memory.

Formats: events, phases, flows and metadata are those of "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Top-level members are Kineto's
(``libkineto/src/output_json.cpp`` in pytorch/kineto). What ids Perfetto takes is in its
``src/trace_processor/importers/json``: the pid is a 32-bit number, the id of a flow a number or a hexadecimal string.

Two ways through the events give the same answer, as in :mod:`profdeck.traces.scanner`:

- whole batches, in which the text of the values is substituted where a decoder and the number of times that their
  keys occur prove each occurrence to be a member of an event;
- event by event, as members whose values stay text, for all that the first way cannot prove.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import operator
import os
import re
import secrets
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import msgspec
import stringzilla
from isal import isal_zlib

from profdeck.errors import TraceError
from profdeck.files import publish
from profdeck.progress import Meter, Progress
from profdeck.traces.integrity import CountingHandler, TraceCheck, TraceChecker, feed_chunks, file_size
from profdeck.traces.pack import _GZIP_WINDOW_BITS, _LEVEL, _sync_directory, _write_all
from profdeck.traces.stream import Chunk, read_ahead

_BASE = "baseTimeNanoseconds"
_COMMON_KEYS = ("schemaVersion", "displayTimeUnit")
_SOURCE_KEYS = ("distributedInfo", "deviceProperties")
_NS_PER_US = 1000

_FLOW_PHASES = "stf"
_ASYNC_PHASES = "bneSTpF"
_OTHER_PHASES = "BEXiICPNODMVvRc(),"

# Process ids that mean a process of an operating system are kept where they are free. Smaller ones are devices, and
# new ones are larger than any thread id: Perfetto takes a thread with the id of its process for the main thread.
_FIRST_KEPT_PID, _FIRST_NEW_PID = 1000, 1_000_000_000

# Ids of flows: source 2 makes 2000000000123 of 123, which JavaScript's numbers hold exactly for 9,000 sources.
_ID_DIGITS = 12
_MAX_INTEGER = 2**64 - 1
_HASHED_ID = 2**63
_HEX_ID = re.compile(r"(?:0[xX])?[0-9a-fA-F]{1,16}")

# Beyond these a number is no time, and to add to it exactly could take any amount of memory.
_MAX_TIME_DIGITS = 40

_SEPARATOR = b",\n"


@attrs.frozen
class Source:
    """One trace to merge."""

    path: Path
    """A Chrome trace, plain or gzip."""
    label: str
    """Put in front of the names of its processes, such as ``"rollout/2 rank 1 (tp1)"``."""
    sort_index: int
    """Where its processes stand in the viewer; sources with the same one stay in the order given."""


def merge_traces(
    sources: Sequence[Source], destination: Path, *, gzip: bool = True, on_progress: Progress | None = None
) -> TraceCheck:
    """Merge Chrome traces into one file, in one pass and bounded memory.

    Events keep their members, the text of their values and their order. Changed are:

    - ``pid``: each process of each source gets its own, a number; those of host processes are kept where no other
      source has them. Events without one get one as well.
    - ``id`` of flow and async events, ``bind_id`` and the global ``id2``: no two sources share one.
    - ``ts``: all count from the smallest ``baseTimeNanoseconds``; the difference is added exactly, to strings as
      well. A trace without one counts from 0.
    - the metadata: each process has a ``process_name`` that begins with the label of its source, and one
      ``process_sort_index``, by the order of the sources and then by its own one, or 0.

    Elements of ``traceEvents`` that are no objects are left out. The object ``profdeck`` of the new file says what
    was merged: for each source its label, base, ``distributedInfo`` and ``deviceProperties``, and the pids that its
    processes had.

    Kineto's base is the same for all traces of a quarter of a year, and stands behind the events. So the traces are
    first merged as if their bases were equal; where one is not, all are read for their bases and merged again.

    Args:
        sources: The traces. Of a damaged one, what comes before the damage is merged; if it ends before its base,
            the smallest that another trace states is assumed.
        destination: The new file, in a directory that exists. It appears when it is complete and on disk (fsync),
            or not at all.
        gzip: Write one gzip member rather than plain JSON.
        on_progress: Called with the bytes of the sources (as on disk) read so far and in all, from the reading
            thread; begins anew when the traces are merged again.

    Returns:
        The check of the new file, made while it was written. It is ``whole`` only if all of the sources are;
        otherwise ``problem`` has a sentence for each one that is not, with its label.

    Raises:
        FileExistsError: There is something at ``destination``; it was left as it is.
        TraceError: No source has an event that could be read.
        OSError: The new file cannot be written.
    """
    if os.path.lexists(destination):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    ordered = sorted(sources, key=lambda source: source.sort_index)
    partial = destination.with_name(f".profdeck-{secrets.token_hex(8)}.tmp")
    try:
        with partial.open("xb", buffering=0) as file:
            try:
                check = _Merge(ordered, on_progress).write(_Output(file, gzip=gzip))
            except _BasesDifferError:
                file.seek(0)
                file.truncate()
                check = _Merge(ordered, on_progress, _bases(ordered)).write(_Output(file, gzip=gzip))
            os.fsync(file.fileno())
        publish(partial, destination)
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(destination.parent)
    return check


class _BasesDifferError(Exception):
    """The bases that were taken to be equal are not."""


class _Output:
    """The new file: deflates, checks and writes what it is given."""

    def __init__(self, file: BinaryIO, *, gzip: bool) -> None:
        self._file = file
        self._deflater = isal_zlib.compressobj(_LEVEL, isal_zlib.DEFLATED, _GZIP_WINDOW_BITS) if gzip else None
        self._checker = TraceChecker()
        self._empty = True
        self._write(b'{\n"traceEvents": [\n')

    def events(self, texts: list[bytes], between: bytes) -> None:
        """Append events, or runs of events with commas between them.

        Args:
            texts: Without white space around them.
            between: A comma, and white space.
        """
        if texts:
            self._write(between.join(texts if self._empty else [b"", *texts]))
            self._empty = False

    def finish(self, members: dict[str, Any]) -> TraceCheck:
        """Close the document behind these members of the top-level object."""
        self._write(b"\n]")
        for key, value in members.items():
            self._write(_SEPARATOR + _encoded({key: value})[1:-1])
        self._write(b"\n}\n")
        if self._deflater is not None:
            _write_all(self._file, self._deflater.flush())
        return self._checker.finish(self._file.tell())

    def _write(self, data: bytes) -> None:
        self._checker.feed(data)
        _write_all(self._file, data if self._deflater is None else self._deflater.compress(data))


@attrs.frozen
class _Read:
    """What became of one source."""

    problem: str | None
    base_ns: int | None = None
    """``None`` if the trace ended before it said."""
    events: int = 0
    """As the scanner counts them."""


class _Merge:
    """One attempt: all sources, one after the other.

    Args:
        sources: In their order in the viewer.
        on_progress: See :func:`merge_traces`.
        bases_ns: What the ``ts`` of each source count from; if not given, they must turn out to be equal.
    """

    def __init__(
        self, sources: Sequence[Source], on_progress: Progress | None, bases_ns: Sequence[int] | None = None
    ) -> None:
        self._sources = sources
        self._bases_ns = bases_ns
        self._base_ns = min(bases_ns, default=None) if bases_ns is not None else None
        self._meter = Meter(sum(_size(source.path) for source in sources), on_progress)
        self._pids = _Pids()
        self._processes = 0
        self._events = 0
        self._problems: list[str] = []
        self._members: dict[str, Any] = {}
        self._described: list[dict[str, Any]] = []

    def write(self, output: _Output) -> TraceCheck:
        """Merge.

        Raises:
            _BasesDifferError: The bases are not equal.
            TraceError: No source has an event that could be read.
        """
        for rank in range(len(self._sources)):
            self._append(rank, output)
        if not self._events:
            raise TraceError(" ".join(["There is no event to merge.", *self._problems]))
        if self._base_ns is not None:  # otherwise no trace says, and to write 0 would say that it is known
            self._members[_BASE] = self._base_ns
        check = output.finish({**self._members, "profdeck": {"sources": self._described}})
        if not self._problems:
            return check
        return attrs.evolve(check, whole=False, problem=" ".join(self._problems))

    def _append(self, rank: int, output: _Output) -> None:
        source = self._sources[rank]
        shift_ns = 0
        if self._bases_ns is not None and self._base_ns is not None:
            shift_ns = self._bases_ns[rank] - self._base_ns
        rewriter = _Rewriter(rank, source.label, self._pids, shift_ns)
        read = _read(source, rewriter, self._within, lambda: output.events(*rewriter.take()))
        rewriter.complete(self._processes)
        output.events(*rewriter.take())
        self._meter.passed(_size(source.path))
        if self._bases_ns is None and read.base_ns is not None:
            if self._base_ns not in {None, read.base_ns}:
                raise _BasesDifferError
            self._base_ns = read.base_ns
        processes = rewriter.processes.values()
        self._processes += len(processes)
        self._events += rewriter.events
        if read.problem is not None:
            self._problems.append(read.problem)
            if rewriter.events and read.base_ns is None:
                self._problems.append(f"Its {_BASE} is lost: that of the other traces is assumed.")
        if lost := read.events - rewriter.events:
            self._problems.append(f"{source.label} ({source.path}): {lost:,} events are too long or deep to be copied.")
        for key in _COMMON_KEYS:
            if key in rewriter.members:
                self._members.setdefault(key, rewriter.members[key])
        self._described.append(
            {
                "label": msgspec.Raw(_encoded(source.label)),
                _BASE: read.base_ns if self._bases_ns is None else self._bases_ns[rank],
                **{key: rewriter.members[key] for key in _SOURCE_KEYS if key in rewriter.members},
                "pids": {str(process.pid): msgspec.Raw(process.original or b"null") for process in processes},
            }
        )

    def _within(self, done_bytes: int) -> None:
        self._meter.within(done_bytes, 0)


def _bases(sources: Sequence[Source]) -> list[int]:
    """Return what the ``ts`` of each trace count from, in nanoseconds; found by reading all of them."""
    found = [_read(source, _Members()).base_ns for source in sources]
    fallback_ns = min((base_ns for base_ns in found if base_ns), default=0)
    return [fallback_ns if base_ns is None else base_ns for base_ns in found]


def _size(path: Path) -> int:
    try:
        return file_size(path)
    except TraceError:
        return 0  # the reader says so


def _read(
    source: Source,
    handler: _Members,
    on_read: Callable[[int], None] | None = None,
    on_piece: Callable[[], None] = lambda: None,
) -> _Read:
    """Pass a trace to a handler as far as it can be read.

    Args:
        source: The trace.
        handler: Takes it.
        on_read: Called with the bytes on disk read so far.
        on_piece: Called when the handler has taken a piece of the trace.
    """
    checker = TraceChecker(handler)
    is_array = False

    def feed(chunk: Chunk) -> None:
        nonlocal is_array
        if not checker.json_bytes:
            is_array = chunk.lstrip().startswith(b"[")
        checker.feed(chunk)
        on_piece()

    try:
        size_bytes = file_size(source.path)
        damage = feed_chunks(feed, read_ahead(source.path, on_read=on_read))
    except TraceError as error:
        return _Read(f"{source.label}: {error}")
    check = checker.finish(size_bytes, damage=damage)
    on_piece()
    base_ns = handler.base_ns()
    if base_ns is None and (check.whole or is_array):
        base_ns = 0
    return _Read(check.problem and f"{source.label} ({source.path}): {check.problem}", base_ns, check.events)


class _Members(CountingHandler):
    """Collects the text of members of the top-level object."""

    wants_text = True
    keys = frozenset({_BASE, *_COMMON_KEYS, *_SOURCE_KEYS})

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[str, msgspec.Raw] = {}

    def member(self, key: str, text: bytes) -> None:
        """Keep it."""
        self.members[key] = msgspec.Raw(text)

    def base_ns(self) -> int | None:
        """Return ``baseTimeNanoseconds``, if it is there and a whole number."""
        return _integer(bytes(self.members.get(_BASE, b"")))


class _Pids:
    """Gives each process of the new trace its pid."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._next = _FIRST_NEW_PID

    def allot(self, original: Any) -> int:
        """Return a free pid, which is ``original`` if that is one that the operating system gave."""
        if isinstance(original, int) and _FIRST_KEPT_PID <= original < _FIRST_NEW_PID and original not in self._taken:
            self._taken.add(original)
            return original
        self._next += 1
        return self._next


@attrs.define
class _Process:
    pid: int
    original: bytes
    """The pid in its source, as JSON; empty if its events have none."""
    named: bool = False
    sort_index: float = 0


_Event = dict[str, msgspec.Raw]


class _Rewriter(_Members):
    """Makes the events of one source fit for the new trace.

    Args:
        rank: The place of the source among the sources.
        label: In front of the names of processes.
        pids: Shared by the sources.
        shift_ns: What to add to each ``ts``.
    """

    def __init__(self, rank: int, label: str, pids: _Pids, shift_ns: int) -> None:
        super().__init__()
        self._rank = rank
        self._label = label
        self._pids = pids
        self._shift_us = Decimal(shift_ns) / _NS_PER_US
        self._by_text: dict[bytes, _Process] = {}
        self._texts: list[bytes] = []
        self._between, self._inside = _SEPARATOR, b""
        self._layout_known = False
        shift_us, rest_ns = divmod(shift_ns, _NS_PER_US)
        self._substitution = _Substitution(self._pid, self._id, None if rest_ns else shift_us)
        self.processes: dict[str | None, _Process] = {}
        """By pid, as JSON in one form; in the order of the trace."""
        self.events = 0
        """Objects with a ``ph`` member so far; those that are written anew with :meth:`complete` count as well."""

    def batch(self, text: memoryview) -> int | None:
        """Take events; see :meth:`profdeck.traces.scanner.TraceHandler.batch`."""
        data = bytes(text)
        if not self._layout_known and (layout := _LAYOUT.search(data)):
            self._layout_known = True
            self._between, self._inside = layout.groups()
        substituted = self._substitution.apply(data)
        if substituted is not None:
            count, new_text = substituted
            self._texts.append(new_text)
            self.events += count
            return count
        events = _split_array(data)
        if events is None:
            return None
        before = self.events
        self._take(events)
        return self.events - before

    def event(self, text: bytes) -> None:
        """Take one event."""
        self._take(_split_array(b"[%b]" % text) or [])

    def take(self) -> tuple[list[bytes], bytes]:
        """Return the texts of the events since the last call, and what to write between them."""
        texts, self._texts = self._texts, []
        return texts, self._between

    def complete(self, first_sort_index: int) -> None:
        """Add the metadata that is missing; to be called at the end of the source.

        Args:
            first_sort_index: The first of as many indices as there are processes. Viewers hold them in 32 bits,
                so that the original ones cannot be kept with room between the sources.
        """
        events = []
        for process in self.processes.values():
            if not process.named:
                name = _labelled(self._label, _text_of(process.original))
                events.append(_metadata("process_name", process.pid, {"name": name}))
        ordered = sorted(self.processes.values(), key=lambda process: process.sort_index)
        for sort_index, process in enumerate(ordered, first_sort_index):
            events.append(_metadata("process_sort_index", process.pid, {"sort_index": sort_index}))
        if events:
            self._texts.append(_encoded_all(events, self._between, self._inside))

    def _take(self, events: list[_Event]) -> None:
        kept = []
        for event in events:
            self.events += "ph" in event
            if self._rewrite(event):
                kept.append(event)
        if kept:
            self._texts.append(_encoded_all(kept, self._between, self._inside))

    def _rewrite(self, event: _Event) -> bool:
        """Change the members in place; ``False`` if the event is to be left out."""
        phase = _value(bytes(event.get("ph", b"")))
        process = self._process(bytes(event.get("pid", b"")))
        if phase == "M":
            name = _value(bytes(event.get("name", b"")))
            if name == "process_sort_index":
                process.sort_index = _sort_index(event)
                return False
            if name == "process_name":
                self._rename(process, event)
        event["pid"] = msgspec.Raw(b"%d" % process.pid)
        self._rewrite_ids(event, phase)
        if self._shift_us and "ts" in event:
            event["ts"] = msgspec.Raw(_later(bytes(event["ts"]), self._shift_us))
        return True

    def _rewrite_ids(self, event: _Event, phase: Any) -> None:
        if "id" in event and isinstance(phase, str) and len(phase) == 1:
            if phase in _FLOW_PHASES:
                event["id"] = msgspec.Raw(self._id(bytes(event["id"])))
            elif phase in _ASYNC_PHASES:
                event["id"] = msgspec.Raw(self._id(bytes(event["id"]), of_flow=False))
        if "bind_id" in event:
            event["bind_id"] = msgspec.Raw(self._id(bytes(event["bind_id"])))
        if "id2" in event:
            scoped = _members_of(event["id2"])
            if scoped is not None and "global" in scoped:
                scoped["global"] = msgspec.Raw(self._id(bytes(scoped["global"]), of_flow=False))
                event["id2"] = msgspec.Raw(_encoded_event(scoped))

    def _rename(self, process: _Process, event: _Event) -> None:
        args = _members_of(event.get("args"))
        if args is not None:
            name = _labelled(self._label, _text_of(bytes(args.get("name", b""))))
            args["name"] = msgspec.Raw(_encoded(name))
            event["args"] = msgspec.Raw(_encoded_event(args))
            process.named = True

    def _pid(self, text: bytes) -> bytes:
        return b"%d" % self._process(text).pid

    def _process(self, text: bytes) -> _Process:
        """Return the process whose pid is this JSON text, or which has none."""
        process = self._by_text.get(text)
        if process is None:
            value = _value(text)
            key = json.dumps(value) if text else None
            process = self.processes.get(key)
            if process is None:
                process = self.processes[key] = _Process(self._pids.allot(value), text)
            self._by_text[text] = process
        return process

    def _id(self, text: bytes, *, of_flow: bool = True) -> bytes:
        """Return the new JSON of an id.

        Perfetto drops flows whose id is neither a number nor a string of hexadecimal digits, and takes both for the
        same; of other events it takes any string.
        """
        if len(text) <= _ID_DIGITS and text.isdigit():
            return b"%d%b" % (self._rank, text.zfill(_ID_DIGITS)) if self._rank else text
        value = _value(text)
        if isinstance(value, str):
            number = int(value, 16) if of_flow and _HEX_ID.fullmatch(value) else None
        else:
            number = _integer(text)
        if number is None or number < 0:
            return _encoded(f"{self._rank}/{_text_of(text)}")
        if number >= 10**_ID_DIGITS:  # Ascend's are times in nanoseconds, which leave no room for a prefix
            digest = hashlib.blake2b(b"%d/%d" % (self._rank, number), digest_size=8).digest()
            return b'"0x%x"' % (int.from_bytes(digest) | _HASHED_ID)
        number += self._rank * 10**_ID_DIGITS
        return b'"0x%x"' % number if isinstance(value, str) else b"%d" % number


# Members that need more than another value, and keys that stand in a text in another form.
_NOT_SUBSTITUTED = (b'"bind_id"', b'"id2"', b'"process_name"', b'"process_sort_index"')
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")
_VALUES = {
    b"pid": re.compile(rb'("pid"[ \t\n\r]*:[ \t\n\r]*)(-?[0-9]+|"[^"\\]*")(?=[ \t\n\r,}])'),
    b"id": re.compile(rb'("id"[ \t\n\r]*:[ \t\n\r]*)(-?[0-9]+)(?=[ \t\n\r,}])'),
    # The whole microseconds, which are all that changes.
    b"ts": re.compile(rb'("ts"[ \t\n\r]*:[ \t\n\r]*(?:"(?=[0-9.]+"))?)([0-9]{1,18})(?=(?:\.[0-9]+)?"?[ \t\n\r,}])'),
}


class _Substitution:
    """Substitutes the values of members in the text of whole batches.

    It takes a batch only if all of its events have a ``pid``, those of the phases that have one have a number as
    ``id``, and none has a member that needs more than another value; and if these keys, in quotes, stand nowhere
    else in the text: not in ``args``, in strings or twice in an event.

    Args:
        pid: Returns the new JSON of a pid.
        id_: Returns the new JSON of an id.
        shift_us: What to add to each ``ts``; ``None`` takes no batch.
    """

    def __init__(self, pid: Callable[[bytes], bytes], id_: Callable[[bytes], bytes], shift_us: int | None) -> None:
        self._possible = shift_us is not None
        self._pids = _Cache(pid)
        self._id = id_
        self._shift_us = shift_us or 0
        fields: list[tuple[str, Any]] = [("pid", int | str)]
        if self._shift_us:
            fields.append(("ts", float | str))
        with_id = [_phase_type(phase, [*fields, ("id", int)]) for phase in _FLOW_PHASES + _ASYNC_PHASES]
        without = [_phase_type(phase, fields) for phase in _OTHER_PHASES]
        self._has_id = frozenset(with_id).__contains__
        event: Any = functools.reduce(operator.or_, [*with_id, *without])
        self._decode = msgspec.json.Decoder(list[event]).decode

    def apply(self, data: bytes) -> tuple[int, bytes] | None:
        """Return how many events there are and their new text; ``None`` if they have to be taken apart.

        Args:
            data: A JSON array, or something else that was cut out of one.
        """
        if not self._possible or any(stringzilla.find(data, needle) >= 0 for needle in _NOT_SUBSTITUTED):
            return None
        # A key may be written with escapes, and would not be found.
        if stringzilla.find(data, b"\\u00") >= 0 and _ESCAPED_LETTER.search(data):
            return None
        try:
            events = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        count = len(events)
        text: bytes | None = _substituted(data, b"pid", count, self._pids.__getitem__)
        if text is not None:
            text = _substituted(text, b"id", sum(map(self._has_id, map(type, events))), self._id)
        if text is not None and self._shift_us:
            text = _substituted(text, b"ts", count, self._later)
        return None if text is None else (count, text[1:-1].strip())

    def _later(self, digits: bytes) -> bytes:
        return b"%d" % (int(digits) + self._shift_us)


def _substituted(data: bytes, key: bytes, count: int, new: Callable[[bytes], bytes]) -> bytes | None:
    """Return the text with new values, or ``None`` if the key does not stand as often as there are members."""
    if stringzilla.count(data, b'"%b"' % key) != count:
        return None
    pieces = _VALUES[key].split(data)  # text, key, value, text, key, value, ..., text
    if len(pieces) != 3 * count + 1:
        return None
    pieces[2::3] = map(new, pieces[2::3])
    return b"".join(pieces)


class _Cache(dict[bytes, bytes]):
    def __init__(self, make: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: bytes) -> bytes:
        value = self[key] = self._make(key)
        return value


def _phase_type(phase: str, fields: list[tuple[str, Any]]) -> type[msgspec.Struct]:
    return msgspec.defstruct(f"_Event{ord(phase)}", fields, tag_field="ph", tag=phase, gc=False)


# Events that were taken apart keep the layout of their neighbours, so that readers can go on in batches.
_LAYOUT = re.compile(rb'\}([ \t\n\r]*,[ \t\n\r]*)\{([ \t\n\r]*)"')

_decode_events = msgspec.json.Decoder(list[_Event]).decode
# The values are only measured, and Python refuses to read integers of more than 4,300 digits.
_measure = json.JSONDecoder(parse_int=len, parse_float=len).raw_decode
_skip_space = re.compile(r"[ \t\n\r]*").match
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def _split_array(data: bytes) -> list[_Event] | None:
    """Return the objects in a JSON array, with the text of their members; ``None``: it is not JSON, or too deep."""
    try:
        return _decode_events(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return _split_array_loosely(data.decode("utf-8", "surrogatepass"))
    except (ValueError, IndexError, RecursionError):
        return None


def _split_array_loosely(text: str) -> list[_Event]:
    """Do the same for elements that are no objects, for ``NaN`` and ``Infinity`` and for lone surrogates."""
    _, end = _measure(text)
    if text[end:].strip(" \t\n\r"):
        raise ValueError(text[end:])
    events: list[_Event] = []
    at = _space(text, 1)
    while text[at] != "]":
        if text[at] == "{":
            event, at = _split_object(text, at)
            events.append(event)
        else:
            _, at = _measure(text, at)
        at = _space(text, at)
        if text[at] == ",":
            at = _space(text, at + 1)
    return events


def _split_object(text: str, at: int) -> tuple[_Event, int]:
    """Return the members of the object at ``at``, which is known to be one, and where it ends."""
    event: _Event = {}
    at = _space(text, at + 1)
    while text[at] != "}":
        key, at = _measure(text, at)
        at = _space(text, _space(text, at) + 1)  # the colon
        _, end = _measure(text, at)
        event[key] = msgspec.Raw(text[at:end].encode("utf-8", "surrogatepass"))
        at = _space(text, end)
        if text[at] == ",":
            at = _space(text, at + 1)
    return event, at + 1


def _space(text: str, at: int) -> int:
    found = _skip_space(text, at)
    return found.end() if found else at


def _members_of(text: msgspec.Raw | None) -> _Event | None:
    """Return the members, if it is an object."""
    objects = None if text is None else _split_array(b"[%b]" % bytes(text))
    return objects[0] if objects else None


def _value(text: bytes) -> Any:
    """Return the value of JSON text; ``None`` if there is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return json.loads(text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None


def _text_of(text: bytes) -> str:
    """Return what a JSON string says, and the text of any other value."""
    value = _value(text)
    return value if isinstance(value, str) else text.decode("utf-8", "surrogatepass")


def _number(text: bytes) -> Decimal | None:
    if len(text) > _MAX_TIME_DIGITS or not _NUMBER.fullmatch(text):
        return None
    try:
        number = Decimal(text.decode())
    except InvalidOperation:  # the exponent is beyond all bounds
        return None
    return number if not number or abs(number.adjusted()) <= _MAX_TIME_DIGITS else None


def _integer(text: bytes) -> int | None:
    """Return a JSON number that is whole and has 64 bits at most; Python's tools may have written 5 as 5.0."""
    number = _number(text)
    if number is None or abs(number) > _MAX_INTEGER or number != int(number):
        return None
    return int(number)


def _later(text: bytes, shift_us: Decimal) -> bytes:
    """Return a time, a JSON number or a string with one, moved exactly; anything else as it is."""
    quote = text[:1] if text[:1] == b'"' else b""
    number = _number(text.strip(b'"'))
    if number is None:
        return text
    with localcontext(prec=4 * _MAX_TIME_DIGITS):
        return b"%b%b%b" % (quote, format(number + shift_us, "f").encode(), quote)


def _metadata(name: str, pid: int, args: dict[str, Any]) -> _Event:
    members = {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}
    return {key: msgspec.Raw(_encoded(value)) for key, value in members.items()}


def _sort_index(event: _Event) -> float:
    args = _members_of(event.get("args"))
    value = _value(bytes(args.get("sort_index", b""))) if args else None
    return value if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else 0


def _labelled(label: str, name: str) -> str:
    return f"{label}: {name}" if name else label


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates: JSON has escapes for them
        return json.dumps(value).encode()


def _encoded_all(events: list[_Event], between: bytes, inside: bytes) -> bytes:
    """Return JSON objects with commas between them.

    Args:
        events: The members of each.
        between: A comma, and white space.
        inside: White space in front of the first member.
    """
    return between.join(b"{%b%b" % (inside, _encoded_event(event)[1:]) for event in events)


def _encoded_event(event: _Event) -> bytes:
    try:
        return msgspec.json.encode(event)
    except UnicodeEncodeError:  # in a key
        return b"{%b}" % b",".join(b"%b:%b" % (_encoded(key), bytes(value)) for key, value in event.items())
