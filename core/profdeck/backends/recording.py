"""Recordings. A recording leases the devices, calls the plugins and writes the manifest of one capture."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from profdeck.backends.api import Backend
from profdeck.backends.hook_calls import HookCall, Invocation, RoleHooks
from profdeck.backends.plugin_manager import RegisteredPlugin
from profdeck.backends.trace_analysis import start_analysis
from profdeck.base import leases, shutdown, threads
from profdeck.base.errors import CaptureError, LeaseError
from profdeck.base.host_counters import HostCounters
from profdeck.base.interrupts import is_interruption
from profdeck.base.memory import MemoryGrowth
from profdeck.base.operations import Operation
from profdeck.base.text import describe_value, sentence
from profdeck.config.options import CommonOptions
from profdeck.records import manifest, run_directory
from profdeck.records.artifact import Artifact, Output
from profdeck.records.capture import CaptureRecord, CaptureState, Step, Unit
from profdeck.records.status import Status
from profdeck_traces.base.errors import describe_error

logger = logging.getLogger("profdeck")

_CHECK_S = 0.25
"""Interval between memory checks. A recording with Python stacks can grow by 100 MB in this time."""


def reserve(capture: CaptureRecord, directory: run_directory.RunDirectory, recorder: manifest.ManifestWriter) -> None:
    """Write the capture's first manifest, so that the capture is listed even if this process crashes.

    Raises:
        CaptureError: the directory is not writable.
    """
    try:
        directory.prepare()
        directory.reserve(capture, recorder)
    except (OSError, CaptureError) as error:
        raise CaptureError(
            f"Step {capture.current_step}: cannot write to {capture.directory}: {describe_error(error)}"
        ) from error
    capture.move_to(CaptureState.STARTING)


class Recording:
    """Runs a capture from its start to its end. The capture's file names must be reserved.

    If a device is in use, the recording waits and tries again at each boundary.
    """

    def __init__(
        self,
        capture: CaptureRecord,
        backend: Backend,
        hooks: RoleHooks,
        recorder: manifest.ManifestWriter,
        lease_request: leases.LeaseRequest | None = None,
    ) -> None:
        """Args:
        capture: the capture to record.
        backend: the backend that records the capture.
        hooks: the hook calls of the role.
        recorder: the manifest fields that are the same for all captures of this process.
        lease_request: leases the devices that the capture needs. By default, these are the backend's devices.
        """
        self.capture = capture
        self._backend = backend
        self._hooks = hooks
        self._recorder = recorder
        self._lease_request = lease_request or leases.LeaseRequest(
            backend.devices, f"{capture.identity.role}, {capture.id}"
        )
        self._started: set[RegisteredPlugin] = set()
        self._start_failure: str | None = None
        """The reason if a wrapper around the start of the backend failed."""
        self.cause: BaseException | None = None
        """The first exception that was added to the capture's problems."""
        self._interruption: BaseException | None = None
        """The first interruption of a stop. It is raised after all plugins have been stopped."""
        # Re-entrant, because a signal handler can publish the manifest while the same thread is writing it.
        self._mutex = threading.RLock()
        self._publishing = False
        self._outputs: tuple[Output, ...] = ()
        self._counters: HostCounters | None = None
        """Host counters at the start of the recording; None if another process does the recording."""
        self._limits = CaptureLimits(backend.options)
        self._ended = threading.Event()
        self._mini_batch: int | None = None
        """Index of the last reported mini-batch."""
        self._is_ordered = True
        """False if mini-batches were reported out of order."""
        hooks.bind(capture, backend)

    @property
    def waiting(self) -> bool:
        """True if the capture is waiting for a device."""
        return self.capture.state is CaptureState.STARTING

    def start(self) -> Operation[bool]:
        """Start the plugins if the devices are free. Return whether the capture is recording.

        Raises:
            CaptureError: the capture could not start. The reason is in the manifest, if that could be written.
        """
        capture = self.capture
        try:
            is_ready = self._acquire_devices()
            for call in self._hooks.calls("profile_start") if is_ready else ():
                if call.plugin in self._started:  # an earlier attempt started the plugin
                    continue
                with Invocation(call) as invocation:
                    try:
                        yield from invocation.run(capture)
                    except BaseException as error:
                        if self._is_in_use(invocation, error):
                            is_ready = False
                            break
                        self._add_start_failure(invocation, error)
                        if call.is_backend or is_interruption(error):
                            raise
                    else:
                        self._started.add(call.plugin)
        except BaseException as error:
            reason = self._start_failure or describe_error(error)
            backend_started = yield from self._end_failed_start(reason)
            if is_interruption(error):
                raise
            self._raise_interruption()
            outcome = "was stopped at its start" if backend_started else "did not start"
            raise CaptureError(f"Capture {capture.id} {outcome}: {reason}") from error
        self.update_waits_for()
        if is_ready:
            self._start_others()
            self._record_wait()
            capture.cold_first_step = _first_step_is_cold(capture, self._backend)
            capture.move_to(CaptureState.RECORDING)
            self._counters = None if capture.target else HostCounters.read()
            shutdown.start_signal_thread()
        return is_ready

    def watch_limits(self, expire: Callable[[Recording, str], None]) -> None:
        """Start a thread that calls ``expire`` with a reason when the running capture exceeds a limit."""

        def check() -> None:
            while not self._ended.wait(self._limits.interval_s):
                if (reason := self._limits.describe_excess()) is not None:
                    threads.unblock_signals()  # plugins may start processes, which inherit the mask
                    expire(self, reason)
                    return

        threads.start_unsignalled(check, "profdeck limits")

    def end_watch(self) -> None:
        """Stop the thread started by `watch_limits`."""
        self._ended.set()

    def update_waits_for(self) -> None:
        """Set the capture's ``waits_for`` to the device that it waits for and the holder of the device, or to None."""
        self.capture.waits_for = self._lease_request.blocked_by

    def _acquire_devices(self) -> bool:
        """Try to lease the devices. Return True if all devices are leased."""
        acquired = self._lease_request.try_acquire()
        if acquired and self.capture.waits_for is not None:
            self.update_waits_for()
            self.publish()
        return acquired

    def _is_in_use(self, invocation: Invocation, error: BaseException) -> bool:
        """Return True if the backend could not start because its recorder is in use. The capture then waits."""
        if invocation.completed or not (invocation.call.is_backend and isinstance(error, LeaseError)):
            return False
        self._lease_request.record_wait(error)
        return True

    def _add_start_failure(self, invocation: Invocation, error: BaseException) -> None:
        call = invocation.call
        if invocation.completed:  # a wrapper failed after the plugin had started
            self._started.add(call.plugin)
        if not call.is_backend:
            if not is_interruption(error):
                self._add_failure(call, invocation.describe(error), error)
        elif not invocation.raised(error):
            self._start_failure = invocation.describe(error)

    def _start_others(self) -> None:
        """Mark plugins that do not implement ``profile_start`` as started."""
        calls = self._hooks.calls
        plugins = {call.plugin for hook in ("profile_step", "profile_stop") for call in calls(hook)}
        self._started |= plugins - {call.plugin for call in calls("profile_start")}

    def _end_failed_start(self, reason: str) -> Operation[bool]:
        """Stop the plugins that have started and write the manifest. Return whether the backend had started."""
        backend_started, outputs = False, tuple[Output, ...]()
        for call in self._hooks.calls("profile_stop"):
            if call.is_backend and call.plugin in self._started:
                backend_started, outputs = True, (yield from self._stop_plugin(call))
        self.capture.artifacts = self._artifacts(outputs)
        self.abandon(reason)
        yield from self._stop_listeners()
        return backend_started

    def step(self, step: Step) -> Operation[None]:
        """Call ``profile_step`` of the started plugins. If a plugin fails, add the failure to the capture.

        If the capture is still waiting for a device, only try to start it, as `start` does.
        """
        if self.waiting:
            if step.unit is Unit.GLOBAL_STEP:
                self.capture.current_step = step.index + 1
            elif step.unit is self.capture.unit:
                self.capture.passed_over += 1
            yield from self.start()
            return
        self._end_step(step.unit)
        self._check_order(step)
        self._limits.end_first_unit()
        for call in self._hooks.calls("profile_step"):
            if call.plugin not in self._started:
                continue
            try:
                for result in call.report_step(self.capture, step):
                    if inspect.isawaitable(result):
                        yield result
            except BaseException as error:
                if is_interruption(error):
                    raise
                wrapper = call.failed_wrapper(error)
                failed = call.plugin.name if wrapper is None else f"The wrapper of {wrapper} failed around {call}"
                self._add_failure(call, f"{failed} at {step.unit} {step.index}: {describe_error(error)}", error)

    def _check_order(self, step: Step) -> None:
        """Add a note for the first mini-batch in a window whose index is neither 0 nor the next in order."""
        if step.unit is not Unit.MINI_BATCH or self.capture.window is None:
            return
        previous, self._mini_batch = self._mini_batch, step.index
        if not self._is_ordered or previous is None or step.index in {0, previous + 1}:
            return
        self._is_ordered = False
        text = f"Mini-batch {step.index} was reported after mini-batch {previous}. The window counts the reports."
        self.capture.notes.append(f"{text} Report each mini-batch once, in order, counted from 0 in each global step.")

    def _end_step(self, unit: Unit) -> None:
        """End the current step's annotation before plugins run, so that it excludes their work. Ignore other units."""
        try:
            if unit is self.capture.unit:
                self.capture.end_step()
        except Exception as error:  # noqa: BLE001  # the recording must continue or stop
            self._add_problem(f"The annotation of the step was not ended: {describe_error(error)}", error)

    def _stop_plugin(self, call: HookCall) -> Operation[tuple[Output, ...]]:
        """Stop a plugin that has started, and return its outputs. A failure becomes a problem or a note."""
        self._started.discard(call.plugin)
        invocation = Invocation(call)
        try:
            with invocation:
                results = yield from invocation.run_to_completion(self.capture)
            return _outputs_of(call, results)
        except BaseException as error:  # noqa: BLE001  # other plugins must be stopped
            if is_interruption(error):
                self._interruption = self._interruption or error
            else:
                self._add_failure(call, invocation.describe(error), error)
        if invocation.progress is None or invocation.progress.results is None or not call.is_backend:
            return ()
        # A failed wrapper must not lose the trace.
        completed = [outputs for outputs in invocation.progress.results if isinstance(outputs, list | tuple)]
        return tuple(output for outputs in completed for output in outputs)

    def _stop_listeners(self) -> Operation[None]:
        """Stop the listeners after the manifest was written, and write it again with their failures."""
        note_count = len(self.capture.notes)
        for call in self._hooks.calls("profile_stop"):
            if call.plugin in self._started:
                yield from self._stop_plugin(call)
        if len(self.capture.notes) > note_count:
            self._write()

    def _raise_interruption(self) -> None:
        """Raise the first interruption of a stop; all plugins have been stopped."""
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption

    def _add_failure(self, call: HookCall, text: str, error: BaseException) -> None:
        """Add a problem if the backend's call failed, or a note if a listener's call failed. Log the traceback."""
        if call.is_backend:
            self._add_problem(text, error)
        else:
            self.capture.notes.append(f"A listener failed: {text}")
            logger.warning("Capture %s: a listener failed: %s", self.capture.id, text)
            logger.debug("Capture %s: %s", self.capture.id, text, exc_info=error)

    def _add_problem(self, text: str, error: BaseException) -> None:
        """Add a problem to the capture and log the traceback of its cause."""
        self.cause = self.cause or error
        self.capture.problems.append(text)
        logger.debug("Capture %s: %s", self.capture.id, text, exc_info=error)

    def _record_wait(self) -> None:
        capture, wait = self.capture, self._lease_request.pop_wait()
        if wait is None:
            return
        capture.waited_s = wait.duration_s
        has_iterations = capture.first_iteration is not None
        start = f"at iteration {capture.first_iteration}" if has_iterations else f"in step {capture.current_step}"
        capture.notes.append(f"The capture waited {_format_wait(wait)}, and started {start}.")
        if capture.unit is Unit.GLOBAL_STEP and capture.current_step > capture.first_step:
            last = capture.current_step - 1
            steps = f"Step {last} was" if last == capture.first_step else f"Steps {capture.first_step} to {last} were"
            capture.problems.append(f"{steps} not recorded, because the capture was waiting for a device.")

    def abandon(self, reason: str | None) -> None:
        """End the capture when no plugin is recording it.

        Args:
            reason: the reason; None if the wait for a device is the only reason.
        """
        capture, reasons = self.capture, [reason] if reason else []
        self.end_watch()
        self.update_waits_for()
        if (wait := self._lease_request.pop_wait()) is not None:
            capture.waited_s = wait.duration_s
            if capture.waits_for is None:
                capture.notes.append(f"The capture waited {_format_wait(wait)}.")
            else:
                reasons.append(describe_failed_wait(wait))
        self._lease_request.release()
        abandon(capture, self._recorder, *reasons)

    def abandon_started(self, reason: str) -> Operation[None]:
        """End the capture without stopping the backend, because the only thread that could stop it has exited."""
        self._started -= {call.plugin for call in self._hooks.calls("profile_stop") if call.is_backend}
        self.fail(reason)
        yield from self._stop_listeners()
        self._raise_interruption()

    def fail(self, reason: str) -> None:
        """Write the manifest of a capture whose thread does not respond. The caller must then terminate the process.

        Any thread may call this method. It does not stop the plugins, so the trace is lost.
        """
        if self.capture.state is CaptureState.RECORDING:
            self.capture.move_to(CaptureState.STOPPING)
        if self.capture.state is not CaptureState.ENDED:
            self.abandon(reason)

    def publish(self) -> None:
        """Write the manifest if the capture is starting or recording. Any thread may call this."""
        with self._mutex:
            if self._publishing or self.capture.state not in {CaptureState.STARTING, CaptureState.RECORDING}:
                return
            self._publishing = True
            try:
                self._write()
            finally:
                self._publishing = False

    def close(self, reason: str | None, *, remove_empty: bool = False) -> Operation[bool]:
        """Stop every plugin, set the capture's status and write the manifest. Plugin failures are not raised.

        Args:
            reason: the reason for an early end; None if the capture ends as scheduled.
            remove_empty: whether to remove the manifest if nothing was recorded.

        Returns:
            True if the manifest was removed.
        """
        if self.capture.state not in {CaptureState.STARTING, CaptureState.RECORDING}:  # the capture has already ended
            return False
        if not self.waiting:
            yield from self.stop_recording(reason)
        elif not remove_empty:
            self.abandon(reason)
            yield from self._stop_listeners()
            self._raise_interruption()
            return False
        if not remove_empty or self._outputs:
            yield from self.write()
            return False
        self._remove()
        yield from self._stop_listeners()
        self._raise_interruption()
        return True

    def _remove(self) -> None:
        """Remove the manifest of a capture that has recorded nothing."""
        self.end_watch()
        self._lease_request.release()
        self.capture.move_to(CaptureState.ENDED)
        self.capture.status = Status.MISSING
        try:
            run_directory.remove_capture(self.capture)
        except OSError as error:
            logger.warning("The manifest %s cannot be removed: %s", self.capture.manifest_path, error)
        else:
            problems = " ".join(self.capture.problems)
            logger.info("Capture %s ended during its warm-up and was removed. %s", self.capture.id, problems)

    def stop_recording(self, reason: str | None) -> Operation[None]:
        """Stop the ``tryfirst`` listeners and the backend, on the thread that started; `write` must follow."""
        capture = self.capture
        self._end_step(capture.unit)
        self.end_watch()
        capture.move_to(CaptureState.STOPPING)
        if (start := self._counters) is not None:
            capture.host_load = HostCounters.read(start.thread).load_since(start)
        if reason:
            capture.problems.append(sentence(reason))
        calls = self._hooks.calls("profile_stop")
        backend = next(index for index, call in enumerate(calls) if call.is_backend)
        try:
            try:
                for call in calls[:backend]:
                    if call.plugin in self._started:
                        yield from self._stop_plugin(call)
            finally:  # stop the backend even if the generator is closed while a listener is being stopped
                self._outputs = yield from self._stop_plugin(calls[backend])
        except GeneratorExit as error:  # nothing can be awaited any more
            capture.problems.append(f"The stop was interrupted: {describe_error(error)}")
            capture.conclude(self._artifacts(self._outputs))
            self._write()
            raise
        finally:
            self._lease_request.release()
        if self._interruption is not None:
            capture.problems.append(f"The stop was interrupted: {describe_error(self._interruption)}")
            yield from self.write()

    def write(self) -> Operation[None]:
        """Write the artifacts and the manifest, then stop the listeners. Any thread may call this.

        Raises:
            BaseException: an interruption of a plugin or of a write function, after all plugins have been stopped.
        """
        outputs, self._outputs = self._outputs, ()
        self.capture.conclude(self._artifacts(outputs))
        self._write()
        if self._backend.analyses_traces:
            start_analysis(self.capture)
        yield from self._stop_listeners()
        self._raise_interruption()

    def _artifacts(self, outputs: tuple[Output, ...]) -> tuple[Artifact, ...]:
        """Return the artifacts of the capture and of its stop. If one cannot be written, report it as a problem."""
        artifacts: list[Artifact] = []
        for output in (*self.capture.artifacts, *outputs):
            try:
                self.capture.check_directory()
                artifact: object = output() if callable(output) else output
            except BaseException as error:  # noqa: BLE001  # the manifest must be written in any case
                self._add_problem(f"A file could not be written: {describe_error(error)}", error)
                if is_interruption(error):
                    self._interruption = self._interruption or error
                continue
            if not isinstance(artifact, Artifact):
                self.capture.problems.append(
                    f"profile_stop must return artifacts or functions that write them, not {describe_value(artifact)}."
                )
                continue
            try:
                manifest.check_artifact(artifact, self.capture.directory)
            except Exception as error:  # noqa: BLE001  # plugins can set an attribute to any value
                self._add_problem(f"profile_stop returned an invalid artifact: {describe_error(error)}", error)
                continue
            if all(artifact.path != other.path for other in artifacts):
                artifacts.append(artifact)
        return tuple(artifacts)

    def _write(self) -> None:
        try:
            with self._mutex:
                manifest.write_manifest(self.capture, self._recorder)
        except (OSError, CaptureError) as error:
            self.capture.problems.append(f"The manifest cannot be written: {describe_error(error)}")


