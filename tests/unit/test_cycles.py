"""When cycles begin, move on and end: what every recorder of a device shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from profdeck.backends.device_recording import CaptureCycles, CyclePart, recording_metadata
from profdeck.base.identity import Identity
from profdeck.config.options import CommonOptions
from profdeck.config.schedule import Window, WindowPhase
from profdeck.records.artifact import Artifact, Output
from profdeck.records.capture import CaptureRecord, Unit

HERE = Path("run")


@attrs.define
class Notebook:
    """A cycle that writes down the positions that it passed, as a device's library would record them."""

    cycles: CaptureCycles[Notebook]
    position: int
    refuses: bool = False
    first: int | None = None
    recorded: list[int] = attrs.field(factory=list)
    warmed: list[int] = attrs.field(factory=list)
    ended: str | None = None

    def start(self) -> None:
        if self.refuses:
            raise RuntimeError("no device")
        self._moved()

    def step(self) -> None:
        self.position += 1
        self._moved()

    def stop(self) -> None:
        self.ended = "stopped"

    def abandon(self) -> None:
        assert self.ended == "stopped"
        self.ended = "discarded"

    def _moved(self) -> None:
        assert self.ended is None
        assert self.position == self.cycles.position
        if self.cycles.phase(self.position) is WindowPhase.WARMUP:
            self.warmed.append(self.position)
            return
        self.first = self.position if self.first is None else self.first
        self.recorded.append(self.position)


@attrs.define
class Made:
    """A capture's cycles, and all that came of them."""

    cycles: CaptureCycles[Notebook]
    capture: CaptureRecord
    made: list[Notebook]
    outputs: list[Output]

    def artifacts(self) -> list[Artifact]:
        return [output() if callable(output) else output for output in self.outputs]


def make(*, refuses: bool = False, **given: Any) -> Made:
    about = {"id": "c", "directory": HERE, "identity": Identity(), "first_step": 0, "current_step": 0}
    capture = CaptureRecord(**(about | given))
    made: list[Notebook] = []
    outputs: list[Output] = []

    def begin(position: int) -> Notebook:
        made.append(Notebook(cycles, position, refuses))
        return made[-1]

    def write(cycle: Notebook, part: CyclePart) -> Artifact:
        assert cycle.ended == "stopped"
        return Artifact(path=HERE / (part.name or "whole"), iterations=part.iterations)

    cycles = CaptureCycles(capture, begin, write, outputs)
    return Made(cycles, capture, made, outputs)


windows = st.builds(
    Window,
    active=st.integers(1, 4),
    wait=st.integers(0, 3),
    warmup=st.integers(0, 3),
    repeat=st.integers(0, 3),
    skip_first=st.integers(0, 3),
)


@given(window=windows, count=st.integers(0, 30), early=st.booleans())
def test_a_window_gives_a_cycle_per_cycle(window: Window, count: int, early: bool) -> None:
    """A host passes `count` mini-batches, and is interrupted in the next one or not."""
    found = make(unit=Unit.MINI_BATCH, window=window)
    found.cycles.start()
    for _ in range(count):
        found.cycles.step()
    if early:
        found.capture.problems.append("It was interrupted.")
    found.cycles.stop()

    phases = {position: window.phase(position) for position in range(count + 1)}
    for cycle in found.made:
        assert [phases[position] for position in cycle.warmed] == [WindowPhase.WARMUP] * len(cycle.warmed)
        assert all(phases[position] is WindowPhase.RECORD for position in cycle.recorded[:-1])
    passed = [position for cycle in found.made for position in cycle.warmed + cycle.recorded]
    assert passed == [position for position, phase in phases.items() if phase is not WindowPhase.OFF]
    whole = [cycle for cycle in found.made if cycle.recorded and phases[cycle.recorded[-1]] is WindowPhase.RECORD_LAST]
    assert all(cycle.ended == "stopped" for cycle in whole if cycle.recorded[-1] < count)

    # At a normal end the last mini-batch that began was empty.
    last = count if early else count - 1
    held = [[position for position in cycle.recorded if position <= last] for cycle in found.made]
    written = [positions for positions in held if positions]
    if not written:  # an empty recording is better than none
        written = [cycle.recorded[:1] for cycle in found.made if cycle.recorded]
    artifacts = found.artifacts()
    assert [artifact.iterations for artifact in artifacts] == [(part[0], part[-1]) for part in written]
    assert [artifact.path.name for artifact in artifacts] == [f"mb{part[0]:04d}-{part[-1]:04d}" for part in written]
    assert {cycle.ended for cycle in found.made} <= {"stopped", "discarded"}
    assert [cycle.ended for cycle in found.made].count("stopped") == len(artifacts)
    assert (found.capture.problems[early:] == []) == bool(artifacts)


