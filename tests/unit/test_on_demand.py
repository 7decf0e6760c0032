"""Tests of on-demand captures: all processes record the same steps, or report a missed capture."""

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
from hypothesis import example, given, strategies as st

from open_captures import calls_of
from profdeck import Profiler, Status
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.processes import ProcessId
from profdeck.config.schedule import OnDemandSteps, PlannedSteps, Schedule
from profdeck.on_demand import requests, stores, timed_captures, watch as watches
from profdeck.on_demand.requests import JobProcess, OnDemandRequest, StartDecision, StepPlan
from profdeck.on_demand.stores import FileStore
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.run_directory import RUN_FILE
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ConfigError
from profdeck_traces.base.files import write_new

pytestmark = pytest.mark.usefixtures("tally")

EXITED_PROCESS = ProcessId(pid=2**22 + 1, process_started="1")  # greater than the maximum process ID of Linux
REMOTE_PROCESS = ProcessId(host="another-host")


@pytest.fixture(autouse=True)
def check_at_every_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check at every boundary, although the steps of these tests are short."""
    monkeypatch.setattr(watches, "REST_S", 0.0)


class Job:
    """A job with all ranks in this process. The test runs its steps."""

    def __init__(self, output: Path, ranks: int = 2, **config: Any) -> None:
        self.output, self.world_size = output, ranks
        self.config = {"output": str(output), "run": "run", "trainer.backend": "tally", "trainer.ranks": "all"} | config
        self.run = output / "run"
        self.store = FileStore(self.run)
        self.ranks = [self.create_profiler(rank) for rank in range(ranks)]

    def create_profiler(self, rank: int) -> Profiler:
        return Profiler.from_config(identity=Identity(rank=rank, world_size=self.world_size), settings=self.config)

    def step(self, *steps: int, ranks: Sequence[int] | None = None) -> None:
        for step in steps:
            for profiler in self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]:
                with profiler.capture(step):
                    pass

    def read_results(self, request: OnDemandRequest) -> list[tuple[bool, tuple[str, ...], str | None]]:
        """Return the results of the processes that have read a request."""
        processes = [process for process in requests.read_processes(self.store) if process.token == request.token]
        return [(process.done, process.captures, process.problem) for process in processes]

    def read_manifests(self, *, rank: int | None = None) -> dict[str, Manifest]:
        files = filter(is_manifest, sorted(self.run.glob("step_*/**/*.json")))
        return {
            f"{manifest.capture}/{manifest.rank}" if rank is None else manifest.capture: manifest
            for manifest in map(read_manifest, files)
            if rank in (None, manifest.rank)
        }

    def read_step_ranges(self, rank: int = 0) -> dict[str, tuple[int, int]]:
        """Return the first and last step of each capture of a rank, by capture ID."""
        manifests = self.read_manifests(rank=rank)
        return {capture: (manifest.first_step, manifest.last_step) for capture, manifest in manifests.items()}


@pytest.fixture
def job(tally: ModuleType, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Function that creates a job. Its profilers are closed after the test."""
    started: list[Job] = []

    def start(*arguments: Any, **config: Any) -> Job:
        started.append(Job(tmp_path, *arguments, **config))
        return started[-1]

    yield start
    for running in started:
        for profiler in running.ranks:
            profiler.close()


def get_request_watch(profiler: Profiler) -> watches.RequestWatch:
    (role,) = profiler._roles
    assert role.watch is not None
    return role.watch


class _StaleStore(FileStore):
    """Stale view of a run directory that does not contain the request yet."""

    def __init__(self, request_watch: watches.RequestWatch) -> None:
        super().__init__(Path(request_watch._store.address))

    def read(self, name: str) -> bytes | None:
        return None if name == requests.REQUEST else super().read(name)


def change_view(profiler: Profiler, path: str | Path) -> None:
    """Simulate a stale directory view: the profiler checks for a request at another path."""
    request_watch, path = get_request_watch(profiler), Path(path)
    is_current = path.name == requests.REQUEST
    request_watch._store = FileStore(Path(request_watch._store.address)) if is_current else _StaleStore(request_watch)
    request_watch._has_request = lambda: os.access(path, os.F_OK)


# Agreement on the steps.


def test_all_ranks_begin_at_the_step_that_the_first_rank_plans(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0, 1)
    request = requests.create_request(running.store, 2, 3)
    assert requests.read_plan(running.store, request) is None
    running.step(2)
    plan = requests.read_plan(running.store, request)
    assert plan is not None
    assert (plan.first_step, plan.last_step, plan.at_step) == (4, 6, 2)
    assert plan.by == "trainer rank 0"
    running.step(3, 4, 5)
    assert running.read_results(request) == [(False, (), None)] * 2
    running.step(6)
    assert running.read_results(request) == [(True, ("step4",), None)] * 2
    running.step(7, 8)
    report = read_run(running.run)
    assert (report.status, [(capture.id, capture.last_step, len(capture.ranks)) for capture in report.captures]) == (
        Status.COMPLETE,
        [("step4", 6, 2)],
    )
    assert {manifest.demand for manifest in running.read_manifests().values()} == {request.token}


def test_default_in_steps_suffices_for_ranks_one_step_apart(job: Callable[..., Job]) -> None:
    """Ranks that synchronize in every step can be one step apart."""
    running = job()
    running.step(0)
    running.step(1, ranks=[1])  # before the request
    request = requests.create_request(running.store, requests.DEFAULT_IN_STEPS, 1)
    running.step(1, ranks=[0])
    for step in (2, 3):
        running.step(step, ranks=[1])
        running.step(step, ranks=[0])
    assert running.read_results(request) == [(True, ("step3",), None)] * 2


