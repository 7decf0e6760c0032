"""One capture request in one engine process: iteration windows, device lease, recordings and files.

Recordings start and stop on the engine's thread. A background thread writes the files.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import attrs

from profdeck.backends.api import Backend
from profdeck.backends.hook_calls import RoleHooks
from profdeck.backends.recording import CaptureLimits, Recording, describe_failed_wait, reserve
from profdeck.base import leases, shutdown
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.operations import run_without_waiting
from profdeck.base.text import sentence
from profdeck.config.structuring import unstructure
from profdeck.engine.worker.file_writer import FileWriter
from profdeck.engine.worker.iteration_window import IterationWindow
from profdeck.records import manifest, run_directory
from profdeck.records.capture import CaptureRecord, Step, Unit
from profdeck.records.request import BatchKind, CaptureRequest, RequestState
from profdeck_traces.base.errors import describe_error

logger = logging.getLogger("profdeck")


@attrs.frozen
class _DeferredStop:
    """A deferred stop of a capture. The engine's thread stops the capture later."""

    reason: str | None


class CaptureJob:
    """One request in one process."""

    def __init__(self, request: CaptureRequest, identity: Identity, backend: Backend, versions: dict[str, str]) -> None:
        self.request = request
        self.over = False
        """True if no more iterations must be recorded."""
        self.problems: list[str] = []
        self.ended: list[CaptureRecord] = []
        self._identity = identity
        self._backend = backend
        self._hooks = RoleHooks(type(backend))
        run_data = {"roles": [request.role]}
        self._run = run_directory.RunDirectory(request.output.absolute(), request.run, run_data)
        # Data-parallel ranks run different batches, so the captures by kind on other ranks are unknown.
        ranks = [identity.rank] if request.batch_kinds else range(identity.world_size)
        selected = tuple(rank for rank in ranks if request.selects(rank))
        self._manifest_writer = manifest.ManifestWriter(
            backend=backend.name, versions=versions, options=unstructure(backend.options), expected_ranks=selected
        )
        iterations = request.iterations
        # `first` counts from the start of the engine. Requests with `first` are created at engine startup.
        skip = 0 if iterations is None else iterations.skip if iterations.first is None else iterations.first
        new_window = functools.partial(IterationWindow, skip, iterations.count if iterations else None)
        self._windows: dict[BatchKind | None, IterationWindow] = {
            batch: new_window() for batch in request.batch_kinds or (None,)
        }
        self._iteration = 0
        self._key: BatchKind | None = None
        """Key of the current iteration in `_windows`."""
        self._window: IterationWindow | None = None
        """Window that counts the current iteration, or None."""
        self._absolute = iterations is not None and iterations.first is not None
        # Leased from the request on, so that concurrent requests record in the order of arrival. Each later capture of
        # this request acquires a new lease, so that other requests can record in between.
        self._lease_request = leases.LeaseRequest(backend.devices, f"{request.role}, {request.id}")
        self._unstarted: Recording | None = None
        """Reserved recording that has not started."""
        self._recording: Recording | None = None
        self._annotation: AbstractContextManager[object] | None = None
        """Annotation of the current iteration in the trace."""
        self._counts: Counter[BatchKind | None] = Counter()
        """Number of captures by batch kind."""
        self._writer = FileWriter()
        self._limits: CaptureLimits | None = None
        self._thread = threading.get_ident()
        """Thread that started the recording."""
        self._busy = False
        self._stall_s = 0.0
        """Time for which the next capture to end has blocked the engine."""
        self._iterates = True
        self._is_idle = False
        """True if the engine has finished all requests since the last iteration."""
        self._deferred_stop: _DeferredStop | None = None
        self._exiting = False

    @property
    def state(self) -> RequestState:
        """The state of the request in this process."""
        if self._recording is not None:
            return RequestState.RECORDING
        if not self.over:
            return RequestState.ARMED
        return RequestState.ENDED if self._writer.idle else RequestState.WRITING

    @property
    def waits_for(self) -> str | None:
        """The leased device that this request waits for, and its holder; None if it does not wait."""
        return None if self.over else self._lease_request.blocked_by

    @property
    def recorded(self) -> int:
        """Number of recorded iterations."""
        return sum(window.recorded for window in self._windows.values())

    @property
    def pending(self) -> list[str]:
        """Message about a deferred stop, for the reply; empty if no stop is deferred."""
        pending_stop = None if self.over else self._pending_stop()
        if pending_stop is None:
            return []
        reason = f" ({pending_stop.reason})" if pending_stop.reason else ""
        return [f"The stop is deferred until the engine's next iteration{reason}."]

    def prepare(self) -> None:
        """Lease the device if it is free, and write the first manifest.

        Raises:
            ProfdeckError: this process cannot record the request.
        """
        try:
            self._lease_request.try_acquire()
        except OSError as error:
            raise CaptureError(f"The device cannot be leased: {describe_error(error)}.") from error
        if self._absolute:  # the window may start much later
            self._lease_request.release()
        first_capture = self._new_capture(None)
        first_capture.waits_for = self._lease_request.blocked_by
        try:
            reserve(first_capture, self._run, self._manifest_writer)
        except BaseException:
            self._lease_request.release()
            raise
        # Captures by batch kind are reserved when the first batch of the kind arrives. This manifest only tests that
        # the directory is writable, or shows that the request waits for the device.
        if self.request.batch_kinds and first_capture.waits_for is None:
            first_capture.manifest_path.unlink()
        else:
            self._unstarted = Recording(
                first_capture, self._backend, self._hooks, self._manifest_writer, self._lease_request
            )
        self._limits = CaptureLimits(self._backend.options)
        shutdown.watch(self, self._finish_at_exit, self._fail_at_exit)

    def begin_now(self) -> None:
        """Start recording immediately, in a process without iterations.

        Raises:
            CaptureError: the recording did not start.
        """
        self._iterates = False
        try:
            with self._exclusive():
                self.begin(None, "")
                if self._unstarted is not None:
                    error = f"a process without iterations cannot wait for {self.waits_for}"
                    self._abandon(error)
                    raise CaptureError(f"Capture {self.request.id} did not start: {error}.")  # noqa: TRY301  # cleanup below
        except BaseException:
            self._finish()
            shutdown.unwatch(self)
            raise
        self.stop_if_due()

    def begin(self, batch: BatchKind | None, label: str) -> None:
        """Process the start of an iteration; see `EngineRecorder.begin`."""
        if self.over:
            return
        if self._pending_stop():
            self.stop(None)
            return
        self._is_idle = False
        key = batch if self.request.batch_kinds else None
        window = self._windows.get(key)
        is_included = window is not None and window.includes_next
        if self._recording is not None and (not is_included or key != self._key):
            self._close(None)
        self._key = key
        self._window = window if window is not None and self._lease_for(window) else None
        if is_included and self._window is not None:
            if self._recording is None:
                self._open()
            else:
                run_without_waiting(self._recording.step(Step(Unit.ENGINE_ITERATION, self._iteration - 1)))
                if self._limits is not None:
                    self._limits.end_first_unit()
            if self._recording is not None and label:
                annotation = self._recording.capture.annotate(label)
                annotation.__enter__()
                self._annotation = annotation

    def end(self) -> None:
        """Process the end of an iteration."""
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.__exit__(None, None, None)
        if self.over:
            return
        self._iteration += 1
        window = self._window
        if window is None:
            return
        window.seen += 1
        if self._recording is None:
            return
        window.recorded += 1
        if window.done:
            self._close(None)
            if all(other.done for other in self._windows.values()):
                self._finish()

    def report_idle(self) -> None:
        """Record that the engine has no unfinished requests; see `EngineRecorder.report_idle`."""
        if not self._is_idle and not self.over and self._annotation is None:
            self._is_idle = True
            if self._recording is not None:
                self._recording.capture.end_step()

    def stop(self, reason: str | None) -> None:
        """Stop recording. Call this in the recording thread.

        Args:
            reason: why the capture is stopped early. None for a normal stop.
        """
        if self.over:
            return
        pending_stop = self._pending_stop()
        reason = reason or (pending_stop.reason if pending_stop else None)
        missing_iterations = self._describe_missing_iterations()
        if missing_iterations and reason is None and self._is_idle and self.recorded:
            self._note_end_of_work()
            missing_iterations = []
        if self._recording is not None:
            self._close(reason or " ".join(missing_iterations) or None)
        elif self._unstarted is None:
            self.problems += self._describe_vain_wait()
        elif reason or self.waits_for:
            self._abandon(reason)
        elif (window := self._windows[None]).skip and window.seen:
            self._abandon(f"It was stopped after {window.seen} iterations, before its window started.")
        else:
            self._abandon("No engine iteration ran between start and stop.")
        self.problems += [sentence(reason)] if reason else []
        self.problems += missing_iterations
        self._finish()

    @contextmanager
    def measured_stall(self) -> Iterator[None]:
        """Add the duration of the block to ``stall_s`` of the next capture to end."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._stall_s += time.perf_counter() - started_s

    def release_if_ended(self) -> None:
        """Unregister the exit handler if all files are written. Call this in the engine's thread."""
        if self.state is RequestState.ENDED:
            shutdown.unwatch(self)

    def add_note(self, text: str) -> None:
        """Add a note to the running capture, or to the last one, whose files are being written."""
        running = self._recording or self._unstarted
        for capture in [running.capture] if running else self.ended[-1:]:
            capture.notes.append(text)

    def stop_or_defer(self, reason: str | None) -> None:
        """Stop recording, or defer the stop to the recording thread if the recorder must be stopped there."""
        recording = self._recording
        is_bound = self._backend.thread_bound and self._iterates
        if recording is None or not is_bound or self._thread == threading.get_ident():
            self.call_safely(functools.partial(self.stop, reason))
        elif self._pending_stop() is None:
            self._deferred_stop = _DeferredStop(reason)
            recording.capture.notes.append(
                "The stop was requested in another thread and is deferred until the engine's next iteration."
            )
            recording.publish()

    def call_safely(self, call: Callable[[], None]) -> None:
        """Call a function. On an error, fail the capture instead of raising. Then execute a pending stop."""
        with self._exclusive():
            try:
                call()
            except Exception as error:  # noqa: BLE001  # errors must not stop the engine
                self._fail(error)
        self.stop_if_due()

    def stop_if_due(self) -> None:
        """In the recording thread, stop the capture if a stop was deferred or ``max_capture_s`` has passed."""
        is_recording_thread = self._thread == threading.get_ident()
        if is_recording_thread and self._annotation is None and not self.over and self._pending_stop():
            self.call_safely(functools.partial(self.stop, None))
        if self._exiting and self.over:
            self._release()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _describe_missing_iterations(self) -> list[str]:
        return [
            f"Only {window.recorded} of {window.count} {f'{batch} ' if batch else ''}iterations ran before the stop."
            for batch, window in self._windows.items()
            # With several kinds, a kind without any batch is not reported. Iterations are not counted while the request
            # waits for the device.
            if window.count is not None
            and not window.done
            and (window.seen or (len(self._windows) == 1 and not self.waits_for))
        ]

    def _note_end_of_work(self) -> None:
        """Add a note to the last capture that the engine ran out of requests before all iterations were recorded."""
        counts = [
            f"{window.recorded} of {window.count}{f' {batch}' if batch else ''}"
            for batch, window in self._windows.items()
            if window.count is not None and not window.done
        ]
        self.add_note(f"The engine finished all requests after {' and '.join(counts)} iterations.")

    def _describe_vain_wait(self) -> list[str]:
        """Return a problem if the next capture was still waiting for the device."""
        wait = self._lease_request.pop_wait() if self.waits_for else None
        return [] if wait is None else [describe_failed_wait(wait)]

    def _new_capture(self, batch: BatchKind | None) -> CaptureRecord:
        return self._run.capture_of(
            self.request, self._identity, batch, count=self._counts[batch], first_iteration=self._iteration
        )

    def _lease_for(self, window: IterationWindow) -> bool:
        """Lease the device for a window if required. Return False if it is leased by another recording.

        The current iteration then does not count for the window.
        """
        if window.done or (self._absolute and not window.includes_next):
            return True
        if not self._lease_request.try_acquire():
            if self._unstarted is not None:
                self._unstarted.update_waits_for()
            return False
        if self._unstarted is not None and self.request.batch_kinds:  # its manifest only reported the wait
            self._unstarted.capture.manifest_path.unlink(missing_ok=True)
            self._unstarted = None
        return True

    def _open(self) -> None:
        """Start a recording at the current iteration."""
        recording, self._unstarted = self._unstarted, None
        if recording is None:
            self._counts[self._key] += 1
            capture = self._new_capture(self._key)
            reserve(capture, self._run, self._manifest_writer)
            recording = Recording(capture, self._backend, self._hooks, self._manifest_writer, self._lease_request)
        recording.capture.first_iteration = self._iteration
        self._thread = threading.get_ident()
        if self._limits is not None:
            self._limits.start_recording()
        try:
            with self.measured_stall():
                has_started = run_without_waiting(recording.start())
        except Exception:
            self.ended.append(recording.capture)
            raise
        if has_started:
            self._recording = recording
        elif self._key is None:
            self._unstarted = recording
        else:
            recording.capture.manifest_path.unlink()
            self._counts[self._key] -= 1

    def _abandon(self, reason: str | None) -> None:
        """End the capture whose recording has not started."""
        recording, self._unstarted = self._unstarted, None
        if recording is not None:
            self.ended.append(recording.capture)
            recording.abandon(reason)

    def _close(self, reason: str | None) -> None:
        """Stop the running recording, and queue its files for writing."""
        recording, self._recording = self._recording, None
        if recording is not None:
            self.ended.append(recording.capture)
            with self.measured_stall():
                run_without_waiting(recording.stop_recording(reason))
            recording.capture.stall_s, self._stall_s = self._stall_s, 0.0
            self._writer.write(recording)

    def _finish(self) -> None:
        self.over = True
        self._lease_request.release()
        self._writer.close()

    def _fail(self, error: Exception) -> None:
        logger.warning("Capture %s of the engine failed: %s", self.request.id, describe_error(error))
        self.problems.append(describe_error(error))
        try:
            self._abandon(describe_error(error))
            self._close(describe_error(error))
        except Exception as cleanup_error:  # noqa: BLE001  # errors must not stop the engine
            self.problems.append(describe_error(cleanup_error))
        self._finish()

    def _pending_stop(self) -> _DeferredStop | None:
        """Return the deferred stop, if any; create one if the capture exceeds a limit."""
        if self._deferred_stop is None and self._limits is not None and (reason := self._limits.describe_excess()):
            self._deferred_stop = _DeferredStop(reason)
        return self._deferred_stop

    # Stops caused by a signal or by interpreter exit.

    def _finish_at_exit(self, reason: str) -> bool:
        if self._busy:
            self._deferred_stop = _DeferredStop(reason)  # executed after the current operation
            self._exiting = True
            return False
        self.call_safely(lambda: self.stop(reason))
        self._release()
        return True

    def _fail_at_exit(self, reason: str) -> bool:
        """Write the manifest of a capture whose thread does not respond. Return False if the job is busy."""
        if self._busy or not self._writer.idle:
            return False
        for recording in filter(None, (self._recording, self._unstarted)):
            recording.fail(reason)
        return True

    def _release(self) -> None:
        """Wait until the files are written, then unregister the exit handler, which delivers a delayed signal."""
        self._writer.wait()
        shutdown.unwatch(self)