def test_only_the_last_cycle_is_written_after_the_capture() -> None:
    found = make(unit=Unit.MINI_BATCH, window=Window(active=1, repeat=0))
    found.cycles.start()
    found.cycles.step()
    found.capture.problems.append("It was interrupted.")
    found.cycles.stop()
    assert [callable(output) for output in found.outputs] == [False, True]


def test_global_steps_share_a_cycle_that_may_warm_up() -> None:
    found = make(first_step=5, current_step=3)
    found.cycles.start()
    for _ in range(3):
        found.cycles.step()
    found.cycles.stop()
    (cycle,) = found.made
    assert (cycle.warmed, cycle.recorded, cycle.first) == ([3, 4], [5, 6], 5)
    (artifact,) = found.artifacts()
    assert (artifact.iterations, artifact.path.name) == (None, "whole")


def test_a_stop_in_the_warm_up_leaves_nothing_and_says_so() -> None:
    found = make(first_step=5, current_step=3)
    found.cycles.start()
    found.cycles.step()
    found.cycles.stop()
    assert ([cycle.ended for cycle in found.made], found.outputs) == (["discarded"], [])
    assert found.capture.problems == ["The capture ended before recording started."]


@given(window=windows, count=st.integers(0, 30), passed_over=st.integers(1, 50))
def test_a_window_that_had_to_wait_is_the_same_later(window: Window, count: int, passed_over: int) -> None:
    """Its mini-batches keep the numbers that the host gave them."""
    recorded = []
    for late in (0, passed_over):
        found = make(unit=Unit.MINI_BATCH, window=window, passed_over=late)
        found.cycles.start()
        for _ in range(count):
            found.cycles.step()
        found.cycles.stop()
        assert found.cycles.position == count + late
        recorded.append([[number - late for number in cycle.recorded] for cycle in found.made])
    assert recorded[0] == recorded[1]


@pytest.mark.parametrize("passed", [0, 2])
def test_engine_iterations_count_from_the_first_that_is_recorded(passed: int) -> None:
    found = make(unit=Unit.ENGINE_ITERATION, first_iteration=7)
    found.cycles.start()
    for _ in range(passed):
        found.cycles.step()
    found.cycles.stop()
    (artifact,) = found.artifacts()
    assert (artifact.iterations, artifact.path.name) == ((7, 7 + passed), "whole")


def test_a_cycle_that_does_not_start_is_no_cycle() -> None:
    found = make(refuses=True)
    with pytest.raises(RuntimeError, match="no device"):
        found.cycles.start()
    found.cycles.stop()
    assert ([cycle.ended for cycle in found.made], found.outputs) == ([None], [])


def test_a_recording_says_what_it_is_of() -> None:
    found = make(identity=Identity(role="ref", rank=1, world_size=2, host="h", pid=1))
    assert recording_metadata(found.capture, CommonOptions(with_stack=True)).startswith(
        '{"capture": "c", "role": "ref", "rank": 1,'
    )
    assert '"with_stack": true' in recording_metadata(found.capture, CommonOptions(with_stack=True))
