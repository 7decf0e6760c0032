"""Roles of this process. A role performs the actions of its state machine on its current recording."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from time import monotonic
from typing import TYPE_CHECKING, Any

import attrs

from profdeck.backends.api import Backend, EngineBackend, TargetState
from profdeck.backends.hook_calls import RoleHooks
from profdeck.backends.recording import Recording, abandon, reserve
from profdeck.base import shutdown
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.interrupts import is_interruption
from profdeck.base.operations import Blocker, Operation, begin, running_loop
from profdeck.base.processes import ProcessId
from profdeck.base.text import sentence
from profdeck.config.model import Config, OnError, RoleConfig
from profdeck.config.schedule import OnDemandSteps
from profdeck.lifecycle import exit_summary
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
    PendingEnd,
    Repeat,
)
from profdeck.lifecycle.unrecorded_steps import SLOT_MASK, SLOTS, median_step_s, with_capture
from profdeck.on_demand.requests import JobProcess
from profdeck.on_demand.stores import publish_address, store_of_job
from profdeck.on_demand.watch import RequestWatch
from profdeck.records import manifest, run_directory
from profdeck.records.capture import CaptureRecord, CaptureState, Step, Unit
from profdeck.records.request import CaptureRequest
from profdeck.records.status import Status
from profdeck_traces.base.errors import ProfdeckError, describe_error

if TYPE_CHECKING:
    from profdeck.after_capture.finish_child import Finishes

logger = logging.getLogger("profdeck")

_POLL_S = 0.5
_REPORTING_ROLE = "trainer"
"""The role that prints the job's message at exit. If it is not configured, the config's first role prints it."""


@attrs.define(eq=False, kw_only=True)
class Role:
    """One role of this process, ready to record."""

    config: Config
    options: RoleConfig
    """The role's section of the config."""
    identity: Identity
    backend: Backend
    target: str | None
    """Name of the engine that the backend controls; None if it records this process."""
    machine: CaptureMachine
    busy_roles: set[Role]
    """Roles of the same profiler that are not idle."""
    blocker: Blocker
    """Finishes operations for callers that cannot await them."""
    hooks: RoleHooks
    run: run_directory.RunDirectory
    writer: manifest.ManifestWriter
    finishes: Finishes | None = None
    """Runs the ``finish`` commands."""
    recording: Recording | None = attrs.field(default=None, init=False)
    has_repeated_steps: bool = attrs.field(default=False, init=False)
    """True if the warning about repeated step numbers has been logged."""
    watch: RequestWatch | None = attrs.field(default=None, init=False)
    """Checks for capture requests before each global step; None if the job accepts no requests."""
    _steps: list[int | None] = attrs.field(factory=lambda: [None] * SLOTS, init=False)
    """The last global steps that started while no capture was running; see `median_step_s`."""
    _starts_s: list[float] = attrs.field(factory=lambda: [0.0] * SLOTS, init=False)

    def must_start(self, step: int) -> bool:
        """Check for capture requests before a global step. Return whether `start` must be called for the step."""
        machine = self.machine
        if self.watch is not None:
            self.watch.check(step, machine.capture)
        if machine.capture is not None or machine.armed is not None:
            return True
        slot = step & SLOT_MASK
        self._steps[slot] = step
        self._starts_s[slot] = monotonic()
        steps = machine.steps
        if not steps.demands:
            begin, end = steps.idle_range
            if begin <= step < end:
                return False
        return machine.begins_at(step)

    @property
    def active(self) -> CaptureRecord | None:
        """The capture of the current global step; None between two steps of one capture."""
        return None if self.machine.between else self.machine.capture

    @property
    def states(self) -> Mapping[str, TargetState]:
        """The last known state of each target, by name."""
        return self.backend.states if isinstance(self.backend, EngineBackend) else {}

    @property
    def controls_engine(self) -> bool:
        """True if an engine capture is running."""
        return self.recording is not None and isinstance(self.backend, EngineBackend)

    async def await_window(self, timeout_s: float, on_state: Callable[[TargetState], None] | None) -> bool:
        """Wait until the engine has recorded its window; see `Profiler.await_window`."""
        backend, deadline_s = self.backend, monotonic() + timeout_s
        while isinstance(backend, EngineBackend) and self.recording is not None:
            state = await backend.state(self.recording.capture)
            if on_state:
                on_state(state)
            if state.ended:
                return True
            remaining_s = deadline_s - monotonic()
            if remaining_s <= 0:
                break
            await asyncio.sleep(min(remaining_s, _POLL_S))
        return False

    @property
    def is_reporter(self) -> bool:
        """True if this process prints the job's message at exit."""
        reporting_role = _REPORTING_ROLE if _REPORTING_ROLE in self.config.roles else next(iter(self.config.roles))
        lowest_rank = min(self.writer.expected_ranks, default=0)
        return (self.identity.role, self.identity.rank, self.identity.replica or 0) == (reporting_role, lowest_rank, 0)

    def accept_requests(self) -> None:
        """Start checking for capture requests. If the store cannot be reached, log a warning."""
        try:
            store = store_of_job(self.config.on_demand, self.run.path)
            self.run.prepare()
            publish_address(store, self.run.path)
            self.watch = RequestWatch(
                store,
                self.run.path,
                JobProcess.from_identity(
                    self.identity, self.target, self.options.warmup_steps or 0, str(self.run.path.parent)
                ),
                self.machine.steps,
                discrete=self.machine.discrete,
                miss=self._record_missed,
            )
        except (OSError, CaptureError) as error:
            logger.warning("Captures cannot be requested while the job runs: %s", describe_error(error))
            return
        if self.config.steps.timed and self.is_reporter:
            from profdeck.on_demand.timed_captures import TimedCaptures  # imported only if needed

            for schedule in self.config.steps.timed:
                weakref.finalize(self, TimedCaptures(store, schedule).close)

    # Operations.

    def start(self, step: int) -> Operation[None]:
        """Begin a global step."""
        self._steps[step & SLOT_MASK] = with_capture(step)
        return self._perform(self.machine.start(step))

    def step(self, step: Step) -> Operation[None]:
        """Report the end of a global step or of a unit inside it."""
        return self._perform(self.machine.step(step))

    def stop(self) -> Operation[None]:
        """End a global step."""
        return self._perform(self.machine.stop())

    def close(self, reason: str | None) -> Operation[None]:
        """End the capture. `reason` is None if the host has finished."""
        return self._perform(self.machine.close(reason))

    def stop_capture(self, reason: str | None) -> Operation[None]:
        """End the capture of a stage."""
        return self._perform(self.machine.stop_capture(reason))

    def enter_stage(self, name: str) -> Operation[tuple[Role, AbstractContextManager[object] | None]]:
        """Begin a stage.

        Returns:
            This role, and the stage annotation to enter. The annotation is None if the stage is a separate capture.
        """
        before = self.recording
        yield from self._perform(self.machine.enter_stage(name))
        if self.recording is None:
            return self, contextlib.nullcontext()
        return self, None if before is None else _Annotation(self, self.recording.capture, name)

    def _perform(self, actions: Actions) -> Operation[None]:
        """Perform the actions one by one. The result of an action can determine the next action."""
        try:
            for action in actions:
                if not isinstance(action, Begin):
                    yield from self._perform_one(action)
                    continue
                # The code is inlined to keep tracebacks short (see test_start_adds_few_stack_frames).
                self.busy_roles.add(self)
                # Before the start, because the process may exit while the capture starts.
                shutdown.watch(self, self._end_at_exit, self._fail_at_exit)
                capture = self._capture_to_begin(action)
                try:
                    recording = self._reserve_files(capture, action)
                    if not (yield from recording.start()):
                        recording.publish()
                except BaseException as error:
                    if action.remove_empty and isinstance(error, CaptureError):
                        self._remove_capture(capture, error)
                        self._clear_recording()
                        continue
                    self._report_ended(capture, describe_error(error))
                    self._clear_recording()
                    if not self._continues_after(error):
                        raise
                else:
                    self.recording = recording
                    self.machine.began(capture)
                    recording.watch_limits(self._expire)
        finally:
            actions.close()
            if self.machine.is_idle:
                self.busy_roles.discard(self)
            else:
                self.busy_roles.add(self)

    def _perform_one(self, action: Action) -> Operation[None]:
        try:
            yield from self._dispatch(action)
        except BaseException as error:
            if not self._continues_after(error):
                raise

    def _dispatch(self, action: Action) -> Operation[None]:
        match action, self.recording:
            case Pass(), Recording() as recording:
                yield from self._perform_pass(recording, action)
            case End(), Recording() as recording:
                yield from self._stop_recording(recording, action)
            case Note(), _:
                self._add_note(action.text)
            case CheckRequests(), _:
                if self.watch is not None:
                    self.watch.check(action.step, self.machine.capture)
            case EndStep(), _:
                self._end_step(action.problem)
            case Repeat(), _:
                self._warn_of_repeated_step(action.step)
            case Abandon(), Recording() as recording:
                yield from self._abandon(recording, action.reason)
            case Forget(), _:
                self._clear_recording()

    # Actions.

    def _capture_to_begin(self, action: Begin) -> CaptureRecord:
        repeated = f"-{action.count}" if action.count > 1 else ""
        name = f"-{action.stage}{repeated}" if action.stage else ""
        capture = self._build_capture(action.first_step, action.demand, name)
        capture.current_step, capture.stage = action.step, action.stage
        if self.target is None and action.stage is None:
            capture.unrecorded_step_s = median_step_s(action.step, self._steps, self._starts_s)
        return capture

    def _build_capture(self, first_step: int, demand: OnDemandSteps | None, name: str = "") -> CaptureRecord:
        return CaptureRecord(
            id=f"step{first_step}{name}",
            directory=self.run.directory(first_step, self.identity),
            identity=self.identity,
            first_step=first_step,
            current_step=first_step,
            unit=Unit.MINI_BATCH if self.options.window else Unit.GLOBAL_STEP,
            window=self.options.window,
            iterations=self.options.iterations,
            target=self.target,
            demand=demand.token if demand else None,
        )

    def _reserve_files(self, capture: CaptureRecord, action: Begin) -> Recording:
        """Reserve the file names of a capture and return its recording.

        Raises:
            CaptureError: the directory is not writable.
        """
        writer = self._writer_of(capture)
        reserve(capture, self.run, writer)
        demand, warmup = action.demand, self.options.warmup_steps or 0
        if demand is not None:
            demand.begun = True
            demand.captures.append(capture.id)
            if warmup and action.step > action.first_step - warmup:
                capture.notes.append(f"It warmed up for {action.first_step - action.step} of {warmup} steps.")
        if self.target is not None:
            capture.request = CaptureRequest(
                id=capture.id,
                output=self.config.output.absolute(),
                run=self.run.path.name,
                role=self.identity.role,
                replica=self.identity.replica,
                first_step=action.first_step,
                ranks=self.options.ranks,
                iterations=self.options.iterations,
                batch_kinds=self.options.batch_kinds,
                owner=ProcessId(),
            )
        return Recording(capture, self.backend, self.hooks, writer)

    def _writer_of(self, capture: CaptureRecord) -> manifest.ManifestWriter:
        if self.finishes is None or capture.stage is None:
            return self.writer
        return attrs.evolve(self.writer, more_follow=True)

    def _perform_pass(self, recording: Recording, action: Pass) -> Operation[None]:
        try:
            if action.step is not None:
                yield from recording.step(action.step)
            else:
                yield from recording.start()
        except BaseException as error:
            if recording.capture.state is not CaptureState.ENDED:  # an interruption: the capture is still running
                raise
            self._end_recording(recording)
            if not self._continues_after(error):
                raise

    def _stop_recording(self, recording: Recording, action: End) -> Operation[None]:
        capture, removed = recording.capture, False
        try:
            removed = yield from recording.close(action.reason, remove_empty=action.remove_empty)
        finally:
            self._end_recording(recording, removed=removed)
        if removed:
            return
        if capture.status is Status.COMPLETE:
            logger.info("Captured %s in %s.", capture.id, capture.directory)
        elif self.config.on_error is OnError.RAISE and action.reason is None:
            problems = " ".join(capture.problems)
            raise CaptureError(f"Capture {capture.id} is {capture.status}: {problems}") from recording.cause
        else:
            logger.warning("Capture %s is %s: %s", capture.id, capture.status, " ".join(capture.problems))

    def _abandon(self, recording: Recording, reason: str) -> Operation[None]:
        try:
            yield from recording.abandon_started(reason)
        finally:
            self._end_recording(recording)
        logger.warning("Capture %s is %s: %s", recording.capture.id, recording.capture.status, reason)

    def _end_recording(self, recording: Recording, *, removed: bool = False) -> None:
        capture = recording.capture
        if not removed:
            self._report_ended(capture, " ".join(capture.problems) if capture.status is Status.MISSING else None)
        self._clear_recording()

    def _clear_recording(self) -> None:
        # Update the machine first: an interruption must not leave it with a capture that has no recording.
        self.machine.ended()
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.end_watch()
        shutdown.unwatch(self)  # delivers a SIGTERM that was deferred until the trace was written

    def _report_ended(self, capture: CaptureRecord, problem: str | None) -> None:
        """Process an ended capture. Complete its request, except in discrete mode, where more stages can follow."""
        if self.is_reporter and capture.state is CaptureState.ENDED:
            exit_summary.count_capture(self.run.path, capture)
        self._add_to_finish(capture)
        for demand in self.machine.steps.demands:
            if demand.token != capture.demand:
                continue
            if capture.status is not Status.COMPLETE:
                demand.incomplete.append(f"{capture.id}: {problem or ' '.join(capture.problems)}")
            if self.watch is not None and not self.machine.discrete:
                self.watch.complete(demand, problem)

    def _add_to_finish(self, capture: CaptureRecord) -> None:
        """Register a capture for the ``finish`` commands. For a stage, the commands start when its global step ends."""
        if self.finishes is None or capture.state is not CaptureState.ENDED:  # its file names were not reserved
            return
        self.finishes.add(capture, self._writer_of(capture))
        if capture.stage is None:
            self.finishes.start()

    def _remove_capture(self, capture: CaptureRecord, error: CaptureError) -> None:
        """Remove the manifest of a capture whose warm-up could not start."""
        logger.info("Capture %s starts without warm-up: %s", capture.id, error)
        with contextlib.suppress(OSError):
            run_directory.remove_capture(capture)

    def _record_missed(self, demand: OnDemandSteps, reason: str) -> None:
        """Write a manifest for a requested capture that this process missed."""
        capture = self._build_capture(demand.first, demand)
        capture.expected_ranks = () if self.target else (self.identity.rank,)
        earlier = self._find_captures(demand)
        if earlier:
            reason = f"the process was restarted during the capture, and {reason}"
            demand.incomplete.append(reason)
            demand.captures += earlier
        reserve(capture, self.run, self.writer)
        abandon(capture, self.writer, reason)
        self._add_to_finish(capture)
        demand.captures.append(capture.id)

    def _find_captures(self, demand: OnDemandSteps) -> list[str]:
        """Return the IDs of the captures that an earlier process with this rank recorded for a request."""
        captures = []
        prefix = self.identity.stem if self.target is None else "target"
        for step_directory in run_directory.step_directories(self.run.path):
            step = int(step_directory.name.removeprefix("step_"))
            if not demand.first <= step <= demand.last:
                continue
            for file in filter(
                manifest.is_manifest, sorted(self.run.directory(step, self.identity).glob(f"{prefix}.*"))
            ):
                with contextlib.suppress(ProfdeckError):
                    record = manifest.read_manifest(file)
                    if record.demand == demand.token:
                        captures.append(record.capture)
        return captures

    def _end_step(self, problem: str | None) -> None:
        if self.finishes is not None:
            self.finishes.start()
        if self.watch is not None:
            self.watch.complete_stages(problem=problem)

    def _warn_of_repeated_step(self, step: int) -> None:
        if not self.has_repeated_steps:
            self.has_repeated_steps = True
            logger.warning(
                "Global step %d was started again and will not be captured twice. If the host's step numbers restart "
                "each epoch, use a step count that continues across epochs.",
                step,
            )

    def _add_note(self, text: str) -> None:
        logger.debug(text)
        if self.recording is not None:
            self.recording.capture.notes.append(text)
            if self.machine.pending is not None:
                self.recording.publish()

    def _continues_after(self, error: BaseException) -> bool:
        """Log the error and return True if the job continues without the capture; otherwise, return False."""
        if is_interruption(error) or self.config.on_error is OnError.RAISE:
            return False
        logger.warning("%s The job continues without this capture.", sentence(describe_error(error)))
        logger.debug("The traceback of this error:", exc_info=error)
        return True

    # Methods that end a capture from the timer, from a signal handler or at interpreter exit.

    def _expire(self, recording: Recording, reason: str) -> None:
        """Schedule the end of a capture that has exceeded a limit. Runs in the thread that watches the limits."""
        if self.recording is not recording:
            return
        self.machine.limited = recording.capture
        self.machine.pending = PendingEnd(reason)  # the capture ends at the next boundary at the latest
        if isinstance(self.backend, EngineBackend):
            return  # engine processes check the limits themselves, and calls to a busy engine must not be interrupted
        if recording.capture.owner.thread is threading.main_thread():
            shutdown.call_in_main_thread(lambda: self._end_expired(recording, reason))

    def _end_expired(self, recording: Recording, reason: str) -> None:
        if self.recording is recording:
            self._end_at_exit(reason)

    def _end_at_exit(self, reason: str) -> bool:
        """End the capture outside of the host's calls, for example at exit. Return False if the end is deferred."""
        if self.machine.busy:
            self.machine.pending = PendingEnd(reason)
            return False
        loop = running_loop()
        if loop is not None and not self.backend.thread_bound:
            # Hooks must run in this loop, which may be idle. In a signal handler, only call_soon_threadsafe wakes it.
            loop.call_soon_threadsafe(self._close, reason)
            return False
        self._close(reason)
        return True

    def _fail_at_exit(self, reason: str) -> bool:
        """Write the manifest of a capture whose thread does not respond.

        Return False if an operation is in progress.
        """
        if self.machine.busy:
            return False
        if self.recording is not None:
            self.recording.fail(reason)
        return True

    def _close(self, reason: str) -> None:
        if self.backend.thread_bound:
            self.blocker.finish(begin([self.close(reason)]))
        else:
            self.blocker.finish_end([], [self.close(reason)])


@attrs.define(eq=False)
class _Annotation(AbstractContextManager[object]):
    """A backend's annotation of a stage. If the backend raises an error, the error is added to the capture's notes."""

    role: Role
    capture: CaptureRecord
    name: str
    context: AbstractContextManager[object] | None = attrs.field(default=None, init=False)

    def __enter__(self) -> None:
        try:
            context = self.capture.annotate(self.name)
            context.__enter__()
        except BaseException as error:  # noqa: BLE001  # `_add_note` re-raises interruptions
            self._add_note(error)
        else:
            self.context = context

    def __exit__(self, *details: Any) -> None:  # noqa: PYI036  # passed on
        context, self.context = self.context, None
        if context is None:
            return
        try:
            context.__exit__(*details)
        except BaseException as error:  # noqa: BLE001  # as above
            self._add_note(error)

    def _add_note(self, error: BaseException) -> None:
        if is_interruption(error):
            raise error
        note = f"Stage {self.name} could not be annotated: {describe_error(error)}"
        self.capture.notes.append(note)
        logger.debug(note)