@pytest.mark.slow
@given(
    lengths_us=st.lists(st.sampled_from([1, 3, 30, 45, 70, 95, 105, 400, 5000]), min_size=1, max_size=4),
    lag=st.floats(0, 0.99),
    request_position=st.floats(0, 1),
    warmup_steps=st.integers(0, 2),
)
def test_skipped_checks_in_short_steps_lose_no_rank(
    lengths_us: list[int], lag: float, request_position: float, warmup_steps: int
) -> None:
    """Two ranks that synchronize in every step. The second rank begins each step a little later."""
    now_s = 1000.0
    with tempfile.TemporaryDirectory() as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(watches, "REST_S", 1e-4)
        patch.setattr(watches, "monotonic", lambda: now_s)
        running = Job(Path(output), **{"trainer.warmup_steps": warmup_steps})
        lengths_s = [1e-6 * length for length in lengths_us for _ in range(200 // len(lengths_us))]
        request_index = int(request_position * len(lengths_s))
        for index, (step, rank) in enumerate((step, rank) for step in range(len(lengths_s)) for rank in (0, 1)):
            if index == request_index:
                request = requests.create_request(running.store, requests.DEFAULT_IN_STEPS + warmup_steps, 2)
            running.step(step, ranks=[rank])
            now_s += lengths_s[step] * (1 - lag if rank else lag)
        plan = requests.read_plan(running.store, request)
        assert plan is not None
        expected = {f"step{plan.first_step}": (plan.first_step, plan.last_step)}
        assert (running.read_step_ranges(0), running.read_step_ranges(1)) == (expected, expected)
        assert {manifest.status for manifest in running.read_manifests().values()} == {Status.COMPLETE}
        for profiler in running.ranks:
            profiler.close()


def test_late_rank_reports_a_missed_capture(job: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    running = job()
    running.step(0)
    running.step(1, 2, 3, ranks=[1])
    request = requests.create_request(running.store, 1, 2)
    running.step(1, 2, ranks=[0])
    running.step(4, ranks=[1])
    running.step(3, ranks=[0])
    missed = "the request was seen here at step 4, after step 2 had begun; --in 3 would have been early enough"
    assert running.read_results(request) == [(True, ("step2",), None), (True, ("step2",), missed)]
    (capture,) = read_run(running.run).captures
    assert [rank.status for rank in capture.ranks] == [Status.COMPLETE, Status.FAILED]
    assert capture.ranks[1].problems == (missed[0].upper() + missed[1:] + ".",)
    assert "The capture of steps 2 to 3 is missed: the request was seen here at step 4" in caplog.text
    # With the suggested in_steps, the rank records the capture.
    running.step(5, 6, ranks=[1])
    requests.remove_request(running.store, request)
    request = requests.create_request(running.store, 3, 2)
    running.step(4, 5, 6, ranks=[0])
    running.step(7, 8, ranks=[1])
    running.step(7, 8, ranks=[0])
    assert running.read_results(request) == [(True, ("step7",), None)] * 2


def test_process_that_joins_late_records_or_reports_a_missed_capture(job: Callable[..., Job]) -> None:
    running = job(3)
    running.step(0)
    request = requests.create_request(running.store, 2, 1)
    running.step(1, ranks=[0])
    running.ranks[1:] = [running.create_profiler(1), running.create_profiler(2)]
    running.step(2, ranks=[0, 1])
    running.step(3, ranks=[0, 1])
    running.step(4)
    first, second, third = running.read_results(request)
    assert first == second == (True, ("step3",), None)
    assert "seen here at step 4, after step 3" in (third[2] or "")


def test_stale_directory_view_records_or_reports_a_missed_capture(job: Callable[..., Job], tmp_path: Path) -> None:
    """On NFS, another host can see the request several seconds later."""
    running = job(3)
    running.step(0)
    for late in running.ranks[1:]:
        change_view(late, tmp_path / "not yet there")
    request = requests.create_request(running.store, 3, 1)
    running.step(1, 2)
    change_view(running.ranks[1], running.run / "demand.json")
    running.step(3, 4)
    change_view(running.ranks[2], running.run / "demand.json")
    running.step(5)
    (first, second, third) = running.read_results(request)
    assert first == second == (True, ("step4",), None)
    assert "seen here at step 5, after step 4 had begun; --in 4 would have been" in (third[2] or "")


def test_host_that_skips_the_first_step_reports_a_missed_capture(job: Callable[..., Job]) -> None:
    running = job(1)
    running.step(0)
    request = requests.create_request(running.store, 2, 3)
    running.step(1, 4, 5)
    assert running.read_results(request) == [(True, ("step3",), "the host went from step 1 to step 4")]
    assert [manifest.status for manifest in running.read_manifests().values()] == [Status.FAILED]


def test_rank_that_never_steps_does_not_block_other_ranks(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0)
    request = requests.create_request(running.store, 1, 1)
    running.step(1, 2, 3, ranks=[0])
    assert running.read_results(request) == [(True, ("step2",), None)]
    assert [process.token for process in requests.read_processes(running.store)] == [request.token, None]
    (capture,) = read_run(running.run).captures
    assert [rank.status for rank in capture.ranks] == [Status.COMPLETE, Status.MISSING]


@pytest.mark.parametrize("links", [True, False])
def test_concurrent_decisions_return_the_same_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def reject_link(*_: object) -> None:
        raise OSError(errno.EPERM, "links are not supported")

    if not links:
        monkeypatch.setattr(os, "link", reject_link)
    start = threading.Barrier(8)

    def decide(number: int) -> list[StepPlan | None]:
        plans = []
        for round_ in range(50):
            start.wait()
            token = f"{round_:016x}"
            plans.append(
                requests.decide(
                    FileStore(tmp_path), token, StepPlan(token=token, first_step=number, last_step=9, by="me")
                )
            )
        return plans

    with ThreadPoolExecutor(8) as pool:
        plans_by_thread = list(pool.map(decide, range(8)))
    for plans in zip(*plans_by_thread, strict=True):
        first_steps = {plan.first_step for plan in plans if plan is not None}
        assert len(first_steps) == 1
        assert links is False or None not in plans  # without links, a file can be incomplete for a moment
    assert not list(tmp_path.glob(".*.tmp"))


class Simulation:
    """A job whose ranks step, skip steps and restart in any order, while captures are requested and withdrawn."""

    def __init__(self, output: Path, *, explicit: bool, **config: Any) -> None:
        self.job = Job(output, 3, **config)
        self.config = Schedule.from_list(config["steps"])
        self.warmup_steps = config["trainer.warmup_steps"]
        self.explicit = explicit
        self.next_steps = [0, 0, 0]
        """Next step of each rank."""
        self.last_steps = [-1, -1, -1]
        """Last step that each rank has begun since its last restart."""
        self.completed_steps: list[set[int]] = [set(), set(), set()]
        """Steps that each rank has completed, including steps before a restart."""
        self.is_regular = [True, True, True]
        """True for each rank that never repeated or skipped a step."""
        self.pending_request: OnDemandRequest | None = None
        self.requests: list[OnDemandRequest] = []
        self.withdrawn_tokens: set[str] = set()

    def step(self, rank: int, count: int) -> None:
        profiler = self.job.ranks[rank]
        for _ in range(count):
            with profiler.capture(self.next_steps[rank]), profiler.stage("work"):
                pass
            self.last_steps[rank] = self.next_steps[rank]
            self.completed_steps[rank].add(self.next_steps[rank])
            self.next_steps[rank] += 1
            if self.explicit:  # some hosts begin the next step immediately
                profiler.start(self.next_steps[rank])

    def jump(self, rank: int, distance: int) -> None:
        self.next_steps[rank] += distance
        self.is_regular[rank] = False

    def restart(self, rank: int, distance: int) -> None:
        self.job.ranks[rank].close()
        self.job.ranks[rank] = self.job.create_profiler(rank)
        self.last_steps[rank] = -1
        self.next_steps[rank] = max(0, self.next_steps[rank] - distance)
        self.is_regular[rank] = False

    def hide_request(self, rank: int, _: int) -> None:
        change_view(self.job.ranks[rank], self.job.output / "nowhere")

    def show_request(self, rank: int, _: int) -> None:
        change_view(self.job.ranks[rank], self.job.run / "demand.json")

    def request(self, in_steps: int, steps: int) -> None:
        if self.pending_request is None:
            self.pending_request = requests.create_request(self.job.store, in_steps + self.warmup_steps, steps)
            self.requests.append(self.pending_request)

    def withdraw(self, *_: int) -> None:
        if self.pending_request is not None and requests.withdraw(self.job.store, self.pending_request):
            self.withdrawn_tokens.add(self.pending_request.token)
            self.pending_request = None

    def remove(self, *_: int) -> None:
        """Remove the request, as the requester does after all processes have completed it."""
        if self.pending_request is not None:
            requests.remove_request(self.job.store, self.pending_request)
            self.pending_request = None

    def check(self, request: OnDemandRequest) -> None:
        """Check that each rank recorded the planned steps of a request or reported a problem."""
        plan = requests.read_plan(self.job.store, request)
        manifests = [manifest for manifest in self.job.read_manifests().values() if manifest.demand == request.token]
        recorded = [manifest for manifest in manifests if manifest.artifacts]
        if plan is None or plan.first_step is None or plan.last_step is None or request.token in self.withdrawn_tokens:
            assert recorded == []
            return
        for manifest in manifests:
            if manifest.stage is None:
                assert manifest.first_step == plan.first_step
                assert manifest.last_step == plan.last_step or manifest.problems
            else:
                assert plan.first_step <= manifest.first_step <= plan.last_step
        steps = {*range(plan.first_step, plan.last_step + 1)}
        for rank, process in enumerate(requests.read_processes(self.job.store)):
            if process.token != request.token:
                continue
            if not process.done:  # a rank that has passed the capture must have completed the request
                assert self.last_steps[rank] <= plan.last_step
            elif process.problem is None and process.incomplete is None:
                # Either all steps are recorded, or a manifest states why not.
                own_manifests = list(self.job.read_manifests(rank=rank).values())
                for step in steps & self.completed_steps[rank]:
                    assert any(
                        manifest.first_step <= step <= manifest.last_step or manifest.problems
                        for manifest in own_manifests
                    )
            elif process.problem is not None:
                assert not [manifest for manifest in recorded if manifest.rank == rank and not manifest.problems]

    def check_coverage(self, rank: int) -> None:
        """Check that each scheduled step is in exactly one capture, regardless of requests."""
        counts = dict.fromkeys(self.completed_steps[rank], 0)
        for manifest in self.job.read_manifests(rank=rank).values():
            for step in range(manifest.first_step, manifest.last_step + 1) if manifest.artifacts else ():
                if step in counts:
                    counts[step] += 1
        assert [step for step, count in counts.items() if count > 1 or (step in self.config and count == 0)] == []


some_rank = st.integers(0, 2)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("step"), some_rank, st.integers(1, 4)),
        st.tuples(st.just("jump"), some_rank, st.integers(1, 3)),
        st.tuples(st.just("restart"), some_rank, st.integers(0, 3)),
        st.tuples(st.sampled_from(["hide_request", "show_request"]), some_rank, st.just(0)),
        st.tuples(st.just("request"), st.integers(1, 3), st.integers(1, 4)),
        st.tuples(st.sampled_from(["withdraw", "remove"]), st.just(0), st.just(0)),
    ),
    max_size=30,
)
RESTART_IN_A_CAPTURE = [("request", 1, 2), ("step", 2, 2), ("restart", 2, 0), ("step", 2, 1)]


