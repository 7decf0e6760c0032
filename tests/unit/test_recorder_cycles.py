"""Recorder cycles of a capture: start, advance, stop and output, with a fake recorder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from profdeck.backends.device_recording import CaptureCycles, CyclePart, OneAtATime, recording_metadata
from profdeck.base.errors import LeaseError
from profdeck.base.identity import Identity
from profdeck.config.options import CommonOptions
from profdeck.config.schedule import Window, WindowPhase
from profdeck.records.artifact import Artifact, Output
from profdeck.records.capture import CaptureRecord, Unit

DIRECTORY = Path("run")


@attrs.define
class FakeCycle:
    """A recorder cycle that stores its positions instead of recording."""

    cycles: CaptureCycles[FakeCycle]
    position: int
    fails: bool = False
    fails_to_stop: bool = False
    first: int | None = None
    recorded: list[int] = attrs.field(factory=list)
    warmup: list[int] = attrs.field(factory=list)
    outcome: str | None = None

    def start(self) -> None:
        if self.fails:
            raise RuntimeError("no device")
        self._add_position()

    def step(self) -> None:
        self.position += 1
        self._add_position()

    def stop(self) -> None:
        if self.fails_to_stop:
            raise RuntimeError("device lost")
        self.outcome = "stopped"

    def abandon(self) -> None:
        assert self.outcome == "stopped"
        self.outcome = "discarded"

    def _add_position(self) -> None:
        assert self.outcome is None
        assert self.position == self.cycles.position
        if self.cycles.phase(self.position) is WindowPhase.WARMUP:
            self.warmup.append(self.position)
            return
        self.first = self.position if self.first is None else self.first
        self.recorded.append(self.position)


@attrs.define
class FakeRecorder:
    """The cycles of a capture, and the fake cycles and outputs that they created."""

    cycles: CaptureCycles[FakeCycle]
    capture: CaptureRecord
    created: list[FakeCycle]
    outputs: list[Output]

    def artifacts(self) -> list[Artifact]:
        return [output() if callable(output) else output for output in self.outputs]


def build_recorder(*, fails: bool = False, **fields: Any) -> FakeRecorder:
    defaults = {"id": "c", "directory": DIRECTORY, "identity": Identity(), "first_step": 0, "current_step": 0}
    capture = CaptureRecord(**(defaults | fields))
    created: list[FakeCycle] = []
    outputs: list[Output] = []

    def create(position: int) -> FakeCycle:
        created.append(FakeCycle(cycles, position, fails))
        return created[-1]

    def write(cycle: FakeCycle, part: CyclePart) -> Artifact:
        assert cycle.outcome == "stopped"
        return Artifact(path=DIRECTORY / (part.name or "complete"), iterations=part.iterations)

    cycles = CaptureCycles(capture, create, write, outputs)
    return FakeRecorder(cycles, capture, created, outputs)


windows = st.builds(
    Window,
    active=st.integers(1, 4),
    wait=st.integers(0, 3),
    warmup=st.integers(0, 3),
    repeat=st.integers(0, 3),
    skip_first=st.integers(0, 3),
)


@given(window=windows, count=st.integers(0, 30), is_interrupted=st.booleans())
def test_each_window_cycle_has_a_recorder_cycle(window: Window, count: int, is_interrupted: bool) -> None:
    """The host runs `count` mini-batches. It may be interrupted in the next mini-batch."""
    recorder = build_recorder(unit=Unit.MINI_BATCH, window=window)
    recorder.cycles.start()
    for _ in range(count):
        recorder.cycles.step()
    if is_interrupted:
        recorder.capture.problems.append("The host was interrupted.")
    recorder.cycles.stop()

    phases = {position: window.phase(position) for position in range(count + 1)}
    for cycle in recorder.created:
        assert [phases[position] for position in cycle.warmup] == [WindowPhase.WARMUP] * len(cycle.warmup)
        assert all(phases[position] is WindowPhase.RECORD for position in cycle.recorded[:-1])
    observed = [position for cycle in recorder.created for position in cycle.warmup + cycle.recorded]
    assert observed == [position for position, phase in phases.items() if phase is not WindowPhase.OFF]
    complete = [
        cycle for cycle in recorder.created if cycle.recorded and phases[cycle.recorded[-1]] is WindowPhase.RECORD_LAST
    ]
    assert all(cycle.outcome == "stopped" for cycle in complete if cycle.recorded[-1] < count)

    # At a scheduled end, the last started mini-batch is empty.
    last = count if is_interrupted else count - 1
    requested = [[position for position in cycle.recorded if position <= last] for cycle in recorder.created]
    written = [positions for positions in requested if positions]
    if count == 0 and not written:  # the host reported no mini-batches, so the cycle contains the complete step
        written = [cycle.recorded[:1] for cycle in recorder.created if cycle.recorded]
    artifacts = recorder.artifacts()
    assert [artifact.iterations for artifact in artifacts] == [(part[0], part[-1]) for part in written]
    assert [artifact.path.name for artifact in artifacts] == [f"mb{part[0]:04d}-{part[-1]:04d}" for part in written]
    assert {cycle.outcome for cycle in recorder.created} <= {"stopped", "discarded"}
    assert [cycle.outcome for cycle in recorder.created].count("stopped") == len(artifacts)
    is_complete = window.count_recorded(count) >= window.repeat * window.active and count > 0
    assert (recorder.capture.problems[is_interrupted:] == []) == bool(artifacts and (is_interrupted or is_complete))


def test_only_the_last_cycle_is_written_after_the_capture() -> None:
    recorder = build_recorder(unit=Unit.MINI_BATCH, window=Window(active=1, repeat=0))
    recorder.cycles.start()
    recorder.cycles.step()
    recorder.capture.problems.append("The host was interrupted.")
    recorder.cycles.stop()
    assert [callable(output) for output in recorder.outputs] == [False, True]


def test_written_cycles_are_kept_if_the_stop_fails() -> None:
    recorder = build_recorder(unit=Unit.MINI_BATCH, window=Window(active=1, repeat=0))
    recorder.cycles.start()
    recorder.cycles.step()
    recorder.cycles.step()
    recorder.created[-1].fails_to_stop = True
    with pytest.raises(RuntimeError, match="device lost"):
        recorder.cycles.stop()
    assert [artifact.iterations for artifact in recorder.capture.artifacts] == [(0, 0), (1, 1)]


def test_global_steps_have_one_cycle_with_warmup() -> None:
    recorder = build_recorder(first_step=5, current_step=3)
    recorder.cycles.start()
    for _ in range(3):
        recorder.cycles.step()
    recorder.cycles.stop()
    (cycle,) = recorder.created
    assert (cycle.warmup, cycle.recorded, cycle.first) == ([3, 4], [5, 6], 5)
    (artifact,) = recorder.artifacts()
    assert (artifact.iterations, artifact.path.name) == (None, "complete")


def test_stop_during_warmup_discards_the_cycle() -> None:
    recorder = build_recorder(first_step=5, current_step=3)
    recorder.cycles.start()
    recorder.cycles.step()
    recorder.cycles.stop()
    assert ([cycle.outcome for cycle in recorder.created], recorder.outputs) == (["discarded"], [])
    assert recorder.capture.problems == ["The capture ended before recording started."]


@given(window=windows, count=st.integers(0, 30), passed_over=st.integers(1, 50))
def test_skipped_mini_batches_shift_the_window(window: Window, count: int, passed_over: int) -> None:
    """The mini-batches keep the host's numbers."""
    recorded_positions = []
    for skipped in (0, passed_over):
        recorder = build_recorder(unit=Unit.MINI_BATCH, window=window, passed_over=skipped)
        recorder.cycles.start()
        for _ in range(count):
            recorder.cycles.step()
        recorder.cycles.stop()
        assert recorder.cycles.position == count + skipped
        recorded_positions.append([[number - skipped for number in cycle.recorded] for cycle in recorder.created])
    assert recorded_positions[0] == recorded_positions[1]


