"""Captures that share a device. The second capture waits, starts at a later boundary and records the wait."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, strategies as st

from open_captures import calls_of, count_open, end_process, wait_for_files
from processes import until
from profdeck import Profiler, Status
from profdeck.base import leases
from profdeck.base.errors import CaptureError, LeaseError
from profdeck.base.identity import Identity
from profdeck.config.schedule import Iterations
from profdeck.config.structuring import structure
from profdeck.engine.worker.recorder import EngineRecorder, reply_data
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.request import BatchKind, CaptureRequest, Reply, RequestState
from profdeck.verification.run_report import read_run

P, D, M = BatchKind
GPU = "gpu-1"
HOLDER = "gpu-1, held by this process (rollout, step1)"

Build = Callable[..., Profiler]
MakeRequest = Callable[..., CaptureRequest]


@pytest.fixture
def build(tally: ModuleType, tmp_path: Path) -> Build:
    """Function that creates the profiler of a trainer on the device."""

    def create(**settings: Any) -> Profiler:
        option_settings = {f"trainer.options.{key}": settings.pop(key) for key in options & settings.keys()}
        base = {"output": str(tmp_path), "run": "run", "trainer.backend": "tally", "trainer.options.device": GPU}
        return Profiler.from_config(settings={**base, "steps": [1], **settings, **option_settings})

    options = {"fail_at", "wait_s", "thread_bound", "max_capture_s"}
    return create


@pytest.fixture
def engine(tally: ModuleType) -> Iterator[EngineRecorder]:
    """Recorder of an engine on the same device."""
    recorder = EngineRecorder(Identity(), "tally-device", {})
    yield recorder
    recorder.stop()
    wait_for_files(recorder)
    leases.acquire_lease([GPU], holder="the next test").release()
    assert count_open() == 0


@pytest.fixture
def make_request(tmp_path: Path) -> MakeRequest:
    """Function that creates a capture request for the engine."""

    def create(count: int | None = None, skip: int = 0, **options: Any) -> CaptureRequest:
        fields = {key: options.pop(key) for key in ("id", "batch_kinds", "iterations") if key in options}
        iterations = None if count is None else Iterations(count=count, skip=skip)
        base = {"id": "step1", "output": tmp_path, "run": "run", "role": "rollout", "first_step": 1}
        return CaptureRequest(**{**base, "iterations": iterations, "options": {"device": GPU, **options}, **fields})

    return create


@pytest.fixture
def hold_device() -> Iterator[Callable[[str], leases.Lease]]:
    """Function that leases the device for another holder."""
    acquired: list[leases.Lease] = []

    def hold(holder: str) -> leases.Lease:
        acquired.append(leases.acquire_lease([GPU], holder=holder))
        return acquired[-1]

    yield hold
    for lease in acquired:
        lease.release()


def iterate(recorder: EngineRecorder, *batches: BatchKind, first: int = 0) -> None:
    for number, batch in enumerate(batches, first):
        recorder.begin(batch, f"it{number}")
        recorder.end()


def read_manifests(path: Path, role: str = "trainer") -> dict[str, Manifest]:
    files = filter(is_manifest, path.glob(f"run/step_*/{role}/*.json"))
    return {manifest.capture: manifest for manifest in map(read_manifest, files)}


def read_event_names(path: Path, role: str, capture: str) -> list[str]:
    """Return the event names of a trace."""
    (file,) = path.glob(f"run/step_*/{role}/*.{capture}.trace.json")
    return [str(event["name"]) for event in json.loads(file.read_text())["traceEvents"]]


# The trainer waits.


def test_trainer_records_the_remainder_of_the_step(
    build: Build, engine: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    trainer = build()
    engine.start(make_request(2))
    with trainer.capture(1) as capture:
        assert capture is not None
        (manifest,) = read_manifests(tmp_path).values()
        assert (manifest.status, manifest.waits_for) == (Status.RECORDING, HOLDER)
        (report,) = (capture for capture in read_run(tmp_path / "run").captures if capture.role == "trainer")
        assert f"waits for {HOLDER}." in report.ranks[0].problems[0]
        with trainer.stage("generate"):
            iterate(engine, D, D, D)
        assert calls_of(trainer) == []
        with trainer.stage("update"):
            assert calls_of(trainer) == ["start step1"]
            (manifest,) = read_manifests(tmp_path).values()
            assert (manifest.status, manifest.waits_for) == (Status.RECORDING, None)
    assert read_event_names(tmp_path, "trainer", "step1") == ["start", "update"]
    assert read_event_names(tmp_path, "rollout", "step1") == ["start", "it0", "engine_iteration 0", "it1"]
    (manifest,) = read_manifests(tmp_path).values()
    assert (manifest.status, manifest.problems, manifest.waits_for) == (Status.COMPLETE, (), None)
    assert manifest.waited_s is not None
    assert 0 < manifest.waited_s < 60
    assert manifest.notes == (f"The capture waited {manifest.waited_s:.2f} s for {HOLDER}, and started in step 1.",)
    wait_for_files(engine)
    assert read_run(tmp_path / "run").status is Status.COMPLETE


@pytest.mark.parametrize("boundary", ["mini_batch", "engine_iteration", "start", "stage"])
def test_each_boundary_retries_the_start(build: Build, hold_device: Any, tmp_path: Path, boundary: str) -> None:
    trainer, lease = build(), hold_device("rollout, step1")
    trainer.start(1)

    def pass_boundary() -> None:
        if boundary == "start":
            trainer.start(1)
        elif boundary == "stage":
            with trainer.stage("update"):
                pass
        else:
            trainer.step(0, boundary)

    pass_boundary()
    assert calls_of(trainer) == []
    lease.release()
    pass_boundary()
    assert calls_of(trainer) == ["start step1"]
    trainer.stop()
    assert read_manifests(tmp_path)["step1"].status is Status.COMPLETE


def test_steps_before_the_start_are_not_recorded(build: Build, hold_device: Any, tmp_path: Path) -> None:
    trainer, lease = build(steps=["1..4"]), hold_device("rollout, step1")
    for step in range(1, 5):
        with trainer.capture(step) as capture:
            assert capture is not None
            if step == 2:
                lease.release()
    assert calls_of(trainer) == ["start step1", "step step1 global_step 3", "stop step1"]
    manifest = read_manifests(tmp_path)["step1"]
    assert (manifest.status, manifest.first_step, manifest.last_step) == (Status.PARTIAL, 1, 4)
    assert manifest.problems == ("Steps 1 to 2 were not recorded, because the capture was waiting for a device.",)
    assert "and started in step 3." in manifest.notes[0]


def test_wait_during_the_warmup_loses_no_step(build: Build, hold_device: Any, tmp_path: Path) -> None:
    trainer, lease = build(steps=[5], **{"trainer.warmup_steps": 3}), hold_device("rollout, step2")
    for step in range(7):
        with trainer.capture(step):
            if step == 3:
                lease.release()
    assert calls_of(trainer) == ["start step5", "step step5 global_step 4", "stop step5"]
    manifest = read_manifests(tmp_path)["step5"]
    assert (manifest.status, manifest.problems) == (Status.COMPLETE, ())
    assert "and started in step 4." in manifest.notes[0]


def test_capture_is_missing_if_the_device_stays_busy(
    build: Build, hold_device: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hold_device("rollout, step1")
    trainer = build()
    with caplog.at_level(logging.WARNING, "profdeck"), trainer.capture(1):
        trainer.step(0, "mini_batch")
    assert calls_of(trainer) == []
    manifest = read_manifests(tmp_path)["step1"]
    assert (manifest.status, manifest.waits_for) == (Status.MISSING, HOLDER)
    (problem,) = manifest.problems
    assert problem == (
        f"The device did not become available: the capture waited {manifest.waited_s:.2f} s for {HOLDER}. Shorten the "
        "other recording (limit the iterations of an engine, or select stages of a trainer), or capture these roles at "
        "different steps."
    )
    assert "Capture step1 is missing: The device did not become available" in caplog.text
    assert trainer.active is None
    assert read_run(tmp_path / "run").captures[0].status is Status.MISSING


def test_on_error_raise_raises_an_error_if_the_device_stays_busy(build: Build, hold_device: Any) -> None:
    hold_device("rollout, step1")
    trainer = build(on_error="raise")
    trainer.start(1)
    trainer.step(0, "mini_batch")
    with pytest.raises(CaptureError, match="Capture step1 is missing: The device did not become available"):
        trainer.stop()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda trainer: trainer.close(), "The profiler was closed in mid-capture."),
        (lambda trainer: trainer.start(7), "The host went from step 1 to step 7."),
        (lambda _: end_process("SIGTERM in mid-capture"), "SIGTERM in mid-capture."),
    ],
)
def test_early_end_during_the_wait_is_reported(
    build: Build, hold_device: Any, tmp_path: Path, end: Callable[[Profiler], object], reason: str
) -> None:
    lease = hold_device("rollout, step1")
    trainer = build(steps=["1..3"])
    trainer.start(1)
    end(trainer)
    manifest = read_manifests(tmp_path)["step1"]
    assert (manifest.status, manifest.problems[0]) == (Status.MISSING, reason)
    assert manifest.problems[1].startswith("The device did not become available: the capture waited ")
    assert count_open() == 0
    lease.release()
    with build(run="next").capture(1):
        pass
    assert read_run(tmp_path / "next").status is Status.COMPLETE


def test_host_exception_during_the_wait_is_reported(build: Build, hold_device: Any, tmp_path: Path) -> None:
    hold_device("rollout, step1")
    with pytest.raises(ZeroDivisionError), build().capture(1):
        _ = 1 / 0
    manifest = read_manifests(tmp_path)["step1"]
    assert (manifest.status, manifest.problems[0]) == (
        Status.MISSING,
        "An exception ended it: ZeroDivisionError: division by zero.",
    )


def test_wait_ends_at_the_time_limit(build: Build, hold_device: Any, tmp_path: Path) -> None:
    hold_device("rollout, step1")
    trainer = build(max_capture_s=0.02)
    trainer.start(1)
    until(lambda: trainer.active is None)
    manifest = read_manifests(tmp_path)["step1"]
    assert manifest.status is Status.MISSING
    assert manifest.problems[0] == "It was not stopped within max_capture_s=0.02 seconds."


@pytest.mark.parametrize("boundary", ["mini-batch", "step", "stage", "start"])
def test_failure_of_a_delayed_start_is_reported(
    build: Build, hold_device: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, boundary: str
) -> None:
    trainer, lease = build(steps=["1..2"], fail_at="start"), hold_device("rollout, step1")
    trainer.start(1)
    lease.release()
    with caplog.at_level(logging.WARNING, "profdeck"):
        if boundary == "mini-batch":
            trainer.step(0, "mini_batch")
        elif boundary == "step":
            trainer.step(1)
        elif boundary == "start":
            trainer.start(1)
        else:
            with trainer.stage("update"):
                pass
    assert "start does not work. The job continues without this capture." in caplog.text
    manifest = read_manifests(tmp_path)["step1"]
    assert (manifest.status, manifest.problems) == (Status.FAILED, ("RuntimeError: start does not work.",))
    assert f"s for {HOLDER}." in manifest.notes[-1]
    assert (trainer.active, count_open()) == (None, 0)
    leases.acquire_lease([GPU], holder="another process").release()
    trainer.step(1, "mini_batch")
    trainer.stop()


def test_on_error_raise_raises_the_error_of_a_delayed_start(build: Build, hold_device: Any) -> None:
    trainer, lease = build(fail_at="start", on_error="raise"), hold_device("rollout, step1")
    trainer.start(1)
    lease.release()
    with pytest.raises(CaptureError, match="start does not work"):
        trainer.step(0, "mini_batch")
    assert trainer.active is None


def test_stage_in_discrete_mode_waits_for_the_device(build: Build, hold_device: Any, tmp_path: Path) -> None:
    trainer, lease = build(mode="discrete", steps=[1]), hold_device("rollout, step1")
    trainer.start(1)
    with trainer.stage("generate"):
        pass
    with trainer.stage("update"):
        trainer.step(0, "mini_batch")
        lease.release()
        with trainer.stage("inner"):
            pass
    with trainer.stage("update"):
        pass
    trainer.stop()
    stage_manifests = read_manifests(tmp_path)
    assert {name: manifest.status for name, manifest in stage_manifests.items()} == {
        "step1-generate": Status.MISSING,
        "step1-update": Status.COMPLETE,
        "step1-update-2": Status.COMPLETE,
    }
    assert read_event_names(tmp_path, "trainer", "step1-update") == ["start", "inner"]


def test_delayed_window_counts_the_skipped_mini_batches(build: Build, hold_device: Any) -> None:
    """test_recorder_cycles.py tests the effect on the recorder."""
    trainer, lease = build(**{"trainer.window": {"active": 2}}), hold_device("rollout, step1")
    capture = trainer.start(1)
    assert capture is not None
    for number in range(5):
        if number == 3:
            lease.release()
        trainer.step(number, "mini_batch")
    assert capture.passed_over == 4
    trainer.stop()


@pytest.mark.parametrize("thread_bound", [True, False])
def test_wait_does_not_block_async_hosts(build: Build, hold_device: Any, tmp_path: Path, thread_bound: bool) -> None:
    trainer, lease = build(wait_s=0.001, thread_bound=thread_bound, steps=["1..2"]), hold_device("rollout, step1")

    async def run_host() -> None:
        async with trainer.capture(1):
            await trainer.astep(0, "mini_batch")
            lease.release()
            async with trainer.stage("update"):
                assert calls_of(trainer) == ["start step1"]
        async with trainer.capture(2):
            pass

    asyncio.run(run_host())
    manifest = read_manifests(tmp_path)["step1"]
    assert (manifest.status, manifest.problems) == (Status.COMPLETE, ())
    assert read_event_names(tmp_path, "trainer", "step1") == ["start", "update", "global_step 1"]


def test_cancelled_start_releases_the_device(build: Build, hold_device: Any, tmp_path: Path) -> None:
    trainer, lease = build(wait_s=0.05), hold_device("rollout, step1")

    async def run_host() -> None:
        await trainer.astart(1)
        lease.release()
        task = asyncio.ensure_future(trainer.astep(0, "mini_batch"))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run_host())
    assert (trainer.active, count_open()) == (None, 0)
    assert read_manifests(tmp_path)["step1"].status is Status.FAILED
    leases.acquire_lease([GPU], holder="another process").release()


def test_trainer_waits_for_a_busy_recorder(
    build: Build, tally: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend raises LeaseError if its recorder is in use. See `profdeck.backends.device_recording.OneAtATime`."""
    busy = [True]
    perform = tally.TallyBackend.perform

    def perform_if_free(self: Any, name: str, call: str) -> None:
        if name == "start" and busy[0]:
            raise LeaseError("It is busy.", "recorder, held by this process (ref, step1)")
        perform(self, name, call)

    monkeypatch.setattr(tally.TallyBackend, "perform", perform_if_free)
    trainer = build()
    trainer.start(1)
    leases.acquire_lease([GPU], holder="another process").release()  # a waiting profiler holds no lease
    assert read_manifests(tmp_path)["step1"].waits_for == "recorder, held by this process (ref, step1)"
    trainer.step(0, "mini_batch")
    busy[0] = False
    trainer.step(1, "mini_batch")
    trainer.stop()
    manifest = read_manifests(tmp_path)["step1"]
    assert (manifest.status, manifest.problems) == (Status.COMPLETE, ())
    assert "s for recorder, held by this process (ref, step1), and started in step 1." in manifest.notes[0]


