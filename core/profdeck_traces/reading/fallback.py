"""Trace parser in Python, for machines without the compiled parser. Tests check that both give the same results."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from decimal import Context, Decimal
from operator import itemgetter
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from profdeck_traces.reading.compiled import COLUMNS, MAX_NAMES
from profdeck_traces.reading.member_spans import member_spans, scan
from profdeck_traces.reading.walking import EVENT_STATES, NO_TIME, Changes, Kind, Mark, Parser, ParseState, ParseStatus

NO_DURATION = -1
_OTHER_PHASE = 1
_MAX_DEPTH = 512
_MAX_CATEGORIES = 255
_MAX_COUNTED_BYTES = 1 << 20  # limit for top-level members while counting events
_MAX_INTEGER = 2**63
_MAX_TIME_NS = 2**52 * 1000
_MARKED = 2  # value in `Changes.keep`
_NEAR_END = 16  # an error this close to the end may only be a truncated token, which continues in the next buffer
_CUT = re.compile(rb"(\})[ \t\n\r]*,[ \t\n\r]*\{")
_CUT_BYTES = 1 << 18
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|["\[{\]}]', re.DOTALL)
_NUMBER = re.compile(rb"[ \t\n\r]*([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?[ \t\n\r]*")
_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]*)")
_HEXADECIMAL = re.compile(rb'"(?:0[xX])?([0-9a-fA-F]{1,15})"')
_EXACT = Context(prec=10_000)
_FIELDS = ("ph", "name", "cat", "pid", "tid", "ts", "dur", "args")
_NO_TEXT = msgspec.Raw(b"")


class _BadError(Exception):
    """Malformed JSON at an offset in the buffer."""

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(reason)
        self.at = at


class _MoreError(Exception):
    """The buffer ends inside a value."""


class _Codes(dict[bytes, int]):
    """Assigns codes to strings in order of first appearance. Beyond the limit, new strings get code 1."""

    def __init__(self, limit: int, *texts: bytes) -> None:
        super().__init__((text, code) for code, text in enumerate(texts))
        self._limit = limit

    def __missing__(self, text: bytes) -> int:
        if len(self) >= self._limit:
            return 1
        code = self[text] = len(self)
        return code


class _Object:
    """Reads the JSON texts of selected object members into a struct.

    Args:
        fields: Maps field names of the struct to keys of members.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields
        members = [(name, msgspec.Raw, msgspec.field(default=_NO_TEXT, name=key)) for name, key in fields.items()]
        self.type = msgspec.defstruct("_Members", members, gc=False)
        self._decode = msgspec.json.Decoder(self.type).decode

    def read(self, text: bytes) -> Any:
        try:
            return self._decode(text)
        except msgspec.DecodeError:  # for example, for NaN
            spans = member_spans(text.decode("latin-1"))
            fields = {name: spans[key] for name, key in self._fields.items() if key in spans}
            return self.type(**{name: msgspec.Raw(text[begin:end]) for name, (begin, end) in fields.items()})


