"""Substitutes values in the text of whole batches of events, at the speed of a search."""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import attrs
import msgspec

from profdeck_traces.base.byte_search import stringzilla
from profdeck_traces.merge.ids import ASYNC_PHASES, FLOW_PHASES, Ids
from profdeck_traces.reading.phases import PHASES, any_of, phase_type

_PHASES_WITH_ID = FLOW_PHASES + ASYNC_PHASES
_OTHER_PHASES = "".join(phase for phase in PHASES if phase not in _PHASES_WITH_ID)
_NS_PER_US = 1000

_ESCAPED_LETTER = re.compile(rb"\\u00[567]")

_GAP = rb"[ \t\n\r]*:[ \t\n\r]*"
_END = rb"[ \t\n\r,}]"
_PID = re.compile(rb'("pid"%b)(-?[0-9]+|"[^"\\]*")(?=%b)' % (_GAP, _END))
_PID_AND_END = re.compile(rb'("pid"%b)(-?[0-9]+|"[^"\\]*")(%b)' % (_GAP, _END))
_ID = re.compile(rb'("id"%b)([0-9]+)(?=%b)' % (_GAP, _END))
# What changes when whole microseconds are added, and when nanoseconds are.
_WHOLE = re.compile(rb'("ts"%b(?:"(?=[0-9.]+"))?)([0-9]{1,18})(?=(?:\.[0-9]+)?"?%b)' % (_GAP, _END))
_TIME = re.compile(rb'("ts"%b(?:"(?=[0-9.]+"))?)([0-9]{1,15}(?:\.[0-9]{1,3})?)(?="?%b)' % (_GAP, _END))

PROCESS = b'"process_'
"""With what the names of the metadata of processes begin."""
_DIGITS = frozenset("0123456789")
_MAX_PATTERNS = 32


@attrs.frozen
class Substituted:
    """A batch with new values."""

    text: memoryview
    """The events, without the brackets around them."""
    events: int
    complete: int
    """How many of them are complete events."""


class Substitution:
    """Gives batches their new pids, ids and times.

    It takes a batch only if a decoder reads in each of its events a ``pid`` and, in those of the phases that have
    one, a number as ``id``; if these keys, in quotes, stand nowhere else in the text: not in ``args``, in strings or
    twice in an event, which their number proves; and if no event has a member that needs more than another value.
    Then each value that is substituted is that of such a member, and the new text is as well-formed as the old one:
    a JSON number stands where a number or a string stood.

    Args:
        pid: Returns the new JSON of a pid.
        ids: Gives the new ids.
        shift_ns: What to add to each ``ts``.
    """

    def __init__(self, pid: Callable[[bytes], bytes], ids: Ids, shift_ns: int) -> None:
        self._pids = _Pids(pid)
        self._id_prefix = ids.prefix
        self._shift_ns = shift_ns
        self._move = _move() if shift_ns else None
        fields: list[tuple[str, Any]] = [("pid", int | str)]
        if shift_ns:
            fields.append(("ts", float | str))
        fields_with_id = [*fields, ("id", Annotated[int, msgspec.Meta(ge=0, lt=10**ids.digits)])]
        self._with_id = [phase_type(phase, fields_with_id) for phase in _PHASES_WITH_ID]
        without_id = [phase_type(phase, fields) for phase in _OTHER_PHASES]
        self._complete, self._metadata = (without_id[_OTHER_PHASES.index(phase)] for phase in "XM")
        event: Any = any_of([*self._with_id, *without_id])
        self._decode = msgspec.json.Decoder(list[event]).decode

    def apply(self, data: bytes) -> Substituted | None:
        """Return the events with new values; ``None`` if they have to be taken apart.

        Args:
            data: A JSON array, or something else that was cut out of one.
        """
        if stringzilla.find(data, b'"bind_id"') >= 0:
            return None
        # A key may be written with escapes, and would not be found.
        if stringzilla.find(data, b"\\u00") >= 0 and _ESCAPED_LETTER.search(data):
            return None
        try:
            events = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        count = len(events)
        phases = Counter(map(type, events))
        if phases[self._metadata] and stringzilla.find(data, PROCESS) >= 0:
            return None
        text = self._with_new_ids(data, sum(phases[phase] for phase in self._with_id))
        if text is not None:
            text = self._pids.substituted(text, count)
        if text is not None and self._shift_ns:
            text = self._moved(text, count)
        if text is None:
            return None
        inner = memoryview(text)[text.index(b"{") : text.rindex(b"}") + 1] if count else memoryview(b"")
        return Substituted(inner, count, phases[self._complete])

    def _with_new_ids(self, data: bytes, count: int) -> bytes | None:
        # One search looks for both "id" and "id2", which needs more than another value, but finds other strings, too.
        if stringzilla.count(data, b'"id') != count and (
            stringzilla.count(data, b'"id"') != count or stringzilla.find(data, b'"id2"') >= 0
        ):
            return None
        found = _ID.search(data)
        if found is None:
            return None if count else data
        key = found[1]
        pieces = list(stringzilla.Str(data).split(key))
        if len(pieces) == count + 1 and _DIGITS.issuperset(map(operator.itemgetter(0), pieces[1:])):
            return (key + self._id_prefix).join(pieces)
        return _substituted(data, _ID, count, lambda ids: [self._id_prefix + digits for digits in ids])

    def _moved(self, data: bytes, count: int) -> bytes | None:
        if stringzilla.count(data, b'"ts"') != count:
            return None
        if self._move is not None and (text := self._move(data, count, self._shift_ns)) is not None:
            return text
        shift_us, rest_ns = divmod(self._shift_ns, _NS_PER_US)
        if rest_ns:
            return _substituted(data, _TIME, count, functools.partial(_later, self._shift_ns))
        return _substituted(data, _WHOLE, count, functools.partial(_later_whole, shift_us))


