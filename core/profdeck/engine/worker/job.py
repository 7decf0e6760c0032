"""One request in one process of an engine: its windows of iterations, its turn on the device, its recordings and files.

Recordings start and stop on the engine's thread; files are written by another one.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import attrs

from profdeck.backends.api import Backend
from profdeck.backends.hook_calls import RoleHooks
from profdeck.backends.recording import Recording, describe_failed_wait, describe_timeout, reserve
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
class _Ending:
    """A deferred stop of a capture. The engine's thread stops the capture later."""

    reason: str | None


class CaptureJob:
    """One request in one process."""

    def __init__(self, request: CaptureRequest, identity: Identity, backend: Backend, versions: dict[str, str]) -> None:
        self.request = request
        self.over = False
        """No iteration is wanted any more."""
        self.problems: list[str] = []
        self.ended: list[CaptureRecord] = []
        self._identity = identity
        self._backend = backend
        self._hooks = RoleHooks(type(backend))
        about = {"roles": [request.role]}
        self._run = run_directory.RunDirectory(request.output.absolute(), request.run, about)
        # Data-parallel ranks run batches of their own: which captures by kind another rank has cannot be known.
        ranks = [identity.rank] if request.batch_kinds else range(identity.world_size)
        selected = tuple(rank for rank in ranks if request.selects(rank))
        self._recorder = manifest.ManifestWriter(
            backend=backend.name, versions=versions, options=unstructure(backend.options), expected_ranks=selected
        )
        wanted = request.iterations
        # An absolute first iteration counts from the start of the engine, at which such requests are made.
        skip = 0 if wanted is None else wanted.skip if wanted.first is None else wanted.first
        new = functools.partial(IterationWindow, skip, wanted.count if wanted else None)
        self._windows: dict[BatchKind | None, IterationWindow] = {
            batch: new() for batch in request.batch_kinds or (None,)
        }
        self._iteration = 0
        self._key: BatchKind | None = None
        self._window: IterationWindow | None = None
        """What the iteration that is under way counts for."""
        self._absolute = wanted is not None and wanted.first is not None
        # Held from the start on, so that of several who are asked to record in one step the first one is the first;
        # and again for each later capture, so that others have their turn in between.
        self._lease_request = leases.LeaseRequest(backend.devices, f"{request.role}, {request.id}")
        self._unbegun: Recording | None = None
        """The capture that has not begun."""
        self._recording: Recording | None = None
        self._mark: AbstractContextManager[object] | None = None
        self._counts: Counter[BatchKind | None] = Counter()
        self._writer = FileWriter()
        self._deadline_s = math.inf
        """Time at which the capture exceeds ``max_capture_s``, as returned by `time.monotonic`."""
        self._thread = threading.get_ident()
        self._busy = False
        self._held_up_s = 0.0
        self._iterates = True
        self._ending: _Ending | None = None
        self._exiting = False

    @property
    def state(self) -> RequestState:
        """How far it is."""
        if self._recording is not None:
            return RequestState.RECORDING
        if not self.over:
            return RequestState.ARMED
        return RequestState.ENDED if self._writer.idle else RequestState.WRITING

    @property
    def waits_for(self) -> str | None:
        """What is held, and by whom, while it waits for its turn."""
        return None if self.over else self._lease_request.blocked_by

    @property
    def recorded(self) -> int:
        """How many iterations have been recorded."""
        return sum(window.recorded for window in self._windows.values())

    @property
    def pending(self) -> list[str]:
        """Message about a deferred stop, for the reply; empty if no stop is deferred."""
        due = None if self.over else self._due()
        if due is None:
            return []
        reason = f" ({due.reason})" if due.reason else ""
        return [f"The end of the recording is pending until the engine's next iteration{reason}."]

    def prepare(self) -> None:
        """Check all that can be checked before the window, and leave a first manifest.

        Raises:
            ProfdeckError: this process cannot record that.
        """
        try:
            self._lease_request.try_acquire()
        except OSError as error:
            raise CaptureError(f"The device cannot be leased: {describe_error(error)}.") from error
        if self._absolute:  # its window may be far away
            self._lease_request.release()
        first = self._capture(None)
        first.waits_for = self._lease_request.blocked_by
        try:
            reserve(first, self._run, self._recorder)
        except BaseException:
            self._lease_request.release()
            raise
        # Captures of kinds are reserved when their batches come: this one shows that they can be, or that it waits.
        if self.request.batch_kinds and first.waits_for is None:
            first.manifest_path.unlink()
        else:
            self._unbegun = Recording(first, self._backend, self._hooks, self._recorder, self._lease_request)
        self._deadline_s = time.monotonic() + self._backend.options.max_capture_s
        shutdown.watch(self, self._finish_at_exit)

    def begin_now(self) -> None:
        """Begin without an iteration.

        Raises:
            CaptureError: it could not start.
        """
        self._iterates = False
        try:
            with self._exclusive():
                self.begin(None, "")
                if self._unbegun is not None:
                    error = f"it cannot wait for {self.waits_for}, as it has no iterations"
                    self._abandon(error)
                    raise CaptureError(f"Capture {self.request.id} did not start: {error}.")  # noqa: TRY301  # as others
        except BaseException:
            self._finish()
            shutdown.unwatch(self)
            raise
        self.stop_if_due()

    def begin(self, batch: BatchKind | None, label: str) -> None:
        """Report that an iteration begins."""
        if self.over:
            return
        if self._due():
            self.stop(None)
            return
        key = batch if self.request.batch_kinds else None
        window = self._windows.get(key)
        wanted = window is not None and window.wants_next
        if self._recording is not None and (not wanted or key != self._key):
            self._close(None)
        self._key = key
        self._window = window if window is not None and self._count_in(window) else None
        if wanted and self._window is not None:
            if self._recording is None:
                self._open()
            else:
                run_without_waiting(self._recording.step(Step(Unit.ENGINE_ITERATION, self._iteration - 1)))
            if self._recording is not None and label:
                mark = self._recording.capture.annotate(label)
                mark.__enter__()
                self._mark = mark

    def end(self) -> None:
        """Report that an iteration has ended."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)
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

    def stop(self, reason: str | None) -> None:
        """End, on the thread that records; before its time if there is a reason."""
        if self.over:
            return
        due = self._due()
        reason = reason or (due.reason if due else None)
        short = self._short()
        if self._recording is not None:
            self._close(reason or " ".join(short) or None)
        elif self._unbegun is None:
            self.problems += self._in_vain()
        elif reason or self.waits_for:
            self._abandon(reason)
        elif (window := self._windows[None]).skip and window.seen:
            self._abandon(f"It ended after {window.seen} iterations, before its window began.")
        else:
            self._abandon("No engine iteration ran between start and stop.")
        self.problems += [sentence(reason)] if reason else []
        self.problems += short
        self._finish()

    @contextmanager
    def holding_up(self) -> Iterator[None]:
        """Add to the time for which the next capture to end has kept the engine from its work."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._held_up_s += time.perf_counter() - began

    def release_if_ended(self) -> None:
        """Give back what is needed until the files are whole. On the engine's thread."""
        if self.state is RequestState.ENDED:
            shutdown.unwatch(self)

    def note(self, text: str) -> None:
        """Note something in the capture that is under way, or the last one."""
        running = self._recording or self._unbegun
        for capture in [running.capture] if running else self.ended[-1:]:  # the last one is being written
            capture.notes.append(text)

    def stop_here_or_later(self, reason: str | None) -> None:
        """End on this thread, or ask the one that records to do so at its next iteration."""
        recording = self._recording
        bound = self._backend.thread_bound and self._iterates
        if recording is None or not bound or self._thread == threading.get_ident():
            self.guarded(functools.partial(self.stop, reason))
        elif self._due() is None:
            self._ending = _Ending(reason)
            recording.capture.notes.append(
                "A stop from another thread than the one that records is carried out at the engine's next iteration."
            )
            recording.publish()

    def guarded(self, call: Callable[[], None]) -> None:
        """Call without raising into the engine; an ending that was asked for meanwhile follows."""
        with self._exclusive():
            try:
                call()
            except Exception as error:  # noqa: BLE001  # the engine serves on
                self._fail(error)
        self.stop_if_due()

    def stop_if_due(self) -> None:
        """In the recording thread, stop the capture if a stop was deferred or ``max_capture_s`` has passed."""
        here = self._thread == threading.get_ident()
        if here and self._mark is None and not self.over and self._due():
            self.guarded(functools.partial(self.stop, None))
        if self._exiting and self.over:
            self._release()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _short(self) -> list[str]:
        """Say which windows are not full."""
        return [
            f"Only {window.recorded} of {window.count} {f'{batch} ' if batch else ''}iterations ran before the stop."
            for batch, window in self._windows.items()
            # A kind of batch that never came is no loss when all kinds were asked for; and while it waited for its
            # turn, nobody counted.
            if window.count is not None
            and not window.done
            and (window.seen or (len(self._windows) == 1 and not self.waits_for))
        ]

    def _in_vain(self) -> list[str]:
        """Say that the turn of a later capture never came, if it waits for that."""
        wait = self._lease_request.pop_wait() if self.waits_for else None
        return [] if wait is None else [describe_failed_wait(wait)]

    def _capture(self, batch: BatchKind | None) -> CaptureRecord:
        return self._run.capture_of(
            self.request, self._identity, batch, count=self._counts[batch], first_iteration=self._iteration
        )

    def _count_in(self, window: IterationWindow) -> bool:
        """Take the device if it is free; return whether the iteration then counts for its window."""
        if window.done or (self._absolute and not window.wants_next):
            return True
        if not self._lease_request.try_acquire():
            if self._unbegun is not None:
                self._unbegun.update_waits_for()
            return False
        if self._unbegun is not None and self.request.batch_kinds:  # delete the manifest, which only reported the wait
            self._unbegun.capture.manifest_path.unlink(missing_ok=True)
            self._unbegun = None
        return True

    def _open(self) -> None:
        recording, self._unbegun = self._unbegun, None
        if recording is None:
            self._counts[self._key] += 1
            capture = self._capture(self._key)
            reserve(capture, self._run, self._recorder)
            recording = Recording(capture, self._backend, self._hooks, self._recorder, self._lease_request)
        recording.capture.first_iteration = self._iteration
        self._thread = threading.get_ident()
        try:
            with self.holding_up():
                begun = run_without_waiting(recording.start())
        except Exception:
            self.ended.append(recording.capture)
            raise
        if begun:
            self._recording = recording
        elif self._key is None:
            self._unbegun = recording
        else:
            recording.capture.manifest_path.unlink()
            self._counts[self._key] -= 1

    def _abandon(self, reason: str | None) -> None:
        """End the capture that has not begun."""
        recording, self._unbegun = self._unbegun, None
        if recording is not None:
            self.ended.append(recording.capture)
            recording.abandon(reason)

    def _close(self, reason: str | None) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            self.ended.append(recording.capture)
            with self.holding_up():
                run_without_waiting(recording.stop_recording(reason))
            recording.capture.stall_s, self._held_up_s = self._held_up_s, 0.0
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
        except Exception as second:  # noqa: BLE001  # as above
            self.problems.append(describe_error(second))
        self._finish()

    def _due(self) -> _Ending | None:
        """Return the deferred stop, if any; create one when ``max_capture_s`` has passed."""
        if self._ending is None and time.monotonic() >= self._deadline_s:
            self._ending = _Ending(describe_timeout(self._backend.options.max_capture_s))
        return self._ending

    # Stops caused by a signal or by interpreter exit.

    def _finish_at_exit(self, reason: str) -> bool:
        if self._busy:
            self._ending = _Ending(reason)  # what is under way goes on to it
            self._exiting = True
            return False
        self.guarded(lambda: self.stop(reason))
        self._release()
        return True

    def _release(self) -> None:
        """Wait until the files are whole; a signal that waited for them is delivered then."""
        self._writer.wait()
        shutdown.unwatch(self)
