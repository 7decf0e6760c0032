"""Captures that are asked for while a job runs: all processes begin at one step, or say that they did not."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from open_captures import calls_of
from profdeck import Profiler, Status
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.processes import ProcessId
from profdeck.config.schedule import OnDemandSteps, PlannedSteps, Schedule
from profdeck.on_demand import requests, standing, stores, watch as watches
from profdeck.on_demand.requests import JobProcess, OnDemandRequest, StartDecision, StepPlan
from profdeck.on_demand.stores import FileStore
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.run_directory import RUN_FILE
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ConfigError
from profdeck_traces.base.files import write_new

pytestmark = pytest.mark.usefixtures("tally")

GONE = ProcessId(pid=2**22 + 1, process_started="1")  # above the highest pid of Linux
ELSEWHERE = ProcessId(host="another-host")


@pytest.fixture(autouse=True)
def look_at_every_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where steps take longer than those of these tests."""
    monkeypatch.setattr(watches, "REST_S", 0.0)


class Job:
    """A job of which all ranks are in this process. They step when the test says so."""

    def __init__(self, output: Path, ranks: int = 2, **config: Any) -> None:
        self.output, self.world_size = output, ranks
        self.config = {"output": str(output), "run": "run", "trainer.backend": "tally", "trainer.ranks": "all"} | config
        self.run = output / "run"
        self.store = FileStore(self.run)
        self.ranks = [self.join(rank) for rank in range(ranks)]

    def join(self, rank: int) -> Profiler:
        return Profiler.from_config(identity=Identity(rank=rank, world_size=self.world_size), settings=self.config)

    def step(self, *steps: int, ranks: Sequence[int] | None = None) -> None:
        for step in steps:
            for profiler in self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]:
                with profiler.capture(step):
                    pass

    def answers(self, request: OnDemandRequest) -> list[tuple[bool, tuple[str, ...], str | None]]:
        """What each process has answered; of those that know nothing of the request, nothing."""
        found = [process for process in requests.read_processes(self.store) if process.token == request.token]
        return [(process.done, process.captures, process.problem) for process in found]

    def manifests(self, *, rank: int | None = None) -> dict[str, Manifest]:
        files = filter(is_manifest, sorted(self.run.glob("step_*/**/*.json")))
        found = [(file, read_manifest(file)) for file in files]
        return {
            f"{manifest.capture}/{manifest.rank}" if rank is None else manifest.capture: manifest
            for _, manifest in found
            if rank in (None, manifest.rank)
        }

    def steps(self, rank: int = 0) -> dict[str, tuple[int, int]]:
        """The first and last step of every capture of a rank."""
        found = self.manifests(rank=rank)
        return {capture: (manifest.first_step, manifest.last_step) for capture, manifest in found.items()}


