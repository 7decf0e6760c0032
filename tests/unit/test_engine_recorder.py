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
from profdeck.engine.worker.recorder import EngineRecorder, handle_command, reply_data
from profdeck.records.request import BatchKind, CaptureRequest, Recorded, Reply, RequestState
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ConfigError, UnknownPluginError

MakeRequest = Callable[..., CaptureRequest]

P, D, M = BatchKind


@pytest.fixture(autouse=True)
def write_files_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the pause for requests: these tests serve none."""
    monkeypatch.setattr(file_writer, "SERVE_S", 0.0)


@pytest.fixture
def recorder(tally: ModuleType) -> Iterator[EngineRecorder]:
    """Recorder of an engine with one rank."""
    engine_recorder = EngineRecorder(Identity(), "tally-device", {"toy-engine": "1.0"})
    yield engine_recorder
    tally.TallyBackend.may_write.set()
    stop_and_wait(engine_recorder)


@pytest.fixture
def make_request(tmp_path: Path) -> MakeRequest:
    """Function that creates a request for a capture in tmp_path/run.

    Keyword arguments are fields of the request or options of the device backend.
    """
    field_names = {field.name for field in attrs.fields(CaptureRequest)}

    def create(count: int | None = None, skip: int = 0, **options: Any) -> CaptureRequest:
        request_fields = {key: options.pop(key) for key in field_names & options.keys()}
        iterations = None if count is None else Iterations(count=count, skip=skip)
        defaults = {"id": "step1", "output": tmp_path, "run": "run", "role": "rollout", "first_step": 1}
        return CaptureRequest(**{**defaults, "iterations": iterations, "options": options, **request_fields})

    return create


def iterate(recorder: EngineRecorder, batches: Iterable[BatchKind | None], first: int = 0) -> None:
    for number, batch in enumerate(batches, first):
        recorder.begin(batch, f"it{number}")
        recorder.end()


def stop_and_wait(recorder: EngineRecorder) -> Reply:
    recorder.stop()
    return wait_for_files(recorder)


def read_manifests(path: Path) -> dict[str, dict[str, Any]]:
    documents = [
        json.loads(file.read_text())
        for file in path.glob("run/step_*/**/rank_*.json")
        if not file.name.endswith(".trace.json")
    ]
    return {manifest["capture"]: manifest for manifest in documents}


def read_recorded_iterations(path: Path) -> dict[str, list[int]]:
    """Return the iterations in each trace, by capture ID."""
    iterations = {}
    for file in sorted(path.glob("run/step_*/**/*.trace.json")):
        names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
        iterations[file.name.split(".")[1]] = [int(name[2:]) for name in names if name.startswith("it")]
    return iterations


def read_iteration_ranges(path: Path) -> dict[str, list[int]]:
    return {name: manifest["artifacts"][0]["iterations"] for name, manifest in read_manifests(path).items()}


# Recorded iterations.


def test_capture_from_start_to_stop_is_complete(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request())
    assert (recorder.active, recorder.reply().state) == (True, RequestState.ARMED)
    assert read_manifests(tmp_path)["step1"]["status"] == "recording"
    iterate(recorder, [P, D, M])
    assert recorder.reply().state is RequestState.RECORDING
    reply = stop_and_wait(recorder)
    assert (reply.state, reply.iterations, reply.problems) == (RequestState.ENDED, 3, ())
    assert not recorder.active
    assert read_recorded_iterations(tmp_path) == {"step1": [0, 1, 2]}
    manifest = read_manifests(tmp_path)["step1"]
    assert manifest["status"] == "complete"
    assert (manifest["backend"], manifest["versions"], manifest["request"]) == ("tally", {"toy-engine": "1.0"}, "step1")
    assert (manifest["role"], manifest["target"], manifest["iterations"]) == ("rollout", None, None)
    assert manifest["artifacts"][0]["iterations"] == [0, 2]
    (file,) = reply.captures[0].files
    assert Path(file).is_file()
    assert Path(reply.captures[0].manifest).is_file()
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())


def test_backend_receives_the_index_of_each_ended_iteration(
    tally: ModuleType, recorder: EngineRecorder, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(tally.TallyBackend, "perform", lambda _, _name, call: calls.append(call))
    recorder.start(make_request(3, 2))
    iterate(recorder, [D] * 9)
    assert calls == ["start step1", "step step1 engine_iteration 2", "step step1 engine_iteration 3", "stop step1"]


def test_stop_after_the_end_does_not_affect_later_captures(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.stop()
    recorder.start(make_request(1))
    iterate(recorder, [D] * 2)
    for _ in range(2):
        recorder.stop("too late")
        assert wait_for_files(recorder).problems == ()
    recorder.start(make_request(2, 1, id="step2", first_step=2))
    assert recorder.reply().iterations == 0
    iterate(recorder, [D] * 4)
    assert wait_for_files(recorder).iterations == 2
    recorder.start(make_request(1))  # repeats the first request
    iterate(recorder, [D])
    assert [capture.id for capture in wait_for_files(recorder).captures] == ["step1-take2"]
    assert read_recorded_iterations(tmp_path) == {"step1": [0], "step1-take2": [0], "step2": [1, 2]}
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_unlabelled_iterations_and_unmatched_ends_are_accepted(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.end()
    recorder.begin(D, "it0")
    recorder.start(make_request(2))
    recorder.begin(D, "")
    recorder.end()
    recorder.begin(D, "it1")
    recorder.end()
    assert wait_for_files(recorder).iterations == 2
    assert read_recorded_iterations(tmp_path) == {"step1": [1]}


def test_process_without_iterations_records_immediately(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(), at_once=True)
    assert recorder.reply().state is RequestState.RECORDING
    reply = stop_and_wait(recorder)
    assert (reply.state, reply.captures[0].status) == (RequestState.ENDED, Status.COMPLETE)
    assert read_manifests(tmp_path)["step1"]["status"] == "complete"


def test_rank_that_is_not_selected_stays_idle(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(1, ranks=(1, 3)))
    assert not recorder.active
    iterate(recorder, [D] * 3)
    reply = stop_and_wait(recorder)
    assert (reply.state, reply.request, reply.iterations, reply.captures) == (RequestState.IDLE, "step1", 0, ())
    assert list(tmp_path.iterdir()) == []


def test_every_manifest_lists_the_expected_ranks(tally: ModuleType, make_request: MakeRequest, tmp_path: Path) -> None:
    for rank in (0, 2):
        recorder = EngineRecorder(Identity(rank=rank, world_size=4, parallel={"tp": rank}), "tally-device", {})
        recorder.start(make_request(1, ranks=(0, 2, 3, 9), replica=5))
        iterate(recorder, [D])
        wait_for_files(recorder)
    assert read_manifests(tmp_path)["step1"]["expected_ranks"] == [0, 2, 3]
    (capture,) = read_run(tmp_path / "run").captures
    assert (capture.role, capture.replica) == ("rollout", 5)
    assert {rank.rank: rank.status for rank in capture.ranks} == {
        0: Status.COMPLETE,
        2: Status.COMPLETE,
        3: Status.MISSING,
    }


def test_engine_can_serve_requests_before_files_are_written(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "SERVE_S", 0.3)
    recorder.start(make_request(1, write_later=True))
    iterate(recorder, [D])
    stopped_ns = time.time_ns()
    wait_for_files(recorder)
    (trace,) = tmp_path.glob("run/step_*/**/*.trace.json")
    assert trace.stat().st_mtime_ns - stopped_ns > 0.25e9


# Separate captures per batch kind.


def test_each_batch_kind_has_separate_captures_and_counts(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(2, 1, batch_kinds=(P, D, M)))
    assert not list(tmp_path.glob("run/step_*/**/rank_*"))  # each capture is created at its first batch
    iterate(recorder, [P, P, D, D, P, M, D, D, M])
    assert recorder.active  # one mixed iteration is missing
    iterate(recorder, [P, D, M, M], 9)
    assert not recorder.active
    reply = wait_for_files(recorder)
    assert (reply.iterations, reply.problems) == (6, ())
    assert read_recorded_iterations(tmp_path) == {
        "step1-prefill": [1],
        "step1-decode": [3],
        "step1-prefill-2": [4],
        "step1-decode-2": [6],
        "step1-mixed": [8],
        "step1-mixed-2": [11],
    }
    assert read_iteration_ranges(tmp_path) == {
        name: [run[0], run[-1]] for name, run in read_recorded_iterations(tmp_path).items()
    }
    assert {name: manifest["stage"] for name, manifest in read_manifests(tmp_path).items()} == {
        name: name.split("-")[1] for name in read_recorded_iterations(tmp_path)
    }
    assert {capture.id for capture in reply.captures} == set(read_recorded_iterations(tmp_path))
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())


def test_ranks_with_different_batch_orders_are_complete(
    tally: ModuleType, make_request: MakeRequest, tmp_path: Path
) -> None:
    """Data-parallel ranks run different batches."""
    for rank, batches in ((0, [P, D, P, D]), (1, [P, P, D, D])):
        recorder = EngineRecorder(Identity(rank=rank, world_size=2, parallel={"dp": rank}), "tally-device", {})
        recorder.start(make_request(2, batch_kinds=(P, D), ranks="all"))
        iterate(recorder, batches)
        assert wait_for_files(recorder).iterations == 4
    report = read_run(tmp_path / "run")
    assert {rank.status for capture in report.captures for rank in capture.ranks} == {Status.COMPLETE}


def test_absent_batch_kind_is_reported_unless_all_kinds_are_requested(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(2, batch_kinds=(M,)))
    iterate(recorder, [P, D])
    assert stop_and_wait(recorder).problems == ("Only 0 of 2 mixed iterations ran before the stop.",)
    recorder.start(make_request(2, batch_kinds=(P, D, M)))  # if all kinds are requested, none of them is required
    iterate(recorder, [D, D])
    assert recorder.active
    reply = stop_and_wait(recorder)
    assert (reply.problems, [capture.id for capture in reply.captures]) == ((), ["step1-decode"])


# Early ends.


@pytest.mark.parametrize(
    ("skip", "iterations", "reason", "problem"),
    [
        (0, 0, None, "No engine iteration ran between start and stop."),
        (5, 0, None, "No engine iteration ran between start and stop."),
        (5, 3, None, "It was stopped after 3 iterations, before its window started."),
        (5, 3, "the engine shut down", "The engine shut down."),
        (0, 0, "the engine shut down", "The engine shut down."),
    ],
)
def test_capture_fails_if_its_window_is_not_reached(
    recorder: EngineRecorder,
    make_request: MakeRequest,
    tmp_path: Path,
    skip: int,
    iterations: int,
    reason: str | None,
    problem: str,
) -> None:
    recorder.start(make_request(2, skip))
    iterate(recorder, [D] * iterations)
    recorder.stop(reason)
    reply = wait_for_files(recorder)
    assert (reply.state, reply.captures[0].status, reply.captures[0].files) == (RequestState.ENDED, Status.FAILED, ())
    manifest = read_manifests(tmp_path)["step1"]
    assert (manifest["status"], manifest["problems"]) == ("failed", [problem])
    recorder.start(make_request(1, id="next"))
    iterate(recorder, [D])
    assert wait_for_files(recorder).captures[0].status is Status.COMPLETE


@pytest.mark.parametrize("reason", [None, "the engine shut down"])
def test_incomplete_window_is_partial(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, reason: str | None
) -> None:
    recorder.start(make_request(5, 1))
    iterate(recorder, [D] * 3)
    recorder.stop(reason)
    reply = wait_for_files(recorder)
    assert (reply.iterations, reply.captures[0].status) == (2, Status.PARTIAL)
    assert "Only 2 of 5 iterations ran before the stop." in reply.problems
    manifest = read_manifests(tmp_path)["step1"]
    problem = "The engine shut down." if reason else "Only 2 of 5 iterations ran before the stop."
    assert (manifest["status"], manifest["problems"]) == ("partial", [problem])
    assert read_recorded_iterations(tmp_path) == {"step1": [1, 2]}
    assert read_run(tmp_path / "run").status is Status.PARTIAL


def test_window_is_complete_if_the_engine_has_no_more_work(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(5, 1))
    iterate(recorder, [D] * 3)
    recorder.report_idle()
    reply = stop_and_wait(recorder)
    assert (reply.iterations, reply.problems, reply.captures[0].status) == (2, (), Status.COMPLETE)
    manifest = read_manifests(tmp_path)["step1"]
    assert manifest["notes"] == ["The engine finished all requests after 2 of 5 iterations."]
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_note_about_the_end_of_work_names_batch_kinds(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(3, batch_kinds=(P, D)))
    iterate(recorder, [P, D, D])
    recorder.report_idle()
    assert stop_and_wait(recorder).problems == ()
    note = "The engine finished all requests after 1 of 3 prefill and 2 of 3 decode iterations."
    assert read_manifests(tmp_path)["step1-decode"]["notes"] == [note]


@pytest.mark.parametrize("reason", [None, "the engine shut down"])
def test_window_is_partial_if_the_engine_has_work_again(
    recorder: EngineRecorder, make_request: MakeRequest, reason: str | None
) -> None:
    recorder.start(make_request(5))
    iterate(recorder, [D] * 2)
    recorder.report_idle()
    if reason is None:
        iterate(recorder, [D], 2)
    recorder.stop(reason)
    assert wait_for_files(recorder).captures[0].status is Status.PARTIAL


def test_engine_without_any_iteration_is_not_complete(recorder: EngineRecorder, make_request: MakeRequest) -> None:
    recorder.start(make_request(5))
    recorder.report_idle()
    assert stop_and_wait(recorder).captures[0].status is Status.FAILED


def test_stop_command_can_report_an_idle_engine(recorder: EngineRecorder, make_request: MakeRequest) -> None:
    request = make_request(5)
    recorder.start(request)
    iterate(recorder, [D] * 2)
    handle_command("stop", {**request.key, "idle": True}, recorder, recorder.start, recorder.stop)
    assert wait_for_files(recorder).captures[0].status is Status.COMPLETE


def test_idle_engine_ends_its_step_once(
    recorder: EngineRecorder, make_request: MakeRequest, tally: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    original = tally.TallyBackend.profile_start

    @functools.wraps(original)
    def profile_start(self: Any, capture: Any) -> Any:
        capture.end_step = lambda: ended.append(1)
        return original(self, capture)

    monkeypatch.setattr(tally.TallyBackend, "profile_start", profile_start)
    recorder.start(make_request())
    iterate(recorder, [D])
    for _ in range(3):
        recorder.report_idle()
    assert len(ended) == 1
    iterate(recorder, [D], 1)
    ended.clear()
    recorder.report_idle()
    assert len(ended) == 1


def test_incomplete_window_names_its_batch_kind(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(3, batch_kinds=(P, D, M)))
    iterate(recorder, [P, D, D])
    problems = stop_and_wait(recorder).problems
    assert problems == (
        "Only 1 of 3 prefill iterations ran before the stop.",
        "Only 2 of 3 decode iterations ran before the stop.",
    )
    assert read_manifests(tmp_path)["step1-decode"]["status"] == "partial"


def test_reply_and_capture_contain_the_stop_reason_once(recorder: EngineRecorder, make_request: MakeRequest) -> None:
    recorder.start(make_request())
    iterate(recorder, [D])
    recorder.stop("the engine shut down in mid-capture")
    reply = wait_for_files(recorder)
    assert reply.problems == reply.captures[0].problems == ("The engine shut down in mid-capture.",)


def test_stop_inside_an_iteration_keeps_the_iteration(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(9))
    iterate(recorder, [D])
    recorder.begin(D, "it1")
    recorder.stop("now")
    recorder.end()
    reply = wait_for_files(recorder)
    assert (reply.state, reply.captures[0].status) == (RequestState.ENDED, Status.PARTIAL)
    assert read_recorded_iterations(tmp_path) == {"step1": [0, 1]}


def run_in_other_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("reason", [None, "the engine shut down"])
@pytest.mark.parametrize("inside_iteration", [False, True])
def test_stop_from_another_thread_is_deferred_to_the_next_iteration(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, reason: str | None, inside_iteration: bool
) -> None:
    recorder.start(make_request())
    iterate(recorder, [D])
    if inside_iteration:
        recorder.begin(D, "it1")
    for _ in range(2):
        run_in_other_thread(lambda: recorder.stop(reason))
    replies: list[Reply] = []
    run_in_other_thread(lambda: replies.append(recorder.reply()))
    (reply,) = replies
    reason_suffix = f" ({reason})" if reason else ""
    assert reply.state is RequestState.RECORDING
    assert reply.problems == (f"The stop is deferred until the engine's next iteration{reason_suffix}.",)
    manifest_before = read_manifests(tmp_path)["step1"]
    assert manifest_before["status"] == "recording"
    (note,) = manifest_before["notes"]
    assert note == "The stop was requested in another thread and is deferred until the engine's next iteration."
    recorder.end() if inside_iteration else recorder.begin(D, "it1")
    assert not recorder.active
    assert wait_for_files(recorder).problems == (("The engine shut down.",) if reason else ())
    manifest = read_manifests(tmp_path)["step1"]
    assert (manifest["status"], manifest["notes"]) == ("partial" if reason else "complete", [note])
    assert read_recorded_iterations(tmp_path) == {"step1": [0, 1] if inside_iteration else [0]}


def test_client_reads_its_result_after_the_start_of_another_client(
    recorder: EngineRecorder, make_request: MakeRequest
) -> None:
    def send(command: str, payload: dict[str, Any]) -> Reply:
        return handle_command(command, payload, recorder, recorder.start, recorder.stop)

    first, second = make_request(2, id="first"), make_request(2, id="second")
    recorder.start(first)
    iterate(recorder, [D, D])
    wait_for_files(recorder)
    recorder.start(second)
    iterate(recorder, [D])

    for command, key in (("stop", first.key), ("status", first.key), ("stop", {"request": "first"})):
        reply = send(command, key)
        assert (reply.request, reply.token, reply.state) == ("first", first.token, RequestState.ENDED)
        assert [(recorded.id, recorded.status) for recorded in reply.captures] == [("first", Status.COMPLETE)]
        assert (reply.iterations, reply.problems, reply.error) == (2, (), None)
    for key in ({}, second.key, {"request": "unknown"}, {**first.key, "token": "unknown"}):
        assert send("status", key).token == second.token
    assert send("stop", first.key).pid == os.getpid()
    iterate(recorder, [D])
    wait_for_files(recorder)
    assert send("stop", second.key).iterations == 2


def test_results_of_unselected_ranks_and_repeated_ids_are_kept_apart(
    recorder: EngineRecorder, make_request: MakeRequest
) -> None:
    requests = [make_request(1, id="same", ranks=ranks) for ranks in ("all", (7,), "all")]
    for request in requests:
        recorder.start(request)
        iterate(recorder, [D])
        wait_for_files(recorder)
    replies = [handle_command("status", request.key, recorder, recorder.start, recorder.stop) for request in requests]
    assert [reply.token for reply in replies] == [request.token for request in requests]
    assert [reply.state for reply in replies] == [RequestState.ENDED, RequestState.IDLE, RequestState.ENDED]
    assert [[recorded.id for recorded in reply.captures] for reply in replies] == [["same"], [], ["same-take2"]]


def test_stop_from_another_thread_is_immediate_if_it_is_safe(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(5, 1))
    iterate(recorder, [D])
    run_in_other_thread(recorder.stop)  # armed, not yet recording
    assert recorder.reply().state is RequestState.ENDED
    recorder.start(make_request(id="free", thread_bound=False))
    iterate(recorder, [D])
    run_in_other_thread(recorder.stop)
    assert not recorder.active
    wait_for_files(recorder)
    recorder.start(make_request(id="frontend"), at_once=True)  # runs no iterations to wait for
    run_in_other_thread(recorder.stop)
    assert wait_for_files(recorder).state is RequestState.ENDED
    assert {name: manifest["status"] for name, manifest in read_manifests(tmp_path).items()} == {
        "step1": "failed",
        "free": "complete",
        "frontend": "complete",
    }


def test_recording_thread_may_differ_from_the_starting_thread(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request())
    run_in_other_thread(lambda: iterate(recorder, [D]))
    recorder.stop()
    assert recorder.active
    run_in_other_thread(lambda: iterate(recorder, [D], 1))
    assert wait_for_files(recorder).state is RequestState.ENDED
    assert read_recorded_iterations(tmp_path) == {"step1": [0]}


def test_memory_limit_ends_a_capture_without_a_window(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(max_memory_share=1e-6))
    held, waiting = [], threading.Event()
    for number in range(1000):
        iterate(recorder, [None], number)
        if not recorder.active:
            break
        held.append(b"x" * (1 << 20))
        waiting.wait(0.005)
    wait_for_files(recorder)
    manifest = read_manifests(tmp_path)["step1"]
    assert manifest["status"] == "partial"
    assert "more than max_memory_share=1e-06 of the" in manifest["problems"][0]


@pytest.mark.parametrize("command", ["status", "start", "stop"])
def test_command_to_an_idle_engine_enforces_max_capture_s(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, command: str
) -> None:
    recorder.start(make_request(max_capture_s=0.1))
    iterate(recorder, [D])
    time.sleep(0.1)
    assert recorder.active
    if command == "start":
        with contextlib.suppress(TargetError):  # the files of the first capture may not be complete
            recorder.start(make_request(id="step2", first_step=2))
    elif command == "stop":
        recorder.stop()
    else:
        recorder.reply()
    wait_for_files(recorder)
    manifest = read_manifests(tmp_path)["step1"]
    assert manifest["status"] == "partial"
    assert manifest["problems"] == ["It was not stopped within max_capture_s=0.1 seconds."]


@pytest.mark.parametrize("boundary", ["next iteration", "end of an iteration", "stop"])
def test_recording_thread_ends_a_capture_that_exceeds_its_time_limit(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, boundary: str
) -> None:
    active: list[bool] = []
    recording, past_limit = threading.Event(), threading.Event()

    def run_engine() -> None:
        recorder.start(make_request(max_capture_s=0.1))
        iterate(recorder, [D])
        if boundary == "end of an iteration":
            recorder.begin(D, "it1")
        recording.set()
        past_limit.wait()
        active.append(recorder.active)
        if boundary == "next iteration":
            recorder.begin(D, "it1")
        recorder.end() if boundary != "stop" else recorder.stop()
        active.append(recorder.active)

    thread = threading.Thread(target=run_engine)
    thread.start()
    recording.wait()
    problem = "It was not stopped within max_capture_s=0.1 seconds"
    deferral = f"The stop is deferred until the engine's next iteration (it{problem[2:]})."
    until(lambda: recorder.reply().problems == (deferral,))
    past_limit.set()
    thread.join()
    assert active == [True, False]
    wait_for_files(recorder)
    assert read_manifests(tmp_path)["step1"]["problems"] == [f"{problem}."]
    assert read_recorded_iterations(tmp_path) == {"step1": [0, 1] if boundary == "end of an iteration" else [0]}


def test_armed_capture_ends_at_the_time_limit(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(1, 5, max_capture_s=0.02))
    until(lambda: recorder.reply().state is not RequestState.ARMED)
    assert wait_for_files(recorder).state is RequestState.ENDED
    assert read_manifests(tmp_path)["step1"]["problems"] == ["It was not stopped within max_capture_s=0.02 seconds."]


# Rejected starts.


@pytest.mark.parametrize("state", [RequestState.ARMED, RequestState.RECORDING, RequestState.WRITING])
def test_second_start_is_rejected_and_the_first_capture_continues(
    tally: ModuleType, recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, state: RequestState
) -> None:
    tally.TallyBackend.may_write.clear()
    recorder.start(make_request(3, 1, write_later=True))
    iterate(recorder, [D] * {RequestState.ARMED: 1, RequestState.RECORDING: 2, RequestState.WRITING: 4}[state])
    assert recorder.reply().state is state
    first_reply = recorder.reply()
    for rank in (0, 5):
        with pytest.raises(CaptureError, match=f"Capture second cannot start while capture step1 is {state} in this"):
            recorder.start(make_request(1, id="second", ranks=(rank,)))
    assert recorder.reply() == first_reply
    iterate(recorder, [D] * (4 - first_reply.iterations), 4)
    tally.TallyBackend.may_write.set()
    reply = wait_for_files(recorder)
    assert (reply.request, reply.state, reply.iterations, reply.problems) == ("step1", RequestState.ENDED, 3, ())
    (manifest,) = read_manifests(tmp_path).values()
    assert (manifest["status"], manifest["problems"]) == ("complete", [])
    assert manifest["notes"] == ["A second start (second) was refused."] * 2
    recorder.start(make_request(1, id="second"))
    iterate(recorder, [D])
    assert wait_for_files(recorder).captures[0].status is Status.COMPLETE


def test_engine_continues_while_files_are_written(
    tally: ModuleType, recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    tally.TallyBackend.may_write.clear()
    recorder.start(make_request(1, batch_kinds=(P, D), write_later=True))
    iterate(recorder, [P])
    assert recorder.reply().captures[0].status is Status.RECORDING
    iterate(recorder, [M, D], 1)  # the next kind is recorded during the write
    reply = recorder.reply()
    assert (reply.state, reply.iterations, recorder.active) == (RequestState.WRITING, 2, False)
    assert not list(tmp_path.rglob("*.trace.json"))
    tally.TallyBackend.may_write.set()
    assert [capture.status for capture in wait_for_files(recorder).captures] == [Status.COMPLETE, Status.COMPLETE]
    assert read_recorded_iterations(tmp_path) == {"step1-prefill": [0], "step1-decode": [2]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fail_on": "start"}, "options: unknown key 'fail_on'. Did you mean 'fail_at'?"),
        ({"record_shapes": 1}, "options.record_shapes: expected true or false"),
        ({"max_capture_s": 0}, "'max_capture_s' must be > 0"),
    ],
)
def test_invalid_options_are_rejected(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as excinfo:
        recorder.start(make_request(1, options=options))
    assert message in str(excinfo.value)
    assert not recorder.active
    assert list(tmp_path.iterdir()) == []


def test_rejected_start_does_not_change_the_reply(recorder: EngineRecorder, make_request: MakeRequest) -> None:
    recorder.start(make_request(1))
    iterate(recorder, [D])
    first_reply = wait_for_files(recorder)
    with pytest.raises(ConfigError):
        recorder.start(make_request(1, id="second", nonsense=1))
    assert recorder.reply() == first_reply


def test_device_type_without_a_backend_is_rejected(
    tally: ModuleType, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder = EngineRecorder(Identity(), "abacus", {})
    with pytest.raises(UnknownPluginError, match="No installed backend records the device type 'abacus'"):
        recorder.start(make_request(1))
    assert list(tmp_path.iterdir()) == []
    assert device_backend("tally-device") is tally.TallyBackend


def test_unusable_lease_directory_rejects_the_start(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(leases.DIRECTORY_VARIABLE, "/proc/profdeck")
    with pytest.raises(CaptureError, match="The device cannot be leased: FileNotFoundError"):
        recorder.start(make_request(1, device="gpu-1"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stages", [(), (P, D)])
def test_file_at_the_path_of_the_run_rejects_the_start(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, stages: tuple[BatchKind, ...]
) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(CaptureError, match="cannot write to"):
        recorder.start(make_request(1, batch_kinds=stages))
    assert not recorder.active
    assert (tmp_path / "run").read_text() == "in the way"


@pytest.mark.parametrize("link", ["run", "run/step_000001", "run/step_000001/rollout"])
def test_link_out_of_the_output_directory_rejects_the_start(
    recorder: EngineRecorder,
    make_request: MakeRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    link: str,
) -> None:
    link_target = tmp_path_factory.mktemp("elsewhere")
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(link_target)
    with pytest.raises(CaptureError, match="outside of the output directory"):
        recorder.start(make_request(1))
    assert not recorder.active
    assert list(link_target.iterdir()) == []


@pytest.mark.parametrize("cause", ["options", "directory", "at once", "at once, and taken"])
def test_rejected_start_releases_all_resources(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, cause: str
) -> None:
    threads_before, open_before = set(threading.enumerate()), count_open()
    handler = signal.getsignal(signal.SIGTERM)
    lease = leases.acquire_lease(["gpu-1"], holder="trainer")
    request = {
        "options": make_request(nonsense=1, device="gpu-2"),
        "directory": make_request(output=Path("/proc/x"), device="gpu-2"),
        "at once": make_request(fail_at="start", device="gpu-2"),
        "at once, and taken": make_request(device="gpu-1"),  # cannot retry, because it runs no iterations
    }[cause]
    with pytest.raises((CaptureError, ConfigError)):
        recorder.start(request, at_once=cause.startswith("at once"))
    lease.release()
    leases.acquire_lease(["gpu-1", "gpu-2"], holder="trainer").release()
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(5)
    assert set(threading.enumerate()) <= threads_before  # threads from earlier tests may have ended
    assert count_open() == open_before
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not list(tmp_path.rglob("*.tmp"))
    expected_statuses = {"at once": ["failed"], "at once, and taken": ["missing"]}
    assert [manifest["status"] for manifest in read_manifests(tmp_path).values()] == expected_statuses.get(cause, [])
    recorder.start(make_request(1))
    iterate(recorder, [D])
    assert wait_for_files(recorder).captures[0].status is Status.COMPLETE


# Failures during a capture.


@pytest.mark.parametrize("stages", [(), (D,)])
@pytest.mark.parametrize(
    ("hook", "status"), [("start", "failed"), ("step", "partial"), ("stop", "failed"), ("write", "failed")]
)
def test_backend_error_is_not_raised_into_the_engine(
    recorder: EngineRecorder,
    make_request: MakeRequest,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    hook: str,
    status: str,
    stages: tuple[BatchKind, ...],
) -> None:
    with caplog.at_level(logging.WARNING, "profdeck"):
        recorder.start(make_request(2, fail_at=hook, batch_kinds=stages))
        iterate(recorder, [D] * 4)
        reply = stop_and_wait(recorder)
    (capture,) = reply.captures
    assert (reply.state, capture.status) == (RequestState.ENDED, status)
    assert f"RuntimeError: {hook} does not work" in " ".join((*reply.problems, *capture.problems))
    (manifest,) = read_manifests(tmp_path).values()
    assert manifest["status"] == status
    assert f"RuntimeError: {hook} does not work" in " ".join(manifest["problems"])
    if hook == "start":
        assert f"{hook} does not work" in caplog.text
    recorder.start(make_request(1, id="next", batch_kinds=stages))
    iterate(recorder, [D])
    reply = wait_for_files(recorder)
    assert (reply.problems, reply.captures[0].status) == ((), Status.COMPLETE)


def test_error_of_a_deferred_write_is_reported(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(1, fail_at="write", write_later=True))
    iterate(recorder, [D])
    reply = wait_for_files(recorder)
    assert (reply.state, reply.captures[0].status) == (RequestState.ENDED, Status.FAILED)
    assert "RuntimeError: write does not work" in read_manifests(tmp_path)["step1"]["problems"][0]


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_coroutine_hooks_are_reported(
    tally: ModuleType, recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, hook: str
) -> None:
    """An engine's loop cannot await them."""

    async def coroutine_hook(_: object, capture: object) -> None:
        await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patch:
        hooks = ["start", "step", "stop"]
        for name in hooks[hooks.index(hook) :]:
            patch.setattr(tally.TallyBackend, f"profile_{name}", tally.hookimpl(coroutine_hook))
        recorder.start(make_request(2))
        iterate(recorder, [D] * (1 if hook == "stop" else 3))
        reply = stop_and_wait(recorder)
    assert reply.state is RequestState.ENDED
    assert reply.problems
    assert len(reply.captures) == 1
    assert read_manifests(tmp_path)["step1"]["status"] == "failed"
    recorder.start(make_request(1))
    iterate(recorder, [D])
    assert wait_for_files(recorder).captures[0].status is Status.COMPLETE


