"""Feeds the content of a trace to a parser, and resumes after malformed events."""

from __future__ import annotations

import enum
import re
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.stream import Chunk, DamagedStreamError

_SPACE = rb"[ \t\n\r]{0,1000}"
# At or after an error, parsing resumes at the first opening brace that follows a comma or a bracket and precedes a key
# used by events. The patterns search raw bytes, because an unescaped quote turns strings into syntax and vice versa.
# They are compiled on first use, because compilation takes 5 ms and few traces are damaged.
_NEXT_EVENT = rb'[,\[}]%b(\{)%b"(?:ph|name|cat|pid|tid|ts|dur|id|args|bp|s)"%b:' % (_SPACE, _SPACE, _SPACE)
_NEXT_ARRAY = rb'"traceEvents"%b:%b(\[)' % (_SPACE, _SPACE)
_MATCH_BYTES = 4096  # longer than any match of either pattern
_ROOM = 64  # bytes after the content that a parser may read and write
_WINDOW_BYTES = 1 << 15
MAX_VALUE_BYTES = 64 << 20
_MAX_RANGES = 1000
_WHITE_SPACE = b" \t\n\r"


NO_TIME = int(np.iinfo(np.int64).min)
"""Start time of events that have no valid time."""


class ParseStatus(enum.IntEnum):
    """Result of feeding a parser."""

    MORE = 0
    BAD = 1


class ParseState(enum.IntEnum):
    """Position of a parser in the document."""

    START = 0
    FIRST_MEMBER = 1
    MEMBER = 2
    AFTER_MEMBER = 3
    FIRST_EVENT = 4
    EVENT = 5
    AFTER_EVENT = 6
    END = 7


class Kind(enum.IntEnum):
    """Representation of the values of an arg."""

    TEXT = 0
    """Code of the value's JSON text in `Parser.texts`."""
    INTEGER = 1
    ID = 2
    """A nonnegative integer from a number or hexadecimal string. For any other value, -2 minus its JSON text's code."""


EVENT_STATES = frozenset({ParseState.FIRST_EVENT, ParseState.EVENT, ParseState.AFTER_EVENT})


class Mark(NamedTuple):
    """Position of a marked event in copied text."""

    row: int
    begin: int
    end: int


_MAX_SHIFT_NS = 2**62


@attrs.frozen(eq=False)
class Changes:
    """Changes to make in the text of copied events. Each array has one value per row.

    Raises:
        ValueError: The arrays have different lengths, or a lane or `shift_ns` is out of range.
    """

    keep: NDArray[np.uint8] | None = None
    """0: skip the event; 1: copy it; 2: copy it, and return its position from `Parser.take_copied`."""
    lane: NDArray[np.int32] | None = None
    """Index of the event's new lane in `lanes`, or -1 to keep its lane."""
    lanes: Sequence[tuple[bytes, bytes]] = ()
    """New process and thread ids as JSON texts. An empty text keeps the member; a missing member is inserted."""
    ids: NDArray[np.int64] | None = None
    """The new ``id``, or -1 to keep the ``id``."""
    shift_ns: int = 0
    """Added to every valid time. Times are written with three decimals; strings stay strings, numbers stay numbers."""
    separator: bytes = b",\n"
    """Text written between two events."""

    def __attrs_post_init__(self) -> None:
        if len({len(array) for array in (self.keep, self.lane, self.ids) if array is not None}) > 1:
            raise ValueError("The arrays have different lengths.")
        if self.lane is not None and int(self.lane.max(initial=-1)) >= len(self.lanes):
            raise ValueError("`lane` contains an index that is not in `lanes`.")
        if abs(self.shift_ns) >= _MAX_SHIFT_NS:
            raise ValueError(f"Times cannot be shifted by {self.shift_ns} ns.")

    @property
    def rows(self) -> int:
        """The length of the arrays."""
        return max((len(array) for array in (self.keep, self.lane, self.ids) if array is not None), default=0)