@pytest.fixture
def job(tally: ModuleType, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a job, whose profilers are closed after the test."""
    started: list[Job] = []

    def start(*arguments: Any, **config: Any) -> Job:
        started.append(Job(tmp_path, *arguments, **config))
        return started[-1]

    yield start
    for running in started:
        for profiler in running.ranks:
            profiler.close()


def watch(profiler: Profiler) -> watches.RequestWatch:
    (role,) = profiler._roles
    found = role.watch
    assert found is not None
    return found


class _Blind(FileStore):
    """A view of a run directory in which there is no request yet."""

    def __init__(self, found: watches.RequestWatch) -> None:
        super().__init__(Path(found._store.address))

    def read(self, name: str) -> bytes | None:
        return None if name == requests.REQUEST else super().read(name)


def look_at(profiler: Profiler, path: str | Path) -> None:
    """Let a profiler look for requests elsewhere, as if its view of the directory were another one."""
    found, place = watch(profiler), Path(path)
    sees = place.name == requests.REQUEST
    found._store = FileStore(Path(found._store.address)) if sees else _Blind(found)
    found._is_asked = lambda: os.access(place, os.F_OK)


# The agreement.


def test_all_ranks_begin_at_the_step_that_the_first_one_decided(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0, 1)
    request = requests.ask(running.store, 2, 3)
    assert requests.read_plan(running.store, request) is None
    running.step(2)
    plan = requests.read_plan(running.store, request)
    assert plan is not None
    assert (plan.first_step, plan.last_step, plan.at_step) == (4, 6, 2)
    assert plan.by == "trainer rank 0"
    running.step(3, 4, 5)
    assert running.answers(request) == [(False, (), None)] * 2
    running.step(6)
    assert running.answers(request) == [(True, ("step4",), None)] * 2
    running.step(7, 8)
    report = read_run(running.run)
    assert (report.status, [(capture.id, capture.last_step, len(capture.ranks)) for capture in report.captures]) == (
        Status.COMPLETE,
        [("step4", 6, 2)],
    )
    assert {manifest.demand for manifest in running.manifests().values()} == {request.token}


def test_the_default_is_enough_for_ranks_that_differ_by_a_step(job: Callable[..., Job]) -> None:
    """As they do when each waits for the others in every step."""
    running = job()
    running.step(0)
    running.step(1, ranks=[1])  # which saw nothing yet
    request = requests.ask(running.store, requests.DEFAULT_IN_STEPS, 1)
    running.step(1, ranks=[0])
    for step in (2, 3):
        running.step(step, ranks=[1])
        running.step(step, ranks=[0])
    assert running.answers(request) == [(True, ("step3",), None)] * 2


@pytest.mark.slow
@given(
    lengths_us=st.lists(st.sampled_from([1, 3, 30, 45, 70, 95, 105, 400, 5000]), min_size=1, max_size=4),
    lag=st.floats(0, 0.99),
    asked=st.floats(0, 1),
    warmup_steps=st.integers(0, 2),
)
def test_steps_that_are_too_short_to_look_at_each_lose_no_rank(
    lengths_us: list[int], lag: float, asked: float, warmup_steps: int
) -> None:
    """Ranks that wait for each other in every step, of which the second begins each one a little later."""
    now_s = 1000.0
    with tempfile.TemporaryDirectory() as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(watches, "REST_S", 1e-4)
        patch.setattr(watches, "monotonic", lambda: now_s)
        running = Job(Path(output), **{"trainer.warmup_steps": warmup_steps})
        lengths_s = [1e-6 * length for length in lengths_us for _ in range(200 // len(lengths_us))]
        asked_at = int(asked * len(lengths_s))
        for number, (step, rank) in enumerate((step, rank) for step in range(len(lengths_s)) for rank in (0, 1)):
            if number == asked_at:
                request = requests.ask(running.store, requests.DEFAULT_IN_STEPS + warmup_steps, 2)
            running.step(step, ranks=[rank])
            now_s += lengths_s[step] * (1 - lag if rank else lag)
        plan = requests.read_plan(running.store, request)
        assert plan is not None
        wanted = {f"step{plan.first_step}": (plan.first_step, plan.last_step)}
        assert (running.steps(0), running.steps(1)) == (wanted, wanted)
        assert {manifest.status for manifest in running.manifests().values()} == {Status.COMPLETE}
        for profiler in running.ranks:
            profiler.close()


def test_a_rank_that_is_too_late_says_so(job: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    running = job()
    running.step(0)
    running.step(1, 2, 3, ranks=[1])
    request = requests.ask(running.store, 1, 2)
    running.step(1, 2, ranks=[0])
    running.step(4, ranks=[1])
    running.step(3, ranks=[0])
    missed = (
        "the request was seen here at step 4, after step 2 had begun; asked for with --in 3 it would have been in time"
    )
    assert running.answers(request) == [(True, ("step2",), None), (True, ("step2",), missed)]
    (capture,) = read_run(running.run).captures
    assert [rank.status for rank in capture.ranks] == [Status.COMPLETE, Status.FAILED]
    assert capture.ranks[1].problems == (missed[0].upper() + missed[1:] + ".",)
    assert "The capture of steps 2 to 3 is missed: the request was seen here at step 4" in caplog.text
    # And so it would have been.
    running.step(5, 6, ranks=[1])
    requests.remove_request(running.store, request)
    request = requests.ask(running.store, 3, 2)
    running.step(4, 5, 6, ranks=[0])
    running.step(7, 8, ranks=[1])
    running.step(7, 8, ranks=[0])
    assert running.answers(request) == [(True, ("step7",), None)] * 2


def test_a_process_that_joins_late_takes_part_or_says_so(job: Callable[..., Job]) -> None:
    running = job(3)
    running.step(0)
    request = requests.ask(running.store, 2, 1)
    running.step(1, ranks=[0])
    running.ranks[1:] = [running.join(1), running.join(2)]
    running.step(2, ranks=[0, 1])
    running.step(3, ranks=[0, 1])
    running.step(4)
    first, second, third = running.answers(request)
    assert first == second == (True, ("step3",), None)
    assert "seen here at step 4, after step 3" in (third[2] or "")


def test_a_rank_with_a_stale_view_of_the_directory_is_in_time_or_says_so(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """As another host has it on NFS: it sees the request seconds later than others."""
    running = job(3)
    running.step(0)
    for late in running.ranks[1:]:
        look_at(late, tmp_path / "not yet there")
    request = requests.ask(running.store, 3, 1)
    running.step(1, 2)
    look_at(running.ranks[1], running.run / "demand.json")
    running.step(3, 4)
    look_at(running.ranks[2], running.run / "demand.json")
    running.step(5)
    (first, second, third) = running.answers(request)
    assert first == second == (True, ("step4",), None)
    assert "seen here at step 5, after step 4 had begun; asked for with --in 4" in (third[2] or "")


def test_a_host_that_passes_over_the_first_step_says_so(job: Callable[..., Job]) -> None:
    running = job(1)
    running.step(0)
    request = requests.ask(running.store, 2, 3)
    running.step(1, 4, 5)
    assert running.answers(request) == [(True, ("step3",), "the host went from step 1 to step 4")]
    assert [manifest.status for manifest in running.manifests().values()] == [Status.FAILED]


def test_a_rank_that_never_steps_keeps_no_other(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0)
    request = requests.ask(running.store, 1, 1)
    running.step(1, 2, 3, ranks=[0])
    assert running.answers(request) == [(True, ("step2",), None)]
    assert [process.token for process in requests.read_processes(running.store)] == [request.token, None]
    (capture,) = read_run(running.run).captures
    assert [rank.status for rank in capture.ranks] == [Status.COMPLETE, Status.MISSING]


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_decide_at_once_all_think_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    start = threading.Barrier(8)

    def one(number: int) -> list[StepPlan | None]:
        found = []
        for round_ in range(50):
            start.wait()
            token = f"{round_:016x}"
            found.append(
                requests.decide(
                    FileStore(tmp_path), token, StepPlan(token=token, first_step=number, last_step=9, by="me")
                )
            )
        return found

    with ThreadPoolExecutor(8) as pool:
        everyone = list(pool.map(one, range(8)))
    for plans in zip(*everyone, strict=True):
        known = {plan.first_step for plan in plans if plan is not None}
        assert len(known) == 1
        assert links is False or None not in plans  # without links there is an instant in which nobody knows
    assert not list(tmp_path.glob(".*.tmp"))


class World:
    """A job whose ranks step, jump and start again in any order, while somebody asks and withdraws."""

    def __init__(self, output: Path, *, explicit: bool, **config: Any) -> None:
        self.job = Job(output, 3, **config)
        self.config = Schedule.from_list(config["steps"])
        self.warmup_steps = config["trainer.warmup_steps"]
        self.explicit = explicit
        self.at = [0, 0, 0]
        """The step that each rank begins next."""
        self.last = [-1, -1, -1]
        """The last step that each has begun, in its present life."""
        self.passed: list[set[int]] = [set(), set(), set()]
        """The steps that each rank has been through, in all of its lives."""
        self.steady = [True, True, True]
        """Whether each rank never went back or passed over a step."""
        self.pending: OnDemandRequest | None = None
        self.requests: list[OnDemandRequest] = []
        self.withdrawn: set[str] = set()

    def step(self, rank: int, count: int) -> None:
        profiler = self.job.ranks[rank]
        for _ in range(count):
            with profiler.capture(self.at[rank]), profiler.stage("work"):
                pass
            self.last[rank] = self.at[rank]
            self.passed[rank].add(self.at[rank])
            self.at[rank] += 1
            if self.explicit:  # a host that begins the next step before it does anything else
                profiler.start(self.at[rank])

    def jump(self, rank: int, distance: int) -> None:
        self.at[rank] += distance
        self.steady[rank] = False

    def restart(self, rank: int, distance: int) -> None:
        self.job.ranks[rank].close()
        self.job.ranks[rank] = self.job.join(rank)
        self.last[rank] = -1
        self.at[rank] = max(0, self.at[rank] - distance)
        self.steady[rank] = False

    def blind(self, rank: int, _: int) -> None:
        look_at(self.job.ranks[rank], self.job.output / "nowhere")

    def see(self, rank: int, _: int) -> None:
        look_at(self.job.ranks[rank], self.job.run / "demand.json")

    def ask(self, in_steps: int, steps: int) -> None:
        if self.pending is None:
            self.pending = requests.ask(self.job.store, in_steps + self.warmup_steps, steps)
            self.requests.append(self.pending)

    def withdraw(self, *_: int) -> None:
        if self.pending is not None and requests.abandon(self.job.store, self.pending):
            self.withdrawn.add(self.pending.token)
            self.pending = None

    def forget(self, *_: int) -> None:
        """As who waits does once all have answered; at other times it is harmless."""
        if self.pending is not None:
            requests.remove_request(self.job.store, self.pending)
            self.pending = None

    def check(self, request: OnDemandRequest) -> None:
        """No rank has recorded other steps for a request than those of its plan without saying so."""
        plan = requests.read_plan(self.job.store, request)
        made = [manifest for manifest in self.job.manifests().values() if manifest.demand == request.token]
        recorded = [manifest for manifest in made if manifest.artifacts]
        if plan is None or plan.first_step is None or plan.last_step is None or request.token in self.withdrawn:
            assert recorded == []
            return
        for manifest in made:
            if manifest.stage is None:
                assert manifest.first_step == plan.first_step
                assert manifest.last_step == plan.last_step or manifest.problems
            else:
                assert plan.first_step <= manifest.first_step <= plan.last_step
        steps = {*range(plan.first_step, plan.last_step + 1)}
        for rank, process in enumerate(requests.read_processes(self.job.store)):
            if process.token != request.token:
                continue
            if not process.done:  # who steps beyond the capture with open eyes has answered
                assert self.last[rank] <= plan.last_step
            elif process.problem is None:  # it has them all, or says in a manifest why not
                own = list(self.job.manifests(rank=rank).values())
                for step in steps & self.passed[rank]:
                    assert any(one.first_step <= step <= one.last_step or one.problems for one in own)
            else:
                assert not [one for one in recorded if one.rank == rank and not one.problems]

    def check_coverage(self, rank: int) -> None:
        """Every step that the config selects is in one capture, whatever was asked for meanwhile."""
        times = dict.fromkeys(self.passed[rank], 0)
        for manifest in self.job.manifests(rank=rank).values():
            for step in range(manifest.first_step, manifest.last_step + 1) if manifest.artifacts else ():
                if step in times:
                    times[step] += 1
        assert [step for step, count in times.items() if count > 1 or (step in self.config and count == 0)] == []


some_rank = st.integers(0, 2)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("step"), some_rank, st.integers(1, 4)),
        st.tuples(st.just("jump"), some_rank, st.integers(1, 3)),
        st.tuples(st.just("restart"), some_rank, st.integers(0, 3)),
        st.tuples(st.sampled_from(["blind", "see"]), some_rank, st.just(0)),
        st.tuples(st.just("ask"), st.integers(1, 3), st.integers(1, 4)),
        st.tuples(st.sampled_from(["withdraw", "forget"]), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@given(
    operations=operations,
    steps=st.sampled_from([[], [3], ["4..6"], ["every 3"], [2, "5..7", 9], ["0..100"]]),
    warmup_steps=st.integers(0, 2),
    discrete=st.sampled_from([False, False, True]),
    explicit=st.booleans(),
)
def test_whatever_comes_first_all_record_the_same_steps_or_say_so(
    tmp_path_factory: Any,
    operations: list[tuple[str, int, int]],
    steps: list[Any],
    warmup_steps: int,
    discrete: bool,
    explicit: bool,
) -> None:
    mode, warmup_steps = ("discrete", 0) if discrete else ("continuous", warmup_steps)
    config: dict[str, Any] = {"steps": steps, "mode": mode, "trainer.warmup_steps": warmup_steps}
    world = World(tmp_path_factory.mktemp("job"), explicit=explicit, **config)
    for name, one, two in operations:
        getattr(world, name)(one, two)
    for profiler in world.job.ranks:
        profiler.close()
    for request in world.requests:
        world.check(request)
    for rank, steady in enumerate(world.steady):
        if steady and not discrete:
            world.check_coverage(rank)


# What the config selects as well.


@pytest.mark.parametrize(
    ("steps", "captures"),
    [
        (["4..5"], {"step4": (4, 5)}),  # the very same
        (["4..7"], {"step4": (4, 5), "step6": (6, 7)}),
        (["2..5"], {"step2": (2, 3), "step4": (4, 5)}),
        (["2..8"], {"step2": (2, 3), "step4": (4, 5), "step6": (6, 8)}),
        (["2..4"], {"step2": (2, 3), "step4": (4, 5)}),
        ([5, 6], {"step4": (4, 5), "step6": (6, 6)}),
        (["2..3"], {"step2": (2, 3), "step4": (4, 5)}),
        (["6..7"], {"step4": (4, 5), "step6": (6, 7)}),
        ([5], {"step4": (4, 5)}),
    ],
)
@pytest.mark.parametrize("in_steps", [1, 3])
@pytest.mark.parametrize("explicit", [False, True])
def test_what_is_asked_for_is_a_capture_of_its_own_whoever_knew_of_it_when(
    job: Callable[..., Job], steps: list[Any], captures: dict[str, tuple[int, int]], in_steps: int, explicit: bool
) -> None:
    running = job(1, steps=steps)
    (profiler,) = running.ranks
    for step in range(10):
        profiler.start(step)
        if step == 3 - in_steps:
            request = requests.ask(running.store, in_steps, 2)
        if explicit:
            profiler.step(step)
        profiler.stop()
    assert running.steps() == captures
    assert running.answers(request) == [(True, ("step4",), None)]
    assert read_run(running.run).status is Status.COMPLETE
    before = running.manifests(rank=0).get("step2")
    if before is not None and 4 in Schedule.from_list(steps):
        assert before.notes == ("It ended after step 3: a capture of steps 4 to 5 was requested.",)


@pytest.mark.parametrize(("late_at", "in_time"), [(5, True), (7, True)])
def test_a_rank_that_is_late_for_what_the_config_selects_anyway_has_it(
    job: Callable[..., Job], late_at: int, in_time: bool
) -> None:
    running = job(steps=["4..6"])
    running.step(0)
    look_at(running.ranks[1], "/nonexistent")
    request = requests.ask(running.store, 3, 3)
    for step in range(1, 9):
        if step == late_at:
            look_at(running.ranks[1], running.run / "demand.json")
        running.step(step)
    assert running.answers(request) == [(True, ("step4",), None)] * 2
    report = read_run(running.run)
    assert (report.status, [(capture.id, capture.last_step) for capture in report.captures]) == (
        Status.COMPLETE,
        [("step4", 6)],
    )


def test_a_process_that_was_not_there_for_what_the_config_selects_says_so(job: Callable[..., Job]) -> None:
    running = job(1, steps=["4..5"])
    running.step(0)
    request = requests.ask(running.store, 3, 2)
    running.step(1, 2)
    running.ranks = [running.join(0)]
    running.step(6)
    ((done, _, problem),) = running.answers(request)
    assert done
    assert "seen here at step 6, after step 4" in (problem or "")


# Requests, one after the other.


def test_a_second_request_waits_for_the_first(job: Callable[..., Job]) -> None:
    running = job()
    request = requests.ask(running.store, 1, 1)
    with pytest.raises(CaptureError, match=rf"asked for by {ProcessId()} and is not over yet.*remove .*demand.json"):
        requests.ask(running.store, 1, 1)
    running.step(0, 1)
    requests.remove_request(running.store, request)
    second = requests.ask(running.store, 1, 2)
    running.step(2, 3, 4)
    assert running.answers(second) == [(True, ("step3",), None)] * 2
    assert running.steps() == {"step1": (1, 1), "step3": (3, 4)}


@pytest.mark.parametrize("agreed", [False, True])
def test_a_request_that_nobody_waits_for_gives_way(job: Callable[..., Job], agreed: bool) -> None:
    running = job(1)
    abandoned = OnDemandRequest(in_steps=3, steps=1, by=GONE)
    write_new(running.run / "demand.json", requests.encode(abandoned))
    if agreed:
        running.step(0)
    request = requests.ask(running.store, 2, 1)
    running.step(1, 2, 3, 4)
    assert running.answers(request) == [(True, ("step3",), None)]
    assert running.steps() == {"step3": (3, 3)}
    assert running.manifests(rank=0)["step3"].demand == request.token


def test_a_request_of_another_host_does_not_give_way(job: Callable[..., Job]) -> None:
    running = job(1)
    write_new(running.run / "demand.json", requests.encode(OnDemandRequest(in_steps=3, steps=1, by=ELSEWHERE)))
    with pytest.raises(CaptureError, match="asked for by process .* on another-host"):
        requests.ask(running.store, 2, 1)


def test_a_capture_that_nobody_waits_for_goes_on_and_is_cut_by_the_next(job: Callable[..., Job]) -> None:
    running = job(1)
    abandoned = OnDemandRequest(in_steps=1, steps=9, by=GONE)
    write_new(running.run / "demand.json", requests.encode(abandoned))
    running.step(0, 1, 2)
    request = requests.ask(running.store, 2, 2)
    running.step(3, 4, 5, 6, 7)
    assert running.steps() == {"step1": (1, 4), "step5": (5, 6)}
    assert running.answers(request) == [(True, ("step5",), None)]
    cut = running.manifests(rank=0)["step1"]
    assert (cut.status, cut.problems) == (Status.PARTIAL, ("A capture of steps 5 to 6 was requested.",))


def test_to_forget_takes_nothing_from_others(job: Callable[..., Job]) -> None:
    running = job(1)
    other = requests.ask(running.store, 1, 1)
    requests.remove_request(running.store, OnDemandRequest(in_steps=1, steps=1))
    assert json.loads((running.run / "demand.json").read_text())["token"] == other.token
    assert not list(running.run.glob(".*"))


# Withdrawals.


def test_what_nobody_has_seen_is_withdrawn(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0)
    request = requests.ask(running.store, 1, 1)
    assert requests.abandon(running.store, request)
    running.step(1, 2, 3)
    assert (running.steps(), running.answers(request)) == ({}, [])
    assert not (running.run / "demand.json").exists()


def test_what_was_seen_just_before_is_withdrawn_too(job: Callable[..., Job]) -> None:
    """A process that has read the request may decide on it only after it was withdrawn."""
    running = job(1)
    request = requests.ask(running.store, 1, 1)
    text = (running.run / "demand.json").read_bytes()
    assert requests.abandon(running.store, request)
    (running.run / "demand.json").write_bytes(text)
    running.step(0, 1, 2)
    assert running.steps() == {}
    assert running.answers(request) == [(True, (), f"it was withdrawn by {ProcessId()}")]


def test_what_was_agreed_on_is_withdrawn_until_it_begins(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0)
    request = requests.ask(running.store, 3, 1)
    running.step(1, 2, 3)
    assert requests.abandon(running.store, request)
    running.step(4, 5)
    assert running.steps() == {}
    assert running.answers(request) == [(True, (), f"it was withdrawn by {ProcessId()}")] * 2


def test_who_is_too_late_for_what_was_withdrawn_has_missed_nothing(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0)
    request = requests.ask(running.store, 2, 1)
    text = (running.run / "demand.json").read_bytes()
    running.step(1, ranks=[0])
    assert requests.abandon(running.store, request)
    (running.run / "demand.json").write_bytes(text)  # as a client of NFS may still see it
    running.step(7, ranks=[1])
    assert running.manifests() == {}
    assert running.answers(request)[1] == (True, (), f"it was withdrawn by {ProcessId()}")


def test_what_has_begun_anywhere_is_captured_everywhere(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0)
    request = requests.ask(running.store, 2, 2)
    running.step(1, 2)
    running.step(3, ranks=[0])
    assert not requests.abandon(running.store, request)
    running.step(4, ranks=[0])
    running.step(3, 4, ranks=[1])
    assert running.answers(request) == [(True, ("step3",), None)] * 2


def test_to_warm_up_is_to_begin(job: Callable[..., Job]) -> None:
    running = job(1, **{"trainer.warmup_steps": 2})
    running.step(0)
    request = requests.ask(running.store, 3, 1)
    running.step(1)
    running.step(2)
    assert not requests.abandon(running.store, request)


# Modes, windows, warm-up, the end of the job.


def test_stages_are_captured_in_discrete_mode(job: Callable[..., Job]) -> None:
    running = job(1, mode="discrete", steps=[1])
    (profiler,) = running.ranks
    for step in range(6):
        if step == 2:
            request = requests.ask(running.store, 1, 2)
        with profiler.capture(step):
            for stage in ("generate", "update"):
                with profiler.stage(stage):
                    pass
            if step == 4:
                assert running.answers(request)[0][0] is False
        assert running.answers(request)[0][0] is (step == 4) if step in (3, 4) else True
    ids = ("step3-generate", "step3-update", "step4-generate", "step4-update")
    assert running.answers(request) == [(True, ids, None)]
    assert sorted(running.manifests(rank=0)) == sorted([*ids, "step1-generate", "step1-update"])
    assert {name for name, manifest in running.manifests(rank=0).items() if manifest.demand} == set(ids)


def test_a_step_without_stages_is_over_with_the_next_one_in_discrete_mode(job: Callable[..., Job]) -> None:
    running = job(1, mode="discrete")
    request = requests.ask(running.store, 1, 1)
    (profiler,) = running.ranks
    for step in range(2):
        profiler.start(step)
    assert running.answers(request) == [(False, (), None)]
    profiler.start(2)
    assert running.answers(request) == [(True, (), None)]


def test_warm_up_begins_before_the_first_step(job: Callable[..., Job]) -> None:
    running = job(1, **{"trainer.warmup_steps": 2})
    request = requests.ask(running.store, 4, 2)
    running.step(*range(8))
    assert calls_of(running.ranks[0]) == [
        "start step4", "step step4 global_step 2", "step step4 global_step 3", "step step4 global_step 4", "stop step4",
    ]  # fmt: skip
    assert running.answers(request) == [(True, ("step4",), None)]
    assert running.manifests(rank=0)["step4"].notes == ()


@pytest.mark.parametrize(("seen_late", "is_cold"), [(False, False), (True, True)])
def test_the_default_warm_up_delays_no_capture_on_demand(
    job: Callable[..., Job], tally: ModuleType, monkeypatch: pytest.MonkeyPatch, seen_late: bool, is_cold: bool
) -> None:
    monkeypatch.setattr(tally.TallyBackend, "cold_first_step", True)
    running = job(2)
    assert requests.default_in_steps(requests.read_processes(running.store)) == requests.DEFAULT_IN_STEPS
    running.step(0)
    if seen_late:
        running.step(1, 2, ranks=[1])
    request = requests.ask(running.store, 2, 1)
    running.step(1, 2, ranks=[0])
    if not seen_late:
        running.step(1, 2, ranks=[1])
    running.step(3, 4)
    assert running.answers(request) == [(True, ("step3",), None)] * 2
    found = running.manifests()
    assert [found[f"step3/{rank}"].cold_first_step for rank in (0, 1)] == [False, is_cold]
    assert [found[f"step3/{rank}"].notes for rank in (0, 1)] == [(), ()]


def test_a_rank_that_learns_of_it_during_the_warm_up_warms_up_for_less(job: Callable[..., Job]) -> None:
    running = job(2, **{"trainer.warmup_steps": 2})
    running.step(0)
    running.step(1, 2, 3, ranks=[1])
    request = requests.ask(running.store, 4, 1)
    running.step(1, 2, 3, ranks=[0])
    running.step(4, 5)
    assert running.answers(request) == [(True, ("step5",), None)] * 2
    assert running.manifests()["step5/0"].notes == ()
    assert running.manifests()["step5/1"].notes == ("It warmed up for 1 of 2 steps.",)


@pytest.mark.parametrize("seen_at", [1, 3, 4, 5])
def test_a_capture_that_warms_up_for_the_very_step_is_the_one(job: Callable[..., Job], seen_at: int) -> None:
    running = job(2, steps=[5], **{"trainer.warmup_steps": 3})
    running.step(0)
    look_at(running.ranks[1], "/nonexistent")
    request = requests.ask(running.store, 4, 2)
    for step in range(1, 8):
        if step == seen_at:
            look_at(running.ranks[1], running.run / "demand.json")
        running.step(step)
    assert running.answers(request) == [(True, ("step5",), None)] * 2
    assert running.steps(0) == running.steps(1) == {"step5": (5, 6)}
    assert read_run(running.run).status is Status.COMPLETE


def test_a_capture_that_warms_up_for_a_later_step_gives_way(job: Callable[..., Job]) -> None:
    running = job(2, steps=[6], **{"trainer.warmup_steps": 3})
    running.step(0)
    look_at(running.ranks[1], "/nonexistent")
    request = requests.ask(running.store, 4, 1)
    running.step(1, 2, 3)
    look_at(running.ranks[1], running.run / "demand.json")
    running.step(4, 5, 6, 7)
    assert running.answers(request) == [(True, ("step5",), None)] * 2
    assert running.steps(0) == {"step5": (5, 5), "step6": (6, 6)}
    assert running.steps(1) == {"step5": (5, 5), "step6": (6, 6)}
    assert read_run(running.run).status is Status.COMPLETE


def test_mini_batches_are_counted_as_in_other_captures(job: Callable[..., Job]) -> None:
    running = job(1, **{"trainer.window": {"active": 1}})
    (profiler,) = running.ranks
    request = requests.ask(running.store, 1, 1)
    for step in range(3):
        with profiler.capture(step):
            profiler.step(0, "mini_batch")
    assert calls_of(profiler) == ["start step1", "step step1 mini_batch 0", "stop step1"]
    assert running.manifests(rank=0)["step1"].window == {
        "active": 1, "wait": 0, "warmup": 0, "repeat": 1, "skip_first": 0,
    }  # fmt: skip
    assert running.answers(request) == [(True, ("step1",), None)]


def test_the_end_of_the_job_cuts_the_capture(job: Callable[..., Job]) -> None:
    running = job(1, final_step=3)
    request = requests.ask(running.store, 2, 5)
    running.step(0, 1, 2, 3)
    plan = requests.read_plan(running.store, request)
    assert plan is not None
    assert (plan.first_step, plan.last_step) == (2, 3)
    assert running.answers(request) == [(True, ("step2",), None)]
    assert read_run(running.run).status is Status.COMPLETE


def test_nothing_is_captured_beyond_the_end_of_the_job(job: Callable[..., Job]) -> None:
    running = job(final_step=3)
    running.step(0, 1)
    request = requests.ask(running.store, 2, 1)
    running.step(2, 3)
    why = "the capture would begin at step 4, and the job ends with step 3"
    assert running.answers(request) == [(True, (), why)] * 2
    plan = requests.read_plan(running.store, request)
    assert plan is not None
    assert (plan.first_step, plan.problem) == (None, why)


def test_engines_are_asked_at_the_same_step(job: Callable[..., Job], tally: ModuleType, tmp_path: Path) -> None:
    running = job(1, **{"rollout.backend": "tally-engine", "rollout.ranks": "all", "rollout.iterations": {"count": 1}})
    engines = [tally.ToyEngine(blocking=True) for _ in range(2)]
    replicas = [
        Profiler.from_config(identity=Identity(role="rollout", replica=number), settings=running.config, target=engine)
        for number, engine in enumerate(engines)
    ]
    request = requests.ask(running.store, 1, 1)
    for step in range(3):
        for replica, engine in zip(replicas, engines, strict=True):
            with replica.capture(step):
                engine.iterate("decode", "decode")
        running.step(step)
    assert running.answers(request) == [(True, ("step1",), None)] * 3
    assert [process.name for process in requests.read_processes(running.store)] == [
        "rollout/0 (toy)", "rollout/1 (toy)", "trainer rank 0",
    ]  # fmt: skip
    report = read_run(running.run)
    assert report.status is Status.COMPLETE
    assert [(capture.role, capture.replica, capture.id) for capture in report.captures] == [
        ("rollout", 0, "step1"),
        ("rollout", 1, "step1"),
        ("trainer", None, "step1"),
    ]


def test_an_engine_that_is_too_late_says_so(job: Callable[..., Job], tally: ModuleType) -> None:
    running = job(1, **{"rollout.backend": "tally-engine"})
    replica = Profiler.from_config(
        identity=Identity(role="rollout", replica=2), settings=running.config, target=tally.ToyEngine(blocking=True)
    )
    request = requests.ask(running.store, 1, 1)
    running.step(0, 1)
    with replica.capture(2):
        pass
    late, there = running.answers(request)
    assert there == (True, ("step1",), None)
    assert "seen here at step 2, after step 1" in (late[2] or "")
    (target,) = read_run(running.run).targets
    assert (target.id, target.replica, target.status) == ("step1", 2, Status.FAILED)


def test_an_async_host_takes_requests(job: Callable[..., Job]) -> None:
    running = job(1, **{"trainer.options.wait_s": 0.001})
    request = requests.ask(running.store, 2, 2)

    async def host() -> None:
        for step in range(5):
            async with running.ranks[0].capture(step):
                await asyncio.sleep(0)

    asyncio.run(host())
    assert running.answers(request) == [(True, ("step2",), None)]
    assert running.steps() == {"step2": (2, 3)}


# Failures.


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_a_capture_that_fails_is_answered(job: Callable[..., Job], hook: str) -> None:
    running = job(1, **{"trainer.options.fail_at": hook})
    request = requests.ask(running.store, 1, 2)
    running.step(*range(5))
    ((done, captures, problem),) = running.answers(request)
    assert (done, captures) == (True, ("step1",))
    assert (problem is not None) == (hook == "start")  # the others are in the manifest
    assert running.manifests(rank=0)["step1"].status in (Status.FAILED, Status.PARTIAL)
    assert running.steps().keys() == {"step1"}


def test_an_exception_of_the_host_ends_it_early_and_answers(job: Callable[..., Job]) -> None:
    running = job(1)
    request = requests.ask(running.store, 1, 3)
    running.step(0, 1)
    with pytest.raises(ZeroDivisionError), running.ranks[0].capture(2):
        _ = 1 / 0
    assert running.answers(request) == [(True, ("step1",), None)]
    running.step(3, 4)
    assert running.steps() == {"step1": (1, 2)}
    assert running.manifests(rank=0)["step1"].status is Status.PARTIAL


def test_a_device_in_use_is_answered(job: Callable[..., Job]) -> None:
    running = job(1, **{"trainer.options.device": "gpu-3"})
    settings = running.config | {"run": "other", "steps": [1], "on_demand": False}
    request = requests.ask(running.store, 1, 1)
    with Profiler.from_config(settings=settings).capture(1):
        running.step(0, 1, 2)
    ((done, captures, problem),) = running.answers(request)
    assert (done, captures) == (True, ("step1",))
    assert "gpu-3, held by this process (trainer, step1)" in (problem or "")


def test_without_on_demand_nobody_looks(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    running = job(1, on_demand=False, steps=[3])
    assert not running.run.exists()
    looked: list[Any] = []
    access = os.access
    monkeypatch.setattr(os, "access", lambda *arguments: looked.append(arguments) or access(*arguments))
    running.step(0, 1, 2)
    assert not running.run.exists()
    assert looked == []


def test_a_step_costs_one_look(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    access = os.access
    monkeypatch.setattr(os, "access", lambda *arguments: looked.append(arguments) or access(*arguments))
    running = job(1, steps=[7])
    looked.clear()
    (profiler,) = running.ranks
    for step in range(5):
        profiler.start(step)
        with profiler.capture(step):
            profiler.step(step)
        profiler.stop()
    assert looked == [(str(running.run / "demand.json"), os.F_OK)] * 5


def test_a_directory_that_cannot_be_written_costs_requests_only(
    tally: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    common = {"run": "run", "trainer.backend": "tally"}
    blocked = common | {"output": str(tmp_path / "file")}
    assert not Profiler.from_config(settings=blocked).enabled
    assert "Captures cannot be requested while the job runs: NotADirectoryError" in caplog.text
    assert Profiler.from_config(settings=blocked | {"steps": [1]}).enabled
    output = tmp_path / "out"
    (output / "run").mkdir(parents=True)
    (output / "run" / "processes").touch()
    profiler = Profiler.from_config(settings=common | {"output": str(output), "steps": [1]})
    with profiler.capture(1) as capture:
        assert capture is not None


def test_what_cannot_be_answered_is_said_once(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = job(1)
    requests.ask(running.store, 2, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stores, "write_new", full)
    running.step(0, 1, 2, 3)
    assert caplog.text.count("Cannot answer a capture request: OSError: [Errno 28]") == 1
    monkeypatch.undo()
    running.step(4, 5, 6)
    assert running.steps() == {"step6": (6, 6)}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"schema": 1, "token": "../../../../tmp/x", "in_steps": 1, "steps": 1, "requested_ns": 1, "by": {}}',
        '{"schema": 1, "token": "0123456789abcdef", "in_steps": 0, "steps": 1, "requested_ns": 1, "by": {}}',
        '{"schema": 1, "token": "0123456789abcdef", "in_steps": 1, "steps": -1, "requested_ns": 1, "by": {}}',
        '{"schema": 1, "token": "0123456789abcdef", "in_steps": "1", "steps": 1, "requested_ns": 1, "by": {}}',
        '{"schema": 2, "token": "0123456789abcdef", "in_steps": 1, "steps": 1, "requested_ns": 1, "by": {}}',
    ],
)
def test_what_is_no_request_is_passed_over(
    job: Callable[..., Job], caplog: pytest.LogCaptureFixture, text: str
) -> None:
    running = job(1)
    (running.run / "demand.json").write_text(text)
    running.step(0, 1, 2, 3)
    assert (running.steps(), len(list(running.run.iterdir()))) == ({}, 3)
    assert caplog.text.count("demand.json is no request that this version of profdeck understands") == 1


def test_a_request_that_is_being_written_is_read_at_the_next_step(job: Callable[..., Job]) -> None:
    """Where there are no links, a file is there before its content."""
    running = job(1)
    (running.run / "demand.json").touch()
    running.step(0, 1)
    request = OnDemandRequest(in_steps=1, steps=1)
    (running.run / "demand.json").write_bytes(requests.encode(request))
    running.step(2, 3)
    assert running.answers(request) == [(True, ("step3",), None)]


@pytest.mark.parametrize("file", ["plan", "start"])
def test_a_decision_that_is_being_written_is_read_at_the_next_step(job: Callable[..., Job], file: str) -> None:
    running = job(1, **{"trainer.warmup_steps": 1})
    request = requests.ask(running.store, 3, 1)
    path = running.run / f"demand.{request.token}.{file}.json"
    if file == "start":
        running.step(0, 1)
    path.touch()
    running.step(2) if file == "start" else running.step(0, 1)
    plan = StepPlan(token=request.token, by="somebody", first_step=3, last_step=3, at_step=0)
    path.write_bytes(
        requests.encode(plan if file == "plan" else StartDecision(token=request.token, begun=True, by="somebody"))
    )
    running.step(3, 4) if file == "start" else running.step(2, 3, 4)
    assert running.answers(request) == [(True, ("step3",), None)]
    assert running.steps() == {"step3": (3, 3)}


def test_a_decision_that_cannot_be_read_in_time_is_a_miss(job: Callable[..., Job]) -> None:
    running = job(1)
    request = requests.ask(running.store, 2, 1)
    running.step(0)
    (running.run / f"demand.{request.token}.start.json").touch()
    running.step(1, 2, 3)
    assert running.answers(request) == [(True, ("step2",), "it could not begin")]


# Who is there.


def test_processes_say_where_they_are_and_when_they_leave(job: Callable[..., Job]) -> None:
    running = job()
    there = requests.read_processes(running.store)
    assert [(process.name, process.gone, process.at) for process in there] == [
        ("trainer rank 0", False, ProcessId()),
        ("trainer rank 1", False, ProcessId()),
    ]
    with running.ranks[0]:
        running.step(0)
    assert [process.gone for process in requests.read_processes(running.store)] == [True, False]
    running.step(1)  # a host that goes on after all
    assert [process.gone for process in requests.read_processes(running.store)] == [False, False]
    running.ranks.pop()
    gc.collect()
    assert [process.gone for process in requests.read_processes(running.store)] == [False, True]


def test_a_profiler_that_took_the_place_of_another_speaks(job: Callable[..., Job]) -> None:
    running = job(1)
    (first,) = running.ranks
    running.ranks = [running.join(0)]
    with first:
        pass
    (process,) = requests.read_processes(running.store)
    assert not process.gone


def test_a_forked_child_says_nothing_for_its_parent(job: Callable[..., Job]) -> None:
    running = job(1)
    pid = os.fork()
    if pid == 0:
        watch(running.ranks[0]).pause()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not requests.read_processes(running.store)[0].gone


def test_a_process_that_is_started_again_does_not_answer_twice(job: Callable[..., Job]) -> None:
    running = job(1)
    request = requests.ask(running.store, 1, 1)
    running.step(0, 1)
    running.ranks = [running.join(0)]
    running.step(0, 1, 2)  # from a checkpoint before the capture
    assert running.answers(request) == [(True, ("step1",), None)]
    assert running.steps() == {"step1": (1, 1)}


def test_a_process_that_is_started_again_makes_the_capture_that_it_owes(job: Callable[..., Job]) -> None:
    running = job(1)
    request = requests.ask(running.store, 3, 1)
    running.step(0, 1)
    running.ranks = [running.join(0)]
    running.step(1, 2, 3)
    assert running.answers(request) == [(True, ("step3",), None)]


def test_ranks_that_a_smaller_job_left_behind_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "run" / "processes").mkdir(parents=True)

    def enter(rank: int, world_size: int, at_ns: int, role: str = "trainer") -> None:
        process = JobProcess.of(Identity(role=role, rank=rank, world_size=world_size), None, 0)
        path = tmp_path / "run" / "processes" / f"{role}.rank_{rank:04d}.json"
        path.write_bytes(requests.encode(attrs.evolve(process, joined_ns=at_ns)))

    for rank in range(4):
        enter(rank, 4, 10 + rank)
    for rank in range(2):
        enter(rank, 2, 20 + rank)
    enter(3, 4, 5, role="critic")
    assert [process.name for process in requests.read_processes(FileStore(tmp_path / "run"))] == [
        "critic rank 3", "trainer rank 0", "trainer rank 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({}, True),
        ({"process_started": "1"}, False),
        ({"pid": GONE.pid}, False),
        ({"host": "another-host"}, None),
        ({"pid_namespace": "pid:[1]"}, None),
    ],
)
def test_whether_a_process_runs_is_known_on_its_host_only(changes: dict[str, Any], alive: bool | None) -> None:
    assert attrs.evolve(ProcessId(), **changes).alive is alive


def test_the_run_can_be_found_before_it_has_a_capture(job: Callable[..., Job]) -> None:
    running = job()
    assert (running.run / RUN_FILE).exists()
    assert [file.name for file in sorted((running.run / "processes").iterdir())] == [
        "trainer.rank_0000.json",
        "trainer.rank_0001.json",
    ]


# The pure part.

spans = st.lists(
    st.one_of(
        st.integers(0, 30),
        st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda pair: f"{pair[0]}..{pair[0] + pair[1]}"),
        st.integers(1, 7).map(lambda every: f"every {every}"),
    ),
    max_size=3,
)


@given(specs=spans, final_step=st.none() | st.integers(0, 30), warmup_steps=st.integers(0, 3), order=st.randoms())
def test_what_begins_does_not_depend_on_what_was_asked_before(
    specs: list[Any], final_step: int | None, warmup_steps: int, order: Any
) -> None:
    """The range in which nothing begins is remembered, and never wrong."""
    schedule = Schedule.from_list(specs)
    steps = PlannedSteps(schedule, final_step, warmup_steps)
    asked = list(range(40))
    order.shuffle(asked)
    for step in asked:
        selected = [later for later in range(step, step + warmup_steps + 1) if steps.configures(later)]
        assert steps.begins(step) == ((selected[0], None) if selected else None)


def test_a_demand_goes_before_what_the_config_selects() -> None:
    steps = PlannedSteps(Schedule.from_list([5]), warmup_steps=2)
    assert steps.begins(2) is None
    asked = OnDemandSteps("0" * 16, 4, 6)
    steps.add(asked)
    assert steps.begins(2) == (4, asked)
    asked.begun = True
    assert steps.begins(3) == (5, None)
    assert steps.continues(4, 5, asked.token)
    assert not steps.continues(4, 6, asked.token)
    steps.remove(asked)
    assert not steps.continues(4, 4, asked.token)


def step_until(job: Job, done: Callable[[], bool]) -> None:
    """Have a job go on until something is so."""
    pause, deadline_s = threading.Event(), time.monotonic() + 60
    for step in itertools.count():
        if done():
            return
        assert time.monotonic() < deadline_s
        job.step(step)
        pause.wait(0.01)


def test_captures_by_the_clock_are_of_the_same_steps_in_all_ranks(job: Callable[..., Job]) -> None:
    running = job(3, steps=["every 1 s for 2", 0])

    def whole() -> dict[str, list[tuple[int, int]]]:
        """The steps that each rank has recorded, by capture."""
        found = [one for one in running.manifests().values() if one.status is Status.COMPLETE]
        steps = sorted((one.capture, one.first_step, one.last_step) for one in found)
        return {name: [(first, last) for own, first, last in steps if own == name] for name, _, _ in steps}

    step_until(running, lambda: sum(len(one) == 3 for one in whole().values()) >= 3)
    first, second, *_ = [one for name, one in whole().items() if name != "step0" and len(one) == 3]
    assert all(one == [(one[0][0], one[0][0] + 1)] * 3 for one in (first, second))
    assert whole()["step0"] == [(0, 0)] * 3
    assert read_run(running.run).problems == ()


def test_who_asks_meanwhile_is_told_of_the_standing_capture(job: Callable[..., Job]) -> None:
    running = job(1, steps=["every 1 s"])
    awaited, deadline_s = threading.Event(), time.monotonic() + 60
    while running.store.read(requests.REQUEST) is None:  # nobody steps, so it stays
        assert time.monotonic() < deadline_s
        awaited.wait(0.01)
    with pytest.raises(CaptureError, match="A standing capture of this run is under way"):
        requests.ask(running.store, 2, 1)


def test_a_process_that_is_gone_ends_no_captures_by_the_clock(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host, of which nobody can tell whether it lives."""
    monkeypatch.setattr(standing, "_MOST_S", 1.0)
    running = job(1, steps=["every 1 s"])
    gone = JobProcess(role="rollout", replica=0, rank=0, world_size=1, target=None, warmup_steps=0, at=ELSEWHERE)
    running.store.put(f"{requests.PROCESSES}rollout.replica_000.rank_0000.json", requests.encode(gone))
    step_until(running, lambda: len(running.steps()) > 2)


def test_captures_by_the_clock_need_requests(job: Callable[..., Job]) -> None:
    with pytest.raises(ConfigError, match="'every 1 s' requires on-demand requests, but on_demand is false"):
        job(1, steps=["every 1 s"], on_demand=False)
