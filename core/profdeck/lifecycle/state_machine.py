"""State machine for captures. It converts events into actions, does no I/O and calls no hooks.

Each event method returns a generator of actions, because the result of an action can determine the next action. The
role performs each action before it requests the next one. After an action that begins or ends a capture, the role
first calls `CaptureMachine.began` or `CaptureMachine.ended`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias

import attrs

from profdeck.config.schedule import OnDemandSteps, PlannedSteps
from profdeck.records.capture import CaptureRecord, CaptureState, Owner, Step, Unit

CLOSED = "the profiler was closed in mid-capture"
_ENDED_THREAD = "the thread that started the capture has ended. Run all steps in one thread"
_COLD = "it was restarted without warm-up"


@attrs.frozen
class Begin:
    """Begin a capture."""

    step: int
    """The current global step."""
    first_step: int
    """The first global step to record; later than ``step`` if the capture warms up."""
    demand: OnDemandSteps | None = None
    stage: str | None = None
    count: int = 1
    """Sequence number among the captures of the same stage and step, starting at 1."""
    remove_empty: bool = False
    """True to remove the manifest if the capture cannot start."""


@attrs.frozen
class Pass:
    """Notify the plugins that a unit has ended. If the capture is waiting for a device, only try to start it."""

    step: Step | None = None
    """The global step or other unit that has ended; None to only try to start a waiting capture."""


@attrs.frozen
class End:
    """End the capture."""

    reason: str | None
    """The reason for an early end; None if the capture ends as scheduled."""
    remove_empty: bool = False
    """True to remove the manifest if nothing was recorded."""


@attrs.frozen
class Note:
    """Add a note to the capture. If the capture has a pending end, also write the manifest immediately."""

    text: str


@attrs.frozen
class CheckRequests:
    """Check for capture requests before a global step begins."""

    step: int


@attrs.frozen
class EndStep:
    """Complete a global step: answer capture requests and start the ``finish`` commands."""

    problem: str | None = None
    """In discrete mode, the reason why the host did not complete the step; None if the step was completed."""


@attrs.frozen
class Repeat:
    """Report that the host repeats a global step that has already been captured."""

    step: int


@attrs.frozen
class Forget:
    """Discard a capture that this process inherited through a fork. The parent process owns the capture."""


@attrs.frozen
class Abandon:
    """End the capture without stopping its recorder, because the only thread that could stop it has exited."""

    reason: str


Action: TypeAlias = Begin | Pass | End | Note | CheckRequests | EndStep | Repeat | Forget | Abandon
Actions: TypeAlias = Generator[Action, None, None]


@attrs.frozen
class PendingEnd:
    """A deferred request to end the capture."""

    reason: str | None
    """The reason for an early end; None if the capture ends as scheduled."""
    host_is_done: bool = False
    """True if the capture ends because the host has finished."""


@attrs.define(eq=False)
class CaptureMachine:
    """State machine for the captures of one role. At most one capture is active at a time."""

    steps: PlannedSteps
    default_warmup: bool = False
    """True if the backend's default warm-up applies. A capture that ends during this warm-up is removed."""
    discrete: bool = False
    """True if each stage is recorded as a separate capture."""
    stages: tuple[str, ...] = ()
    """Stages to capture in discrete mode. If empty, all stages are captured."""
    thread_bound: bool = True
    """True if only the thread that started a capture can end it."""
    max_steps: int | None = None
    """Maximum number of global steps in a capture; None for no limit."""
    caller: Callable[[], Owner] = Owner
    """Function that returns the calling process and thread."""
    capture: CaptureRecord | None = attrs.field(default=None, init=False)
    """The running or waiting capture."""
    armed: int | None = attrs.field(default=None, init=False)
    """In discrete mode, the global step whose stages are captured."""
    announced: int | None = attrs.field(default=None, init=False)
    """The capture's next global step, from the `step` call that ended the previous step until the `start` call."""
    between: bool = attrs.field(default=False, init=False)
    """True while the capture is between two of its global steps."""
    busy: bool = attrs.field(default=False, init=False)
    """True while an operation is in progress."""
    pending: PendingEnd | None = attrs.field(default=None, init=False)
    """The deferred request to end the capture."""
    limited: CaptureRecord | None = attrs.field(default=None, init=False)
    """The last capture that exceeded a limit. The adjacent steps after it are not captured."""
    _captured: set[int | None] = attrs.field(factory=set, init=False)
    """Scheduled global steps that were captured. If the host's step numbers restart, they are not captured again."""
    _counts: Counter[tuple[int, str]] = attrs.field(factory=Counter, init=False)
    # Re-entrant: a signal handler can end the capture while this thread holds the lock.
    mutex: threading.RLock = attrs.field(factory=threading.RLock, init=False)

    @property
    def is_idle(self) -> bool:
        """True if no capture is running or starting, and no stage would be captured."""
        return self.capture is None and self.armed is None and not self.busy

    def is_open(self, step: int) -> bool:
        """Return whether `start` has already been called for a global step."""
        if self.capture is None:
            return self.armed == step
        return self.capture.current_step == step and self.announced != step

    def begins_at(self, step: int) -> bool:
        """Return whether `start` would do anything for a global step while no capture is running."""
        return (self.discrete and self.steps.demand_at(step) is not None) or self.steps.begins(step) is not None

    # Results of actions.

    def began(self, capture: CaptureRecord) -> None:
        """Store the capture that a `Begin` action started. The capture may still be waiting for a device."""
        self.capture = capture

    def ended(self) -> None:
        """Clear the current capture after it has ended or failed to start."""
        if (capture := self.capture) is not None and capture.demand is None:
            self._captured.update(range(capture.first_step, capture.current_step + 1))
        self.capture = self.pending = self.announced = None
        self.between = False

    # Events.

    def start(self, step: int) -> Actions:
        """Handle the start of a global step."""
        return self._guarded(f"start({step})", self._start(step))

    def step(self, step: Step) -> Actions:
        """Handle the end of a global step, or of a unit inside it."""
        return self._guarded(f"step({step.index})", self._step(step))

    def stop(self) -> Actions:
        """Handle the host's ``stop`` call. End the capture unless the next global step belongs to it."""
        self.armed = None
        if self.capture is not None and (self.announced is not None or self._continues(self.capture)):
            self.between = True
        else:
            yield from self.stop_capture(None)
        yield EndStep()

    def close(self, reason: str | None) -> Actions:
        """End the capture at the host's request. `reason` is None if the host has finished."""
        armed, self.armed = self.armed, None
        current = armed if self.capture is None else self.capture.current_step
        yield from self.stop_capture(reason or CLOSED, host_is_done=reason is None)
        self._captured.discard(current)  # the host may retry the step after an exception
        yield EndStep(None if armed is None else f"step {armed} was not completed: {reason or CLOSED}")

    def stop_capture(self, reason: str | None, *, host_is_done: bool = False) -> Actions:
        """End the capture. Defer the end if only another thread can end it, or if an operation is in progress."""
        if self.capture is None and not self.busy:
            return
        # Also ends a capture that is still starting. Keep the first reason, which is the cause.
        self.pending = self.pending or PendingEnd(reason, host_is_done)
        yield from self._guarded("stop", ())

    def enter_stage(self, name: str) -> Actions:
        """Handle the start of a stage. In discrete mode, begin a capture of the stage."""
        if self.capture is not None:
            if self._is_waiting(self.capture):
                yield from self._guarded(f"stage {name}", [Pass()])
        elif self.armed is not None and (not self.stages or name in self.stages):
            yield from self._guarded(f"stage {name}", self._begin_stage(self.armed, name))

    # Decisions.

    @staticmethod
    def _is_waiting(capture: CaptureRecord) -> bool:
        return capture.state is CaptureState.STARTING

    def _continues(self, capture: CaptureRecord) -> bool:
        """Return whether the next global step belongs to the same capture."""
        if self.discrete:
            return False
        continues = self.steps.continues(capture.first_step, capture.current_step, capture.demand)
        return continues and not self._is_at_limit(capture)

    def _is_at_limit(self, capture: CaptureRecord) -> bool:
        """Return whether the capture has `max_steps` global steps, but would otherwise include the next step."""
        if self.max_steps is None or self.discrete or capture.current_step - capture.first_step + 1 < self.max_steps:
            return False
        return self.steps.continues(capture.first_step, capture.current_step, capture.demand)

    def _start(self, step: int) -> Actions:
        self.between = False
        if (capture := self.capture) is not None:
            if step == capture.current_step or capture.stage is not None:
                if self.announced != step:
                    yield Note(f"start({step}) was ignored: {capture.id} was already recording.")
                self.announced = None
                if self._is_waiting(capture):
                    yield Pass()
                return
            continues = self._continues(capture)
            if not continues or step != capture.current_step + 1:
                skipped = f"the host went from step {capture.current_step} to step {step}"
                yield from self._stop(PendingEnd(skipped if continues else None))
            elif self._starts_cold(capture):
                yield from self._stop(PendingEnd(_COLD))
            else:
                yield Pass(Step(Unit.GLOBAL_STEP, capture.current_step))
                capture.current_step = step
                return
        if self.discrete:
            if (demand := self.steps.demand_at(step)) is not None:
                demand.begun = True
            elif step in self._captured and step != self.armed:
                self.armed = None
                yield Repeat(step)
                return
            self.armed = step if self.steps.selects(step) else None
        else:
            yield from self._begin(step)

    def _begin(self, step: int) -> Actions:
        if (begun := self.steps.begins(step)) is not None:
            first_step, demand = begun
            if demand is None and first_step in self._captured:
                yield Repeat(first_step)
                return
            remove_empty = self.default_warmup and step < first_step and demand is None
            yield Begin(step, first_step, demand, remove_empty=remove_empty)

    def _begin_stage(self, step: int, name: str) -> Actions:
        self._counts[step, name] += 1
        yield Begin(step, step, self.steps.demand_at(step), name, self._counts[step, name])

    def _step(self, step: Step) -> Actions:
        if (capture := self.capture) is None:
            return
        if step.unit is not Unit.GLOBAL_STEP:
            yield Pass(step)
            return
        if step.index != capture.current_step:
            yield Note(f"step({step.index}) was ignored: step {capture.current_step} was in progress.")
            return
        if capture.stage is None:  # a stage can continue after its global step
            yield CheckRequests(step.index + 1)
        if not self._continues(capture):  # `stop` ends the capture after its last step
            if self._is_at_limit(capture):  # the host might not call `stop` until its loop ends
                yield from self._stop(PendingEnd(None))
            return
        if self._starts_cold(capture):
            yield from self._stop(PendingEnd(_COLD))
            yield from self._begin(step.index + 1)
        else:
            yield Pass(step)
            capture.current_step = step.index + 1
        if self.capture is not None:  # the capture may have failed to start
            self.announced = step.index + 1

    def _guarded(self, operation: str, actions: Iterable[Action]) -> Actions:
        """Run one operation at a time, in the owner's thread. If an end is pending, also end the capture."""
        owner, caller = (self.capture.owner if self.capture else None), self.caller()
        if owner is not None and owner.pid != caller.pid:
            self.armed, self.busy = None, False
            yield Forget()
            return
        is_foreign = owner is not None and owner.thread is not caller.thread and self.thread_bound
        if is_foreign and self.capture is not None and not self.capture.owner.thread.is_alive():
            yield Abandon(_ENDED_THREAD)
        elif is_foreign:
            result = "was deferred to the owner's next boundary" if self.pending else "was ignored"
            yield Note(f"{operation} from a thread that did not start the capture {result}.")
            return
        with self.mutex:
            admitted, self.busy = not self.busy, True
        if not admitted:
            yield Note(f"{operation} was called while another operation was in progress.")
            return
        try:
            yield from self._stop_if_pending()
            yield from actions
            yield from self._stop_if_pending()
        finally:
            self.busy = False

    def _stop_if_pending(self) -> Actions:
        if self.pending is not None:
            yield from self._stop(self.pending)

    def _stop(self, end: PendingEnd) -> Actions:
        if (capture := self.capture) is None:
            self.pending = None
            return
        remove_empty = self._may_remove(capture, end)
        reason = end.reason
        if reason is None and self._is_at_limit(capture):
            reason, self.limited = f"it reached max_capture_steps={self.max_steps}", capture
        if self.limited is capture and not self.discrete:
            demand = next((demand for demand in self.steps.demands if demand.token == capture.demand), None)
            self.steps.skip_after(capture.current_step, demand)
        if reason is None and (requested := self._requested_next(capture)) is not None:
            following, steps = capture.current_step + 1, self.steps
            current = next((demand for demand in steps.demands if demand.token == capture.demand), None)
            if following <= capture.first_step or (current is not None and following <= current.last):
                reason = requested
            elif current is None and steps.configures(following):
                yield Note(f"It ended after step {capture.current_step}: {requested}.")
        if self.announced is not None and capture.current_step > capture.first_step:
            capture.current_step -= 1  # the host did not start the announced step
        yield End(reason, remove_empty)

    def _may_remove(self, capture: CaptureRecord, end: PendingEnd) -> bool:
        """Return whether a capture that is still warming up for a configured step can be removed.

        With the default warm-up, such a capture is always removed. With a configured warm-up, it is removed in two
        cases: a requested capture records the step, or the host has finished and the schedule has no end.
        """
        if capture.current_step >= capture.first_step or capture.demand is not None:
            return False
        if self.default_warmup:
            return True
        if end.host_is_done:
            return self.steps.schedule.is_endless_at(capture.first_step)
        return end.reason is None

    def _starts_cold(self, capture: CaptureRecord) -> bool:
        """Return whether a capture must be restarted without warm-up.

        A restart is necessary if a problem, such as another profiler, occurred during the default warm-up.
        """
        return bool(capture.problems) and self._may_remove(capture, PendingEnd(_COLD))

    def _requested_next(self, capture: CaptureRecord) -> str | None:
        """Return the reason to end the capture if a requested capture begins at the next step."""
        following = capture.current_step + 1
        demand = next((each for each in self.steps.demands if each.first == following and not each.begun), None)
        if demand is None or capture.stage is not None:
            return None
        return f"a capture of steps {demand.first} to {demand.last} was requested"
