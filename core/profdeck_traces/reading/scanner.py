"""An incremental JSON scanner that finds the events of a Chrome trace and proves the document well-formed.

Format: RFC 8259 plus the literals ``NaN``, ``Infinity`` and ``-Infinity``, which Python's ``json`` (and so many
tools that rewrite traces) emits. The trace is an object with a ``traceEvents`` array, or the bare array:
"Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

Two ways through the events give the same answer:

- whole batches: the text between two event boundaries, found by searching for the literal that separates the
  last two events seen, is decoded as a JSON array by a compiled decoder. JSON's grammar is deterministic, so a
  batch that decodes from a known boundary ends on a boundary: a wrong cut cannot decode.
- token by token, with regular expressions, for everything else: what stands around the events, layouts in which
  no batch can be cut, and text that is broken, where it tells the offset.
"""

from __future__ import annotations

import json
import re

from profdeck_traces.reading.handler import TraceHandler
from profdeck_traces.reading.json_patterns import (
    match_elements,
    match_elements_but_objects,
    match_members,
    match_members_but_ph,
    match_number,
    match_partial_escape,
    match_scalar,
    match_separator,
    match_space,
    match_text,
    match_token,
    squeeze_digits,
)
from profdeck_traces.reading.stream import Chunk

_MAX_DEPTH = 1_000_000
_MAX_KEY_BYTES = 128  # "traceEvents" written wholly in \uXXXX escapes has 66
_MAX_HELD_TOKEN_BYTES = 4096
_MAX_CAPTURE_BYTES = 16 << 20

_OBJECT, _ARRAY = ord("{"), ord("[")
_CLOSERS = {ord("}"): _OBJECT, ord("]"): _ARRAY}
_QUOTE, _COMMA, _COLON = b'",:'


class MalformedJsonError(ValueError):
    """The text is not JSON; the message is a sentence that names the offset."""


def _end(found: re.Match[bytes] | None, otherwise: int) -> int:
    return found.end() if found else otherwise


# What may stand next. Plain integers: members of an enum cost a third of the time of a token.
_VALUE = 0
_FIRST_ELEMENT = 1  # a value or "]"
_KEY = 2
_FIRST_KEY = 3  # a key or "}"
_EXPECT_COLON = 4
_AFTER_VALUE = 5  # a comma or a closing bracket
_IN_STRING = 6
_IN_KEY = 7
_DONE = 8


