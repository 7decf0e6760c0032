"""Merging in several processes."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from profdeck_traces.base.errors import TraceError
from profdeck_traces.merge import EventFilter, MergeSource, merge_traces
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.integrity import check_trace


def event(ph: str = "X", **members: Any) -> dict[str, Any]:
    return {"ph": ph, "name": "n", "pid": 4711, "tid": 1, "ts": 1, **members}


def trace(rank: int) -> bytes:
    """Return the trace of a rank. Base times, processes, lanes and layouts differ between ranks."""
    times: Any = {"ts": 0.5, "dur": 1.125}
    events = [event(pid=4711 + rank // 2, args={"n": n}) for n in range(50)]
    events += [event("s", id=n) for n in range(50)] + [event(cat="kernel", **times), event(cat="kernel", **times)]
    if rank == 1:
        events += [event(cat="kernel", ts=1.0, dur=1.0)]
    base = {"baseTimeNanoseconds": 10**18 + 500 * (rank % 3)}
    return json.dumps({"traceEvents": events, **base}, indent=rank % 3 or None).encode()


@pytest.fixture
def sources(tmp_path: Path) -> list[MergeSource]:
    (tmp_path / "sources").mkdir()
    written_sources = [
        MergeSource(tmp_path / "sources" / str(rank), f"rank {rank}", 0, shift_ns=1500 * rank) for rank in range(5)
    ]
    for rank, merge_source in enumerate(written_sources):
        data = trace(rank)
        merge_source.path.write_bytes(gzip.compress(data) if rank % 2 else data)
    written_sources[3].path.write_bytes(written_sources[3].path.read_bytes()[:-30])
    return written_sources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    merged_folder = tmp_path / "merged"
    merged_folder.mkdir()
    return merged_folder


@pytest.mark.parametrize("as_gzip", [False, True])
def test_file_is_independent_of_the_number_of_processes(
    sources: list[MergeSource], folder: Path, *, as_gzip: bool
) -> None:
    checks = [
        merge_traces(sources, folder / str(processes), gzip=as_gzip, processes=processes) for processes in (1, 2, 9)
    ]

    assert checks[0] == checks[1] == checks[2]
    assert checks[0].problem is not None
    assert checks[0].problem.startswith("rank 3 (")
    assert attrs.evolve(checks[0], whole=True, problem=None) == check_trace(folder / "1")
    assert len({path.read_bytes() for path in folder.iterdir()}) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "9"]


def test_pid_is_kept_in_the_first_source_that_has_it(sources: list[MergeSource], folder: Path) -> None:
    merge_traces(sources, folder / "merged", gzip=False)

    events = json.loads((folder / "merged").read_bytes())["traceEvents"]
    assert {event["pid"] for event in events if event["pid"] < 10**9} == {4711, 4712, 4713}
    labels = [event["args"]["name"] for event in events if event["name"] == "process_name" and event["pid"] == 4711]
    assert labels == ["rank 0: 4711"]


def test_process_with_threads_does_not_fork(sources: list[MergeSource], folder: Path) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        merge_traces(sources, folder / "2", processes=2)
    finally:
        ended.set()
        thread.join()
    merge_traces(sources, folder / "1")

    assert (folder / "1").read_bytes() == (folder / "2").read_bytes()


class Killing:
    """Kills the process that selects events."""

    def rows(self, _: Events) -> NDArray[np.bool_]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Failing:
    """Fails as writing to a full disk does."""

    def rows(self, _: Events) -> NDArray[np.bool_]:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("select", "error", "message"),
    [
        (Killing(), TraceError, r"sources/4: the worker process was killed by SIGKILL"),
        (Failing(), OSError, "No space left"),
    ],
)
def test_failed_process_leaves_no_files(
    sources: list[MergeSource], folder: Path, select: EventFilter, error: type[Exception], message: str
) -> None:
    sources[4] = attrs.evolve(sources[4], select=select)

    with pytest.raises(error, match=message):
        merge_traces(sources, folder / "merged", processes=2)

    assert not list(folder.iterdir())
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 2])
def test_interrupted_merge_leaves_no_files(sources: list[MergeSource], folder: Path, processes: int) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_traces(sources, folder / "merged", processes=processes, on_progress=interrupt)

    assert not list(folder.iterdir())
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 2])
def test_progress_is_that_of_all_sources(sources: list[MergeSource], folder: Path, processes: int) -> None:
    progress: list[tuple[int, int]] = []

    merge_traces(
        sources,
        folder / "merged",
        processes=processes,
        on_progress=lambda bytes_read, total: progress.append((bytes_read, total)),
    )

    total = sum(source.path.stat().st_size for source in sources)
    assert progress == sorted(progress)
    assert progress[-1] == (total, total)


def test_file_system_without_copy_support_works(
    sources: list[MergeSource], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_traces(sources, folder / "1")
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    merge_traces(sources, folder / "2")

    assert (folder / "1").read_bytes() == (folder / "2").read_bytes()


def test_no_two_of_many_sources_share_an_id(tmp_path: Path) -> None:
    data = json.dumps([event("s", id=flow_id) for flow_id in [*range(9), 12, 123, 10**12, 10**13, "0x1f"]]).encode()
    sources = [MergeSource(tmp_path / str(rank), f"rank {rank}", 0) for rank in range(300)]
    for merge_source in sources:
        merge_source.path.write_bytes(data)

    assert merge_traces(sources, tmp_path / "merged", gzip=False, processes=2).whole

    events = json.loads((tmp_path / "merged").read_bytes())["traceEvents"]
    ids = [event["id"] for event in events if event["ph"] == "s"]
    assert sorted(ids) == list(range(1, 300 * 14 + 1))
    assert len({event["pid"] for event in events}) == 300