@given(
    operations=operations,
    steps=st.sampled_from([[], [3], ["4..6"], ["every 3"], [2, "5..7", 9], ["0..100"]]),
    warmup_steps=st.integers(0, 2),
    discrete=st.sampled_from([False, False, True]),
    explicit=st.booleans(),
)
@example(operations=RESTART_IN_A_CAPTURE, steps=[], warmup_steps=0, discrete=True, explicit=False)
@example(operations=RESTART_IN_A_CAPTURE, steps=[], warmup_steps=0, discrete=True, explicit=True)
def test_ranks_record_the_same_steps_or_report_a_problem(
    tmp_path_factory: Any,
    operations: list[tuple[str, int, int]],
    steps: list[Any],
    warmup_steps: int,
    discrete: bool,
    explicit: bool,
) -> None:
    mode, warmup_steps = ("discrete", 0) if discrete else ("continuous", warmup_steps)
    config: dict[str, Any] = {"steps": steps, "mode": mode, "trainer.warmup_steps": warmup_steps}
    simulation = Simulation(tmp_path_factory.mktemp("job"), explicit=explicit, **config)
    for name, first, second in operations:
        getattr(simulation, name)(first, second)
    for profiler in simulation.job.ranks:
        profiler.close()
    for request in simulation.requests:
        simulation.check(request)
    for rank, is_regular in enumerate(simulation.is_regular):
        if is_regular and not discrete:
            simulation.check_coverage(rank)


