"""Recording in one engine process: complete windows, separate batch kinds, and no exceptions raised into the engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from hypothesis import example, given, strategies as st

from open_captures import count_open, end_process, wait_for_files
from processes import until
from profdeck import Status
from profdeck.base import leases
from profdeck.base.errors import CaptureError, TargetError
from profdeck.base.identity import Identity
from profdeck.config.schedule import Iterations
from profdeck.config.structuring import structure
from profdeck.engine.worker import file_writer
from profdeck.engine.worker.device import device_backend
from profdeck.engine.worker.recorder import EngineRecorder, reply_data
from profdeck.records.request import BatchKind, CaptureRequest, Recorded, Reply, RequestState
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ConfigError, UnknownPluginError

Ask = Callable[..., CaptureRequest]

P, D, M = BatchKind


@pytest.fixture(autouse=True)
def no_iterations_before_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is served in these tests."""
    monkeypatch.setattr(file_writer, "SERVE_S", 0.0)


@pytest.fixture
def recorder(tally: ModuleType) -> Iterator[EngineRecorder]:
    """Return the recorder of the only rank of an engine."""
    made = EngineRecorder(Identity(), "tally-device", {"toy-engine": "1.0"})
    yield made
    tally.TallyBackend.may_write.set()
    end(made)


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Ask for a capture below tmp_path/run; further arguments are options of the device's backend."""
    fields = {field.name for field in attrs.fields(CaptureRequest)}

    def make(count: int | None = None, skip: int = 0, **given: Any) -> CaptureRequest:
        own = {key: given.pop(key) for key in fields & given.keys()}
        iterations = None if count is None else Iterations(count=count, skip=skip)
        defaults = {"id": "step1", "output": tmp_path, "run": "run", "role": "rollout", "first_step": 1}
        return CaptureRequest(**{**defaults, "iterations": iterations, "options": given, **own})

    return make


def iterate(recorder: EngineRecorder, batches: Iterable[BatchKind | None], first: int = 0) -> None:
    for number, batch in enumerate(batches, first):
        recorder.begin(batch, f"it{number}")
        recorder.end()


def end(recorder: EngineRecorder) -> Reply:
    recorder.stop()
    return wait_for_files(recorder)


def manifests(path: Path) -> dict[str, dict[str, Any]]:
    found = [
        json.loads(file.read_text())
        for file in path.glob("run/step_*/**/rank_*.json")
        if not file.name.endswith(".trace.json")
    ]
    return {manifest["capture"]: manifest for manifest in found}


def recorded(path: Path) -> dict[str, list[int]]:
    """Read the iterations that each trace holds, by capture."""
    found = {}
    for file in sorted(path.glob("run/step_*/**/*.trace.json")):
        names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
        found[file.name.split(".")[1]] = [int(name[2:]) for name in names if name.startswith("it")]
    return found


def ranges(path: Path) -> dict[str, list[int]]:
    return {name: manifest["artifacts"][0]["iterations"] for name, manifest in manifests(path).items()}


# What is recorded.


def test_from_start_to_stop(recorder: EngineRecorder, ask: Ask, tmp_path: Path) -> None:
    recorder.start(ask())
    assert (recorder.active, recorder.reply().state) == (True, RequestState.ARMED)
    assert manifests(tmp_path)["step1"]["status"] == "recording"
    iterate(recorder, [P, D, M])
    assert recorder.reply().state is RequestState.RECORDING
    reply = end(recorder)
    assert (reply.state, reply.iterations, reply.problems) == (RequestState.ENDED, 3, ())
    assert not recorder.active
    assert recorded(tmp_path) == {"step1": [0, 1, 2]}
    manifest = manifests(tmp_path)["step1"]
    assert manifest["status"] == "complete"
    assert (manifest["backend"], manifest["versions"], manifest["request"]) == ("tally", {"toy-engine": "1.0"}, "step1")
    assert (manifest["role"], manifest["target"], manifest["iterations"]) == ("rollout", None, None)
    assert manifest["artifacts"][0]["iterations"] == [0, 2]
    (file,) = reply.captures[0].files
    assert Path(file).is_file()
    assert Path(reply.captures[0].manifest).is_file()
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())


