"""Tests of parallel processing of traces with real processes: order, progress, failures and cleanup."""

from __future__ import annotations

import contextlib
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from profdeck_traces.base import parallel
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.parallel import map_traces

HERE = Path(__file__).parent
WAITING = """
import sys
from parallel_jobs import obey
from profdeck_traces.base import parallel
if __name__ == "__main__":
    parallel._start_method = lambda: sys.argv[2]
    parallel.map_traces(obey, [f"wait {sys.argv[1]}"] * 3, [1, 1, 1], processes=2)
"""


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(HERE)
    import parallel_jobs

    return parallel_jobs


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """Traces of several sizes. One is truncated and one is missing."""
    paths = []
    for number in range(5):
        events = [{"ph": "X", "name": f"{number}-{event}", "ts": event, "dur": 1} for event in range(20 * number + 1)]
        data = gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0)
        paths.append(tmp_path / f"{number}.json.gz")
        paths[-1].write_bytes(data[:-20] if number == 3 else data)
    return [*paths, tmp_path / "missing.json.gz"]


def sizes(paths: list[Path]) -> list[int]:
    return [path.stat().st_size if path.exists() else 0 for path in paths]


def texts(results: list[object]) -> list[str]:
    return [f"{type(result).__name__}: {result}" for result in results]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_results_are_independent_of_processes(jobs, traces, monkeypatch, method) -> None:
    monkeypatch.setattr(parallel, "_start_method", lambda: method)
    alone = map_traces(jobs.check, traces, sizes(traces))
    assert texts(map_traces(jobs.check, traces, sizes(traces), processes=2)) == texts(alone)
    assert [result.whole for result in alone[:5]] == [True, True, True, False, True]
    assert isinstance(alone[5], TraceError)


def test_one_process_runs_in_the_current_process(jobs) -> None:
    results = map_traces(jobs.obey, ["a", "b"], [1, 2])
    assert results == [("a", os.getpid()), ("b", os.getpid())]


def test_one_item_runs_in_the_current_process(jobs) -> None:
    assert map_traces(jobs.obey, ["a"], [1], processes=4) == [("a", os.getpid())]


@pytest.mark.parametrize("processes", [1, 2])
def test_no_items_have_no_results(jobs, processes) -> None:
    assert map_traces(jobs.obey, [], [], processes=processes) == []


def test_number_of_processes_is_limited(jobs) -> None:
    results = map_traces(jobs.obey, list("abcdefgh"), [1] * 8, processes=3)
    assert [order for order, _ in results] == list("abcdefgh")
    pids = {pid for _, pid in results}
    assert len(pids) <= 3
    assert os.getpid() not in pids


def test_results_keep_the_order_and_the_largest_item_starts_first(jobs, tmp_path) -> None:
    # The first and the last item wait for each other, so both must start before the small item.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    orders = [f"meet-as-reader {pipe}", "small", f"meet-as-writer {pipe}"]
    results = map_traces(jobs.obey, orders, [9, 1, 5], processes=2)
    assert [order for order, _ in results] == orders
    begun: list[str] = []

    def begin(worker: parallel._Worker[str, str], index: int, item: str) -> None:
        begun.append(item)
        start(worker, index, item)

    start = parallel._Worker.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel._Worker, "begin", begin)
        map_traces(jobs.obey, ["a", "b", "c", "d"], [1, 3, 2, 3], processes=2)
    assert begun == ["b", "d", "c", "a"]


