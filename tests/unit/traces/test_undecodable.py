"""Tests of undecodable events. Each event must be counted or reported."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from profdeck_traces.reading.integrity import check_trace
from profdeck_traces.reading.reader import read_trace

HEAD = b'{"ph": "X", "cat": "cpu_op", "name": "x", "dur": 1, "pid": 1, "tid": 1'
EVENTS = [HEAD + b', "ts": %d}' % (10 * number) for number in range(1000)]


def trace(tmp_path: Path, *events: bytes) -> Path:
    path = tmp_path / "a.trace.json"
    path.write_bytes(b'{"traceEvents": [' + b",\n".join(events) + b"]}")
    return path


@pytest.mark.parametrize(
    ("event", "read"),
    [
        (HEAD + b', "ts": 5, "args": {"a": ' + b"9" * 5000 + b"}}", True),
        (HEAD + b', "ts": ' + b"9" * 5000 + b"}", False),
        (HEAD + b', "ts": 5, "args": {"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}}", False),
    ],
)
def test_undecodable_event_is_reported(tmp_path: Path, event: bytes, *, read: bool) -> None:
    path = trace(tmp_path, *EVENTS[:500], event, *EVENTS[500:])
    assert check_trace(path).whole  # it is JSON
    trace_read = read_trace(path)
    assert len(trace_read.columns().name) == 1000 + read
    assert trace_read.check.whole is read
    assert trace_read.check.events == 1001
    if not read:
        assert "An event cannot be decoded" in (trace_read.check.problem or "")


@pytest.mark.parametrize("position", [b'"x\xff"', b'"x", "args": {"a": "\xff"}'])
def test_events_after_invalid_utf_8_are_lost(tmp_path: Path, position: bytes) -> None:
    bad = EVENTS[0].replace(b'"x"', position)
    trace_read = read_trace(trace(tmp_path, *EVENTS[:500], bad, *EVENTS[500:]))
    assert (len(trace_read.columns().name), trace_read.check.whole) == (500, False)
    assert "not UTF-8 at offset" in (trace_read.check.problem or "")


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


@pytest.mark.parametrize("devices_only", [False, True])
@pytest.mark.parametrize("category", ["user_annotation", "kernel"])
def test_args_with_too_deep_nesting_do_not_stop_reading(tmp_path: Path, category: str, *, devices_only: bool) -> None:
    args = b'{"External id": 3, "Collective name": "x", "Process Group Name": "0", "a": %b}' % (
        b"[" * 20_000 + b"]" * 20_000
    )
    event = HEAD.replace(b"cpu_op", category.encode()) + b', "ts": 5, "args": ' + args + b"}"
    work = [text.replace(b"cpu_op", b"kernel")[:-1] + b', "args": {"stream": 7}}' for text in EVENTS]
    trace_read = read_trace(trace(tmp_path, *work[:500], event, *work[500:]), devices_only=devices_only)
    assert len(trace_read.columns().name) in (1000, 1001)
