"""Decides when captures begin, go on and end. One controller per process role; both façades drive it.

Every operation takes ``resolve``, the façade's way to bring a hook's awaitable to its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager

import attrs

from profdeck.backends.api import EngineBackend, TargetState
from profdeck.backends.recording import Recording, expired
from profdeck.base import shutdown
from profdeck.base.blocking import Resolve, drive, resolve_later
from profdeck.base.errors import CaptureError
from profdeck.config.model import Mode, OnError
from profdeck.lifecycle.session import Session
from profdeck.lifecycle.state import CLOSED, IDLE, ControllerState, PendingEnd
from profdeck.records.capture import Capture, CaptureState, Owner, Step, Unit
from profdeck.records.status import Status

logger = logging.getLogger("profdeck")

_POLL_S = 0.5


class Controller:
    """The policy of one profiler: which operation does what in which state."""

    def __init__(self, session: Session, on_change: Callable[[Capture | None], None], resolve_now: Resolve) -> None:
        """Args:
        session: what to record with.
        on_change: told the capture when a recording has begun, and None when it has ended.
        resolve_now: awaits by blocking; for ends that a signal, the clock or the interpreter's exit asks for.
        """
        self._session = session
        self._on_change = on_change
        self._resolve_now = resolve_now
        self._state: ControllerState = IDLE
        self._busy = False
        """Whether an operation is under way: one at a time."""
        # Re-entrant: a signal may come while this thread holds it, and its handler ends the capture.
        self._mutex = threading.RLock()
        self._ending: PendingEnd | None = None
        self._counts: Counter[tuple[int, str]] = Counter()
        self._timer: threading.Timer | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def capture(self) -> Capture | None:
        """The running capture."""
        return self._recording.capture if self._recording else None

    @property
    def active(self) -> Capture | None:
        """The capture of the global step that is under way; None between two steps of a capture, as `start` is due."""
        return None if self._state.between else self.capture

    @property
    def at_rest(self) -> bool:
        """Whether there is nothing that a stop could end."""
        return self._state is IDLE and not self._busy

    @property
    def _recording(self) -> Recording | None:
        return self._state.recording

    def _arm(self, step: int | None) -> None:
        """Capture the stages of a global step from now on, or no stages."""
        idle = step is None and self._recording is None
        self._state = IDLE if idle else attrs.evolve(self._state, armed=step)

    def _mark(self, *, announced: int | None = None, between: bool = False) -> None:
        """Say where between its global steps a capture is."""
        if self._recording is not None:
            self._state = attrs.evolve(self._state, announced=announced, between=between)

    @property
    def suspends(self) -> bool:
        """Whether the end of a capture has to wait for an event loop."""
        return isinstance(self._session.backend, EngineBackend) and not self._session.backend.blocking

    @property
    def states(self) -> Mapping[str, TargetState]:
        """How far each target said that it was when it was last asked, by its name."""
        backend = self._session.backend
        return backend.states if isinstance(backend, EngineBackend) else {}

    def enter(self, step: int) -> bool:
        """Pass the boundary into a global step; return whether `start` has anything to do there."""
        if self._state is IDLE:
            return self._session.enters(step)
        self._session.look_for_requests(step, self.capture)
        return True

    def under_way(self, step: int) -> bool:
        """Tell whether that global step has been begun by an earlier start."""
        if self._recording is None:
            return self._state.armed == step
        return self._recording.capture.current_step == step and self._state.announced != step

    async def start(self, step: int, resolve: Resolve) -> Capture | None:
        """Begin a global step."""
        async with self._exclusive(f"start({step})", resolve) as free:
            if not free:
                return self.capture
            self._mark(announced=self._state.announced)
            if self._recording is not None and await self._goes_on(self._recording, step, resolve):
                return self.capture
            discrete = self._session.config.mode is Mode.DISCRETE
            self._arm(step if discrete and self._session.begin_stages(step) else None)
            if not discrete and self._session.begins_at(step):
                await self._begin(step, resolve)
            return self.capture

    def start_now(self, step: int) -> Capture | None:
        """Do what `start` does, by blocking."""
        return drive(self.start(step, self._resolve_now))

    async def step(self, step: Step, resolve: Resolve) -> None:
        """Pass a boundary inside the running capture."""
        async with self._exclusive(f"step({step.index})", resolve) as free:
            if not free or self._recording is None:
                return
            capture = self._recording.capture
            if step.unit is not Unit.GLOBAL_STEP:
                await self._passed(self._recording, step, resolve)
            elif step.index != capture.current_step:
                self._note(f"step({step.index}) while step {capture.current_step} was under way: ignored.")
            elif self._enters_next(capture):  # after the last step, the host calls stop
                if await self._gives_up_warm_up(capture, resolve):
                    await self._begin(step.index + 1, resolve)
                else:
                    await self._advance(self._recording, resolve)
                self._mark(announced=step.index + 1)

    async def stop(self, resolve: Resolve) -> None:
        """End a global step: end its capture, unless the next step belongs to it."""
        self._arm(None)
        announced = self._state.announced is not None  # by step(): the next global step follows
        if self._recording is None or not (announced or self._session.continues(self._recording.capture)):
            await self.stop_capture(None, resolve)
        else:
            self._mark(announced=self._state.announced, between=True)
        self._session.end_step()

    async def await_window(self, timeout_s: float, on_state: Callable[[TargetState], None] | None) -> bool:
        """Wait until a target has recorded its window."""
        backend, deadline = self._session.backend, time.monotonic() + timeout_s
        while isinstance(backend, EngineBackend) and self._recording is not None:
            state = await backend.state(self._recording.capture)
            if on_state:
                on_state(state)
            if state.ended:
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, _POLL_S))
        return False

    async def close(self, reason: str | None, resolve: Resolve) -> None:
        """End whatever runs, before its time; without a reason, because the host is done."""
        self._arm(None)
        await self.stop_capture(reason or CLOSED, resolve, host_is_done=reason is None)
        self._session.end_step()

    def pause_requests(self) -> None:
        """Take no requests for captures until the next global step."""
        self._session.pause_requests()

    async def stop_capture(self, reason: str | None, resolve: Resolve, *, host_is_done: bool = False) -> None:
        """End the running capture, now or as soon as the owner's thread is free to."""
        if self._recording is None and not self._busy:
            return
        self._ending = PendingEnd(reason, host_is_done=host_is_done)  # kept for a recording that is just starting
        async with self._exclusive("stop", resolve) as free:  # an ending that waits is carried out on the way in
            recording = self._recording
            if not free and recording is not None:
                recording.publish()  # so that the caller sees that the end is pending

    async def enter_stage(self, name: str, resolve: Resolve) -> AbstractContextManager[object] | None:
        """Begin a stage: its own capture (None is returned) or a mark in the running one (to be entered)."""
        if self._recording is not None and self._recording.waiting:
            async with self._exclusive(f"stage {name}", resolve) as free:
                if free:
                    await self._take_turn(self._recording, resolve)
        if self._recording is not None:
            return self._recording.capture.annotate(name)
        # Of an engine they are kinds of batches, and not those of the host.
        stages = () if isinstance(self._session.backend, EngineBackend) else self._session.role.stages
        armed = self._state.armed
        if armed is None or (stages and name not in stages):
            return contextlib.nullcontext()
        begun = False
        async with self._exclusive(f"stage {name}", resolve) as free:
            if free:
                self._counts[armed, name] += 1
                begun = await self._begin(armed, resolve, stage=name, count=self._counts[armed, name])
        return None if begun else contextlib.nullcontext()

    def _enters_next(self, capture: Capture) -> bool:
        """Pass the boundary into the next global step; return whether it belongs to the same capture."""
        if capture.stage is None:  # the stages of a step are not over with it
            self._session.look_for_requests(capture.current_step + 1, capture)
        return self._session.continues(capture)

    async def _goes_on(self, recording: Recording, step: int, resolve: Resolve) -> bool:
        """Carry a running capture into a global step; False once it has been ended because it cannot go on."""
        capture = recording.capture
        if step == capture.current_step or capture.stage is not None:
            if self._state.announced != step:
                self._note(f"start({step}) while {capture.id} was recording: ignored.")
            self._mark()
            await self._take_turn(recording, resolve)
            return True
        continues = self._session.continues(capture)
        if continues and step == capture.current_step + 1:
            if await self._gives_up_warm_up(capture, resolve):
                return False
            await self._advance(recording, resolve)
            return True
        reason = f"the host went from step {capture.current_step} to step {step}" if continues else None
        await self._finish(PendingEnd(reason), resolve)
        return False

    async def _gives_up_warm_up(self, capture: Capture, resolve: Resolve) -> bool:
        """Withdraw a capture if its default warm-up had a problem, such as another profiler.

        Returns:
            True if the capture was withdrawn. It then starts without warm-up.
        """
        if not capture.problems or not self._session.may_withdraw(capture, host_is_done=False, failed=True):
            return False
        await self._finish(PendingEnd(capture.problems[0]), resolve)
        return True

    async def _advance(self, recording: Recording, resolve: Resolve) -> None:
        step = Step(Unit.GLOBAL_STEP, recording.capture.current_step)
        await self._passed(recording, step, resolve)
        recording.capture.current_step = step.index + 1

    async def _passed(self, recording: Recording, step: Step, resolve: Resolve) -> None:
        """Pass a boundary; what waits for its turn tries to begin there."""
        await self._trying(recording, recording.passed(step, resolve))

    async def _take_turn(self, recording: Recording, resolve: Resolve) -> None:
        """Begin what waits for its turn, if that has come."""
        if recording.waiting:
            await self._trying(recording, recording.start(resolve))

    async def _trying(self, recording: Recording, attempt: Awaitable[object]) -> None:
        try:
            await attempt
        except BaseException as error:
            if recording.capture.state is not CaptureState.ENDED:  # it records, and is interrupted in a hook
                raise
            self._quieten()
            self._over(recording)
            if not self._excused(error):
                raise

    def _excused(self, error: BaseException) -> bool:
        """Tell whether the job goes on without a capture that could not start."""
        if not isinstance(error, CaptureError) or self._session.config.on_error is OnError.RAISE:
            return False
        logger.warning("%s The job goes on without this capture.", error)
        return True

    async def _begin(self, step: int, resolve: Resolve, *, stage: str | None = None, count: int = 1) -> bool:
        shutdown.watch(self, self._finish_at_exit)  # while it starts as well: an ending then waits until it has
        try:
            recording = await self._session.begin(step, resolve, stage=stage, count=count)
        except BaseException as error:
            self._ending = None
            shutdown.unwatch(self)
            if not self._excused(error):
                raise
            return False
        if recording is None:
            self._ending = None
            shutdown.unwatch(self)
            return False
        self._state = ControllerState(recording, armed=self._state.armed)
        limit_s = self._session.backend.options.max_capture_s
        self._timer = threading.Timer(limit_s, self._expire, (recording, limit_s))
        self._timer.daemon = True
        self._timer.start()
        self._on_change(recording.capture)
        return True

    async def _finish(self, ending: PendingEnd, resolve: Resolve) -> None:
        if (recording := self._recording) is None:
            self._ending = None
            return
        self._quieten()
        capture, withdrawn = recording.capture, False
        may_withdraw = self._session.may_withdraw(
            capture, host_is_done=ending.host_is_done, failed=not ending.is_no_failure
        )
        reason = ending.reason or self._session.interrupt(capture)
        try:
            withdrawn = may_withdraw and await recording.withdraw(reason, resolve)
            if not may_withdraw:
                await recording.stop(reason, resolve)
        finally:
            self._over(recording, counts=not withdrawn)
        if not withdrawn:
            self._report(capture, early=reason is not None)

    def _quieten(self) -> None:
        self._on_change(None)
        if self._timer is not None:
            self._timer.cancel()

    def _over(self, recording: Recording, *, counts: bool = True) -> None:
        if counts:
            self._session.ended(recording.capture)
        armed = self._state.armed
        self._state = IDLE if armed is None else ControllerState(armed=armed)
        self._ending = None
        shutdown.unwatch(self)  # a SIGTERM that waited for the trace is delivered here

    def _report(self, capture: Capture, *, early: bool) -> None:
        if capture.status is Status.COMPLETE:
            logger.info("Captured %s in %s.", capture.id, capture.directory)
        elif self._session.config.on_error is OnError.RAISE and not early:
            raise CaptureError(f"Capture {capture.id} is {capture.status}: {' '.join(capture.problems)}")
        else:
            logger.warning("Capture %s is %s: %s", capture.id, capture.status, " ".join(capture.problems))

    @contextlib.asynccontextmanager
    async def _exclusive(self, what: str, resolve: Resolve) -> AsyncIterator[bool]:
        """Let one operation in at a time, on the owner's thread, and carry out an ending that waits.

        Yields False to an operation that has to be left out; an ending is remembered in that case.
        """
        if not self._may_act(what):
            yield False
            return
        try:
            await self._end_if_asked(resolve)
            yield True
            await self._end_if_asked(resolve)
        finally:
            self._busy = False

    async def _end_if_asked(self, resolve: Resolve) -> None:
        if self._ending is not None:
            await self._finish(self._ending, resolve)

    def _may_act(self, what: str) -> bool:
        owner, here = (self._recording.capture.owner if self._recording else None), Owner()
        if owner is not None and owner.pid != here.pid:
            self._forget()
            return False
        if owner is not None and owner.thread != here.thread and self._session.backend.thread_bound:
            when = "is carried out at the owner's next boundary" if self._ending else "was ignored"
            self._note(f"{what} from another thread than the one that started the capture {when}.")
            return False
        with self._mutex:
            if self._busy:
                self._note(f"{what} while another operation was under way.")
                return False
            self._busy = True
        return True

    def _forget(self) -> None:
        """Drop a capture that a forked child inherited: it belongs to the parent."""
        self._state, self._ending, self._timer, self._busy = IDLE, None, None, False
        self._on_change(None)

    def _note(self, text: str) -> None:
        logger.debug(text)
        if self._recording is not None:
            self._recording.capture.notes.append(text)

    # Ends that nobody called for: they come from the clock, a signal or the interpreter's exit.

    def _expire(self, recording: Recording, limit_s: float) -> None:
        """Ask for the end of a capture that takes too long. Runs on the timer's thread."""
        if self._recording is not recording:
            return
        reason = expired(limit_s)
        self._ending = PendingEnd(reason)  # the next boundary ends it, if nothing does before
        if isinstance(self._session.backend, EngineBackend):
            return  # its processes keep the time themselves, and calls into a busy engine may not be interrupted
        if recording.capture.owner.thread == threading.main_thread().ident:
            shutdown.call_in_main_thread(functools.partial(self._finish_expired, recording, reason))

    def _finish_expired(self, recording: Recording, reason: str) -> None:
        if self._recording is recording:
            self._finish_at_exit(reason)

    def _close_in(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        self._closing = loop.create_task(self.close(reason, resolve_later))  # kept: loops hold their tasks weakly

    def _finish_at_exit(self, reason: str) -> bool:
        """End the capture from whatever the owner's thread was doing. False if that happens a little later."""
        if self._busy:
            self._ending = PendingEnd(reason)
            return False
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not None and not self._session.backend.thread_bound:
            # The hooks wait for this very loop, which may be asleep: a handler wakes it only so.
            loop.call_soon_threadsafe(self._close_in, loop, reason)
            return False
        drive(self.close(reason, self._resolve_now))
        return True