@pytest.mark.parametrize("count", [0, 2])
def test_engine_iterations_are_counted_from_the_first_recorded_iteration(count: int) -> None:
    recorder = build_recorder(unit=Unit.ENGINE_ITERATION, first_iteration=7)
    recorder.cycles.start()
    for _ in range(count):
        recorder.cycles.step()
    recorder.cycles.stop()
    (artifact,) = recorder.artifacts()
    assert (artifact.iterations, artifact.path.name) == ((7, 7 + count), "complete")


def test_cycle_that_fails_to_start_is_ignored() -> None:
    recorder = build_recorder(fails=True)
    with pytest.raises(RuntimeError, match="no device"):
        recorder.cycles.start()
    recorder.cycles.stop()
    assert ([cycle.outcome for cycle in recorder.created], recorder.outputs) == ([None], [])


def test_trace_metadata_contains_capture_and_options() -> None:
    recorder = build_recorder(identity=Identity(role="ref", rank=1, world_size=2, host="h", pid=1))
    metadata = recording_metadata(recorder.capture, CommonOptions(with_stack=True))
    assert metadata.startswith('{"capture": "c", "role": "ref", "rank": 1,')
    assert '"with_stack": true' in metadata


@pytest.mark.parametrize(
    ("reported", "problem"),
    [(0, "Call profiler.step(i, 'mini_batch') after each mini-batch i"), (2, "ended after mini-batch 1, before")],
)
def test_window_that_did_not_start_names_the_cause(reported: int, problem: str) -> None:
    recorder = build_recorder(window=Window(wait=4, active=1))
    recorder.cycles.start()
    for _ in range(reported):
        recorder.cycles.step()
    recorder.cycles.stop()
    assert problem in recorder.capture.problems[0]


