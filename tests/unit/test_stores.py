"""On-demand captures of jobs without a shared directory: stores and polling for requests."""

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
    """Stands for a store of a job, in this process."""

    def __init__(self) -> None:
        self.address = "memory:here"
        self.notes: dict[str, bytes] = {}
        self.cut = False
        self.calls = 0
        self._mutex = threading.Lock()

    def read(self, name: str) -> bytes | None:
        return self._do(lambda: self.notes.get(name) or None)

    def read_all(self, prefix: str) -> Mapping[str, bytes]:
        return self._do(lambda: {name: text for name, text in self.notes.items() if name.startswith(prefix) and text})

    def create(self, name: str, text: bytes) -> bytes | None:
        def create() -> bytes | None:
            self.notes[name] = self.notes.get(name) or text
            return self.notes[name]

        return self._do(create)

    def put(self, name: str, text: bytes) -> None:
        self._do(lambda: self.notes.update({name: text}))

    def remove(self, name: str, text: bytes) -> None:
        self._do(lambda: self.notes.update({name: b""}) if self.notes.get(name) == text else None)

    def _do(self, call: Callable[[], Any]) -> Any:
        with self._mutex:
            self.calls += 1
            if self.cut:
                raise ConnectionError("the link is cut")
            return call()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    found = MemoryStore()
    monkeypatch.setattr(stores, "_load_connect", lambda _: lambda *_: found)
    monkeypatch.setattr(request_poller, "_POLL_S", 0.01)
    return found


Start = Callable[..., list[Profiler]]


@pytest.fixture
def start(store: MemoryStore, tmp_path: Path) -> Iterator[Start]:
    """Start ranks, each with a directory of its own as on a host of its own."""
    started: list[Profiler] = []

    def ranks(count: int = 2, **settings: Any) -> list[Profiler]:
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

    yield ranks
    for profiler in started:
        profiler.close()
    started.clear()


def step(ranks: list[Profiler], *steps: int) -> None:
    for number in steps:
        for profiler in ranks:
            with profiler.capture(number):
                pass


def asked(store: Store, in_steps: int, steps: int, ranks: int) -> OnDemandRequest:
    """Ask as the command does: let them decide when all look."""
    request = requests.create_request(store, in_steps, steps)
    until(lambda: [one.looks_for for one in requests.read_processes(store)] == [request.token] * ranks)
    requests.mark_ready(store, request)
    return request


def answers(store: Store) -> list[tuple[bool, tuple[str, ...], str | None]]:
    return [(process.done, process.captures, process.problem) for process in requests.read_processes(store)]


def test_ranks_that_share_nothing_begin_at_one_step(start: Start, store: MemoryStore) -> None:
    ranks = start(3)
    step(ranks, 0, 1)
    asked(store, 2, 2, 3)
    step(ranks, *range(2, 8))
    assert answers(store) == [(True, ("step4",), None)] * 3


def test_processes_are_in_one_order_whoever_came_first(store: MemoryStore) -> None:
    for rank in (2, 0, 1):
        process = JobProcess.from_identity(Identity(rank=rank, world_size=3), None, 0)
        store.put(f"processes/trainer.rank_{rank:04d}.json", requests.encode(process))
    assert [process.rank for process in requests.read_processes(store)] == [0, 1, 2]


def test_nothing_is_decided_before_all_look(start: Start, store: MemoryStore) -> None:
    ranks = start()
    request = requests.create_request(store, 1, 1)
    until(lambda: all(one.looks_for == request.token for one in requests.read_processes(store)))
    step(ranks, 0, 1, 2)
    assert requests.read_plan(store, request) is None
    requests.mark_ready(store, request)
    step(ranks, 3, 4, 5)
    assert answers(store) == [(True, ("step4",), None)] * 2


def test_a_step_asks_no_store_while_nobody_asks_for_a_capture(start: Start, store: MemoryStore) -> None:
    ranks = start(1)
    main, callers = threading.get_ident(), list[int]()
    store.read, read = lambda name: (callers.append(threading.get_ident()), read(name))[1], store.read  # type: ignore[method-assign]
    step(ranks, *range(50))
    assert main not in callers


def test_a_request_that_nobody_waits_for_any_more_is_taken_back(
    start: Start, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_poller, "LOST_S", 0.05)
    ranks = start()
    requests.create_request(store, 1, 1)
    until(lambda: store.read(requests.REQUEST) is None)
    step(ranks, 0, 1, 2)
    assert answers(store) == [(False, (), None)] * 2
    asked_again = requests.create_request(store, 1, 1)
    assert asked_again.ready is False


def test_a_store_that_is_gone_costs_steps_nothing(start: Start, store: MemoryStore) -> None:
    ranks = start()
    asked(store, 2, 2, 2)
    store.cut = True
    calls = store.calls
    step(ranks, *range(200))
    assert store.calls - calls < 50  # those of the lookouts, and one of each rank
    store.cut = False
    assert all(one.token is None for one in requests.read_processes(store))


@pytest.mark.parametrize("kind", [FileStore, MemoryStore])
def test_what_a_store_promises(kind: type[Store], tmp_path: Path) -> None:
    store: Store = FileStore(tmp_path) if kind is FileStore else MemoryStore()
    keeps_its_promises(store)


def keeps_its_promises(store: Store) -> None:
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


def test_a_job_that_shares_its_directory_again_is_asked_there(start: Start, tmp_path: Path) -> None:
    start(1)
    run = tmp_path / "host0" / "run"
    assert stores.open_store(run, None).remote
    again = Profiler.from_config(settings={"output": str(run.parent), "run": "run", "trainer.backend": "tally"})
    assert not stores.open_store(run, None).remote
    again.close()


@pytest.mark.parametrize("given", ["tcpstore", "tcpstore:", ":1", ""])
def test_what_is_no_address_is_said(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected NAME:ADDRESS"):
        stores.open_store(tmp_path / "run", given)


@pytest.mark.parametrize(("name", "library"), [("ray", "ray"), ("tcpstore", "torch")])
def test_a_library_that_is_missing_is_named(name: str, library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here")
    with pytest.raises(MissingLibraryError, match=f"store '{name}' needs {library}, .* pip install"):
        stores.open_store(tmp_path / "run", f"{name}:127.0.0.1:1")


def test_an_unknown_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownPluginError, match=r"There is no store 'etcd'.*Installed: .*tcpstore"):
        Profiler.from_config(settings={"output": str(tmp_path), "trainer.backend": "tally", "on_demand": "etcd"})


@pytest.mark.parametrize("value", ["yes", "'true'", 1, ["tcpstore"]])
def test_what_is_neither_a_switch_nor_a_name_is_said(value: object, tmp_path: Path) -> None:
    config = {"output": str(tmp_path), "trainer.backend": "tally", "on_demand": str(value).strip("'")}
    if not isinstance(value, str):
        config["on_demand"] = value  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="on_demand: expected true, false or a name"):
        Profiler.from_config(settings=config)


def test_a_rank_of_another_host_is_gone_when_it_says_so(store: MemoryStore) -> None:
    process = JobProcess.from_identity(Identity(), None, 0)
    away = attrs.evolve(process, at=ProcessId(host="another-host"))
    assert not away.is_gone
    assert attrs.evolve(away, ended=True).is_gone