# The engine waits.


def test_engine_records_after_the_trainer(
    build: Build, engine: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    trainer = build()
    holder = "gpu-1, held by this process (trainer, step1)"
    with trainer.capture(1):
        engine.start(make_request(2, 1))
        reply = engine.reply()
        assert (reply.state, reply.waits_for, engine.active) == (RequestState.ARMED, holder, True)
        assert structure(json.loads(json.dumps(reply_data(reply))), Reply, where="") == reply
        assert read_manifests(tmp_path, "rollout")["step1"].waits_for == holder
        iterate(engine, D, D, D)
        assert engine.reply().iterations == 0
    iterate(engine, D, first=3)
    assert (engine.reply().state, engine.reply().waits_for) == (RequestState.ARMED, None)
    iterate(engine, D, D, D, first=4)
    reply = wait_for_files(engine)
    assert (reply.state, reply.iterations, reply.problems, reply.waits_for) == (RequestState.ENDED, 2, (), None)
    assert read_event_names(tmp_path, "rollout", "step1") == ["start", "it4", "engine_iteration 4", "it5"]
    manifest = read_manifests(tmp_path, "rollout")["step1"]
    assert (manifest.status, manifest.problems, manifest.waits_for) == (Status.COMPLETE, (), None)
    assert manifest.artifacts[0].iterations == (4, 5)
    assert manifest.notes == (
        f"The capture waited {manifest.waited_s:.2f} s for {holder}, and started at iteration 4.",
    )
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_engine_requested_before_the_trainer_records_first(
    build: Build, engine: EngineRecorder, make_request: MakeRequest, tmp_path: Path
) -> None:
    """The device is leased at the request, before the first iteration."""
    engine.start(make_request(1, 2))
    trainer = build()
    trainer.start(1)
    iterate(engine, D, D)
    trainer.step(0, "mini_batch")
    assert calls_of(trainer) == []
    iterate(engine, D, first=2)
    trainer.step(1, "mini_batch")  # the window has ended; its file may not be written yet
    assert calls_of(trainer) == ["start step1"]
    trainer.stop()
    assert wait_for_files(engine).captures[0].status is Status.COMPLETE


def test_device_is_released_before_the_files_are_written(
    tally: ModuleType, engine: EngineRecorder, make_request: MakeRequest
) -> None:
    tally.TallyBackend.may_write.clear()
    engine.start(make_request(1, write_later=True))
    iterate(engine, D)
    assert engine.reply().state is RequestState.WRITING
    leases.acquire_lease([GPU], holder="trainer").release()
    tally.TallyBackend.may_write.set()


def test_engine_does_not_lease_the_device_before_its_window(
    engine: EngineRecorder, make_request: MakeRequest, hold_device: Any, tmp_path: Path
) -> None:
    lease = hold_device("trainer, step0")
    engine.start(make_request(iterations=Iterations(count=2, first=3)))
    assert engine.reply().waits_for is None
    lease.release()
    iterate(engine, D, D, D)
    lease = hold_device("trainer, step1")
    iterate(engine, D, first=3)
    assert engine.reply().waits_for == "gpu-1, held by this process (trainer, step1)"
    lease.release()
    iterate(engine, D, D, first=4)
    assert wait_for_files(engine).captures[0].status is Status.COMPLETE
    assert read_manifests(tmp_path, "rollout")["step1"].artifacts[0].iterations == (4, 5)


def test_each_batch_kind_waits_separately(
    engine: EngineRecorder, make_request: MakeRequest, hold_device: Any, tmp_path: Path
) -> None:
    engine.start(make_request(2, batch_kinds=(P, D)))
    iterate(engine, P, D, D)
    lease = hold_device("trainer, step1")  # the prefill window is not complete, and no prefill is being recorded
    iterate(engine, P, D, first=3)
    assert engine.reply().waits_for == "gpu-1, held by this process (trainer, step1)"
    lease.release()
    iterate(engine, P, first=5)
    reply = wait_for_files(engine)
    assert (reply.state, reply.iterations, reply.problems) == (RequestState.ENDED, 4, ())
    kind_manifests = read_manifests(tmp_path, "rollout")
    assert {name: manifest.artifacts[0].iterations for name, manifest in kind_manifests.items()} == {
        "step1-prefill": (0, 0),
        "step1-decode": (1, 2),
        "step1-prefill-2": (5, 5),
    }
    assert [name for name, manifest in kind_manifests.items() if manifest.waited_s is not None] == ["step1-prefill-2"]


def test_waiting_batch_kinds_have_a_manifest(
    engine: EngineRecorder, make_request: MakeRequest, hold_device: Any, tmp_path: Path
) -> None:
    lease = hold_device("trainer, step1")
    engine.start(make_request(1, batch_kinds=(P, D)))
    iterate(engine, P, D)
    assert read_manifests(tmp_path, "rollout")["step1"].waits_for is not None
    lease.release()
    iterate(engine, P, D, first=2)
    assert wait_for_files(engine).state is RequestState.ENDED
    assert {*read_manifests(tmp_path, "rollout")} == {"step1-prefill", "step1-decode"}
    assert read_run(tmp_path / "run").status is Status.COMPLETE


@pytest.mark.parametrize("stages", [(), (P, D)])
@pytest.mark.parametrize("reason", [None, "the engine shut down"])
@pytest.mark.parametrize("iterations", [0, 3])
def test_engine_capture_is_missing_if_the_device_stays_busy(
    engine: EngineRecorder,
    make_request: MakeRequest,
    hold_device: Any,
    tmp_path: Path,
    iterations: int,
    reason: str | None,
    stages: tuple[BatchKind, ...],
) -> None:
    hold_device("trainer, step1")
    engine.start(make_request(2, batch_kinds=stages))
    iterate(engine, *[D] * iterations)
    engine.stop(reason)
    reply = engine.reply()
    assert (reply.state, reply.waits_for, engine.active) == (RequestState.ENDED, None, False)
    (recorded,) = reply.captures
    manifest = read_manifests(tmp_path, "rollout")["step1"]
    assert (recorded.status, manifest.status) == (Status.MISSING, Status.MISSING)
    assert recorded.problems == manifest.problems
    expected = [
        *(["The engine shut down."] if reason else []),
        "The device did not become available: the capture waited ",
    ]
    assert len(manifest.problems) == len(expected)
    assert all(problem.startswith(start) for problem, start in zip(manifest.problems, expected, strict=True))
    assert "s for gpu-1, held by this process (trainer, step1). Shorten the other recording" in manifest.problems[-1]
    assert reply.problems == (("The engine shut down.",) if reason else ())


def test_device_busy_for_a_later_batch_kind_is_reported(
    engine: EngineRecorder, make_request: MakeRequest, hold_device: Any
) -> None:
    engine.start(make_request(2, batch_kinds=(P, D)))
    iterate(engine, P, D)
    engine.begin(M, "it2")  # ends the recording of decodes
    engine.end()
    hold_device("trainer, step1")
    iterate(engine, D, P, first=3)
    engine.stop()
    reply = wait_for_files(engine)
    assert (reply.state, reply.iterations) == (RequestState.ENDED, 2)
    assert reply.problems[0].startswith("The device did not become available: the capture waited ")
    assert reply.problems[1:] == (
        "Only 1 of 2 prefill iterations ran before the stop.",
        "Only 1 of 2 decode iterations ran before the stop.",
    )


def test_stop_between_the_wait_and_the_window_is_reported(
    engine: EngineRecorder, make_request: MakeRequest, hold_device: Any, tmp_path: Path
) -> None:
    lease = hold_device("trainer, step1")
    engine.start(make_request(2, 5))
    iterate(engine, D)
    lease.release()
    iterate(engine, D, D, first=1)
    engine.stop()
    manifest = read_manifests(tmp_path, "rollout")["step1"]
    assert (manifest.status, manifest.waits_for) == (Status.FAILED, None)
    assert manifest.problems == ("It was stopped after 2 iterations, before its window started.",)
    wait = f"{manifest.waited_s:.2f} s for gpu-1, held by this process (trainer, step1)"
    assert manifest.notes == (f"The capture waited {wait}.",)


def test_exit_while_an_engine_waits_is_reported(
    engine: EngineRecorder, make_request: MakeRequest, hold_device: Any, tmp_path: Path
) -> None:
    hold_device("trainer, step1")
    engine.start(make_request(2))
    iterate(engine, D)
    assert end_process("SIGTERM in mid-capture")
    manifest = read_manifests(tmp_path, "rollout")["step1"]
    assert (manifest.status, manifest.problems[0]) == (Status.MISSING, "SIGTERM in mid-capture.")


def test_wait_of_an_engine_ends_at_the_time_limit(
    engine: EngineRecorder, make_request: MakeRequest, hold_device: Any, tmp_path: Path
) -> None:
    hold_device("trainer, step1")
    engine.start(make_request(2, max_capture_s=0.02))
    while engine.active:
        iterate(engine, D)
    manifest = read_manifests(tmp_path, "rollout")["step1"]
    assert manifest.status is Status.MISSING
    assert manifest.problems[0] == "It was not stopped within max_capture_s=0.02 seconds."


def test_unusable_lease_directory_ends_the_wait_of_an_engine(
    engine: EngineRecorder, make_request: MakeRequest, hold_device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_device("trainer, step1")
    engine.start(make_request(2))
    with monkeypatch.context() as patch:
        patch.setenv(leases.DIRECTORY_VARIABLE, "/proc/profdeck")
        iterate(engine, D)
    reply = wait_for_files(engine)
    assert (reply.state, engine.active) == (RequestState.ENDED, False)
    assert "FileNotFoundError" in reply.problems[0]
    assert read_manifests(tmp_path, "rollout")["step1"].status is Status.MISSING


@pytest.mark.parametrize("stages", [(), (D,)])
def test_engine_waits_for_a_busy_recorder(
    tally: ModuleType,
    engine: EngineRecorder,
    make_request: MakeRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stages: tuple[BatchKind, ...],
) -> None:
    """For example, an engine in the trainer's process, while torch records the trainer."""
    busy = [True]
    perform = tally.TallyBackend.perform

    def perform_if_free(self: Any, name: str, call: str) -> None:
        if name == "start" and busy[0]:
            raise LeaseError("It is busy.", "recorder, held by this process (trainer, step1)")
        perform(self, name, call)

    monkeypatch.setattr(tally.TallyBackend, "perform", perform_if_free)
    engine.start(make_request(2, batch_kinds=stages))
    iterate(engine, D, D)
    assert engine.reply().waits_for == "recorder, held by this process (trainer, step1)"
    leases.acquire_lease([GPU], holder="another process").release()  # a waiting engine holds no lease
    busy[0] = False
    iterate(engine, D, D, first=2)
    reply = wait_for_files(engine)
    assert (reply.state, reply.iterations, reply.captures[0].status) == (RequestState.ENDED, 2, Status.COMPLETE)
    (manifest,) = read_manifests(tmp_path, "rollout").values()
    assert manifest.artifacts[0].iterations == (2, 3)
    assert "and started at iteration 2." in manifest.notes[0]


# Random orders of operations.


class Colocated:
    """A trainer, an engine and another process on one device. Each method is an operation."""

    def __init__(self, directory: Path, mode: str) -> None:
        """Args:
        directory: the output directory.
        mode: the mode of the trainer.
        """
        base = {"output": str(directory), "run": "run", "steps": ["1..99"], "mode": mode, "on_demand": False}
        self.trainer = Profiler.from_config(
            settings={**base, "trainer.backend": "tally", "trainer.options.device": GPU}
        )
        self.engine = EngineRecorder(Identity(), "tally-device", {})
        self.other = leases.LeaseRequest(lambda: [GPU], "other")
        self._directory = directory
        self._step = self._requests = 0

    def check(self) -> None:
        """Check that at most one capture is recording, and that it has leased the device."""
        (role,) = self.trainer._roles
        trainer_records = role.recording is not None and not role.recording.waiting
        engine_records = self.engine.reply().state is RequestState.RECORDING
        assert trainer_records + engine_records <= 1
        if self.other.try_acquire():
            self.other.release()
            assert not trainer_records
            assert not engine_records

    def start(self) -> None:
        self._step += 1
        self.trainer.start(self._step)

    def step(self) -> None:
        self.trainer.step(self._step)

    def mini_batch(self) -> None:
        self.trainer.step(0, "mini_batch")

    def stage(self) -> None:
        with self.trainer.stage("work"):
            self.check()

    def stop(self) -> None:
        self.trainer.stop()

    def close(self) -> None:
        self.trainer.close()

    def request(self, *stages: BatchKind) -> None:
        if self.engine.reply().state in {RequestState.IDLE, RequestState.ENDED}:
            self._requests += 1
            self.engine.start(
                CaptureRequest(
                    id=f"request{self._requests}",
                    output=self._directory,
                    run="run",
                    role="rollout",
                    iterations=Iterations(count=2, skip=self._requests % 2),
                    batch_kinds=stages,
                    options={"device": GPU},
                )
            )

    def request_by_batch_kind(self) -> None:
        self.request(P, D)

    def prefill(self) -> None:
        iterate(self.engine, P)

    def decode(self) -> None:
        iterate(self.engine, D)

    def end(self) -> None:
        self.engine.stop()
        wait_for_files(self.engine)

    def other_process(self) -> None:
        if self.other.try_acquire():
            self.decode()
            self.mini_batch()
            self.other.release()


OPERATIONS = [name for name in vars(Colocated) if not name.startswith("_") and name != "check"]


@pytest.mark.usefixtures("tally")
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=40), mode=st.sampled_from(["continuous", "discrete"]))
def test_at_most_one_capture_records_in_any_order_of_operations(
    tmp_path_factory: Any, operations: list[str], mode: str
) -> None:
    """No operation raises, every capture ends, and the device is released."""
    directory = tmp_path_factory.mktemp("run")
    colocated = Colocated(directory, mode)
    for operation in operations:
        getattr(colocated, operation)()
        colocated.check()
    colocated.close()
    colocated.end()
    leases.acquire_lease([GPU], holder="the end").release()
    assert count_open() == 0
    for role in ("trainer", "rollout"):
        for manifest in read_manifests(directory, role).values():
            assert manifest.status is not Status.RECORDING
            assert (manifest.status is Status.MISSING) == (manifest.waits_for is not None)