def _outputs_of(call: HookCall, results: list[Any]) -> tuple[Output, ...]:
    """Return the outputs of a ``profile_stop`` call.

    Raises:
        CaptureError: the plugin returned neither an iterable nor None.
    """
    for outputs in results:
        if outputs is not None and not isinstance(outputs, Iterable):
            raise CaptureError(
                f"{call} must return a list of artifacts or of functions that write them, not "
                f"{describe_value(outputs)}."
            )
    return tuple(output for outputs in results for output in outputs or ())


def _first_step_is_cold(capture: CaptureRecord, backend: Backend) -> bool | None:
    """Return whether recording starts without warm-up, so that the first step, mini-batch or iteration is slower.

    Return None if the backend's ``cold_first_step`` is False.
    """
    if not backend.cold_first_step:
        return None
    if capture.unit is Unit.GLOBAL_STEP:
        return capture.current_step >= capture.first_step
    return capture.window is None or capture.window.warmup == 0


def abandon(capture: CaptureRecord, recorder: manifest.ManifestWriter, *reasons: str) -> None:
    """End a reserved capture that does not start, and write its manifest."""
    capture.problems += map(sentence, reasons)
    capture.conclude(capture.artifacts)
    try:
        manifest.write_manifest(capture, recorder)
    except (OSError, CaptureError) as error:
        logger.warning("The manifest %s cannot be written: %s", capture.manifest_path, describe_error(error))