def test_the_backend_is_told_which_iteration_has_ended(
    tally: ModuleType, recorder: EngineRecorder, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(tally.TallyBackend, "perform", lambda _, _name, call: calls.append(call))
    recorder.start(ask(3, 2))
    iterate(recorder, [D] * 9)
    assert calls == ["start step1", "step step1 engine_iteration 2", "step step1 engine_iteration 3", "stop step1"]


def test_a_stop_after_the_end_is_harmless_and_a_later_start_works(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path
) -> None:
    recorder.stop()
    recorder.start(ask(1))
    iterate(recorder, [D] * 2)
    for _ in range(2):
        recorder.stop("too late")
        assert wait_for_files(recorder).problems == ()
    recorder.start(ask(2, 1, id="step2", first_step=2))
    assert recorder.reply().iterations == 0
    iterate(recorder, [D] * 4)
    assert wait_for_files(recorder).iterations == 2
    recorder.start(ask(1))  # the same again
    iterate(recorder, [D])
    assert [capture.id for capture in wait_for_files(recorder).captures] == ["step1-take2"]
    assert recorded(tmp_path) == {"step1": [0], "step1-take2": [0], "step2": [1, 2]}
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_an_iteration_without_a_name_and_an_end_without_a_begin(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path
) -> None:
    recorder.end()
    recorder.begin(D, "it0")
    recorder.start(ask(2))
    recorder.begin(D, "")
    recorder.end()
    recorder.begin(D, "it1")
    recorder.end()
    assert wait_for_files(recorder).iterations == 2
    assert recorded(tmp_path) == {"step1": [1]}


def test_a_process_without_iterations_records_at_once(recorder: EngineRecorder, ask: Ask, tmp_path: Path) -> None:
    recorder.start(ask(), at_once=True)
    assert recorder.reply().state is RequestState.RECORDING
    reply = end(recorder)
    assert (reply.state, reply.captures[0].status) == (RequestState.ENDED, Status.COMPLETE)
    assert manifests(tmp_path)["step1"]["status"] == "complete"


def test_a_rank_that_is_not_selected_stays_idle(recorder: EngineRecorder, ask: Ask, tmp_path: Path) -> None:
    recorder.start(ask(1, ranks=(1, 3)))
    assert not recorder.active
    iterate(recorder, [D] * 3)
    reply = end(recorder)
    assert (reply.state, reply.request, reply.iterations, reply.captures) == (RequestState.IDLE, "step1", 0, ())
    assert list(tmp_path.iterdir()) == []


def test_the_ranks_that_should_record_are_in_every_manifest(tally: ModuleType, ask: Ask, tmp_path: Path) -> None:
    for rank in (0, 2):
        recorder = EngineRecorder(Identity(rank=rank, world_size=4, parallel={"tp": rank}), "tally-device", {})
        recorder.start(ask(1, ranks=(0, 2, 3, 9), replica=5))
        iterate(recorder, [D])
        wait_for_files(recorder)
    assert manifests(tmp_path)["step1"]["expected_ranks"] == [0, 2, 3]
    (capture,) = read_run(tmp_path / "run").captures
    assert (capture.role, capture.replica) == ("rollout", 5)
    assert {rank.rank: rank.status for rank in capture.ranks} == {
        0: Status.COMPLETE,
        2: Status.COMPLETE,
        3: Status.MISSING,
    }


def test_running_requests_are_served_between_the_stop_and_the_writing(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "SERVE_S", 0.3)
    recorder.start(ask(1, write_later=True))
    iterate(recorder, [D])
    stopped_ns = time.time_ns()
    wait_for_files(recorder)
    (trace,) = tmp_path.glob("run/step_*/**/*.trace.json")
    assert trace.stat().st_mtime_ns - stopped_ns > 0.25e9


# Kinds of batches apart.


def test_kinds_have_captures_and_counts_of_their_own(recorder: EngineRecorder, ask: Ask, tmp_path: Path) -> None:
    recorder.start(ask(2, 1, batch_kinds=(P, D, M)))
    assert not list(tmp_path.glob("run/step_*/**/rank_*"))  # their captures come with their batches
    iterate(recorder, [P, P, D, D, P, M, D, D, M])
    assert recorder.active  # a mixed one is still wanted
    iterate(recorder, [P, D, M, M], 9)
    assert not recorder.active
    reply = wait_for_files(recorder)
    assert (reply.iterations, reply.problems) == (6, ())
    assert recorded(tmp_path) == {
        "step1-prefill": [1],
        "step1-decode": [3],
        "step1-prefill-2": [4],
        "step1-decode-2": [6],
        "step1-mixed": [8],
        "step1-mixed-2": [11],
    }
    assert ranges(tmp_path) == {name: [run[0], run[-1]] for name, run in recorded(tmp_path).items()}
    assert {name: manifest["stage"] for name, manifest in manifests(tmp_path).items()} == {
        name: name.split("-")[1] for name in recorded(tmp_path)
    }
    assert {capture.id for capture in reply.captures} == set(recorded(tmp_path))
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())


def test_kinds_are_not_missing_on_a_rank_whose_batches_differ(tally: ModuleType, ask: Ask, tmp_path: Path) -> None:
    """Data-parallel ranks run batches of their own."""
    for rank, batches in ((0, [P, D, P, D]), (1, [P, P, D, D])):
        recorder = EngineRecorder(Identity(rank=rank, world_size=2, parallel={"dp": rank}), "tally-device", {})
        recorder.start(ask(2, batch_kinds=(P, D), ranks="all"))
        iterate(recorder, batches)
        assert wait_for_files(recorder).iterations == 4
    report = read_run(tmp_path / "run")
    assert {rank.status for capture in report.captures for rank in capture.ranks} == {Status.COMPLETE}