def _move() -> Callable[[bytes, int, int], bytes | None]:
    from profdeck_traces.merge.times import moved  # NumPy takes a tenth of a second to load

    return moved


def _later_whole(shift_us: int, times_us: Sequence[bytes]) -> list[bytes] | None:
    moved = list(map(shift_us.__add__, map(int, times_us)))
    return [b"%d" % time_us for time_us in moved] if min(moved, default=0) >= 0 else None


def _later(shift_ns: int, times_us: Sequence[bytes]) -> list[bytes] | None:
    parts = (time_us.partition(b".") for time_us in times_us)
    moved = [int(whole + fraction.ljust(3, b"0")) + shift_ns for whole, _, fraction in parts]
    return [b"%d.%03d" % divmod(time_ns, _NS_PER_US) for time_ns in moved] if min(moved, default=0) >= 0 else None


class _Pids:
    """Substitutes pids: there are few different ones, so that each can be searched with the text around it."""

    def __init__(self, new: Callable[[bytes], bytes]) -> None:
        self._new = _Cache(new)
        self._known: Counter[tuple[bytes, bytes]] = Counter()
        self._patterns: list[tuple[bytes, bytes]] = []

    def substituted(self, data: bytes, count: int) -> bytes | None:
        """Return the text with new pids, or ``None`` if the key does not stand as often as there are members."""
        if stringzilla.count(data, b'"pid"') != count:
            return None
        text = self._by_patterns(data, count)
        if text is None:
            text = _substituted(data, _PID, count, lambda pids: list(map(self._new.__getitem__, pids)))
            if text is not None:
                self._learn(data)
        return text

    def _by_patterns(self, data: bytes, left: int) -> bytes | None:
        for old, new in self._patterns:
            if not left:
                break
            if old == new:
                left -= stringzilla.count(data, old)
            else:
                pieces = list(stringzilla.Str(data).split(old))
                left -= len(pieces) - 1
                data = new.join(pieces) if len(pieces) > 1 else data
        return None if left else data

    def _learn(self, data: bytes) -> None:
        """Make patterns of the pids in this text, the frequent ones first."""
        self._known.update((key + pid + end, pid) for key, pid, end in _PID_AND_END.findall(data))
        changed = {new for old, new in self._new.items() if old != new}
        if len(self._known) > _MAX_PATTERNS or not changed.isdisjoint(self._new):
            self._patterns = []  # one would be found in what another one made
            return
        self._patterns = [(old, old.replace(pid, self._new[pid])) for (old, pid), _ in self._known.most_common()]


class _Cache(dict[bytes, bytes]):
    def __init__(self, make: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: bytes) -> bytes:
        value = self[key] = self._make(key)
        return value


def _substituted(
    data: bytes, member: re.Pattern[bytes], count: int, new: Callable[[Sequence[bytes]], list[bytes] | None]
) -> bytes | None:
    """Return the text with new values, or ``None`` if it cannot be done.

    Args:
        data: The text.
        member: Finds the key, the text between, and the value.
        count: How often it must be found.
        new: Returns the new values.
    """
    pieces = member.split(data)  # text, key, value, text, key, value, ..., text
    values = new(pieces[2::3]) if len(pieces) == 3 * count + 1 else None
    if values is None:
        return None
    pieces[2::3] = values
    return b"".join(pieces)
