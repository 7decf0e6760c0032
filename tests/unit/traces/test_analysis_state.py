from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from profdeck.base.processes import process_started
from profdeck_npu.traces.analysis_state import STATE_FILE, AnalysisState, read_state, write_state
from profdeck_traces.base.errors import TraceError

STATE = AnalysisState(
    state="running",
    host=socket.gethostname(),
    pid=os.getpid(),
    process_started=process_started(os.getpid()),
    started_ns=1,
    problems=("one",),
    remedy="do it",
    expected=("*.json",),
)


def test_state_round_trips_without_other_files(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    write_state(tmp_path, STATE)
    done_state = attrs.evolve(STATE, state="done", ended_ns=2)
    write_state(tmp_path, done_state)
    assert read_state(tmp_path) == done_state
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    path = tmp_path / STATE_FILE
    path.write_text(path.read_text().replace('"state"', '"later": 1,\n "state"', 1))
    assert read_state(tmp_path) == STATE


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"state": "done"}', b'{"state": "else"}', b"\xff"])
def test_invalid_file_raises_an_error_with_its_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(TraceError, match=STATE_FILE):
        read_state(tmp_path)


def test_failed_write_keeps_the_old_state(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).mkdir()
    with pytest.raises(OSError, match=STATE_FILE):
        write_state(tmp_path, STATE)
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FILE]
    with pytest.raises(TraceError, match=STATE_FILE):
        read_state(tmp_path)


def test_state_is_active_while_its_process_runs() -> None:
    assert STATE.is_active
    assert attrs.evolve(STATE, state="pending").is_active
    assert not attrs.evolve(STATE, state="done").is_active
    assert not attrs.evolve(STATE, state="failed").is_active
    assert not attrs.evolve(STATE, host="another-host").is_active
    assert not attrs.evolve(STATE, process_started="1").is_active  # an earlier process with the same PID
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        running_state = attrs.evolve(STATE, pid=process.pid, process_started=process_started(process.pid))
        assert running_state.is_active
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # exited but not reaped
        assert not running_state.is_active
    assert not running_state.is_active