def test_a_kind_that_never_came(recorder: EngineRecorder, ask: Ask, tmp_path: Path) -> None:
    recorder.start(ask(2, batch_kinds=(M,)))
    iterate(recorder, [P, D])
    assert end(recorder).problems == ("Only 0 of 2 mixed iterations ran before the stop.",)
    recorder.start(ask(2, batch_kinds=(P, D, M)))  # if all kinds are requested, none of them is required
    iterate(recorder, [D, D])
    assert recorder.active
    reply = end(recorder)
    assert (reply.problems, [capture.id for capture in reply.captures]) == ((), ["step1-decode"])


# Ends before their time.


@pytest.mark.parametrize(
    ("skip", "ran", "reason", "problem"),
    [
        (0, 0, None, "No engine iteration ran between start and stop."),
        (5, 0, None, "No engine iteration ran between start and stop."),
        (5, 3, None, "It was stopped after 3 iterations, before its window started."),
        (5, 3, "the engine shut down", "The engine shut down."),
        (0, 0, "the engine shut down", "The engine shut down."),
    ],
)
def test_a_window_that_is_never_reached_has_failed(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path, skip: int, ran: int, reason: str | None, problem: str
) -> None:
    recorder.start(ask(2, skip))
    iterate(recorder, [D] * ran)
    recorder.stop(reason)
    reply = wait_for_files(recorder)
    assert (reply.state, reply.captures[0].status, reply.captures[0].files) == (RequestState.ENDED, Status.FAILED, ())
    manifest = manifests(tmp_path)["step1"]
    assert (manifest["status"], manifest["problems"]) == ("failed", [problem])
    recorder.start(ask(1, id="next"))
    iterate(recorder, [D])
    assert wait_for_files(recorder).captures[0].status is Status.COMPLETE


@pytest.mark.parametrize("reason", [None, "the engine shut down"])
def test_a_short_window_is_partial(recorder: EngineRecorder, ask: Ask, tmp_path: Path, reason: str | None) -> None:
    recorder.start(ask(5, 1))
    iterate(recorder, [D] * 3)
    recorder.stop(reason)
    reply = wait_for_files(recorder)
    assert (reply.iterations, reply.captures[0].status) == (2, Status.PARTIAL)
    assert "Only 2 of 5 iterations ran before the stop." in reply.problems
    manifest = manifests(tmp_path)["step1"]
    said = "The engine shut down." if reason else "Only 2 of 5 iterations ran before the stop."
    assert (manifest["status"], manifest["problems"]) == ("partial", [said])
    assert recorded(tmp_path) == {"step1": [1, 2]}
    assert read_run(tmp_path / "run").status is Status.PARTIAL


def test_a_short_window_of_a_kind_names_the_kind(recorder: EngineRecorder, ask: Ask, tmp_path: Path) -> None:
    recorder.start(ask(3, batch_kinds=(P, D, M)))
    iterate(recorder, [P, D, D])
    problems = end(recorder).problems
    assert problems == (
        "Only 1 of 3 prefill iterations ran before the stop.",
        "Only 2 of 3 decode iterations ran before the stop.",
    )
    assert manifests(tmp_path)["step1-decode"]["status"] == "partial"


def test_the_reason_is_said_once_and_alike(recorder: EngineRecorder, ask: Ask) -> None:
    recorder.start(ask())
    iterate(recorder, [D])
    recorder.stop("the engine shut down in mid-capture")
    reply = wait_for_files(recorder)
    assert reply.problems == reply.captures[0].problems == ("The engine shut down in mid-capture.",)


def test_a_stop_inside_of_an_iteration(recorder: EngineRecorder, ask: Ask, tmp_path: Path) -> None:
    recorder.start(ask(9))
    iterate(recorder, [D])
    recorder.begin(D, "it1")
    recorder.stop("now")
    recorder.end()
    reply = wait_for_files(recorder)
    assert (reply.state, reply.captures[0].status) == (RequestState.ENDED, Status.PARTIAL)
    assert recorded(tmp_path) == {"step1": [0, 1]}


