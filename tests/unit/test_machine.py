"""The capture state machine: the actions that it returns for each event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from profdeck.base.identity import Identity
from profdeck.config.schedule import PlannedSteps, Schedule
from profdeck.lifecycle.machine import (
    Action,
    Actions,
    Begin,
    CaptureMachine,
    End,
    EndStep,
    Forget,
    LookForRequests,
    Note,
    Pass,
)
from profdeck.records.capture import CaptureRecord, Step, Unit


def machine(*steps: Any, warmup: int = 0, **settings: Any) -> CaptureMachine:
    return CaptureMachine(PlannedSteps(Schedule.from_list(list(steps)), warmup_steps=warmup), **settings)


def capture_of(action: Begin) -> CaptureRecord:
    return CaptureRecord(
        id=f"step{action.first_step}",
        directory=Path(),
        identity=Identity(),
        first_step=action.first_step,
        current_step=action.step,
        stage=action.stage,
    )


def perform(captures: CaptureMachine, actions: Actions, *, fails: bool = False) -> list[Action]:
    """Report the result of each action to the machine, as `Role` does, and return all actions."""
    performed = []
    for action in actions:
        performed.append(action)
        if isinstance(action, Begin) and not fails:
            captures.began(capture_of(action))
        elif isinstance(action, Begin | End | Forget):
            captures.ended()
    return performed


@pytest.mark.parametrize("default_warmup", [True, False])
@pytest.mark.parametrize("reports_step", [True, False])
def test_problem_during_warmup(reports_step: bool, default_warmup: bool) -> None:
    captures = machine("5..6", warmup=1, default_warmup=default_warmup)
    perform(captures, captures.start(4))
    assert captures.capture is not None
    captures.capture.problems.append("Another profiler began.")
    passed = Step(Unit.GLOBAL_STEP, 4)
    actions = perform(captures, captures.step(passed) if reports_step else captures.start(5))
    restarted: list[Action] = [End("it starts again without warm-up", withdraw=True), Begin(5, 5)]
    looked: list[Action] = [LookForRequests(5)] if reports_step else []
    assert actions == looked + (restarted if default_warmup else [Pass(passed)])
    if reports_step:
        assert perform(captures, captures.start(5)) == []
    assert perform(captures, captures.start(6)) == [Pass(Step(Unit.GLOBAL_STEP, 5))]
    assert perform(captures, captures.stop()) == [End(None), EndStep()]


def test_close_during_start_is_deferred() -> None:
    captures = machine(1)
    starting = captures.start(1)
    begin = next(starting)
    assert isinstance(begin, Begin)
    assert list(captures.close("enough")) == [
        Note("stop was called while another operation was in progress."),
        EndStep(),
    ]
    captures.began(capture_of(begin))
    assert perform(captures, starting) == [End("enough")]


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
    captures = machine(1, "3..4", 6, **settings)
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
            "end": lambda: captures.end("reason"),
        }[name]()
        for action in perform(captures, actions, fails=fails):
            if isinstance(action, Begin):
                assert not is_open
                is_open = not fails
            elif isinstance(action, Pass | End):
                assert is_open
                is_open = isinstance(action, Pass)
        assert not captures.busy
        assert (captures.capture is not None) == is_open
    assert captures.is_idle