class Parser(Protocol):
    """Interface of trace parsers. The parsers in `compiled` and `fallback` give the same results."""

    error: str
    """The last error, without its position."""
    error_at: int
    """Offset of the last error in the document."""
    state: ParseState
    has_events: bool
    """True if an array of events was found."""
    rows: int

    def feed(self, buffer: bytearray, length: int, base: int, *, is_last: bool) -> tuple[ParseStatus, int]:
        """Parse the complete elements in ``buffer[:length]``. Return the status and the number of bytes consumed.

        Args:
            buffer: The content, followed by at least 64 bytes of room.
            length: Size of the content.
            base: Offset of the buffer in the document.
            is_last: True if the document ends with this content.
        """

    def count_events(self, name: bytes = b"") -> None:
        """From now on, only count events, in bounded memory. Columns are kept only for events named `name`.

        The total size of the top-level members that are kept is also limited.

        Args:
            name: The name as written in the file. If it is empty, no columns are kept.
        """

    def resume(self) -> None:
        """Resume parsing after an error. The next value must be an event."""

    def column(self, name: str) -> NDArray[Any]:
        """Return a column, which has one value per row.

        Args:
            name: ``start_ns``, ``duration_ns``, ``name``, ``track``, ``phase`` or ``category``.
        """

    def pairs(self, key: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the rows that have an arg, and the values of the arg: integers, or codes into `texts`."""

    def drop(self, name: str) -> None:
        """Free a column."""

    def drop_pairs(self, key: str) -> None:
        """Free the rows and values of an arg."""

    def strings(self, name: str) -> list[bytes]:
        """Return the JSON text for each code in a column: ``name``, ``category`` or ``track``."""

    def texts(self, key: str) -> list[bytes]:
        """Return the JSON text for each code of an arg."""

    def members(self) -> list[tuple[bytes, bytes]]:
        """Return the top-level members, with key and value as JSON text. The value of ``traceEvents`` is empty."""

    copied: int
    """Number of events copied so far."""

    def copy_events(self, changes: Changes) -> None:
        """From now on, copy the text of events instead of adding rows."""

    def take_copied(self) -> tuple[bytes, list[Mark]]:
        """Return the text copied since the last call, and the positions of the marked events in it."""


@attrs.define
class Walk:
    """Result of parsing a document."""

    json_bytes: int = 0
    problem: str | None = None
    """The first problem, in one sentence; None if the document is an intact Chrome trace."""
    skipped: list[tuple[int, int]] = attrs.field(factory=list)
    """Byte ranges of malformed events (at most 1,000 ranges)."""
    skips: int = 0
    """Number of malformed byte ranges, including those not listed in `skipped`."""

    def note(self, problem: str) -> None:
        """Record a problem unless one has already been recorded."""
        self.problem = self.problem or problem

    def skip(self, begin: int, end: int) -> None:
        """Record a malformed byte range."""
        self.skips += 1
        if len(self.skipped) < _MAX_RANGES:
            self.skipped.append((begin, end))


class Walker:
    """Feeds a document to a parser, and buffers the bytes that the parser has not consumed.

    After a malformed event, parsing resumes at the next object that follows a comma or a bracket and starts with a key
    used by events.

    Args:
        parser: The parser to feed.
        max_value_bytes: Skip longer events and members, because each event or member must fit in memory.
    """

    def __init__(self, parser: Parser, max_value_bytes: int = MAX_VALUE_BYTES) -> None:
        self.parser = parser
        self.result = Walk()
        self._max_value_bytes = max_value_bytes
        self._held = bytearray(4 << 20)
        self._filled = self._base = 0
        self._needed = 0
        self._window = 0
        """Number of bytes to feed at once after an error, so that time stays linear in the input; 0 feeds all bytes."""
        self._error_at: int | None = None
        """Offset of the last error until the next event after it is found, then None."""
        self._element_at = 0
        self._is_over = False

    def add_all(self, chunks: Generator[Chunk, None, None], max_json_bytes: int) -> None:
        """Read all UTF-8 chunks, up to `max_json_bytes` in total.

        Raises:
            TraceError: The file cannot be read.
        """
        try:
            for chunk in chunks:
                if self.result.json_bytes + len(chunk) > max_json_bytes:
                    self.result.note(f"The JSON has more than {max_json_bytes:,} bytes: the remainder was not read.")
                    break
                self.add(chunk)
        except DamagedStreamError as error:
            self.result.problem = str(error)
        finally:
            chunks.close()

    def add(self, chunk: Chunk, *, is_last: bool = False) -> None:
        """Read the next UTF-8 chunk."""
        self.result.json_bytes += len(chunk)
        if self._is_over:
            return
        end = self._filled + len(chunk)
        if len(self._held) < end + _ROOM:
            self._held.extend(bytes(end + _ROOM))
        self._held[self._filled : end] = chunk
        self._filled = end
        if is_last or self._filled >= self._needed:
            self._feed(is_last=is_last)

    def finish(self) -> Walk:
        """Finish parsing after the last chunk, and return the result."""
        self.add(b"", is_last=True)
        parser, result = self.parser, self.result
        if not result.json_bytes:
            result.note("The file is empty.")
        elif not self._is_over and parser.state != ParseState.END:
            if self._error_at is not None or self._held[: self._filled].strip(_WHITE_SPACE):
                begin = self._base if self._error_at is None else self._element_at
                result.skip(begin, result.json_bytes)
            result.note(f"The JSON is not closed: it ends after {result.json_bytes:,} bytes.")
        if not parser.has_events:
            result.note('It is not a Chrome trace: neither an array nor an object with "traceEvents".')
        elif not parser.rows:
            result.note("There are no events in the trace.")
        return result

    def _feed(self, *, is_last: bool) -> None:
        while not self._is_over:
            if self._error_at is not None and not self._resume():
                return
            length = min(self._filled, self._window or self._filled)
            status, taken = self.parser.feed(self._held, length, self._base, is_last=is_last and length == self._filled)
            self._drop(taken)
            if status == ParseStatus.BAD:
                self._handle_error(self.parser.error_at)
            elif self._window and length < self._filled + taken:
                self._window = self._window * 2 if self._window < self._filled else 0
            elif not taken and self._filled > self._max_value_bytes:
                self.parser.error = f"a value of more than {self._max_value_bytes >> 20} MiB"
                self._handle_error(self._base + 1)
            else:
                self._window = 0
                self._needed = 0 if taken else min(2 * self._filled, self._max_value_bytes + 1)
                return

    def _drop(self, count: int) -> None:
        if count:
            self._filled -= count
            self._base += count
            with memoryview(self._held) as held:
                held[: self._filled] = held[count : count + self._filled]

    def _handle_error(self, error_at: int) -> None:
        self.result.note(f"Malformed JSON at offset {error_at:,}: {self.parser.error}.")
        if self.parser.state not in EVENT_STATES and self.parser.has_events:
            self._is_over = True  # the error is after the events, so no event is lost
            return
        self._error_at, self._element_at = error_at, self._base
        offset = error_at - self._base
        if self.parser.state == ParseState.AFTER_EVENT and self._held[offset : offset + 1] == b"{":
            self._resume_at(offset)  # only the comma between two events is missing

    def _resume(self) -> bool:
        """Find the next event after an error. Return False if the buffer does not contain one."""
        in_events = self.parser.state in EVENT_STATES
        error_at = (self._error_at or 0) - self._base
        pattern = re.compile(_NEXT_EVENT if in_events else _NEXT_ARRAY)
        for match in pattern.finditer(self._held, max(0, error_at - _MATCH_BYTES), self._filled):
            if match.start(1) >= error_at:
                self._resume_at(match.start(1) + (not in_events))
                return True
        self._drop(max(0, self._filled - 2 * _MATCH_BYTES))
        return False

    def _resume_at(self, offset: int) -> None:
        self._drop(offset)
        self.result.skip(self._element_at, self._base)
        self.parser.resume()
        self._error_at, self._window = None, _WINDOW_BYTES


def walk(
    chunks: Generator[Chunk, None, None],
    parser: Parser,
    *,
    max_json_bytes: int,
    max_value_bytes: int = MAX_VALUE_BYTES,
) -> Walk:
    """Feed all chunks to a parser, using a `Walker`.

    Args:
        chunks: The document in UTF-8.
        parser: The parser to feed.
        max_json_bytes: Stop before the chunks exceed this total size.
        max_value_bytes: Skip longer events and members.

    Raises:
        TraceError: The file cannot be read.
    """
    walker = Walker(parser, max_value_bytes)
    walker.add_all(chunks, max_json_bytes)
    return walker.finish()