def elsewhere(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("reason", [None, "the engine shut down"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_stop_from_another_thread_is_pending_until_the_next_iteration(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path, reason: str | None, inside: bool
) -> None:
    recorder.start(ask())
    iterate(recorder, [D])
    if inside:
        recorder.begin(D, "it1")
    for _ in range(2):
        elsewhere(lambda: recorder.stop(reason))
    replies: list[Reply] = []
    elsewhere(lambda: replies.append(recorder.reply()))
    (reply,) = replies
    said = f" ({reason})" if reason else ""
    assert reply.state is RequestState.RECORDING
    assert reply.problems == (f"The stop is deferred until the engine's next iteration{said}.",)
    pending = manifests(tmp_path)["step1"]
    assert pending["status"] == "recording"
    (note,) = pending["notes"]
    assert note == "The stop was requested in another thread and is deferred until the engine's next iteration."
    recorder.end() if inside else recorder.begin(D, "it1")
    assert not recorder.active
    assert wait_for_files(recorder).problems == (("The engine shut down.",) if reason else ())
    manifest = manifests(tmp_path)["step1"]
    assert (manifest["status"], manifest["notes"]) == ("partial" if reason else "complete", [note])
    assert recorded(tmp_path) == {"step1": [0, 1] if inside else [0]}


def test_a_stop_from_another_thread_is_carried_out_where_that_does_no_harm(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path
) -> None:
    recorder.start(ask(5, 1))
    iterate(recorder, [D])
    elsewhere(recorder.stop)  # armed: nothing records yet
    assert recorder.reply().state is RequestState.ENDED
    recorder.start(ask(id="free", thread_bound=False))
    iterate(recorder, [D])
    elsewhere(recorder.stop)
    assert not recorder.active
    wait_for_files(recorder)
    recorder.start(ask(id="frontend"), at_once=True)  # it has no iteration to wait for
    elsewhere(recorder.stop)
    assert wait_for_files(recorder).state is RequestState.ENDED
    assert {name: found["status"] for name, found in manifests(tmp_path).items()} == {
        "step1": "failed",
        "free": "complete",
        "frontend": "complete",
    }


def test_the_thread_that_records_may_be_another_than_the_one_that_started(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path
) -> None:
    recorder.start(ask())
    elsewhere(lambda: iterate(recorder, [D]))
    recorder.stop()
    assert recorder.active
    elsewhere(lambda: iterate(recorder, [D], 1))
    assert wait_for_files(recorder).state is RequestState.ENDED
    assert recorded(tmp_path) == {"step1": [0]}


@pytest.mark.parametrize("command", ["status", "start", "stop"])
def test_command_to_an_idle_engine_enforces_max_capture_s(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path, command: str
) -> None:
    recorder.start(ask(max_capture_s=0.1))
    iterate(recorder, [D])
    time.sleep(0.1)
    assert recorder.active
    if command == "start":
        with contextlib.suppress(TargetError):  # the files of the first capture may not be complete
            recorder.start(ask(id="step2", first_step=2))
    elif command == "stop":
        recorder.stop()
    else:
        recorder.reply()
    wait_for_files(recorder)
    manifest = manifests(tmp_path)["step1"]
    assert manifest["status"] == "partial"
    assert manifest["problems"] == ["It was not stopped within max_capture_s=0.1 seconds."]


@pytest.mark.parametrize("how", ["next iteration", "end of an iteration", "stop"])
def test_too_long_a_recording_of_another_thread_ends_there(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path, how: str
) -> None:
    active: list[bool] = []
    begun, go_on = threading.Event(), threading.Event()

    def engine() -> None:
        recorder.start(ask(max_capture_s=0.1))
        iterate(recorder, [D])
        if how == "end of an iteration":
            recorder.begin(D, "it1")
        begun.set()
        go_on.wait()
        active.append(recorder.active)
        if how == "next iteration":
            recorder.begin(D, "it1")
        recorder.end() if how != "stop" else recorder.stop()
        active.append(recorder.active)

    thread = threading.Thread(target=engine)
    thread.start()
    begun.wait()
    late = "It was not stopped within max_capture_s=0.1 seconds"
    pending = f"The stop is deferred until the engine's next iteration (it{late[2:]})."
    until(lambda: recorder.reply().problems == (pending,))
    go_on.set()
    thread.join()
    assert active == [True, False]
    wait_for_files(recorder)
    assert manifests(tmp_path)["step1"]["problems"] == [f"{late}."]
    assert recorded(tmp_path) == {"step1": [0, 1] if how == "end of an iteration" else [0]}


def test_armed_too_long_ends_as_well(recorder: EngineRecorder, ask: Ask, tmp_path: Path) -> None:
    recorder.start(ask(1, 5, max_capture_s=0.02))
    until(lambda: recorder.reply().state is not RequestState.ARMED)
    assert wait_for_files(recorder).state is RequestState.ENDED
    assert manifests(tmp_path)["step1"]["problems"] == ["It was not stopped within max_capture_s=0.02 seconds."]


# What is refused.


@pytest.mark.parametrize("state", [RequestState.ARMED, RequestState.RECORDING, RequestState.WRITING])
def test_a_second_start_is_refused_and_the_first_one_goes_on(
    tally: ModuleType, recorder: EngineRecorder, ask: Ask, tmp_path: Path, state: RequestState
) -> None:
    tally.TallyBackend.may_write.clear()
    recorder.start(ask(3, 1, write_later=True))
    iterate(recorder, [D] * {RequestState.ARMED: 1, RequestState.RECORDING: 2, RequestState.WRITING: 4}[state])
    assert recorder.reply().state is state
    before = recorder.reply()
    for rank in (0, 5):
        with pytest.raises(CaptureError, match=f"Capture second cannot start while capture step1 is {state} in this"):
            recorder.start(ask(1, id="second", ranks=(rank,)))
    assert recorder.reply() == before
    iterate(recorder, [D] * (4 - before.iterations), 4)
    tally.TallyBackend.may_write.set()
    reply = wait_for_files(recorder)
    assert (reply.request, reply.state, reply.iterations, reply.problems) == ("step1", RequestState.ENDED, 3, ())
    (manifest,) = manifests(tmp_path).values()
    assert (manifest["status"], manifest["problems"]) == ("complete", [])
    assert manifest["notes"] == ["A second start (second) was refused."] * 2
    recorder.start(ask(1, id="second"))
    iterate(recorder, [D])
    assert wait_for_files(recorder).captures[0].status is Status.COMPLETE


def test_the_engine_goes_on_while_files_are_written(
    tally: ModuleType, recorder: EngineRecorder, ask: Ask, tmp_path: Path
) -> None:
    tally.TallyBackend.may_write.clear()
    recorder.start(ask(1, batch_kinds=(P, D), write_later=True))
    iterate(recorder, [P])
    assert recorder.reply().captures[0].status is Status.RECORDING
    iterate(recorder, [M, D], 1)  # the next kind is recorded meanwhile
    reply = recorder.reply()
    assert (reply.state, reply.iterations, recorder.active) == (RequestState.WRITING, 2, False)
    assert not list(tmp_path.rglob("*.trace.json"))
    tally.TallyBackend.may_write.set()
    assert [capture.status for capture in wait_for_files(recorder).captures] == [Status.COMPLETE, Status.COMPLETE]
    assert recorded(tmp_path) == {"step1-prefill": [0], "step1-decode": [2]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fail_on": "start"}, "options: unknown key 'fail_on'. Did you mean 'fail_at'?"),
        ({"record_shapes": 1}, "options.record_shapes: expected true or false"),
        ({"max_capture_s": 0}, "'max_capture_s' must be > 0"),
    ],
)
def test_wrong_options_are_refused(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recorder.start(ask(1, options=options))
    assert message in str(caught.value)
    assert not recorder.active
    assert list(tmp_path.iterdir()) == []


def test_a_refused_start_changes_nothing(recorder: EngineRecorder, ask: Ask) -> None:
    recorder.start(ask(1))
    iterate(recorder, [D])
    before = wait_for_files(recorder)
    with pytest.raises(ConfigError):
        recorder.start(ask(1, id="second", nonsense=1))
    assert recorder.reply() == before


def test_a_device_that_nobody_records(tally: ModuleType, ask: Ask, tmp_path: Path) -> None:
    recorder = EngineRecorder(Identity(), "abacus", {})
    with pytest.raises(UnknownPluginError, match="No installed backend records the device type 'abacus'"):
        recorder.start(ask(1))
    assert list(tmp_path.iterdir()) == []
    assert device_backend("tally-device") is tally.TallyBackend


def test_a_directory_of_leases_that_cannot_be_used(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(leases.DIRECTORY_VARIABLE, "/proc/profdeck")
    with pytest.raises(CaptureError, match="The device cannot be leased: FileNotFoundError"):
        recorder.start(ask(1, device="gpu-1"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stages", [(), (P, D)])
def test_a_file_in_the_way(recorder: EngineRecorder, ask: Ask, tmp_path: Path, stages: tuple[BatchKind, ...]) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(CaptureError, match="cannot write to"):
        recorder.start(ask(1, batch_kinds=stages))
    assert not recorder.active
    assert (tmp_path / "run").read_text() == "in the way"


@pytest.mark.parametrize("link", ["run", "run/step_000001", "run/step_000001/rollout"])
def test_a_link_out_of_the_output_directory(
    recorder: EngineRecorder, ask: Ask, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, link: str
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(elsewhere)
    with pytest.raises(CaptureError, match="outside of the output directory"):
        recorder.start(ask(1))
    assert not recorder.active
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("why", ["options", "directory", "at once", "at once, and taken"])
def test_a_refused_start_leaves_nothing_behind(recorder: EngineRecorder, ask: Ask, tmp_path: Path, why: str) -> None:
    before, watched = set(threading.enumerate()), count_open()
    handler = signal.getsignal(signal.SIGTERM)
    held = leases.acquire_lease(["gpu-1"], holder="trainer")
    request = {
        "options": ask(nonsense=1, device="gpu-2"),
        "directory": ask(output=Path("/proc/x"), device="gpu-2"),
        "at once": ask(fail_at="start", device="gpu-2"),
        "at once, and taken": ask(device="gpu-1"),  # it has no iteration at which it could try again
    }[why]
    with pytest.raises((CaptureError, ConfigError)):
        recorder.start(request, at_once=why.startswith("at once"))
    held.release()
    leases.acquire_lease(["gpu-1", "gpu-2"], holder="trainer").release()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) == before
    assert count_open() == watched
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not list(tmp_path.rglob("*.tmp"))
    left = {"at once": ["failed"], "at once, and taken": ["missing"]}
    assert [manifest["status"] for manifest in manifests(tmp_path).values()] == left.get(why, [])
    recorder.start(ask(1))
    iterate(recorder, [D])
    assert wait_for_files(recorder).captures[0].status is Status.COMPLETE


# What fails in mid-capture.


@pytest.mark.parametrize("stages", [(), (D,)])
@pytest.mark.parametrize(
    ("hook", "status"), [("start", "failed"), ("step", "partial"), ("stop", "failed"), ("write", "failed")]
)
def test_a_backend_that_fails_never_reaches_the_engine(
    recorder: EngineRecorder,
    ask: Ask,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    hook: str,
    status: str,
    stages: tuple[BatchKind, ...],
) -> None:
    with caplog.at_level(logging.WARNING, "profdeck"):
        recorder.start(ask(2, fail_at=hook, batch_kinds=stages))
        iterate(recorder, [D] * 4)
        reply = end(recorder)
    (capture,) = reply.captures
    assert (reply.state, capture.status) == (RequestState.ENDED, status)
    assert f"RuntimeError: {hook} does not work" in " ".join((*reply.problems, *capture.problems))
    (manifest,) = manifests(tmp_path).values()
    assert manifest["status"] == status
    assert f"RuntimeError: {hook} does not work" in " ".join(manifest["problems"])
    if hook == "start":
        assert f"{hook} does not work" in caplog.text
    recorder.start(ask(1, id="next", batch_kinds=stages))
    iterate(recorder, [D])
    reply = wait_for_files(recorder)
    assert (reply.problems, reply.captures[0].status) == ((), Status.COMPLETE)


def test_a_writer_that_fails(recorder: EngineRecorder, ask: Ask, tmp_path: Path) -> None:
    recorder.start(ask(1, fail_at="write", write_later=True))
    iterate(recorder, [D])
    reply = wait_for_files(recorder)
    assert (reply.state, reply.captures[0].status) == (RequestState.ENDED, Status.FAILED)
    assert "RuntimeError: write does not work" in manifests(tmp_path)["step1"]["problems"][0]


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_a_backend_whose_hooks_are_coroutines_is_reported(
    tally: ModuleType, recorder: EngineRecorder, ask: Ask, tmp_path: Path, hook: str
) -> None:
    """They cannot be awaited in an engine's loop; all else is as with any failure."""

    async def later(_: object, capture: object) -> None:
        await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patch:
        hooks = ["start", "step", "stop"]
        for name in hooks[hooks.index(hook) :]:
            patch.setattr(tally.TallyBackend, f"profile_{name}", tally.hookimpl(later))
        recorder.start(ask(2))
        iterate(recorder, [D] * (1 if hook == "stop" else 3))
        reply = end(recorder)
    assert reply.state is RequestState.ENDED
    assert reply.problems
    assert len(reply.captures) == 1
    assert manifests(tmp_path)["step1"]["status"] == "failed"
    recorder.start(ask(1))
    iterate(recorder, [D])
    assert wait_for_files(recorder).captures[0].status is Status.COMPLETE


@pytest.mark.parametrize("part", ["make", "enter", "exit"])
def test_a_mark_that_fails_is_reported_once(
    tally: ModuleType,
    recorder: EngineRecorder,
    ask: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
) -> None:
    class Mark:
        def __init__(self, _: str) -> None:
            self._do("make")

        def __enter__(self) -> None:
            self._do("enter")

        def __exit__(self, *_: object) -> None:
            self._do("exit")

        def _do(self, here: str) -> None:
            if here == part:
                raise RuntimeError("no marks here")

    monkeypatch.setattr(tally.TallyBackend, "mark_stage", Mark)
    recorder.start(ask(4))
    iterate(recorder, [D] * 4)
    reply = end(recorder)
    assert reply.problems == ("RuntimeError: no marks here",)
    assert manifests(tmp_path)["step1"]["status"] == "partial"


def test_an_artifact_in_a_place_of_its_own_does_not_hide_the_end(
    tally: ModuleType, recorder: EngineRecorder, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that writes elsewhere breaks its contract, which must be seen."""
    recorder.start(ask(1))
    monkeypatch.setattr("profdeck.records.capture.CaptureRecord.artifact_path", lambda *_: tmp_path / "away.trace.json")
    iterate(recorder, [D])
    reply = wait_for_files(recorder)
    assert (reply.state, reply.captures[0].status) == (RequestState.ENDED, Status.FAILED)
    assert manifests(tmp_path)["step1"]["status"] == "failed"
    assert "away.trace.json" in " ".join(manifests(tmp_path)["step1"]["problems"])


def test_a_manifest_that_cannot_be_written_is_logged(
    tally: ModuleType, recorder: EngineRecorder, ask: Ask, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    stop = tally.TallyBackend.profile_stop

    def odd(self: Any, capture: Any) -> Any:
        return [attrs.evolve(artifact, kind=object()) for artifact in stop(self, capture)]

    monkeypatch.setattr(tally.TallyBackend, "profile_stop", tally.hookimpl(odd))
    recorder.start(ask(1))
    iterate(recorder, [D])
    reply = wait_for_files(recorder)
    assert reply.state is RequestState.ENDED
    assert "TypeError" in reply.captures[0].problems[0]
    assert "rank_0000.step1.json cannot be written: TypeError" in caplog.text


def test_a_directory_that_goes_away_while_armed(recorder: EngineRecorder, ask: Ask, tmp_path: Path) -> None:
    recorder.start(ask(1, batch_kinds=(D,)))
    (tmp_path / "run" / "step_000001" / "rollout").rmdir()
    (tmp_path / "run" / "step_000001").rmdir()
    (tmp_path / "run" / "step_000001").write_text("in the way")
    iterate(recorder, [D] * 2)
    reply = wait_for_files(recorder)
    assert (reply.state, reply.captures, recorder.active) == (RequestState.ENDED, (), False)
    assert "cannot write to" in reply.problems[0]


# Replies.


def test_replies_are_plain_data(tally: ModuleType, recorder: EngineRecorder, ask: Ask) -> None:
    replies = [recorder.reply("it is refused")]
    tally.TallyBackend.may_write.clear()
    recorder.start(ask(3, 1, write_later=True))
    replies.append(recorder.reply())
    iterate(recorder, [D] * 2)
    replies.append(recorder.reply())
    recorder.stop("enough")
    replies.append(recorder.reply())
    tally.TallyBackend.may_write.set()
    replies.append(wait_for_files(recorder))
    assert [reply.state for reply in replies] == [*RequestState]
    for reply in replies:
        assert structure(json.loads(json.dumps(reply_data(reply))), Reply, where="") == reply
    assert reply_data(replies[0])["error"] == "it is refused"
    (recorded,) = replies[-1].captures
    assert isinstance(recorded, Recorded)
    assert (recorded.status, recorded.events, recorded.size_bytes > 0) == (Status.PARTIAL, 2, True)


def test_a_reply_says_who_answers(tally: ModuleType) -> None:
    reply = EngineRecorder(Identity(rank=3, world_size=4, host="h", pid=7), "tally-device", {}).reply()
    assert (reply.rank, reply.world_size, reply.host, reply.pid, reply.state) == (3, 4, "h", 7, RequestState.IDLE)


# The end of the process. What needs a process of its own is in tests/integration/test_engine_exits.py.


def test_the_exits_are_watched_until_the_files_are_whole(tally: ModuleType, recorder: EngineRecorder, ask: Ask) -> None:
    before = signal.getsignal(signal.SIGTERM)
    tally.TallyBackend.may_write.clear()
    recorder.start(ask(1, write_later=True))
    assert signal.getsignal(signal.SIGTERM) is not before
    iterate(recorder, [D])
    assert recorder.reply().state is RequestState.WRITING
    assert signal.getsignal(signal.SIGTERM) is not before
    tally.TallyBackend.may_write.set()
    wait_for_files(recorder)
    assert signal.getsignal(signal.SIGTERM) is before
    assert count_open() == 0


def test_the_next_start_forgets_the_last_one(recorder: EngineRecorder, ask: Ask) -> None:
    """Start new captures without calling `EngineRecorder.reply` after the previous ones."""

    def is_started(request: CaptureRequest) -> bool:
        with contextlib.suppress(TargetError):  # the files of the last capture may not be complete
            recorder.start(request)
            return True
        return False

    for number in range(3):
        until(functools.partial(is_started, ask(1, id=f"n{number}")))
        iterate(recorder, [D])
    until(functools.partial(is_started, ask(1, ranks=(1,))))
    assert count_open() == 0


@pytest.mark.parametrize("moment", ["armed", "between", "inside"])
def test_an_exit_ends_it_at_once(recorder: EngineRecorder, ask: Ask, tmp_path: Path, moment: str) -> None:
    recorder.start(ask(5))
    if moment != "armed":
        iterate(recorder, [D])
    if moment == "inside":
        recorder.begin(D, "it1")
    assert end_process("SIGTERM in mid-capture")
    assert count_open() == 0
    assert (recorder.active, recorder.reply().state) == (False, RequestState.ENDED)
    manifest = manifests(tmp_path)["step1"]
    assert manifest["problems"] == ["SIGTERM in mid-capture."]
    assert manifest["status"] == ("failed" if moment == "armed" else "partial")
    recorder.end()


@pytest.fixture
def terminated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the SIGTERMs that reach the host."""
    seen: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_a_signal_during_a_hook_is_delivered_when_it_has_ended(
    tally: ModuleType,
    terminated: list[int],
    recorder: EngineRecorder,
    ask: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
) -> None:
    do = tally.TallyBackend.perform

    def interrupted(self: Any, name: str, call: str) -> None:
        do(self, name, call)
        if name == hook:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not terminated

    monkeypatch.setattr(tally.TallyBackend, "perform", interrupted)
    recorder.start(ask(3))
    iterate(recorder, [D] * 4)
    assert terminated == [signal.SIGTERM]
    assert (recorder.active, count_open()) == (False, 0)
    manifest = manifests(tmp_path)["step1"]
    assert manifest["status"] == ("complete" if hook == "stop" else "partial")
    assert manifest["artifacts"][0]["whole"]
    # The iteration that was under way is whole as well.
    assert recorder.reply().iterations == {"start": 1, "step": 2, "stop": 3}[hook]


def test_a_signal_during_a_start_at_once(
    tally: ModuleType,
    terminated: list[int],
    recorder: EngineRecorder,
    ask: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No iteration follows that could end it."""
    do = tally.TallyBackend.perform

    def interrupted(self: Any, name: str, call: str) -> None:
        do(self, name, call)
        if name == "start":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(tally.TallyBackend, "perform", interrupted)
    recorder.start(ask(), at_once=True)
    assert terminated == [signal.SIGTERM]
    assert (recorder.active, recorder.reply().state) == (False, RequestState.ENDED)
    assert manifests(tmp_path)["step1"]["problems"] == ["SIGTERM in mid-capture."]


def test_a_signal_while_files_are_written_waits_for_them(
    tally: ModuleType, terminated: list[int], recorder: EngineRecorder, ask: Ask, tmp_path: Path
) -> None:
    tally.TallyBackend.may_write.clear()
    recorder.start(ask(1, write_later=True))
    iterate(recorder, [D])
    threading.Timer(0.01, tally.TallyBackend.may_write.set).start()
    os.kill(os.getpid(), signal.SIGTERM)
    assert terminated == [signal.SIGTERM]
    assert manifests(tmp_path)["step1"]["status"] == "complete"


def test_a_question_takes_no_lock_that_an_exit_waits_for(tally: ModuleType, recorder: EngineRecorder, ask: Ask) -> None:
    """A signal may interrupt the question, and its handler waits for the files in the same thread."""
    tally.TallyBackend.may_write.clear()
    recorder.start(ask(1, write_later=True))
    iterate(recorder, [D])
    assert recorder._job is not None
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(recorder.reply()), daemon=True)
    with recorder._job._writer._futures[0]._condition:
        thread.start()
        thread.join(10)
    assert [reply.state for reply in replies] == [RequestState.WRITING]


# Any order of batches.


def model(
    batches: Sequence[BatchKind], count: int | None, skip: int, stages: Sequence[BatchKind]
) -> tuple[dict[str, list[int]], int]:
    """Say which iterations are recorded, by capture, and after how many the recording ends by itself."""
    seen = dict.fromkeys(stages or (None,), 0)
    wanted: list[tuple[int, BatchKind | None]] = []
    ended = len(batches)
    for number, batch in enumerate(batches):
        key = batch if stages else None
        if key not in seen:
            continue
        seen[key] += 1
        if seen[key] > skip and (count is None or seen[key] <= skip + count):
            wanted.append((number, key))
        if count is not None and all(past >= skip + count for past in seen.values()):
            ended = number + 1
            break
    captures: dict[str, list[int]] = {}
    runs: dict[BatchKind | None, int] = {}
    # Iterations that follow each other and are of one kind share a capture.
    for (key, _), run in groupby(enumerate(wanted), lambda item: (item[1][1], item[1][0] - item[0])):
        runs[key] = runs.get(key, 0) + 1
        name = "-".join(["step1", *([key] if key else []), *([str(runs[key])] if runs[key] > 1 else [])])
        captures[name] = [number for _, (number, _) in run]
    return captures, ended


@given(
    batches=st.lists(st.sampled_from(BatchKind), max_size=20),
    count=st.none() | st.integers(1, 4),
    skip=st.integers(0, 3),
    stages=st.lists(st.sampled_from(BatchKind), unique=True).map(tuple),
)
@example(batches=[P, D, P, D], count=1, skip=0, stages=(P, D))
def test_any_order_of_batches_is_recorded_as_asked(
    tmp_path_factory: Any, batches: list[BatchKind], count: int | None, skip: int, stages: tuple[BatchKind, ...]
) -> None:
    """Every iteration is recorded once if it is asked for, and not at all if it is not."""
    if count is None:
        skip = 0  # a skip comes with a count
    path = tmp_path_factory.mktemp("engine")
    iterations = None if count is None else Iterations(count=count, skip=skip)
    recorder = EngineRecorder(Identity(), "tally-device", {})
    request = CaptureRequest(
        id="step1", output=path, run="run", role="rollout", first_step=1, batch_kinds=stages, iterations=iterations
    )
    recorder.start(request)
    expected, ended = model(batches, count, skip, stages)
    for number, batch in enumerate(batches):
        assert recorder.active == (number < ended)
        recorder.begin(batch, f"it{number}")
        recorder.end()
    by_itself = not recorder.active
    reply = end(recorder)
    found = recorded(path)
    assert found == expected
    assert reply.iterations == sum(map(len, expected.values()))
    files = [file for capture in reply.captures for file in capture.files]
    assert len({capture.id for capture in reply.captures}) == len(reply.captures)
    assert len(set(files)) == len(files) == len(expected)
    short = count is not None and not by_itself
    for name, manifest in manifests(path).items():
        if name not in expected:
            assert (manifest["status"], manifest["artifacts"]) == ("failed", [])
            continue
        assert manifest["artifacts"][0]["iterations"] == [expected[name][0], expected[name][-1]]
        assert manifest["iterations"] == (None if count is None else {"count": count, "skip": skip, "first": None})
        assert manifest["status"] == "complete" or (short and manifest["status"] == "partial")
    if not short and expected:
        assert reply.problems == ()
        assert read_run(path / "run").status is Status.COMPLETE
    assert count_open() == 0


test_any_order_of_batches_is_recorded_as_asked = pytest.mark.usefixtures("tally")(
    test_any_order_of_batches_is_recorded_as_asked
)