def adopt(capture: CaptureRecord, recorder: manifest.ManifestWriter, artifacts: tuple[Artifact, ...]) -> None:
    """End a reserved capture with artifacts that another profiler recorded, and write its manifest.

    Raises:
        OSError: the manifest cannot be written.
    """
    capture.move_to(CaptureState.RECORDING)
    capture.move_to(CaptureState.STOPPING)
    capture.conclude(artifacts)
    manifest.write_manifest(capture, recorder)


class CaptureLimits:
    """Time and memory limits of one capture. The time limit starts when this object is created."""

    def __init__(self, options: CommonOptions) -> None:
        """Args:
        options: the backend's options.
        """
        self._options = options
        self._deadline_s = time.monotonic() + options.max_capture_s
        self._next_check_s = 0.0
        self._is_first_unit = True
        self._growth = MemoryGrowth()

    @property
    def interval_s(self) -> float:
        """Time until `describe_excess` should be called again."""
        return max(0.0, min(_CHECK_S, self._deadline_s - time.monotonic()))

    def start_recording(self) -> None:
        """Measure the memory growth from the start of the recording."""
        self._is_first_unit, self._growth = True, MemoryGrowth()

    def end_first_unit(self) -> None:
        """Measure the memory growth from the end of the first unit.

        During the first unit, hosts allocate buffers and optimizer states.
        """
        if self._is_first_unit:
            self._is_first_unit, self._growth = False, MemoryGrowth()

    def describe_excess(self) -> str | None:
        """Return the reason to stop the capture, or None. Memory usage is read at most four times per second."""
        now_s = time.monotonic()
        if now_s >= self._deadline_s:
            return f"it was not stopped within max_capture_s={self._options.max_capture_s:g} seconds"
        if now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + _CHECK_S
        return self._growth.describe_excess(self._options.max_memory_share)


def describe_failed_wait(wait: leases.LeaseWait) -> str:
    """Return the problem message of a capture that waited for a device until its end."""
    return (
        f"The device did not become available: the capture waited {_format_wait(wait)}. Shorten the other recording "
        "(limit the iterations of an engine, or select stages of a trainer), or capture these roles at different steps."
    )


def _format_wait(wait: leases.LeaseWait) -> str:
    return f"{wait.duration_s:.2f} s for {', then for '.join(wait.held)}"
