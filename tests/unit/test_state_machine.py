"""Tests of the capture state machine: the actions that each event returns."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from profdeck.base.identity import Identity
from profdeck.config.schedule import PlannedSteps, Schedule
from profdeck.lifecycle.state_machine import (
    Abandon,
    Action,
    Actions,
    Begin,
    CaptureMachine,
    CheckRequests,
    End,
    EndStep,
    Forget,
    Note,
    Pass,
)
from profdeck.records.capture import CaptureRecord, Owner, Step, Unit


def create_machine(*steps: Any, warmup: int = 0, **settings: Any) -> CaptureMachine:
    return CaptureMachine(PlannedSteps(Schedule.from_list(list(steps)), warmup_steps=warmup), **settings)


def create_capture(action: Begin) -> CaptureRecord:
    return CaptureRecord(
        id=f"step{action.first_step}",
        directory=Path(),
        identity=Identity(),
        first_step=action.first_step,
        current_step=action.step,
        stage=action.stage,
    )


def perform_actions(captures: CaptureMachine, actions: Actions, *, fails: bool = False) -> list[Action]:
    """Report the result of each action to the machine, as `Role` does, and return all actions."""
    performed = []
    for action in actions:
        performed.append(action)
        if isinstance(action, Begin) and not fails:
            captures.began(create_capture(action))
        elif isinstance(action, Begin | End | Forget):
            captures.ended()
    return performed


def test_capture_of_two_steps() -> None:
    captures = create_machine("2..3")
    assert not captures.begins_at(1)
    assert perform_actions(captures, captures.start(2)) == [Begin(2, 2)]
    assert perform_actions(captures, captures.stop()) == [EndStep()]
    assert captures.between
    assert perform_actions(captures, captures.start(3)) == [Pass(Step(Unit.GLOBAL_STEP, 2))]
    assert perform_actions(captures, captures.stop()) == [End(None), EndStep()]
    assert captures.is_idle


@pytest.mark.parametrize("stops", [0, 1, 2])
def test_announced_step_that_did_not_start_is_not_counted(stops: int) -> None:
    captures = create_machine("3..8")
    for step in (3, 4, 5):
        perform_actions(captures, captures.start(step))
        perform_actions(captures, captures.step(Step(Unit.GLOBAL_STEP, step)))
        for _ in range(stops):
            perform_actions(captures, captures.stop())
    capture = captures.capture
    perform_actions(captures, captures.close("the job ended"))
    assert capture is not None
    assert (capture.first_step, capture.current_step) == (3, 5)


def test_warmup_and_skipped_steps() -> None:
    captures = create_machine("5..8", warmup=2)
    assert perform_actions(captures, captures.start(3)) == [Begin(3, 5)]
    note = Note("step(9) was ignored: step 3 was in progress.")
    assert perform_actions(captures, captures.step(Step(Unit.GLOBAL_STEP, 9))) == [note]
    passed = Step(Unit.GLOBAL_STEP, 3)
    assert perform_actions(captures, captures.step(passed)) == [CheckRequests(4), Pass(passed)]
    assert perform_actions(captures, captures.start(4)) == []  # step(3) has already reported this boundary
    assert perform_actions(captures, captures.start(7)) == [End("the host went from step 4 to step 7"), Begin(7, 7)]
    assert perform_actions(captures, captures.close(None)) == [End("the profiler was closed in mid-capture"), EndStep()]


def test_configured_warmup_is_withdrawn_only_without_a_failure() -> None:
    for reason, schedule, end in (
        (None, "5..8", End("the profiler was closed in mid-capture")),
        (None, "every 5", End("the profiler was closed in mid-capture", remove_empty=True)),
        ("a failure", "every 5", End("a failure")),
    ):
        captures = create_machine(schedule, warmup=1)
        assert perform_actions(captures, captures.start(4)) == [Begin(4, 5)]
        assert perform_actions(captures, captures.close(reason)) == [end, EndStep()]


def test_default_warmup_is_always_withdrawn() -> None:
    for reason, action in (
        (None, End("the profiler was closed in mid-capture", remove_empty=True)),
        ("a failure", End("a failure", remove_empty=True)),
    ):
        captures = create_machine("5..8", warmup=1, default_warmup=True)
        assert perform_actions(captures, captures.start(4)) == [Begin(4, 5, remove_empty=True)]
        assert perform_actions(captures, captures.close(reason)) == [action, EndStep()]
    captures = create_machine("5..8", warmup=1, default_warmup=True)
    perform_actions(captures, captures.start(4))
    skipped = End("the host went from step 4 to step 6", remove_empty=True)
    assert perform_actions(captures, captures.start(6)) == [skipped, Begin(6, 6)]
    assert perform_actions(captures, captures.close("a failure")) == [End("a failure"), EndStep()]


def test_cold_start_after_failed_default_warmup() -> None:
    captures = create_machine("5..8", warmup=1, default_warmup=True)
    assert perform_actions(captures, captures.start(4), fails=True) == [Begin(4, 5, remove_empty=True)]
    assert perform_actions(captures, captures.start(5), fails=True) == [Begin(5, 5)]


@pytest.mark.parametrize("default_warmup", [True, False])
@pytest.mark.parametrize("reports_step", [True, False])
def test_problem_during_warmup(reports_step: bool, default_warmup: bool) -> None:
    captures = create_machine("5..6", warmup=1, default_warmup=default_warmup)
    perform_actions(captures, captures.start(4))
    assert captures.capture is not None
    captures.capture.problems.append("Another profiler began.")
    passed = Step(Unit.GLOBAL_STEP, 4)
    actions = perform_actions(captures, captures.step(passed) if reports_step else captures.start(5))
    restarted: list[Action] = [End("it was restarted without warm-up", remove_empty=True), Begin(5, 5)]
    looked: list[Action] = [CheckRequests(5)] if reports_step else []
    assert actions == looked + (restarted if default_warmup else [Pass(passed)])
    if reports_step:
        assert perform_actions(captures, captures.start(5)) == []
    assert perform_actions(captures, captures.start(6)) == [Pass(Step(Unit.GLOBAL_STEP, 5))]
    assert perform_actions(captures, captures.stop()) == [End(None), EndStep()]


def test_machine_is_idle_after_a_failed_late_start() -> None:
    captures = create_machine("2..4")
    perform_actions(captures, captures.start(2))
    for action in captures.step(Step(Unit.GLOBAL_STEP, 2)):
        if isinstance(action, Pass):
            captures.ended()
    assert (captures.is_idle, captures.announced) == (True, None)
    assert perform_actions(captures, captures.start(3)) == [Begin(3, 3)]
    assert captures.is_open(3)


def test_stages_are_counted() -> None:
    captures = create_machine(1, discrete=True, stages=("update",))
    assert perform_actions(captures, captures.start(1)) == []
    assert perform_actions(captures, captures.enter_stage("other")) == []
    assert perform_actions(captures, captures.enter_stage("update")) == [Begin(1, 1, stage="update")]
    assert perform_actions(captures, captures.stop_capture(None)) == [End(None)]
    assert perform_actions(captures, captures.enter_stage("update")) == [Begin(1, 1, stage="update", count=2)]


def test_close_during_start_is_deferred() -> None:
    captures = create_machine(1)
    starting = captures.start(1)
    begin = next(starting)
    assert isinstance(begin, Begin)
    assert list(captures.close("enough")) == [
        Note("stop was called while another operation was in progress."),
        EndStep(),
    ]
    captures.began(create_capture(begin))
    assert perform_actions(captures, starting) == [End("enough")]


def test_close_from_another_thread_is_deferred_to_the_owner() -> None:
    owner = Owner()
    callers = [owner]
    captures = create_machine("1..9", caller=lambda: callers[-1])
    perform_actions(captures, captures.start(1))
    callers.append(Owner(owner.pid, threading.Thread()))
    (note, _) = perform_actions(captures, captures.close("enough"))
    assert note == Note("stop from a thread that did not start the capture was deferred to the owner's next boundary.")
    callers.append(owner)
    assert perform_actions(captures, captures.step(Step(Unit.GLOBAL_STEP, 1))) == [End("enough")]


def test_capture_of_a_thread_that_has_ended_is_abandoned() -> None:
    """A new thread can reuse the ID of a thread that has exited."""
    ended = threading.Thread()
    callers = [Owner(thread=ended)]
    captures = create_machine(1, 3, caller=lambda: callers[-1])
    begin = next(captures.start(1))
    assert isinstance(begin, Begin)
    captures.began(attrs.evolve(create_capture(begin), owner=callers[0]))
    callers.append(Owner())
    stop = captures.stop()
    abandon = next(stop)
    assert abandon == Abandon("the thread that started the capture has ended. Run all steps in one thread")
    captures.ended()
    assert list(stop) == [EndStep()]
    assert captures.is_idle


def test_forked_child_drops_the_capture() -> None:
    owner = Owner()
    callers = [owner]
    captures = create_machine(1, caller=lambda: callers[-1])
    perform_actions(captures, captures.start(1))
    callers.append(Owner(owner.pid + 1, owner.thread))
    assert perform_actions(captures, captures.stop()) == [Forget(), EndStep()]
    assert captures.is_idle


events = st.tuples(
    st.sampled_from(["start", "step", "mini_batch", "problem", "stop", "close", "stage", "end"]),
    st.integers(0, 7),
    st.booleans(),
)


@given(events=st.lists(events), discrete=st.booleans(), warmup=st.integers(0, 2), default_warmup=st.booleans())
def test_every_begin_has_one_end(
    events: list[tuple[str, int, bool]], discrete: bool, warmup: int, default_warmup: bool
) -> None:
    settings = {"discrete": discrete, "warmup": 0 if discrete else warmup, "default_warmup": default_warmup}
    captures = create_machine(1, "3..4", 6, **settings)
    is_open = False
    for name, step, fails in [*events, ("close", 0, False)]:
        if name == "problem":
            if captures.capture is not None:
                captures.capture.problems.append("A problem.")
            continue
        actions = {
            "start": lambda step=step: captures.start(step),
            "step": lambda step=step: captures.step(Step(Unit.GLOBAL_STEP, step)),
            "mini_batch": lambda step=step: captures.step(Step(Unit.MINI_BATCH, step)),
            "stop": captures.stop,
            "close": lambda: captures.close(None),
            "stage": lambda: captures.enter_stage("work"),
            "end": lambda: captures.stop_capture("reason"),
        }[name]()
        for action in perform_actions(captures, actions, fails=fails):
            if isinstance(action, Begin):
                assert not is_open
                is_open = not fails
            elif isinstance(action, Pass | End):
                assert is_open
                is_open = isinstance(action, Pass)
        assert not captures.busy
        assert (captures.capture is not None) == is_open
    assert captures.is_idle