def test_killed_worker_fails_only_its_item(jobs) -> None:
    orders = ["a", "kill", "b", "kill", "c", "d"]
    results = map_traces(jobs.obey, orders, [1, 9, 1, 9, 1, 1], processes=2)
    assert [result[0] for result in results if not isinstance(result, TraceError)] == ["a", "b", "c", "d"]
    assert str(results[1]) == str(results[3])
    assert str(results[1]) == (
        "Cannot read kill: the worker process was killed by SIGKILL. "
        "If the host ran out of memory, read fewer traces at the same time (--processes)."
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_unreadable_item_has_an_error_result(jobs, processes) -> None:
    first, second, third = map_traces(jobs.obey, ["a", "unreadable", "b"], [1, 1, 1], processes=processes)
    assert (first[0], third[0]) == ("a", "b")
    assert isinstance(second, TraceError)
    assert str(second) == "It is torn."
    assert second.__traceback__ is None


@pytest.mark.parametrize("processes", [1, 2])
def test_other_exceptions_are_raised_with_the_item(jobs, processes) -> None:
    with pytest.raises(ValueError, match="a bug") as caught:
        map_traces(jobs.obey, ["fault", "b", "c"], [1, 1, 1], processes=processes)
    assert caught.value.__notes__[0] == "The error occurred while reading fault."


def test_exception_has_the_workers_traceback(jobs) -> None:
    with pytest.raises(ValueError, match="a bug") as caught:
        map_traces(jobs.obey, ["fault", "b"], [1, 1], processes=2)
    assert "in obey" in caught.value.__notes__[1]


def test_exception_that_cannot_be_pickled_is_reported(jobs) -> None:
    with pytest.raises(RuntimeError, match=r"OddError: 1 and 2\nThe error occurred while reading odd-fault\."):
        map_traces(jobs.obey, ["odd-fault", "b"], [1, 1], processes=2)


def test_item_of_an_exited_worker_is_reported(jobs) -> None:
    with pytest.raises(RuntimeError, match=r"exited with code 3 while reading exit\."):
        map_traces(jobs.obey, ["exit", "b"], [1, 1], processes=2)
    with pytest.raises(SystemExit, match="bye"):
        map_traces(jobs.obey, ["leave", "b"], [1, 1], processes=2)


def test_different_numbers_of_sizes_and_items_are_an_error(jobs) -> None:
    with pytest.raises(ValueError, match="zip"):
        map_traces(jobs.obey, ["a", "b"], [1])


@pytest.mark.parametrize("processes", [1, 2])
def test_progress_increases_to_the_total(jobs, processes) -> None:
    reports: list[tuple[int, int]] = []
    threads = set()

    def on_progress(bytes_read: int, total: int) -> None:
        reports.append((bytes_read, total))
        threads.add(threading.get_ident())

    map_traces(jobs.obey, ["a", "unreadable", "b", "c"], [3, 4, 5, 6], processes=processes, on_progress=on_progress)
    bytes_read = [bytes_read for bytes_read, _ in reports]
    assert bytes_read == sorted(set(bytes_read))
    assert reports[-1] == (18, 18)
    assert len(bytes_read) == 8  # each item reports 1 byte of progress and its end
    assert threads == {threading.get_ident()}


def test_item_of_a_killed_worker_is_counted_as_read(jobs) -> None:
    reports: list[tuple[int, int]] = []
    map_traces(jobs.obey, ["kill", "b"], [3, 4], processes=2, on_progress=lambda *progress: reports.append(progress))
    assert reports[-1] == (7, 7)


def test_worker_progress_is_rate_limited_and_at_most_the_size() -> None:
    sent: list[int] = []
    report = parallel._throttled(sent.append)
    report(1, 9)
    report(2, 9)
    assert sent == [1]
    reports: list[tuple[int, int]] = []
    job: parallel.TraceJob[str, str] = parallel.TraceJob(["a"], [5], lambda *progress: reports.append(progress))
    for read_bytes in (3, 2, 7, 9):
        job.handle_report(0, read_bytes)
    assert reports == [(3, 5), (5, 5)]


def test_process_with_threads_is_not_forked() -> None:
    # Use a subprocess: threads of other tests may still be running in this process.
    code = """
import threading
from profdeck_traces.base import parallel
print(parallel._start_method())
end = threading.Event()
threading.Thread(target=end.wait).start()
print(parallel._start_method())
end.set()
"""
    methods = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert methods == ["fork" if sys.platform == "linux" else "spawn", "spawn"]


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_exit_with_the_parent(tmp_path: Path, number: signal.Signals, method: str) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    python_path = os.pathsep.join([str(HERE), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "at"), method],
        env=os.environ | {"PYTHONPATH": python_path},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: len(list(tmp_path.glob("at.*"))) == 2)
        pids = children(parent.pid)
        workers = [int(path.suffix[1:]) for path in tmp_path.glob("at.*")]
        assert set(workers) <= set(pids)
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)  # like a terminal
        else:
            parent.send_signal(number)
        _, errors = parent.communicate(timeout=30)
    finally:
        parent.kill()
        parent.wait()
    assert parent.returncode == -number
    if number == signal.SIGINT:
        assert not any(running(pid) for pid in workers)
        assert errors.count("Traceback") == 1, errors  # only the parent has a traceback
    wait_for(lambda: not any(running(pid) for pid in pids))