class TraceScanner:
    """Feed it a trace in pieces of any size; it tells a handler about the events and itself counts them.

    Memory is bounded by a few times the largest piece, plus, when the handler wants text, one event or
    member (16 MiB at most; a longer one is counted and not handed over).
    """

    def __init__(self, handler: TraceHandler) -> None:
        self._handler = handler
        # The byte in front of the text makes room for the "[" that turns a batch into a JSON array. The buffer
        # never shrinks: to grow it for each piece would cost half as much as decoding it.
        self._buffer = bytearray(1)
        self._filled = 1
        self._offset = 0  # of the first byte of text in the buffer
        self._state = _VALUE
        self._stack = bytearray()
        self._events_depth = 0  # depth inside the events array, 0 outside
        self._separator = b""
        self._key: bytearray | None = None
        self._top_key = ""
        self._event_has_ph = False
        self._capture: list[bytes] | None = None
        self._capture_bytes = 0
        self._capture_from = 0  # in the buffer
        self.events = 0
        """Objects with a ``ph`` member in the events array, so far."""
        self.events_arrays = 0
        """How many arrays of events there were: 1 in a sound trace."""

    @property
    def done(self) -> bool:
        """Whether the document is closed."""
        return self._state == _DONE

    @property
    def open_brackets(self) -> int:
        """How many objects and arrays are open."""
        return len(self._stack)

    def feed(self, piece: Chunk) -> None:
        """Scan one more piece.

        Raises:
            MalformedJsonError: The text up to here cannot be the beginning of a JSON document.
        """
        buffer = self._buffer
        filled = self._filled + len(piece)
        if filled > len(buffer):
            buffer.extend(bytes(filled))
        with memoryview(buffer) as view:  # a bytearray would copy the piece once more before it takes it
            view[self._filled : filled] = piece
        self._filled = filled
        pos, stopped = 1, True
        while stopped:
            if self._separator and self._at_event():
                cut = buffer.rfind(self._separator, pos, filled)
                if cut >= 0 and self._take_batch(pos, cut + 1):
                    self._state = _VALUE
                    self._consume(buffer.index(_COMMA, cut + 1) + 1)
                    return  # what follows the last boundary waits for the next piece
                pos, _ = self._scan(pos, stop_at_event=False)
                break
            pos, stopped = self._scan(pos, stop_at_event=True)
        self._consume(pos)
        if self._filled > _MAX_HELD_TOKEN_BYTES:
            self._squeeze_number()

    def finish(self) -> None:
        """Scan what is held back; whether the document is closed is then in :attr:`done`.

        Raises:
            MalformedJsonError: The text cannot be the beginning of a JSON document.
        """
        pos, _ = self._scan(1, stop_at_event=False)
        self._consume(pos)

    def _at_event(self) -> bool:
        return 0 < self._events_depth == len(self._stack) and self._state in (
            _VALUE,
            _FIRST_ELEMENT,
        )

    def _take_batch(self, start: int, end: int) -> bool:
        """Offer the text from ``start`` to ``end`` as an array, in place: its neighbours lend their bytes."""
        buffer = self._buffer
        before, after = buffer[start - 1], buffer[end]
        buffer[start - 1], buffer[end] = _ARRAY, ord("]")
        with memoryview(buffer) as view, view[start - 1 : end + 1] as text:
            count = self._handler.batch(text)
        buffer[start - 1], buffer[end] = before, after
        if count is None:
            return False
        self.events += count
        return True

    def _consume(self, pos: int) -> None:
        """Forget the text in front of ``pos``."""
        if self._capture is not None:
            self._keep(pos)
            self._capture_from = 1
        self._offset += pos - 1
        self._hold(self._buffer[pos : self._filled])

    def _hold(self, text: bytearray) -> None:
        """Make ``text`` all that the buffer holds."""
        self._filled = 1 + len(text)
        self._buffer[1 : self._filled] = text

    def _squeeze_number(self) -> None:
        """Shorten a number that is still being read: only its form matters, and its length must cost nothing."""
        held = self._buffer[1 : self._filled]
        slack = len("e+")  # the longest end that is not yet a number by itself
        if len(held) - _end(match_number(held), 0) > slack:
            raise self._malformed(1)
        shorter = bytearray(squeeze_digits(rb"\1", held))
        self._offset += len(held) - len(shorter)
        self._hold(shorter)

    def _scan(self, pos: int, *, stop_at_event: bool) -> tuple[int, bool]:
        """Scan tokens from ``pos``; return where the first incomplete one starts, and ``False``.

        With ``stop_at_event`` return at each boundary of the events array, and ``True``, so that the caller can
        try a batch.
        """
        data, size = self._buffer, self._filled
        while True:
            if self._state in (_IN_STRING, _IN_KEY):
                end = self._in_text(pos)
            else:
                pos = _end(match_space(data, pos, size), pos)
                if pos == size:
                    return pos, False
                end = self._token(data[pos], pos)
                if stop_at_event and end > pos and self._at_event():
                    return end, True
            if end == pos:
                return pos, False
            pos = end

    def _token(self, char: int, pos: int) -> int:
        """Read what stands at ``pos`` and return where it ends; ``pos`` when it is incomplete."""
        state = self._state
        if state == _AFTER_VALUE:
            return self._after_value(char, pos)
        if state in (_KEY, _FIRST_KEY):
            return self._key_or_end(char, pos)
        if state == _EXPECT_COLON:
            if char != _COLON:
                raise self._malformed(pos)
            self._state = _VALUE
            return pos + 1
        if state == _DONE:
            raise self._malformed(pos, "text follows the end of the document")
        return self._value(char, pos)

    def _in_text(self, pos: int) -> int:
        """Read on in a string and return how far; ``pos`` when more is needed."""
        data, size = self._buffer, self._filled
        end = _end(match_text(data, pos, size), pos)
        if self._key is not None and len(self._key) <= _MAX_KEY_BYTES:
            self._key += data[pos : min(end, pos + _MAX_KEY_BYTES + 1)]
        if end == size:
            return end
        if data[end] != _QUOTE:
            if match_partial_escape(data, end, size):
                return end
            raise self._malformed(end)
        if self._state == _IN_KEY:
            self._state = _EXPECT_COLON
            if self._key is not None:
                self._key_ended(bytes(self._key))
                self._key = None
        else:
            self._value_ended(end + 1)
        return end + 1

    def _key_ended(self, raw: bytes) -> None:
        # json.loads undoes escapes; a key of more than _MAX_KEY_BYTES may be cut and is none that we look for.
        key = "" if len(raw) > _MAX_KEY_BYTES else json.loads(f'"{raw.decode(errors="replace")}"')
        if self._events_depth:
            self._event_has_ph |= key == "ph"
        else:
            self._top_key = key

    def _key_or_end(self, char: int, pos: int) -> int:
        if char != _QUOTE:
            if char in _CLOSERS and self._state == _FIRST_KEY:
                return self._close(char, pos)
            raise self._malformed(pos)
        depth = len(self._stack)
        in_event = 0 < self._events_depth == depth - 1
        if depth > 1:
            match_run = match_members_but_ph if in_event else match_members
            run_end = _end(match_run(self._buffer, pos, self._filled), pos)
            if run_end > pos:
                self._state = _KEY
                return run_end
        if in_event or depth == 1:
            self._key = bytearray()
        self._state = _IN_KEY
        return pos + 1

    def _after_value(self, char: int, pos: int) -> int:
        if char == _COMMA:
            self._state = _KEY if self._stack[-1] == _OBJECT else _VALUE
            return pos + 1
        if char in _CLOSERS:
            return self._close(char, pos)
        raise self._malformed(pos)

    def _value(self, char: int, pos: int) -> int:
        """Read a value, or the beginning of one, and return where it ends; ``pos`` when it is incomplete."""
        data, size, stack = self._buffer, self._filled, self._stack
        if self._state == _FIRST_ELEMENT and char in _CLOSERS:
            return self._close(char, pos)
        if len(stack) == 1 and stack[0] == _OBJECT:
            self._member_begins(char, pos)
        if stack and stack[-1] == _ARRAY:
            match_run = match_elements_but_objects if self._events_depth == len(stack) else match_elements
            run_end = _end(match_run(data, pos, size), pos)
            if run_end > pos:
                self._state = _VALUE
                return run_end
        if char in (_OBJECT, _ARRAY):
            self._open(char, pos)
            return pos + 1
        if char == _QUOTE:
            self._state = _IN_STRING
            return pos + 1
        end = _end(match_token(data, pos, size), pos)
        if end == size:
            return pos
        if end == pos or _end(match_scalar(data, pos, size), pos) != end:
            raise self._malformed(pos)
        self._value_ended(end)
        return end

    def _open(self, char: int, pos: int) -> None:
        stack = self._stack
        if len(stack) >= _MAX_DEPTH:
            raise self._malformed(pos, f"brackets are nested more than {_MAX_DEPTH:,} deep")
        if char == _OBJECT:
            if self._events_depth and self._events_depth == len(stack):
                self._event_has_ph = False
                if self._handler.wants_text:
                    self._begin_capture(pos)
            self._state = _FIRST_KEY
        else:
            self._state = _FIRST_ELEMENT
            if not stack or (stack == b"{" and self._top_key == "traceEvents"):
                self._events_depth = len(stack) + 1
                self.events_arrays += 1
        stack.append(char)

    def _close(self, char: int, pos: int) -> int:
        stack = self._stack
        if stack[-1] != _CLOSERS[char]:
            raise self._malformed(pos)
        if len(stack) == self._events_depth:
            self._events_depth = 0
        stack.pop()
        end = pos + 1
        if 0 < self._events_depth == len(stack) and char == ord("}"):
            self.events += self._event_has_ph
            separator = match_separator(self._buffer, pos, self._filled)
            if separator is not None:
                self._separator = separator.group()
            if self._capture is not None:
                text = self._end_capture(end)
                if text is not None:
                    self._handler.event(text)
        self._value_ended(end)
        return end

    def _value_ended(self, end: int) -> None:
        depth = len(self._stack)
        self._state = _AFTER_VALUE if depth else _DONE
        if depth == 1 and self._capture is not None:
            text = self._end_capture(end)
            if text is not None:
                self._handler.member(self._top_key, text)

    def _member_begins(self, char: int, pos: int) -> None:
        if self._top_key == "traceEvents":
            if char != _ARRAY:
                raise self._malformed(pos, '"traceEvents" is not an array: not a Chrome trace')
        elif self._handler.wants_text and self._top_key in self._handler.keys and self._capture is None:
            self._begin_capture(pos)

    def _begin_capture(self, pos: int) -> None:
        self._capture, self._capture_bytes, self._capture_from = [], 0, pos

    def _keep(self, end: int) -> None:
        assert self._capture is not None  # noqa: S101 - callers have looked
        self._capture_bytes += end - self._capture_from
        if self._capture_bytes <= _MAX_CAPTURE_BYTES:
            self._capture.append(bytes(self._buffer[self._capture_from : end]))
        else:
            self._capture.clear()

    def _end_capture(self, end: int) -> bytes | None:
        assert self._capture is not None  # noqa: S101 - callers have looked
        self._keep(end)
        parts, self._capture = self._capture, None
        if self._capture_bytes > _MAX_CAPTURE_BYTES:
            return None
        return b"".join(parts)

    def _malformed(self, pos: int, what: str = "") -> MalformedJsonError:
        offset = self._offset + pos - 1
        if not what:
            byte = self._buffer[pos]
            if byte == 0:
                return MalformedJsonError(f"NUL bytes at offset {offset:,}: that part of the file was never written.")
            shown = repr(chr(byte)) if 0x20 <= byte < 0x7F else f"byte 0x{byte:02x}"  # noqa: PLR2004 - printable ASCII
            what = f"unexpected {shown}"
        return MalformedJsonError(f"The JSON is broken at offset {offset:,}: {what}.")
