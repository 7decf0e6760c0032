"""Tests that read traces with unusual values. Every event must be read or reported as skipped."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from profdeck_traces.reading.events import read_events
from profdeck_traces.reading.integrity import check_trace
from profdeck_traces.reading.reader import read_trace

HEAD = b'{"ph": "X", "cat": "cpu_op", "name": "x", "dur": 1, "pid": 1, "tid": 1'
EVENTS = [HEAD + b', "ts": %d}' % (10 * number) for number in range(1000)]


def trace(tmp_path: Path, *events: bytes) -> Path:
    path = tmp_path / "a.trace.json"
    path.write_bytes(b'{"traceEvents": [' + b",\n".join(events) + b"]}")
    return path


@pytest.mark.parametrize(
    ("event", "has_time"),
    [
        (HEAD + b', "ts": 5, "args": {"a": ' + b"9" * 5000 + b"}}", True),
        (HEAD + b', "ts": 5, "args": {"External id": ' + b"9" * 5000 + b"}}", True),
        (HEAD + b', "ts": ' + b"9" * 5000 + b"}", False),
        (HEAD + b', "ts": [5]}', False),
    ],
)
def test_event_with_unusual_numbers_is_counted(tmp_path: Path, event: bytes, *, has_time: bool) -> None:
    path = trace(tmp_path, *EVENTS[:500], event, *EVENTS[500:])
    trace_read = read_trace(path)
    assert len(trace_read.events) == 1000 + has_time
    assert trace_read.check.whole
    assert trace_read.check.events == 1001
    assert check_trace(path).events == 1001


BAD_EVENTS = {
    "not UTF-8 in a name": EVENTS[0].replace(b'"x"', b'"x\xff"'),
    "not UTF-8 in args": EVENTS[0].replace(b'"x"', b'"x", "args": {"a": "\xff"}'),
    "control character": EVENTS[0].replace(b'"x"', b'"x\x01"'),
    "quotation mark": EVENTS[0].replace(b'"x"', b'"x"y"'),
    "nesting": HEAD + b', "ts": 5, "args": {"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}}",
}


@pytest.mark.parametrize("bad", BAD_EVENTS.values(), ids=BAD_EVENTS)
def test_malformed_event_is_skipped_and_reported(tmp_path: Path, bad: bytes) -> None:
    path = trace(tmp_path, *EVENTS[:500], bad, *EVENTS[500:])
    events = read_events(path)
    assert (events.complete, events.check.whole) == (1000, False)
    assert (events.check.problem or "").startswith("Malformed JSON at offset ")
    check = check_trace(path)
    assert (check.events, check.problem) == (1000, events.check.problem)
    ((skipped_from, skipped_to),) = events.check.skipped
    begin = path.read_bytes().index(bad)
    assert begin - 2 <= skipped_from <= begin < skipped_to <= begin + len(bad) + 2


def test_repeated_name_uses_no_additional_memory(tmp_path: Path) -> None:
    """The args of one event contain "process_name" as often as fits into 1 MiB."""
    args = json.dumps({"name": "x", **{str(number): "process_name" for number in range(40_000)}}).encode()
    meta = b'{"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "ts": 0, "args": ' + args + b"}"
    path = trace(tmp_path, meta, *EVENTS)
    code = "import sys; from pathlib import Path; from profdeck_traces.reading.reader import read_trace\n"
    code += "trace = read_trace(Path(sys.argv[1])); assert trace.process_names == {1: 'x'}, trace.process_names"
    limit = 1 << 30

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    command = [sys.executable, "-c", code, str(path)]
    subprocess.run(command, check=True, timeout=60, preexec_fn=bounded)  # one call of the system