def test_mini_batch_that_the_host_did_not_report_is_not_recorded() -> None:
    recorder = build_recorder(unit=Unit.MINI_BATCH, window=Window(wait=1, warmup=1, active=1))
    recorder.cycles.start()
    for _ in range(2):
        recorder.cycles.step()
    recorder.cycles.stop()
    assert recorder.outputs == []
    assert "ended after mini-batch 1, before the window" in recorder.capture.problems[0]


def test_window_that_the_host_did_not_finish_is_a_problem() -> None:
    recorder = build_recorder(unit=Unit.MINI_BATCH, window=Window(wait=1, active=2, repeat=3))
    recorder.cycles.start()
    for _ in range(5):
        recorder.cycles.step()
    recorder.cycles.stop()
    assert [artifact.iterations for artifact in recorder.artifacts()] == [(1, 2), (4, 4)]
    assert "recorded 3 of 6 mini-batches, because the capture ended after mini-batch 4" in recorder.capture.problems[0]


def test_window_without_reported_mini_batches_keeps_the_trace_and_names_the_missing_call() -> None:
    recorder = build_recorder(unit=Unit.MINI_BATCH, window=Window(active=2))
    recorder.cycles.start()
    recorder.cycles.stop()
    assert [artifact.iterations for artifact in recorder.artifacts()] == [(0, 0)]
    assert "Call profiler.step(i, 'mini_batch')" in recorder.capture.problems[0]


def test_forked_child_can_record_during_a_capture_of_its_parent() -> None:
    lock = OneAtATime("torch")
    captures = [
        CaptureRecord(id=name, directory=DIRECTORY, identity=Identity(), first_step=1, current_step=1)
        for name in ("parent", "child")
    ]
    lock.acquire(captures[0])
    with pytest.raises(LeaseError, match="held by this process|is being recorded in this process"):
        lock.acquire(captures[1])
    child = os.fork()
    if child == 0:
        try:
            lock.acquire(captures[1])
        except LeaseError:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    lock.release(captures[0])
    lock.acquire(captures[1])