@pytest.mark.parametrize("failing_method", ["make", "enter", "exit"])
def test_annotation_error_is_reported_once(
    tally: ModuleType,
    recorder: EngineRecorder,
    make_request: MakeRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing_method: str,
) -> None:
    class FailingAnnotation:
        def __init__(self, _: str) -> None:
            self._call("make")

        def __enter__(self) -> None:
            self._call("enter")

        def __exit__(self, *_: object) -> None:
            self._call("exit")

        def _call(self, method: str) -> None:
            if method == failing_method:
                raise RuntimeError("annotation failed")

    monkeypatch.setattr(tally.TallyBackend, "mark_stage", FailingAnnotation)
    recorder.start(make_request(4))
    iterate(recorder, [D] * 4)
    reply = stop_and_wait(recorder)
    assert reply.problems == ("RuntimeError: annotation failed",)
    assert read_manifests(tmp_path)["step1"]["status"] == "partial"


def test_artifact_outside_the_capture_directory_fails_the_capture(
    tally: ModuleType,
    recorder: EngineRecorder,
    make_request: MakeRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backend must write to `CaptureRecord.artifact_path`."""
    recorder.start(make_request(1))
    monkeypatch.setattr("profdeck.records.capture.CaptureRecord.artifact_path", lambda *_: tmp_path / "away.trace.json")
    iterate(recorder, [D])
    reply = wait_for_files(recorder)
    assert (reply.state, reply.captures[0].status) == (RequestState.ENDED, Status.FAILED)
    assert read_manifests(tmp_path)["step1"]["status"] == "failed"
    assert "away.trace.json" in " ".join(read_manifests(tmp_path)["step1"]["problems"])


def test_artifact_with_an_invalid_value_is_reported(
    tally: ModuleType,
    recorder: EngineRecorder,
    make_request: MakeRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    stop = tally.TallyBackend.profile_stop

    def return_unserialisable_kind(self: Any, capture: Any) -> Any:
        return [attrs.evolve(artifact, kind=object()) for artifact in stop(self, capture)]

    monkeypatch.setattr(tally.TallyBackend, "profile_stop", tally.hookimpl(return_unserialisable_kind))
    recorder.start(make_request(1))
    iterate(recorder, [D])
    reply = wait_for_files(recorder)
    assert reply.state is RequestState.ENDED
    (problem, *_) = read_manifests(tmp_path)["step1"]["problems"]
    assert problem == reply.captures[0].problems[0]
    assert problem.startswith("profile_stop returned an invalid artifact: TypeError")


def test_directory_replaced_by_a_file_while_armed_is_reported(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    recorder.start(make_request(1, batch_kinds=(D,)))
    (tmp_path / "run" / "step_000001" / "rollout").rmdir()
    (tmp_path / "run" / "step_000001").rmdir()
    (tmp_path / "run" / "step_000001").write_text("in the way")
    iterate(recorder, [D] * 2)
    reply = wait_for_files(recorder)
    assert (reply.state, reply.captures, recorder.active) == (RequestState.ENDED, (), False)
    assert "cannot write to" in reply.problems[0]


# Replies.


def test_replies_can_be_converted_to_json_and_back(
    tally: ModuleType, recorder: EngineRecorder, make_request: MakeRequest
) -> None:
    replies = [recorder.reply("it is refused")]
    tally.TallyBackend.may_write.clear()
    recorder.start(make_request(3, 1, write_later=True))
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
    (capture,) = replies[-1].captures
    assert isinstance(capture, Recorded)
    assert (capture.status, capture.events, capture.size_bytes > 0) == (Status.PARTIAL, 2, True)


def test_reply_identifies_the_process(tally: ModuleType) -> None:
    reply = EngineRecorder(Identity(rank=3, world_size=4, host="h", pid=7), "tally-device", {}).reply()
    assert (reply.rank, reply.world_size, reply.host, reply.pid, reply.state) == (3, 4, "h", 7, RequestState.IDLE)


# Process exit. Tests in tests/integration/test_engine_exits.py use separate processes.


def test_exit_handlers_are_installed_until_the_files_are_complete(
    tally: ModuleType, recorder: EngineRecorder, make_request: MakeRequest
) -> None:
    host_handler = signal.getsignal(signal.SIGTERM)
    tally.TallyBackend.may_write.clear()
    recorder.start(make_request(1, write_later=True))
    assert signal.getsignal(signal.SIGTERM) is not host_handler
    iterate(recorder, [D])
    assert recorder.reply().state is RequestState.WRITING
    assert signal.getsignal(signal.SIGTERM) is not host_handler
    tally.TallyBackend.may_write.set()
    wait_for_files(recorder)
    assert signal.getsignal(signal.SIGTERM) is host_handler
    assert count_open() == 0


def test_next_start_releases_the_previous_capture(recorder: EngineRecorder, make_request: MakeRequest) -> None:
    """Start new captures without calling `EngineRecorder.reply` after the previous ones."""

    def is_started(request: CaptureRequest) -> bool:
        with contextlib.suppress(TargetError):  # the files of the last capture may not be complete
            recorder.start(request)
            return True
        return False

    for number in range(3):
        until(functools.partial(is_started, make_request(1, id=f"n{number}")))
        iterate(recorder, [D])
    until(functools.partial(is_started, make_request(1, ranks=(1,))))
    assert count_open() == 0


@pytest.mark.parametrize("moment", ["armed", "between", "inside"])
def test_exit_ends_the_capture_immediately(
    recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path, moment: str
) -> None:
    recorder.start(make_request(5))
    if moment != "armed":
        iterate(recorder, [D])
    if moment == "inside":
        recorder.begin(D, "it1")
    assert end_process("SIGTERM in mid-capture")
    assert count_open() == 0
    assert (recorder.active, recorder.reply().state) == (False, RequestState.ENDED)
    manifest = read_manifests(tmp_path)["step1"]
    assert manifest["problems"] == ["SIGTERM in mid-capture."]
    assert manifest["status"] == ("failed" if moment == "armed" else "partial")
    recorder.end()


@pytest.fixture
def received_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """List of the SIGTERM signals that the host receives."""
    signals: list[int] = []
    host_handler = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    yield signals
    signal.signal(signal.SIGTERM, host_handler)


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_signal_during_a_hook_is_delivered_after_the_hook(
    tally: ModuleType,
    received_signals: list[int],
    recorder: EngineRecorder,
    make_request: MakeRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
) -> None:
    perform = tally.TallyBackend.perform

    def perform_and_signal(self: Any, name: str, call: str) -> None:
        perform(self, name, call)
        if name == hook:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not received_signals

    monkeypatch.setattr(tally.TallyBackend, "perform", perform_and_signal)
    recorder.start(make_request(3))
    iterate(recorder, [D] * 4)
    assert received_signals == [signal.SIGTERM]
    assert (recorder.active, count_open()) == (False, 0)
    manifest = read_manifests(tmp_path)["step1"]
    assert manifest["status"] == ("complete" if hook == "stop" else "partial")
    assert manifest["artifacts"][0]["whole"]
    # The iteration in progress is complete, too.
    assert recorder.reply().iterations == {"start": 1, "step": 2, "stop": 3}[hook]


def test_signal_during_an_immediate_start_ends_the_capture(
    tally: ModuleType,
    received_signals: list[int],
    recorder: EngineRecorder,
    make_request: MakeRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No iteration follows that could end the capture."""
    perform = tally.TallyBackend.perform

    def perform_and_signal(self: Any, name: str, call: str) -> None:
        perform(self, name, call)
        if name == "start":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(tally.TallyBackend, "perform", perform_and_signal)
    recorder.start(make_request(), at_once=True)
    assert received_signals == [signal.SIGTERM]
    assert (recorder.active, recorder.reply().state) == (False, RequestState.ENDED)
    assert read_manifests(tmp_path)["step1"]["problems"] == ["SIGTERM in mid-capture."]


def test_signal_is_delivered_after_the_files_are_written(
    tally: ModuleType, received_signals: list[int], recorder: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    tally.TallyBackend.may_write.clear()
    recorder.start(make_request(1, write_later=True))
    iterate(recorder, [D])
    threading.Timer(0.01, tally.TallyBackend.may_write.set).start()
    os.kill(os.getpid(), signal.SIGTERM)
    assert received_signals == [signal.SIGTERM]
    assert read_manifests(tmp_path)["step1"]["status"] == "complete"


def test_reply_acquires_no_lock_of_the_file_writer(
    tally: ModuleType, recorder: EngineRecorder, make_request: MakeRequest
) -> None:
    """A signal handler can interrupt `EngineRecorder.reply` and wait for the files in the same thread."""
    tally.TallyBackend.may_write.clear()
    recorder.start(make_request(1, write_later=True))
    iterate(recorder, [D])
    assert recorder._job is not None
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(recorder.reply()), daemon=True)
    with recorder._job._writer._futures[0]._condition:
        thread.start()
        thread.join(10)
    assert [reply.state for reply in replies] == [RequestState.WRITING]


# Random orders of batches.


def expected_captures(
    batches: Sequence[BatchKind], count: int | None, skip: int, stages: Sequence[BatchKind]
) -> tuple[dict[str, list[int]], int]:
    """Return the expected iterations by capture ID, and the number of iterations until the recording ends."""
    counts = dict.fromkeys(stages or (None,), 0)
    selected: list[tuple[int, BatchKind | None]] = []
    end = len(batches)
    for number, batch in enumerate(batches):
        key = batch if stages else None
        if key not in counts:
            continue
        counts[key] += 1
        if counts[key] > skip and (count is None or counts[key] <= skip + count):
            selected.append((number, key))
        if count is not None and all(kind_count >= skip + count for kind_count in counts.values()):
            end = number + 1
            break
    captures: dict[str, list[int]] = {}
    capture_counts: dict[BatchKind | None, int] = {}
    # Consecutive iterations of the same kind share a capture.
    for (key, _), consecutive in groupby(enumerate(selected), lambda item: (item[1][1], item[1][0] - item[0])):
        capture_counts[key] = capture_counts.get(key, 0) + 1
        name = "-".join(
            ["step1", *([key] if key else []), *([str(capture_counts[key])] if capture_counts[key] > 1 else [])]
        )
        captures[name] = [number for _, (number, _) in consecutive]
    return captures, end


@given(
    batches=st.lists(st.sampled_from(BatchKind), max_size=20),
    count=st.none() | st.integers(1, 4),
    skip=st.integers(0, 3),
    stages=st.lists(st.sampled_from(BatchKind), unique=True).map(tuple),
)
@example(batches=[P, D, P, D], count=1, skip=0, stages=(P, D))
def test_any_order_of_batches_is_recorded_as_requested(
    tmp_path_factory: Any, batches: list[BatchKind], count: int | None, skip: int, stages: tuple[BatchKind, ...]
) -> None:
    """Every requested iteration is recorded once. Other iterations are not recorded."""
    if count is None:
        skip = 0  # `skip` requires `count`
    path = tmp_path_factory.mktemp("engine")
    iterations = None if count is None else Iterations(count=count, skip=skip)
    recorder = EngineRecorder(Identity(), "tally-device", {})
    request = CaptureRequest(
        id="step1", output=path, run="run", role="rollout", first_step=1, batch_kinds=stages, iterations=iterations
    )
    recorder.start(request)
    expected, ended = expected_captures(batches, count, skip, stages)
    for number, batch in enumerate(batches):
        assert recorder.active == (number < ended)
        recorder.begin(batch, f"it{number}")
        recorder.end()
    window_complete = not recorder.active
    reply = stop_and_wait(recorder)
    recorded_iterations = read_recorded_iterations(path)
    assert recorded_iterations == expected
    assert reply.iterations == sum(map(len, expected.values()))
    files = [file for capture in reply.captures for file in capture.files]
    assert len({capture.id for capture in reply.captures}) == len(reply.captures)
    assert len(set(files)) == len(files) == len(expected)
    is_incomplete = count is not None and not window_complete
    for name, manifest in read_manifests(path).items():
        if name not in expected:
            assert (manifest["status"], manifest["artifacts"]) == ("failed", [])
            continue
        assert manifest["artifacts"][0]["iterations"] == [expected[name][0], expected[name][-1]]
        assert manifest["iterations"] == (None if count is None else {"count": count, "skip": skip, "first": None})
        assert manifest["status"] == "complete" or (is_incomplete and manifest["status"] == "partial")
    if not is_incomplete and expected:
        assert reply.problems == ()
        assert read_run(path / "run").status is Status.COMPLETE
    assert count_open() == 0


test_any_order_of_batches_is_recorded_as_requested = pytest.mark.usefixtures("tally")(
    test_any_order_of_batches_is_recorded_as_requested
)
