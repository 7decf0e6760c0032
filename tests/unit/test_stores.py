"""Stores of on-demand requests, and captures in jobs without a shared directory."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from processes import until
from profdeck import Profiler
from profdeck.base.identity import Identity
from profdeck.base.processes import ProcessId
from profdeck.on_demand import request_poller, requests, stores
from profdeck.on_demand.requests import JobProcess, OnDemandRequest
from profdeck.on_demand.stores import FileStore, Store
from profdeck_traces.base.errors import ConfigError, MissingLibraryError, UnknownPluginError

pytestmark = pytest.mark.usefixtures("tally")


class MemoryStore(Store):
    """Store in the memory of this process."""

    def __init__(self) -> None:
        self.address = "memory:here"
        self.files: dict[str, bytes] = {}
        self.is_disconnected = False
        self.calls = 0
        self._mutex = threading.Lock()

    def read(self, name: str) -> bytes | None:
        return self._call(lambda: self.files.get(name) or None)

    def read_all(self, prefix: str) -> Mapping[str, bytes]:
        return self._call(lambda: {name: text for name, text in self.files.items() if name.startswith(prefix) and text})

    def create(self, name: str, text: bytes) -> bytes | None:
        def create() -> bytes | None:
            self.files[name] = self.files.get(name) or text
            return self.files[name]

        return self._call(create)

    def put(self, name: str, text: bytes) -> None:
        self._call(lambda: self.files.update({name: text}))

    def remove(self, name: str, text: bytes) -> None:
        self._call(lambda: self.files.update({name: b""}) if self.files.get(name) == text else None)

    def _call(self, call: Callable[[], Any]) -> Any:
        with self._mutex:
            self.calls += 1
            if self.is_disconnected:
                raise ConnectionError("the connection was lost")
            return call()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()
    monkeypatch.setattr(stores, "_load_connect", lambda _: lambda *_: store)
    monkeypatch.setattr(request_poller, "_POLL_S", 0.01)
    return store


StartJob = Callable[..., list[Profiler]]


@pytest.fixture
def start_job(store: MemoryStore, tmp_path: Path) -> Iterator[StartJob]:
    """Function that starts ranks with separate output directories, as on separate hosts."""
    started: list[Profiler] = []

    def start_ranks(count: int = 2, **settings: Any) -> list[Profiler]:
        for rank in range(count):
            config = {
                "run": "run",
                "trainer.backend": "tally",
                "trainer.ranks": "all",
                "on_demand": "memory",
            } | settings
            started.append(
                Profiler.from_config(
                    identity=Identity(rank=rank, world_size=count),
                    settings=config | {"output": str(tmp_path / f"host{rank}")},
                )
            )
        until(lambda: len(requests.read_processes(store)) == count)
        return started

    yield start_ranks
    for profiler in started:
        profiler.close()
    started.clear()


def run_steps(ranks: list[Profiler], *steps: int) -> None:
    for number in steps:
        for profiler in ranks:
            with profiler.capture(number):
                pass


def send_request(store: Store, in_steps: int, steps: int, ranks: int) -> OnDemandRequest:
    """Send a request as the command does, and mark it as ready after all processes have seen it."""
    request = requests.create_request(store, in_steps, steps)
    until(lambda: [process.looks_for for process in requests.read_processes(store)] == [request.token] * ranks)
    requests.mark_ready(store, request)
    return request


def read_results(store: Store) -> list[tuple[bool, tuple[str, ...], str | None]]:
    return [(process.done, process.captures, process.problem) for process in requests.read_processes(store)]


def test_ranks_without_a_shared_directory_capture_the_same_steps(start_job: StartJob, store: MemoryStore) -> None:
    ranks = start_job(3)
    run_steps(ranks, 0, 1)
    send_request(store, 2, 2, 3)
    run_steps(ranks, *range(2, 8))
    assert read_results(store) == [(True, ("step4",), None)] * 3


def test_processes_are_sorted_by_rank(store: MemoryStore) -> None:
    for rank in (2, 0, 1):
        process = JobProcess.from_identity(Identity(rank=rank, world_size=3), None, 0)
        store.put(f"processes/trainer.rank_{rank:04d}.json", requests.encode(process))
    assert [process.rank for process in requests.read_processes(store)] == [0, 1, 2]


def test_steps_are_planned_only_after_the_request_is_ready(start_job: StartJob, store: MemoryStore) -> None:
    ranks = start_job()
    request = requests.create_request(store, 1, 1)
    until(lambda: all(process.looks_for == request.token for process in requests.read_processes(store)))
    run_steps(ranks, 0, 1, 2)
    assert requests.read_plan(store, request) is None
    requests.mark_ready(store, request)
    run_steps(ranks, 3, 4, 5)
    assert read_results(store) == [(True, ("step4",), None)] * 2


def test_steps_do_not_access_the_store_without_a_request(start_job: StartJob, store: MemoryStore) -> None:
    ranks = start_job(1)
    main_thread, reader_threads = threading.get_ident(), list[int]()
    store.read, read = lambda name: (reader_threads.append(threading.get_ident()), read(name))[1], store.read  # type: ignore[method-assign]
    run_steps(ranks, *range(50))
    assert main_thread not in reader_threads


def test_request_without_heartbeats_is_withdrawn(
    start_job: StartJob, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_poller, "LOST_S", 0.05)
    ranks = start_job()
    requests.create_request(store, 1, 1)
    until(lambda: store.read(requests.REQUEST) is None)
    run_steps(ranks, 0, 1, 2)
    assert read_results(store) == [(False, (), None)] * 2
    second_request = requests.create_request(store, 1, 1)
    assert second_request.ready is False


def test_unreachable_store_does_not_delay_steps(start_job: StartJob, store: MemoryStore) -> None:
    ranks = start_job()
    send_request(store, 2, 2, 2)
    store.is_disconnected = True
    calls = store.calls
    run_steps(ranks, *range(200))
    assert store.calls - calls < 50  # calls of the pollers, and one call per rank
    store.is_disconnected = False
    assert all(process.token is None for process in requests.read_processes(store))


@pytest.mark.parametrize("kind", [FileStore, MemoryStore])
def test_stores_implement_all_operations(kind: type[Store], tmp_path: Path) -> None:
    store: Store = FileStore(tmp_path) if kind is FileStore else MemoryStore()
    check_store(store)


def check_store(store: Store) -> None:
    assert store.read("a.json") is None
    assert store.create("a.json", b"1") == b"1"
    assert store.create("a.json", b"2") == b"1"
    store.remove("a.json", b"2")
    assert store.read("a.json") == b"1"
    store.remove("a.json", b"1")
    assert store.read("a.json") is None
    assert store.create("a.json", b"3") == b"3"
    store.put("processes/x.json", b"4")
    store.put("processes/y.json", b"5")
    store.put("processes/x.json", b"6")
    assert dict(store.read_all("processes/")) == {"processes/x.json": b"6", "processes/y.json": b"5"}


def test_address_is_removed_if_the_job_uses_its_directory_again(start_job: StartJob, tmp_path: Path) -> None:
    start_job(1)
    run = tmp_path / "host0" / "run"
    assert stores.open_store(run, None).remote
    restarted = Profiler.from_config(settings={"output": str(run.parent), "run": "run", "trainer.backend": "tally"})
    assert not stores.open_store(run, None).remote
    restarted.close()


@pytest.mark.parametrize("location", ["tcpstore", "tcpstore:", ":1", ""])
def test_invalid_location_is_rejected(location: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected NAME:ADDRESS"):
        stores.open_store(tmp_path / "run", location)


@pytest.mark.parametrize(("name", "library"), [("ray", "ray"), ("tcpstore", "torch")])
def test_error_names_the_missing_library(name: str, library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here")
    with pytest.raises(MissingLibraryError, match=f"store '{name}' needs {library}, .* pip install"):
        stores.open_store(tmp_path / "run", f"{name}:127.0.0.1:1")


def test_unknown_store_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnknownPluginError, match=r"There is no store 'etcd'.*Installed: .*tcpstore"):
        Profiler.from_config(settings={"output": str(tmp_path), "trainer.backend": "tally", "on_demand": "etcd"})


@pytest.mark.parametrize("value", ["yes", "'true'", 1, ["tcpstore"]])
def test_on_demand_must_be_a_boolean_or_a_name(value: object, tmp_path: Path) -> None:
    config = {"output": str(tmp_path), "trainer.backend": "tally", "on_demand": str(value).strip("'")}
    if not isinstance(value, str):
        config["on_demand"] = value  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="on_demand: expected true, false or a name"):
        Profiler.from_config(settings=config)


def test_process_of_another_host_is_gone_only_after_it_has_ended(store: MemoryStore) -> None:
    process = JobProcess.from_identity(Identity(), None, 0)
    remote_process = attrs.evolve(process, at=ProcessId(host="another-host"))
    assert not remote_process.is_gone
    assert attrs.evolve(remote_process, ended=True).is_gone
