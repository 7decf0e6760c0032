"""Writer for the critical path as a thread in a Chrome trace. The args of each event describe its owner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from profdeck_traces.account.owned_path import OwnedPath, args_of
from profdeck_traces.analysis.critical_path import PATH_CATEGORY, PATH_NAME
from profdeck_traces.reading.identifiers import Id

_TID = 899_999_999  # above thread and stream ids, but below the ids of the lanes that a merge adds
_FIRST = -1_000_000
_NS_PER_US = 1000


def path_events(path: OwnedPath, pid: Id, shift_ns: int) -> Iterator[bytes]:
    """Yield the JSON text of each event: the name and sort index of the thread, then one event per segment.

    Without segments, there are no events.

    Args:
        path: The critical path.
        pid: Process id of the events.
        shift_ns: Offset to add to all times.
    """
    if not len(path):
        return
    for name, args in (("thread_name", {"name": PATH_NAME}), ("thread_sort_index", {"sort_index": _FIRST})):
        yield _text({"ph": "M", "name": name, "pid": pid, "tid": _TID, "ts": 0, "args": args})
    parts = []
    for owner in path.owners:
        args = args_of(owner)
        event = {"ph": "X", "cat": PATH_CATEGORY, "name": owner.label, "pid": pid, "tid": _TID, "args": args}
        parts.append(_text(event)[:-1])
    times = zip(path.begin_ns.tolist(), path.end_ns.tolist(), path.owner.tolist(), strict=True)
    for begin_ns, end_ns, number in times:
        yield b'%b,"ts":%b,"dur":%b}' % (parts[number], _us(begin_ns + shift_ns), _us(end_ns - begin_ns))


def _text(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode("utf-8", "replace")


def _us(time_ns: int) -> bytes:
    """Format nanoseconds as microseconds without losing precision."""
    whole, rest = divmod(abs(time_ns), _NS_PER_US)
    return b"%b%d.%03d" % (b"-" if time_ns < 0 else b"", whole, rest)