# Scheduled captures.


@pytest.mark.parametrize(
    ("steps", "captures"),
    [
        (["4..5"], {"step4": (4, 5)}),  # the same steps
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
def test_requested_capture_is_separate_from_scheduled_captures(
    job: Callable[..., Job], steps: list[Any], captures: dict[str, tuple[int, int]], in_steps: int, explicit: bool
) -> None:
    running = job(1, steps=steps)
    (profiler,) = running.ranks
    for step in range(10):
        profiler.start(step)
        if step == 3 - in_steps:
            request = requests.create_request(running.store, in_steps, 2)
        if explicit:
            profiler.step(step)
        profiler.stop()
    assert running.read_step_ranges() == captures
    assert running.read_results(request) == [(True, ("step4",), None)]
    assert read_run(running.run).status is Status.COMPLETE
    previous = running.read_manifests(rank=0).get("step2")
    if previous is not None and 4 in Schedule.from_list(steps):
        assert previous.notes == ("It ended after step 3: a capture of steps 4 to 5 was requested.",)


@pytest.mark.parametrize(("late_at", "in_time"), [(5, True), (7, True)])
def test_late_rank_uses_its_scheduled_capture(job: Callable[..., Job], late_at: int, in_time: bool) -> None:
    running = job(steps=["4..6"])
    running.step(0)
    change_view(running.ranks[1], "/nonexistent")
    request = requests.create_request(running.store, 3, 3)
    for step in range(1, 9):
        if step == late_at:
            change_view(running.ranks[1], running.run / "demand.json")
        running.step(step)
    assert running.read_results(request) == [(True, ("step4",), None)] * 2
    report = read_run(running.run)
    assert (report.status, [(capture.id, capture.last_step) for capture in report.captures]) == (
        Status.COMPLETE,
        [("step4", 6)],
    )


def test_process_started_after_the_schedule_reports_a_missed_capture(job: Callable[..., Job]) -> None:
    running = job(1, steps=["4..5"])
    running.step(0)
    request = requests.create_request(running.store, 3, 2)
    running.step(1, 2)
    running.ranks = [running.create_profiler(0)]
    running.step(6)
    ((completed, _, problem),) = running.read_results(request)
    assert completed
    assert "seen here at step 6, after step 4" in (problem or "")


# Successive requests.


def test_second_request_is_rejected_until_the_first_is_removed(job: Callable[..., Job]) -> None:
    running = job()
    request = requests.create_request(running.store, 1, 1)
    with pytest.raises(CaptureError, match=rf"requested by {ProcessId()}, is pending.*remove .*demand.json"):
        requests.create_request(running.store, 1, 1)
    running.step(0, 1)
    requests.remove_request(running.store, request)
    second = requests.create_request(running.store, 1, 2)
    running.step(2, 3, 4)
    assert running.read_results(second) == [(True, ("step3",), None)] * 2
    assert running.read_step_ranges() == {"step1": (1, 1), "step3": (3, 4)}


@pytest.mark.parametrize("has_plan", [False, True])
def test_abandoned_request_is_replaced(job: Callable[..., Job], has_plan: bool) -> None:
    running = job(1)
    abandoned = OnDemandRequest(in_steps=3, steps=1, by=EXITED_PROCESS)
    write_new(running.run / "demand.json", requests.encode(abandoned))
    if has_plan:
        running.step(0)
    request = requests.create_request(running.store, 2, 1)
    running.step(1, 2, 3, 4)
    assert running.read_results(request) == [(True, ("step3",), None)]
    assert running.read_step_ranges() == {"step3": (3, 3)}
    assert running.read_manifests(rank=0)["step3"].demand == request.token


def test_request_of_another_host_is_not_replaced(job: Callable[..., Job]) -> None:
    running = job(1)
    write_new(running.run / "demand.json", requests.encode(OnDemandRequest(in_steps=3, steps=1, by=REMOTE_PROCESS)))
    with pytest.raises(CaptureError, match="requested by process .* on another-host"):
        requests.create_request(running.store, 2, 1)


def test_abandoned_capture_continues_until_the_next_capture(job: Callable[..., Job]) -> None:
    running = job(1)
    abandoned = OnDemandRequest(in_steps=1, steps=9, by=EXITED_PROCESS)
    write_new(running.run / "demand.json", requests.encode(abandoned))
    running.step(0, 1, 2)
    request = requests.create_request(running.store, 2, 2)
    running.step(3, 4, 5, 6, 7)
    assert running.read_step_ranges() == {"step1": (1, 4), "step5": (5, 6)}
    assert running.read_results(request) == [(True, ("step5",), None)]
    abandoned_manifest = running.read_manifests(rank=0)["step1"]
    assert (abandoned_manifest.status, abandoned_manifest.problems) == (
        Status.PARTIAL,
        ("A capture of steps 5 to 6 was requested.",),
    )


def test_remove_request_keeps_other_requests(job: Callable[..., Job]) -> None:
    running = job(1)
    other_request = requests.create_request(running.store, 1, 1)
    requests.remove_request(running.store, OnDemandRequest(in_steps=1, steps=1))
    assert json.loads((running.run / "demand.json").read_text())["token"] == other_request.token
    assert not list(running.run.glob(".*"))


# Withdrawals.


def test_unread_request_can_be_withdrawn(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0)
    request = requests.create_request(running.store, 1, 1)
    assert requests.withdraw(running.store, request)
    running.step(1, 2, 3)
    assert (running.read_step_ranges(), running.read_results(request)) == ({}, [])
    assert not (running.run / "demand.json").exists()


def test_request_withdrawn_after_it_was_read_is_not_captured(job: Callable[..., Job]) -> None:
    """A process can read the request before the withdrawal and plan its steps afterwards."""
    running = job(1)
    request = requests.create_request(running.store, 1, 1)
    text = (running.run / "demand.json").read_bytes()
    assert requests.withdraw(running.store, request)
    (running.run / "demand.json").write_bytes(text)
    running.step(0, 1, 2)
    assert running.read_step_ranges() == {}
    assert running.read_results(request) == [(True, (), f"it was withdrawn by {ProcessId()}")]


def test_planned_capture_can_be_withdrawn_until_it_begins(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0)
    request = requests.create_request(running.store, 3, 1)
    running.step(1, 2, 3)
    assert requests.withdraw(running.store, request)
    running.step(4, 5)
    assert running.read_step_ranges() == {}
    assert running.read_results(request) == [(True, (), f"it was withdrawn by {ProcessId()}")] * 2


def test_late_rank_does_not_miss_a_withdrawn_capture(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0)
    request = requests.create_request(running.store, 2, 1)
    text = (running.run / "demand.json").read_bytes()
    running.step(1, ranks=[0])
    assert requests.withdraw(running.store, request)
    (running.run / "demand.json").write_bytes(text)  # an NFS client may still see the request
    running.step(7, ranks=[1])
    assert running.read_manifests() == {}
    assert running.read_results(request)[1] == (True, (), f"it was withdrawn by {ProcessId()}")


def test_capture_that_has_begun_in_one_rank_cannot_be_withdrawn(job: Callable[..., Job]) -> None:
    running = job()
    running.step(0)
    request = requests.create_request(running.store, 2, 2)
    running.step(1, 2)
    running.step(3, ranks=[0])
    assert not requests.withdraw(running.store, request)
    running.step(4, ranks=[0])
    running.step(3, 4, ranks=[1])
    assert running.read_results(request) == [(True, ("step3",), None)] * 2


def test_capture_cannot_be_withdrawn_during_warm_up(job: Callable[..., Job]) -> None:
    running = job(1, **{"trainer.warmup_steps": 2})
    running.step(0)
    request = requests.create_request(running.store, 3, 1)
    running.step(1)
    running.step(2)
    assert not requests.withdraw(running.store, request)


# Modes, windows, warm-up and the end of the job.


def test_stages_are_captured_in_discrete_mode(job: Callable[..., Job]) -> None:
    running = job(1, mode="discrete", steps=[1])
    (profiler,) = running.ranks
    for step in range(6):
        if step == 2:
            request = requests.create_request(running.store, 1, 2)
        with profiler.capture(step):
            for stage in ("generate", "update"):
                with profiler.stage(stage):
                    pass
            if step == 4:
                assert running.read_results(request)[0][0] is False
        assert running.read_results(request)[0][0] is (step == 4) if step in (3, 4) else True
    ids = ("step3-generate", "step3-update", "step4-generate", "step4-update")
    assert running.read_results(request) == [(True, ids, None)]
    assert sorted(running.read_manifests(rank=0)) == sorted([*ids, "step1-generate", "step1-update"])
    assert {name for name, manifest in running.read_manifests(rank=0).items() if manifest.demand} == set(ids)


def test_discrete_step_without_stages_completes_at_the_next_step(job: Callable[..., Job]) -> None:
    running = job(1, mode="discrete")
    request = requests.create_request(running.store, 1, 1)
    (profiler,) = running.ranks
    for step in range(2):
        profiler.start(step)
    assert running.read_results(request) == [(False, (), None)]
    profiler.start(2)
    assert running.read_results(request) == [(True, (), None)]


def test_warm_up_begins_before_the_first_step(job: Callable[..., Job]) -> None:
    running = job(1, **{"trainer.warmup_steps": 2})
    request = requests.create_request(running.store, 4, 2)
    running.step(*range(8))
    assert calls_of(running.ranks[0]) == [
        "start step4", "step step4 global_step 2", "step step4 global_step 3", "step step4 global_step 4", "stop step4",
    ]  # fmt: skip
    assert running.read_results(request) == [(True, ("step4",), None)]
    assert running.read_manifests(rank=0)["step4"].notes == ()


@pytest.mark.parametrize(("seen_late", "is_cold"), [(False, False), (True, True)])
def test_default_warm_up_does_not_delay_requested_captures(
    job: Callable[..., Job], tally: ModuleType, monkeypatch: pytest.MonkeyPatch, seen_late: bool, is_cold: bool
) -> None:
    monkeypatch.setattr(tally.TallyBackend, "cold_first_step", True)
    running = job(2)
    assert requests.default_in_steps(requests.read_processes(running.store)) == requests.DEFAULT_IN_STEPS
    running.step(0)
    if seen_late:
        running.step(1, 2, ranks=[1])
    request = requests.create_request(running.store, 2, 1)
    running.step(1, 2, ranks=[0])
    if not seen_late:
        running.step(1, 2, ranks=[1])
    running.step(3, 4)
    assert running.read_results(request) == [(True, ("step3",), None)] * 2
    manifests = running.read_manifests()
    assert [manifests[f"step3/{rank}"].cold_first_step for rank in (0, 1)] == [False, is_cold]
    assert [manifests[f"step3/{rank}"].notes for rank in (0, 1)] == [(), ()]


def test_rank_that_reads_the_request_late_warms_up_for_fewer_steps(job: Callable[..., Job]) -> None:
    running = job(2, **{"trainer.warmup_steps": 2})
    running.step(0)
    running.step(1, 2, 3, ranks=[1])
    request = requests.create_request(running.store, 4, 1)
    running.step(1, 2, 3, ranks=[0])
    running.step(4, 5)
    assert running.read_results(request) == [(True, ("step5",), None)] * 2
    assert running.read_manifests()["step5/0"].notes == ()
    assert running.read_manifests()["step5/1"].notes == ("It warmed up for 1 of 2 steps.",)


@pytest.mark.parametrize("seen_at", [1, 3, 4, 5])
def test_scheduled_capture_that_warms_up_for_the_same_step_is_used(job: Callable[..., Job], seen_at: int) -> None:
    running = job(2, steps=[5], **{"trainer.warmup_steps": 3})
    running.step(0)
    change_view(running.ranks[1], "/nonexistent")
    request = requests.create_request(running.store, 4, 2)
    for step in range(1, 8):
        if step == seen_at:
            change_view(running.ranks[1], running.run / "demand.json")
        running.step(step)
    assert running.read_results(request) == [(True, ("step5",), None)] * 2
    assert running.read_step_ranges(0) == running.read_step_ranges(1) == {"step5": (5, 6)}
    assert read_run(running.run).status is Status.COMPLETE


def test_scheduled_capture_that_warms_up_for_a_later_step_is_withdrawn(job: Callable[..., Job]) -> None:
    running = job(2, steps=[6], **{"trainer.warmup_steps": 3})
    running.step(0)
    change_view(running.ranks[1], "/nonexistent")
    request = requests.create_request(running.store, 4, 1)
    running.step(1, 2, 3)
    change_view(running.ranks[1], running.run / "demand.json")
    running.step(4, 5, 6, 7)
    assert running.read_results(request) == [(True, ("step5",), None)] * 2
    assert running.read_step_ranges(0) == {"step5": (5, 5), "step6": (6, 6)}
    assert running.read_step_ranges(1) == {"step5": (5, 5), "step6": (6, 6)}
    assert read_run(running.run).status is Status.COMPLETE


def test_mini_batches_are_counted_in_requested_captures(job: Callable[..., Job]) -> None:
    running = job(1, **{"trainer.window": {"active": 1}})
    (profiler,) = running.ranks
    request = requests.create_request(running.store, 1, 1)
    for step in range(3):
        with profiler.capture(step):
            profiler.step(0, "mini_batch")
    assert calls_of(profiler) == ["start step1", "step step1 mini_batch 0", "stop step1"]
    assert running.read_manifests(rank=0)["step1"].window == {
        "active": 1, "wait": 0, "warmup": 0, "repeat": 1, "skip_first": 0,
    }  # fmt: skip
    assert running.read_results(request) == [(True, ("step1",), None)]


def test_final_step_truncates_the_capture(job: Callable[..., Job]) -> None:
    running = job(1, final_step=3)
    request = requests.create_request(running.store, 2, 5)
    running.step(0, 1, 2, 3)
    plan = requests.read_plan(running.store, request)
    assert plan is not None
    assert (plan.first_step, plan.last_step) == (2, 3)
    assert running.read_results(request) == [(True, ("step2",), None)]
    assert read_run(running.run).status is Status.COMPLETE


def test_nothing_is_captured_after_the_final_step(job: Callable[..., Job]) -> None:
    running = job(final_step=3)
    running.step(0, 1)
    request = requests.create_request(running.store, 2, 1)
    running.step(2, 3)
    problem = "the capture would begin at step 4, and the job ends with step 3"
    assert running.read_results(request) == [(True, (), problem)] * 2
    plan = requests.read_plan(running.store, request)
    assert plan is not None
    assert (plan.first_step, plan.problem) == (None, problem)


def test_engines_are_captured_at_the_same_step(job: Callable[..., Job], tally: ModuleType, tmp_path: Path) -> None:
    running = job(1, **{"rollout.backend": "tally-engine", "rollout.ranks": "all", "rollout.iterations": {"count": 1}})
    engines = [tally.ToyEngine(blocking=True) for _ in range(2)]
    replicas = [
        Profiler.from_config(identity=Identity(role="rollout", replica=index), settings=running.config, target=engine)
        for index, engine in enumerate(engines)
    ]
    request = requests.create_request(running.store, 1, 1)
    for step in range(3):
        for replica, engine in zip(replicas, engines, strict=True):
            with replica.capture(step):
                engine.iterate("decode", "decode")
        running.step(step)
    assert running.read_results(request) == [(True, ("step1",), None)] * 3
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


def test_late_engine_reports_a_missed_capture(job: Callable[..., Job], tally: ModuleType) -> None:
    running = job(1, **{"rollout.backend": "tally-engine"})
    replica = Profiler.from_config(
        identity=Identity(role="rollout", replica=2), settings=running.config, target=tally.ToyEngine(blocking=True)
    )
    request = requests.create_request(running.store, 1, 1)
    running.step(0, 1)
    with replica.capture(2):
        pass
    late, in_time = running.read_results(request)
    assert in_time == (True, ("step1",), None)
    assert "seen here at step 2, after step 1" in (late[2] or "")
    (target,) = read_run(running.run).targets
    assert (target.id, target.replica, target.status) == ("step1", 2, Status.FAILED)


def test_async_host_accepts_requests(job: Callable[..., Job]) -> None:
    running = job(1, **{"trainer.options.wait_s": 0.001})
    request = requests.create_request(running.store, 2, 2)

    async def host() -> None:
        for step in range(5):
            async with running.ranks[0].capture(step):
                await asyncio.sleep(0)

    asyncio.run(host())
    assert running.read_results(request) == [(True, ("step2",), None)]
    assert running.read_step_ranges() == {"step2": (2, 3)}


# Failures.


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_failed_capture_completes_the_request(job: Callable[..., Job], hook: str) -> None:
    running = job(1, **{"trainer.options.fail_at": hook})
    request = requests.create_request(running.store, 1, 2)
    running.step(*range(5))
    ((completed, captures, problem),) = running.read_results(request)
    assert (completed, captures) == (True, ("step1",))
    assert (problem is not None) == (hook == "start")  # other problems are in the manifest
    assert running.read_manifests(rank=0)["step1"].status in (Status.FAILED, Status.PARTIAL)
    assert running.read_step_ranges().keys() == {"step1"}


def test_host_exception_ends_the_capture_and_completes_the_request(job: Callable[..., Job]) -> None:
    running = job(1)
    request = requests.create_request(running.store, 1, 3)
    running.step(0, 1)
    with pytest.raises(ZeroDivisionError), running.ranks[0].capture(2):
        _ = 1 / 0
    assert running.read_results(request) == [(True, ("step1",), None)]
    running.step(3, 4)
    assert running.read_step_ranges() == {"step1": (1, 2)}
    assert running.read_manifests(rank=0)["step1"].status is Status.PARTIAL


def test_device_in_use_completes_the_request(job: Callable[..., Job]) -> None:
    running = job(1, **{"trainer.options.device": "gpu-3"})
    settings = running.config | {"run": "other", "steps": [1], "on_demand": False}
    request = requests.create_request(running.store, 1, 1)
    with Profiler.from_config(settings=settings).capture(1):
        running.step(0, 1, 2)
    ((completed, captures, problem),) = running.read_results(request)
    assert (completed, captures) == (True, ("step1",))
    assert "gpu-3, held by this process (trainer, step1)" in (problem or "")


def test_steps_do_not_check_for_requests_if_on_demand_is_false(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = job(1, on_demand=False, steps=[3])
    assert not running.run.exists()
    calls: list[Any] = []
    access = os.access
    monkeypatch.setattr(os, "access", lambda *arguments: calls.append(arguments) or access(*arguments))
    running.step(0, 1, 2)
    assert not running.run.exists()
    assert calls == []


def test_each_step_makes_one_system_call(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    access = os.access
    monkeypatch.setattr(os, "access", lambda *arguments: calls.append(arguments) or access(*arguments))
    running = job(1, steps=[7])
    calls.clear()
    (profiler,) = running.ranks
    for step in range(5):
        profiler.start(step)
        with profiler.capture(step):
            profiler.step(step)
        profiler.stop()
    assert calls == [(str(running.run / "demand.json"), os.F_OK)] * 5


def test_unwritable_directory_disables_only_requests(
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


def test_failed_result_writes_are_logged_once(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = job(1)
    requests.create_request(running.store, 2, 1)

    def raise_no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stores, "write_new", raise_no_space)
    running.step(0, 1, 2, 3)
    assert caplog.text.count("Cannot answer a capture request: OSError: [Errno 28]") == 1
    monkeypatch.undo()
    running.step(4, 5, 6)
    assert running.read_step_ranges() == {"step6": (6, 6)}


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
def test_invalid_request_is_ignored(job: Callable[..., Job], caplog: pytest.LogCaptureFixture, text: str) -> None:
    running = job(1)
    (running.run / "demand.json").write_text(text)
    running.step(0, 1, 2, 3)
    assert (running.read_step_ranges(), len(list(running.run.iterdir()))) == ({}, 3)
    assert caplog.text.count("demand.json is not a capture request that this version of profdeck can read") == 1


def test_incomplete_request_is_read_at_the_next_step(job: Callable[..., Job]) -> None:
    """On file systems without hard links, a file exists before its content is written."""
    running = job(1)
    (running.run / "demand.json").touch()
    running.step(0, 1)
    request = OnDemandRequest(in_steps=1, steps=1)
    (running.run / "demand.json").write_bytes(requests.encode(request))
    running.step(2, 3)
    assert running.read_results(request) == [(True, ("step3",), None)]


@pytest.mark.parametrize("file", ["plan", "start"])
def test_incomplete_decision_is_read_at_the_next_step(job: Callable[..., Job], file: str) -> None:
    running = job(1, **{"trainer.warmup_steps": 1})
    request = requests.create_request(running.store, 3, 1)
    path = running.run / f"demand.{request.token}.{file}.json"
    if file == "start":
        running.step(0, 1)
    path.touch()
    running.step(2) if file == "start" else running.step(0, 1)
    plan = StepPlan(token=request.token, by="another process", first_step=3, last_step=3, at_step=0)
    path.write_bytes(
        requests.encode(
            plan if file == "plan" else StartDecision(token=request.token, begun=True, by="another process")
        )
    )
    running.step(3, 4) if file == "start" else running.step(2, 3, 4)
    assert running.read_results(request) == [(True, ("step3",), None)]
    assert running.read_step_ranges() == {"step3": (3, 3)}


def test_capture_is_missed_if_its_decision_stays_incomplete(job: Callable[..., Job]) -> None:
    running = job(1)
    request = requests.create_request(running.store, 2, 1)
    running.step(0)
    (running.run / f"demand.{request.token}.start.json").touch()
    running.step(1, 2, 3)
    assert running.read_results(request) == [(True, ("step2",), "it could not begin")]


# Process status.


def test_process_files_are_written_at_start_and_end(job: Callable[..., Job]) -> None:
    running = job()
    processes = requests.read_processes(running.store)
    assert [(process.name, process.is_gone, process.at) for process in processes] == [
        ("trainer rank 0", False, ProcessId()),
        ("trainer rank 1", False, ProcessId()),
    ]
    with running.ranks[0]:
        running.step(0)
    assert [process.is_gone for process in requests.read_processes(running.store)] == [True, False]
    running.step(1)  # the host uses the profiler again
    assert [process.is_gone for process in requests.read_processes(running.store)] == [False, False]
    running.ranks.pop()
    gc.collect()
    assert [process.is_gone for process in requests.read_processes(running.store)] == [False, True]


def test_newest_profiler_of_a_rank_writes_the_status(job: Callable[..., Job]) -> None:
    running = job(1)
    (first,) = running.ranks
    running.ranks = [running.create_profiler(0)]
    with first:
        pass
    (process,) = requests.read_processes(running.store)
    assert not process.is_gone


def test_forked_child_does_not_change_the_status_of_its_parent(job: Callable[..., Job]) -> None:
    running = job(1)
    pid = os.fork()
    if pid == 0:
        get_request_watch(running.ranks[0]).pause()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not requests.read_processes(running.store)[0].is_gone


def test_restarted_process_keeps_its_result(job: Callable[..., Job]) -> None:
    running = job(1)
    request = requests.create_request(running.store, 1, 1)
    running.step(0, 1)
    running.ranks = [running.create_profiler(0)]
    running.step(0, 1, 2)  # from a checkpoint before the capture
    assert running.read_results(request) == [(True, ("step1",), None)]
    assert running.read_step_ranges() == {"step1": (1, 1)}


def test_restarted_process_makes_the_pending_capture(job: Callable[..., Job]) -> None:
    running = job(1)
    request = requests.create_request(running.store, 3, 1)
    running.step(0, 1)
    running.ranks = [running.create_profiler(0)]
    running.step(1, 2, 3)
    assert running.read_results(request) == [(True, ("step3",), None)]


def test_restart_in_a_capture_of_stages_is_reported(job: Callable[..., Job]) -> None:
    running = job(1, mode="discrete")
    request = requests.create_request(running.store, 1, 2)
    for step in (0, 1):
        with running.ranks[0].capture(step), running.ranks[0].stage("work"):
            pass
    running.ranks = [running.create_profiler(0)]  # the first process was killed
    running.step(2)
    (process,) = requests.read_processes(running.store)
    assert (process.token, process.done, process.problem) == (request.token, True, None)
    assert process.captures == ("step1-work", "step1")
    assert process.incomplete is not None
    assert process.incomplete.startswith("the process was restarted during the capture")


def test_stages_of_an_interrupted_step_are_incomplete(job: Callable[..., Job]) -> None:
    running = job(1, mode="discrete")
    requests.create_request(running.store, 1, 1)
    running.step(0)
    profiler = running.ranks[0]
    profiler.start(1)
    with profiler.stage("work"):
        pass
    profiler.close()
    (process,) = requests.read_processes(running.store)
    assert process.incomplete == "step 1 was not completed: the profiler was closed in mid-capture"


def test_ranks_beyond_the_latest_world_size_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "run" / "processes").mkdir(parents=True)

    def write_process(rank: int, world_size: int, joined_ns: int, role: str = "trainer") -> None:
        process = JobProcess.from_identity(Identity(role=role, rank=rank, world_size=world_size), None, 0)
        path = tmp_path / "run" / "processes" / f"{role}.rank_{rank:04d}.json"
        path.write_bytes(requests.encode(attrs.evolve(process, joined_ns=joined_ns)))

    for rank in range(4):
        write_process(rank, 4, 10 + rank)
    for rank in range(2):
        write_process(rank, 2, 20 + rank)
    write_process(3, 4, 5, role="critic")
    assert [process.name for process in requests.read_processes(FileStore(tmp_path / "run"))] == [
        "critic rank 3", "trainer rank 0", "trainer rank 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({}, True),
        ({"process_started": "1"}, False),
        ({"pid": EXITED_PROCESS.pid}, False),
        ({"host": "another-host"}, None),
        ({"pid_namespace": "pid:[1]"}, None),
    ],
)
def test_process_is_alive_only_if_it_can_be_checked_on_this_host(changes: dict[str, Any], alive: bool | None) -> None:
    assert attrs.evolve(ProcessId(), **changes).alive is alive


def test_run_directory_exists_before_the_first_capture(job: Callable[..., Job]) -> None:
    running = job()
    assert (running.run / RUN_FILE).exists()
    assert [file.name for file in sorted((running.run / "processes").iterdir())] == [
        "trainer.rank_0000.json",
        "trainer.rank_0001.json",
    ]


# Planned steps.

spans = st.lists(
    st.one_of(
        st.integers(0, 30),
        st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda pair: f"{pair[0]}..{pair[0] + pair[1]}"),
        st.integers(1, 7).map(lambda every: f"every {every}"),
    ),
    max_size=3,
)


@given(specs=spans, final_step=st.none() | st.integers(0, 30), warmup_steps=st.integers(0, 3), random=st.randoms())
def test_begins_does_not_depend_on_the_order_of_calls(
    specs: list[Any], final_step: int | None, warmup_steps: int, random: Any
) -> None:
    """`PlannedSteps` caches a range of steps in which nothing begins."""
    schedule = Schedule.from_list(specs)
    steps = PlannedSteps(schedule, final_step, warmup_steps)
    queries = list(range(40))
    random.shuffle(queries)
    for step in queries:
        selected = [later for later in range(step, step + warmup_steps + 1) if steps.configures(later)]
        assert steps.begins(step) == ((selected[0], None) if selected else None)


def test_requested_capture_takes_precedence_over_the_schedule() -> None:
    steps = PlannedSteps(Schedule.from_list([5]), warmup_steps=2)
    assert steps.begins(2) is None
    demand = OnDemandSteps("0" * 16, 4, 6)
    steps.add(demand)
    assert steps.begins(2) == (4, demand)
    demand.begun = True
    assert steps.begins(3) == (5, None)
    assert steps.continues(4, 5, demand.token)
    assert not steps.continues(4, 6, demand.token)
    steps.remove(demand)
    assert not steps.continues(4, 4, demand.token)


def step_until(job: Job, is_done: Callable[[], bool]) -> None:
    """Run steps of a job until a condition is true."""
    pause, deadline_s = threading.Event(), time.monotonic() + 60
    for step in itertools.count():
        if is_done():
            return
        assert time.monotonic() < deadline_s
        job.step(step)
        pause.wait(0.01)


def test_timed_captures_record_the_same_steps_in_all_ranks(job: Callable[..., Job]) -> None:
    running = job(3, steps=["every 1 s for 2", 0])

    def read_complete_captures() -> dict[str, list[tuple[int, int]]]:
        """Return the first and last step of each rank's complete captures, by capture ID."""
        captures: dict[str, list[tuple[int, int]]] = {}
        for manifest in running.read_manifests().values():
            if manifest.status is Status.COMPLETE:
                captures.setdefault(manifest.capture, []).append((manifest.first_step, manifest.last_step))
        return captures

    step_until(running, lambda: sum(len(ranks) == 3 for ranks in read_complete_captures().values()) >= 3)
    first, second, *_ = [
        ranks for name, ranks in read_complete_captures().items() if name != "step0" and len(ranks) == 3
    ]
    assert all(ranks == [(ranks[0][0], ranks[0][0] + 1)] * 3 for ranks in (first, second))
    assert read_complete_captures()["step0"] == [(0, 0)] * 3
    assert read_run(running.run).problems == ()


def test_request_during_a_timed_capture_is_rejected(job: Callable[..., Job]) -> None:
    running = job(1, steps=["every 1 s"])
    pause, deadline_s = threading.Event(), time.monotonic() + 60
    while running.store.read(requests.REQUEST) is None:  # without steps, the request stays pending
        assert time.monotonic() < deadline_s
        pause.wait(0.01)
    with pytest.raises(CaptureError, match="A scheduled capture of this run is in progress"):
        requests.create_request(running.store, 2, 1)


def test_lost_process_does_not_end_timed_captures(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is on another host, so its end cannot be detected."""
    monkeypatch.setattr(timed_captures, "_MIN_TIMEOUT_S", 1.0)
    running = job(1, steps=["every 1 s"])
    lost_process = JobProcess(
        role="rollout", replica=0, rank=0, world_size=1, target=None, warmup_steps=0, at=REMOTE_PROCESS
    )
    running.store.put(f"{requests.PROCESSES}rollout.replica_000.rank_0000.json", requests.encode(lost_process))
    step_until(running, lambda: len(running.read_step_ranges()) > 2)


def test_timed_captures_require_on_demand(job: Callable[..., Job]) -> None:
    with pytest.raises(ConfigError, match="'every 1 s' requires on-demand requests, but on_demand is false"):
        job(1, steps=["every 1 s"], on_demand=False)