class PythonParser(Parser):
    """A `Parser` implemented with msgspec. It takes the same arguments as `CompiledParser`, except for the library."""

    def __init__(self, args: Mapping[str, int], *, max_names: int = MAX_NAMES, in_files: bool = False) -> None:
        del in_files  # values are kept in Python lists in memory
        self.state, self.has_events, self.rows = ParseState.START, False, 0
        self.error, self.error_at = "", -1
        self._is_array = False
        self._members: list[tuple[bytes, bytes]] = []
        self._counted_name: bytes | None = None
        self._member_bytes = 0
        self._columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
        self._names = _Codes(max_names, b"", b"(other)")
        self._categories = _Codes(_MAX_CATEGORIES, b"", b"(other)")
        self._tracks = _Codes(max_names, b"null,null", b'"(other)","(other)"')
        self._kinds = dict(args)
        self._texts = {
            key: _Codes(max_names, b"null", b'"(other)"') for key, kind in args.items() if kind != Kind.INTEGER
        }
        self._pairs: dict[str, tuple[list[int], list[int]]] = {key: ([], []) for key in args}
        self._own = {f"own{number}": key for number, key in enumerate(args) if key.startswith("@")}
        self._keys = {f"arg{number}": key for number, key in enumerate(args) if not key.startswith("@")}
        self._event = _Object(
            dict(zip(_FIELDS, _FIELDS, strict=True)) | {name: key[1:] for name, key in self._own.items()}
        )
        self._args = _Object(self._keys)
        self._decode_events = msgspec.json.Decoder(list[self._event.type]).decode  # type: ignore[name-defined]
        self._changes: Changes | None = None
        self.copied = 0
        self._copy = bytearray()
        self._marks: list[Mark] = []
        self._phases: dict[bytes, int] = {}
        self._buffer, self._text = b"", ""
        self._bad_byte = self._length = 0
        self._is_last = False

    @override
    def feed(self, buffer: bytearray, length: int, base: int, *, is_last: bool) -> tuple[ParseStatus, int]:
        self._buffer, self._length, self._is_last, self._text = bytes(buffer[:length]), length, is_last, ""
        self._bad_byte = self._find_bad_byte()
        at = taken = 0
        try:
            while True:
                at = self._skip_space(at)
                if at >= length:
                    return ParseStatus.MORE, taken
                at = taken = self._step(at)
        except _MoreError:
            if self._bad_byte < length:
                return self._fail(base + self._bad_byte, "bytes that are not UTF-8"), taken
            return ParseStatus.MORE, taken
        except _BadError as error:
            return self._fail(base + error.at, str(error)), taken

    @override
    def count_events(self, name: bytes = b"") -> None:
        self._counted_name = name

    @override
    def resume(self) -> None:
        self.has_events, self.state = True, ParseState.EVENT

    @override
    def column(self, name: str) -> NDArray[Any]:
        return np.array(self._columns[name], COLUMNS[name][1])

    @override
    def pairs(self, key: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        rows, values = self._pairs[key]
        return np.array(rows, np.uint32), np.array(values, np.int64)

    @override
    def drop(self, name: str) -> None:
        self._columns[name].clear()

    @override
    def drop_pairs(self, key: str) -> None:
        for values in self._pairs[key]:
            values.clear()

    @override
    def strings(self, name: str) -> list[bytes]:
        return list({"name": self._names, "category": self._categories, "track": self._tracks}[name])

    @override
    def texts(self, key: str) -> list[bytes]:
        return list(self._texts[key])

    @override
    def members(self) -> list[tuple[bytes, bytes]]:
        return self._members

    @override
    def copy_events(self, changes: Changes) -> None:
        self._changes = changes

    @override
    def take_copied(self) -> tuple[bytes, list[Mark]]:
        copied, marks = bytes(self._copy), self._marks
        self._copy, self._marks = bytearray(), []
        return copied, marks

    # ------------------------------------------------------------ document

    def _step(self, at: int) -> int:  # noqa: C901 - one branch per state
        """Read the next element of the document. Return the offset after it."""
        byte, state = self._buffer[at : at + 1], self.state
        if state == ParseState.START:
            if byte not in b"{[":
                self._bad(at, "neither an object nor an array begins")
            self._is_array = self.has_events = byte == b"["
            self.state = ParseState.FIRST_EVENT if self._is_array else ParseState.FIRST_MEMBER
        elif state == ParseState.FIRST_MEMBER and byte == b"}":
            self.state = ParseState.END
        elif state in (ParseState.FIRST_MEMBER, ParseState.MEMBER):
            return self._read_member(at)
        elif state == ParseState.AFTER_MEMBER:
            if byte not in b",}":
                self._bad(at, "a comma or a closing bracket is expected")
            self.state = ParseState.MEMBER if byte == b"," else ParseState.END
        elif byte == b"]" and state in (ParseState.FIRST_EVENT, ParseState.AFTER_EVENT):
            self.state = ParseState.END if self._is_array else ParseState.AFTER_MEMBER
        elif state == ParseState.AFTER_EVENT:
            if byte != b",":
                self._bad(at, "a comma or the end of the events is expected")
            self.state = ParseState.EVENT
        elif state in EVENT_STATES:
            return self._read_events(at)
        else:
            self._bad(at, "something follows the document")
        if at >= self._bad_byte:
            raise _MoreError
        return at + 1

    def _read_member(self, at: int) -> int:
        key, key_end, colon = self._read_key(at)
        value = self._skip_space(colon + 1)
        if key == "traceEvents":
            if value >= self._length:
                raise _MoreError
            if self.has_events:
                self._bad(value, "a second array of events begins")
            if self._buffer[value : value + 1] != b"[":
                self._bad(value, "traceEvents is not an array")
            self.has_events, self.state = True, ParseState.FIRST_EVENT
            self._members.append((self._buffer[at:key_end].replace(b"\n", b" "), b""))
            return value + 1
        end = self._end_of(value)
        if self._skip_space(end) >= self._length:
            raise _MoreError  # a number may continue in the next buffer
        texts = [text.replace(b"\n", b" ") for text in (self._buffer[at:key_end], self._buffer[value:end])]
        self.state = ParseState.AFTER_MEMBER
        size = len(texts[0]) + len(texts[1])
        if self._counted_name is None or self._member_bytes + size <= _MAX_COUNTED_BYTES:
            self._members.append((texts[0], texts[1]))
            self._member_bytes += size + 2
        return end

    def _read_events(self, at: int) -> int:
        end = self._read_many(at)
        if end is not None:
            self.state = ParseState.AFTER_EVENT
            return end
        end = self._end_of(at)
        if self._buffer[at : at + 1] == b"{":
            if self._changes is not None:
                self._copy_event(self._changes, at, end)
            else:
                self._add([self._event.read(self._buffer[at:end])])
        elif self._buffer[at : at + 1] != b"[" and self._skip_space(end) >= self._length:
            raise _MoreError  # a scalar may continue in the next buffer
        self.state = ParseState.AFTER_EVENT
        return end

    def _read_many(self, at: int) -> int | None:
        """Read many events at once, up to a boundary near the end of the buffer. Return None if this is impossible."""
        if self._bad_byte < self._length or self._changes is not None:
            return None
        cut = None
        for match in _CUT.finditer(self._buffer, max(at, self._length - _CUT_BYTES)):
            cut = match.end(1)
        if cut is None:
            return None
        text = self._buffer[at:cut]
        if self._is_deep(text) or (b"\\" in text and b"\\" in _ESCAPE.sub(b"", text)):
            return None
        try:
            events = self._decode_events(b"[%b]" % text)
        except (msgspec.DecodeError, RecursionError):
            return None  # the boundary is inside an event, or the JSON is malformed
        self._add(events)
        return cut

    @staticmethod
    def _is_deep(text: bytes) -> bool:
        characters = np.frombuffer(text, np.uint8) | 0x20
        steps = (characters == ord("{")).astype(np.int8) - (characters == ord("}"))
        return bool(np.cumsum(steps, dtype=np.int32).max(initial=0) > _MAX_DEPTH // 2)

    # ------------------------------------------------------------ copying

    def _copy_event(self, changes: Changes, at: int, end: int) -> None:
        spans, row = member_spans(self._characters(), at), self.rows
        if "ph" not in spans:
            return
        self.rows += 1
        has_row = row < changes.rows
        keep = 1 if changes.keep is None else int(changes.keep[row]) if has_row else 0
        if not keep:
            return
        replaced = sorted(self._replaced(changes, row, at, spans), key=itemgetter(0))
        if self.copied:
            self._copy += changes.separator
        self.copied += 1
        begin = len(self._copy)
        for first, last, text in replaced:
            self._copy += self._buffer[at:first] + text
            at = last
        self._copy += self._buffer[at:end]
        if keep == _MARKED:
            self._marks.append(Mark(row, begin, len(self._copy)))

    def _replaced(
        self, changes: Changes, row: int, at: int, spans: Mapping[str, tuple[int, int]]
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield the start, end and new text of each value that changes."""
        has_row = row < changes.rows
        if changes.lane is not None and has_row and (lane := int(changes.lane[row])) >= 0:
            for key, text in zip(("pid", "tid"), changes.lanes[lane], strict=True):
                if text and key in spans:
                    yield *spans[key], text
                elif text:
                    yield at + 1, at + 1, b'"%b": %b, ' % (key.encode(), text)
        if changes.ids is not None and has_row and (new_id := int(changes.ids[row])) >= 0 and "id" in spans:
            yield *spans["id"], b"%d" % new_id
        if changes.shift_ns and "ts" in spans:
            begin, end = spans["ts"]
            time_ns = read_time(self._buffer[begin:end], NO_TIME)
            if time_ns != NO_TIME:
                whole_us, rest_ns = divmod(abs(time_ns + changes.shift_ns), 1000)
                sign = b"-" if time_ns + changes.shift_ns < 0 else b""
                quote = b'"' if self._buffer[begin : begin + 1] == b'"' else b""
                yield begin, end, b"%b%b%d.%03d%b" % (quote, sign, whole_us, rest_ns, quote)

    # ------------------------------------------------------------ values

    def _skip_space(self, at: int) -> int:
        while self._buffer[at : at + 1] in (b" ", b"\t", b"\n", b"\r"):
            at += 1
        return at

    def _characters(self) -> str:
        """Decode the buffer with one character per byte, so that offsets stay the same."""
        if not self._text:
            self._text = self._buffer.decode("latin-1")
        return self._text

    def _end_of(self, at: int) -> int:
        """Return the end of the value that starts at `at`."""
        text = self._characters()
        try:
            _, end = scan(text, at)
        except StopIteration as error:
            self._check_depth(at, int(error.value))
            self._bad(int(error.value), "a value is expected")
        except json.JSONDecodeError as error:
            self._check_depth(at, error.pos)
            if error.msg.startswith("Unterminated"):
                raise _MoreError from error
            place = text.rfind("\\", 0, error.pos + 1) if error.msg.startswith("Invalid \\") else error.pos
            self._bad(place, error.msg)
        except RecursionError as error:
            self._check_depth(at, self._length)
            raise _MoreError from error
        self._check_depth(at, end)
        if end > self._bad_byte:
            raise _MoreError
        if text[at] not in '"{[' and end < self._length and text[end] not in " \t\n\r,]}":
            self._bad(at, "a value is expected")
        return int(end)

    def _check_depth(self, at: int, end: int) -> None:
        """Check that the value at `at` is not nested too deeply. In an event, check its members and args separately."""
        text = self._characters()
        if text.count("[", at, end) + text.count("{", at, end) <= _MAX_DEPTH:
            return
        is_event = self.state in EVENT_STATES and text[at] == "{"
        stack: list[str] = []
        key, is_args = "", False
        for match in _BRACKETS.finditer(text, at, end):
            symbol = match.group()
            if symbol == '"':
                return  # an unterminated string
            if symbol[0] == '"':
                key = symbol
            elif symbol in "[{":
                if is_event and len(stack) == 1:
                    is_args = symbol == "{" and json.loads(key) == "args"
                if len(stack) - (0 if not is_event else 2 if is_args else 1) >= _MAX_DEPTH:
                    self._bad(match.start(), "nested too deeply")
                stack.append(symbol)
            else:
                stack.pop()

    def _read_key(self, at: int) -> tuple[str, int, int]:
        """Return the decoded key at `at`, the end of the key, and the offset of the colon."""
        text = self._characters()
        if text[at] != '"':
            self._bad(at, "a key is expected")
        end = self._end_of(at)
        colon = self._skip_space(end)
        if colon >= self._length:
            raise _MoreError
        if text[colon] != ":":
            self._bad(colon, "a colon is expected")
        return json.loads(text[at:end].encode("latin-1").decode("utf-8", "surrogatepass")), end, colon

    def _find_bad_byte(self) -> int:
        """Return the offset of the first invalid UTF-8 byte, or the length of the buffer if there is none."""
        try:
            # Unlike `bytes.decode`, this accepts an encoded surrogate that is truncated at the end of the buffer.
            codecs.utf_8_decode(self._buffer, "surrogatepass", self._is_last)
        except UnicodeDecodeError as error:
            return error.start
        return self._length

    def _bad(self, at: int, reason: str) -> NoReturn:
        if at >= self._bad_byte or (at + _NEAR_END > self._length and not self._is_last) or at >= self._length:
            raise _MoreError
        raise _BadError(at, reason)

    def _fail(self, at: int, reason: str) -> ParseStatus:
        self.error, self.error_at = reason, at
        return ParseStatus.BAD

    # ------------------------------------------------------------ rows

    def _add(self, events: list[Any]) -> None:
        columns = self._columns
        for event in events:
            phase = bytes(event.ph)
            if not phase:
                continue
            if self._counted_name is not None and not self._is_counted_name(event.name):
                self.rows += 1
                continue
            code = self._phases.get(phase)
            columns["phase"].append(self._phase(phase) if code is None else code)
            columns["start_ns"].append(read_time(bytes(event.ts), NO_TIME))
            columns["duration_ns"].append(read_time(bytes(event.dur), NO_DURATION))
            columns["name"].append(self._names[_string(bytes(event.name), scalars=True)])
            columns["category"].append(self._categories[_string(bytes(event.cat), scalars=False)])
            columns["track"].append(self._tracks[(bytes(event.pid) or b"null") + b"," + (bytes(event.tid) or b"null")])
            self._add_pairs(event, self._own)
            if (text := bytes(event.args)).startswith(b"{"):
                self._add_pairs(self._args.read(text), self._keys)
            self.rows += 1

    def _is_counted_name(self, text: msgspec.Raw) -> bool:
        return bool(self._counted_name) and _string(bytes(text), scalars=True) == self._counted_name

    def _add_pairs(self, members: Any, keys: Mapping[str, str]) -> None:
        for name, key in keys.items():
            if text := bytes(getattr(members, name)):
                self._add_pair(key, text)

    def _add_pair(self, key: str, text: bytes) -> None:
        if text == b"null":
            return
        kind = self._kinds[key]
        if kind == Kind.TEXT:
            value: int | None = self._texts[key][text]
        elif kind == Kind.INTEGER:
            value = read_integer(text)
        else:
            value = read_id(text)
            if value is None:
                value = -2 - self._texts[key][text]
        if value is not None:
            rows, values = self._pairs[key]
            rows.append(self.rows)
            values.append(value)

    def _phase(self, text: bytes) -> int:
        phase = json.loads(text.decode("utf-8", "surrogatepass"))
        is_phase = isinstance(phase, str) and len(phase) == 1 and " " <= phase < "\x80"
        code = self._phases[text] = ord(phase) if is_phase else _OTHER_PHASE
        return code


def _string(text: bytes, *, scalars: bool) -> bytes:
    """Return a string without its quotes. If `scalars` is set, also return the text of other scalars."""
    if text[:1] == b'"':
        return text[1:-1]
    return text if scalars and text[:1] not in (b"{", b"[", b"n") else b""


def read_integer(text: bytes) -> int | None:
    """Parse a signed 64-bit integer, given as a number or a string. Return None for other values."""
    if text[:1] == b'"':
        text = text[1:-1]
    if not _INTEGER.fullmatch(text) or len(text) > 20:  # noqa: PLR2004 - digits of a 64-bit integer, and a sign
        return None
    value = int(text)
    return value if -_MAX_INTEGER <= value < _MAX_INTEGER else None


def read_id(text: bytes) -> int | None:
    """Parse a nonnegative integer, given as a number or a hexadecimal string. Return None for other values."""
    if match := _HEXADECIMAL.fullmatch(text):
        return int(match[1], 16)
    value = None if text.startswith(b'"') else read_integer(text)
    return value if value is not None and value >= 0 else None


def read_time(text: bytes, missing: int) -> int:
    """Convert microseconds to nanoseconds, rounding half to even. Return `missing` if the value is not a valid time."""
    if text[-4:-3] == b"." and (digits := text[:-4] + text[-3:]).isdigit() and len(digits) < 19:  # noqa: PLR2004
        value = int(digits)
        return value if value < _MAX_TIME_NS else missing
    match = _NUMBER.fullmatch(text[1:-1] if text[:1] == b'"' else text)
    if match is None or not text:
        return missing
    sign, digits, exponent = match.groups()
    try:
        number = Decimal(digits.decode()).scaleb(min(max(int((exponent or b"0")[:20]), -9999), 9999), _EXACT)
        if number and number.adjusted() > 20:  # noqa: PLR2004 - outside the range of times
            return missing
        value = int(_EXACT.multiply(number, 1000).to_integral_value(context=_EXACT))
    except ArithmeticError:
        return missing
    return missing if value >= _MAX_TIME_NS else -value if sign == b"-" else value
