"""Records in one process of an engine, one request at a time, while the engine serves.

The engine's plugin calls `EngineRecorder.begin` and `EngineRecorder.end` around every iteration while the recorder is
active, and nothing at all while it is not. Nothing here raises into the engine: what fails is in the reply and in the
manifests. Recordings start and stop on the engine's thread; files are written by another one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs

from profdeck import exits, lease, run
from profdeck.backend import Backend
from profdeck.capture import Capture, Step, Unit
from profdeck.engine.device import device_backend
from profdeck.engine.request import Batch, CaptureRequest, Recorded, Reply, State
from profdeck.errors import CaptureError, describe
from profdeck.identity import Identity
from profdeck.plugins import Plugins
from profdeck.recording import Recording, claim, expired, give_up, sentence
from profdeck.settle import drive, settle_later
from profdeck.strict import structure, unstructure

logger = logging.getLogger("profdeck")


@attrs.define
class _Window:
    """The iterations of one kind: how many came, how many were recorded."""

    skip: int
    count: int | None
    seen: int = 0
    recorded: int = 0

    @property
    def wants(self) -> bool:
        """Whether the next iteration is to be recorded."""
        return self.seen >= self.skip and not self.done

    @property
    def done(self) -> bool:
        return self.count is not None and self.recorded >= self.count


class EngineRecorder:
    """The recorder of one process of an engine."""

    def __init__(self, identity: Identity, device_type: str, versions: dict[str, str]) -> None:
        """Args:
        identity: the place of this process in the engine; role and replica come with the requests.
        device_type: the type of device that it runs on, in torch's words.
        versions: versions of the engine by distribution, for the manifests.
        """
        self.identity = identity
        self._device_type = device_type
        self._versions = versions
        self._job: _Job | None = None
        self._last: CaptureRequest | None = None

    @property
    def active(self) -> bool:
        """Whether iterations have to be reported."""
        return self._job is not None and not self._job.over

    def start(self, request: CaptureRequest, *, at_once: bool = False) -> None:
        """Take a request: record from the first iteration of its window on.

        Args:
            request: what to record.
            at_once: begin now, in a process that has no iterations.

        Raises:
            ProfdeckError: it is refused; what ran before goes on untouched.
        """
        if self._job is not None and self._job.state is not State.ENDED:
            self._job.note(f"A second start ({request.id}) was refused.")
            raise CaptureError(
                f"Capture {self._job.request.id} is {self._job.state} in this engine; {request.id} cannot start "
                "before its files are whole. Wait until it has ended, or stop it."
            )
        if not request.selects(self.identity.rank):
            self._replace(request, None)
            return
        cls = device_backend(self._device_type)
        backend = cls(structure(dict(request.options), cls.Options, where="options"))
        backend.preflight()
        identity = attrs.evolve(self.identity, role=request.role, replica=request.replica)
        versions = dict(filter(None, (library.installed() for library in cls.libraries))) | self._versions
        job = _Job(request, identity, backend, versions)
        with job.holding_up():
            job.prepare()
        if at_once:
            job.begin_now()
        self._replace(request, job)

    def _replace(self, request: CaptureRequest, job: _Job | None) -> None:
        if self._job is not None:
            self._job.settle()
        self._last, self._job = request, job

    def begin(self, batch: Batch | None, label: str) -> None:
        """Pass the beginning of an iteration: what its batch holds, and how it is marked in the trace."""
        if self._job is not None:
            self._job.guarded(functools.partial(self._job.begin, batch, label))

    def end(self) -> None:
        """Pass the end of an iteration."""
        if self._job is not None:
            self._job.guarded(self._job.end)

    def holds(self, request: str, token: str | None) -> bool:
        """Tell whether the last request is the one of an id and, if that is known, a token."""
        last = self._last
        return last is not None and last.id == request and token in {None, last.token}

    def stop(self, reason: str | None = None) -> None:
        """End the request, before its time if there is a reason. Harmless when there is nothing to end."""
        if self._job is not None:
            self._job.guarded(functools.partial(self._job.stop, reason))

    def reply(self, error: str | None = None) -> Reply:
        """Say how things stand."""
        job = self._job
        if job is not None:
            job.settle()
        return Reply(
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            host=self.identity.host,
            pid=self.identity.pid,
            state=job.state if job else State.IDLE,
            request=self._last.id if self._last else None,
            token=self._last.token if self._last else None,
            iterations=job.recorded if job else 0,
            captures=tuple(map(_recorded, job.ended)) if job else (),
            problems=tuple(job.problems) if job else (),
            error=error,
        )


class _Job:
    """One request in one process."""

    def __init__(self, request: CaptureRequest, identity: Identity, backend: Backend, versions: dict[str, str]) -> None:
        self.request = request
        self.over = False
        """No iteration is wanted any more."""
        self.problems: list[str] = []
        self.ended: list[Capture] = []
        self._identity = identity
        self._backend = backend
        self._plugins = Plugins(backend)
        about = {"roles": [request.role]}
        self._run = run.RunDirectory(request.output.absolute(), request.run, about)
        # Data-parallel ranks run batches of their own: which captures by kind another rank has cannot be known.
        ranks = [identity.rank] if request.stages else range(identity.world_size)
        selected = tuple(rank for rank in ranks if request.selects(rank))
        self._recorder = run.Recorder(
            backend=backend.name, versions=versions, options=unstructure(backend.options), expected_ranks=selected
        )
        wanted = request.iterations
        # An absolute first iteration counts from the start of the engine, at which such requests are made.
        skip = 0 if wanted is None else wanted.skip if wanted.first is None else wanted.first
        new = functools.partial(_Window, skip, wanted.count if wanted else None)
        self._windows: dict[Batch | None, _Window] = {batch: new() for batch in request.stages or (None,)}
        self._iteration = 0
        self._key: Batch | None = None
        self._claimed: Capture | None = None
        self._recording: Recording | None = None
        self._mark: AbstractContextManager[object] | None = None
        self._counts: Counter[Batch | None] = Counter()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="profdeck", initializer=_leave_the_cores)
        self._writing: list[Future[None]] = []
        self._written = 0
        self._timer: threading.Timer | None = None
        self._thread = threading.get_ident()
        self._busy = False
        self._held_up_s = 0.0
        self._ending: str | None = None
        self._exiting = False

    @property
    def state(self) -> State:
        if self._recording is not None:
            return State.RECORDING
        if not self.over:
            return State.ARMED
        # Futures are not asked: they lock, and a signal's handler in this very thread waits for them.
        return State.ENDED if self._written == len(self._writing) else State.WRITING

    @property
    def recorded(self) -> int:
        return sum(window.recorded for window in self._windows.values())

    def prepare(self) -> None:
        """Check all that can be checked before the window, and leave a first manifest.

        Raises:
            ProfdeckError: this process cannot record that.
        """
        devices = self._backend.devices()
        try:
            lease.acquire(devices, holder=f"{self.request.role}, {self.request.id}").release()
        except OSError as error:
            raise CaptureError(f"The device cannot be leased: {describe(error)}.") from error
        first = self._capture(None)
        claim(first, self._run, self._recorder)
        if self.request.stages:  # their captures are claimed when they come; this one showed that they can be
            first.manifest_path.unlink()
        else:
            self._claimed = first
        limit_s = self._backend.options.max_capture_s
        self._timer = threading.Timer(limit_s, self._expire, (expired(limit_s),))
        self._timer.daemon = True
        self._timer.start()
        exits.watch(self, self._finish_at_exit)

    def begin_now(self) -> None:
        """Begin without an iteration.

        Raises:
            CaptureError: it could not start.
        """
        try:
            with self._exclusive():
                self.begin(None, "")
        except BaseException:
            self._finish()
            exits.unwatch(self)
            raise
        self._end_if_asked()

    def begin(self, batch: Batch | None, label: str) -> None:
        if self.over:
            return
        if self._ending:
            self.stop(self._ending)
            return
        key = batch if self.request.stages else None
        window = self._windows.get(key)
        wanted = window is not None and window.wants
        if self._recording is not None and (not wanted or key != self._key):
            self._close(None)
        self._key = key
        if wanted:
            if self._recording is None:
                self._open()
            else:
                drive(self._recording.passed(Step(Unit.ENGINE_ITERATION, self._iteration - 1), settle_later))
            if self._recording is not None and label:
                mark = self._recording.capture.annotate(label)
                mark.__enter__()
                self._mark = mark

    def end(self) -> None:
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)
        if self.over:
            return
        window = self._windows.get(self._key)
        self._iteration += 1
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
        if self.over:
            return
        reason = reason or self._ending
        short = self._short()
        if self._claimed is not None:
            early = reason or "No engine iteration ran between start and stop."
            if self._windows[None].skip and self._windows[None].seen:
                early = reason or f"It ended after {self._windows[None].seen} iterations, before its window began."
            give_up(self._claimed, self._recorder, early)
            self.ended.append(self._claimed)
            self._claimed = None
        elif self._recording is not None:
            self._close(reason or " ".join(short) or None)
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

    def settle(self) -> None:
        """Give back what is needed until the files are whole. On the engine's thread."""
        if self.state is State.ENDED:
            exits.unwatch(self)

    def note(self, text: str) -> None:
        running = self._recording.capture if self._recording else self._claimed
        for capture in [running] if running else self.ended[-1:]:  # the last one is being written
            capture.notes.append(text)

    def guarded(self, call: Callable[[], None]) -> None:
        """Call without raising into the engine; an ending that was asked for meanwhile follows."""
        with self._exclusive():
            try:
                call()
            except Exception as error:  # noqa: BLE001  # the engine serves on
                self._fail(error)
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self._ending and not self.over and self._thread == threading.get_ident() and self._mark is None:
            self.guarded(functools.partial(self.stop, self._ending))
        if self._exiting and self.over:
            self._give_back()

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
            # A kind of batch that never came is no loss when all kinds were asked for.
            if window.count is not None and not window.done and (window.seen or len(self._windows) == 1)
        ]

    def _capture(self, batch: Batch | None) -> Capture:
        request, count = self.request, self._counts[batch]
        name = f"{request.id}-{batch}" if batch else request.id
        return Capture(
            id=f"{name}-{count}" if count > 1 else name,
            directory=self._run.directory(request.first_step, self._identity),
            identity=self._identity,
            first_step=request.first_step,
            current_step=request.first_step,
            stage=batch,
            unit=Unit.ENGINE_ITERATION,
            iterations=request.iterations,
            first_iteration=self._iteration,
            request=request,
        )

    def _open(self) -> None:
        capture, self._claimed = self._claimed, None
        if capture is None:
            self._counts[self._key] += 1
            capture = self._capture(self._key)
            claim(capture, self._run, self._recorder)
        capture.first_iteration = self._iteration
        try:
            with self.holding_up():
                self._recording = drive(
                    Recording.begin(capture, self._plugins, self._recorder, self._backend.devices, settle_later)
                )
        except Exception:
            self.ended.append(capture)
            raise

    def _close(self, reason: str | None) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            self.ended.append(recording.capture)
            with self.holding_up():
                drive(recording.halt(reason, settle_later))
            recording.capture.stall_s, self._held_up_s = self._held_up_s, 0.0
            finish = functools.partial(self._write, recording)
            try:
                self._writing.append(self._writer.submit(finish))
            except RuntimeError:  # the interpreter is ending, and starts no threads any more
                finish()

    def _write(self, recording: Recording) -> None:
        """Write the files of a capture. Runs on the writer's thread."""
        try:
            drive(recording.finish(settle_later))
        except Exception as error:  # noqa: BLE001  # nobody asks the future
            logger.warning("The manifest %s cannot be written: %s", recording.capture.manifest_path, describe(error))
            recording.capture.problems.append(describe(error))
        finally:
            self._written += 1

    def _finish(self) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        self._writer.shutdown(wait=False)

    def _fail(self, error: Exception) -> None:
        logger.warning("Capture %s of the engine ends: %s", self.request.id, describe(error))
        self.problems.append(describe(error))
        try:
            self._close(describe(error))
        except Exception as second:  # noqa: BLE001  # as above
            self.problems.append(describe(second))
        self._finish()

    # Ends that nobody called for.

    def _expire(self, reason: str) -> None:
        """Ask for the end of a capture that takes too long. Runs on the timer's thread."""
        self._ending = reason  # the next iteration ends it, if nothing does before
        if self._thread == threading.main_thread().ident:
            exits.call_in_main_thread(lambda: None if self._busy else self.guarded(lambda: self.stop(reason)))

    def _finish_at_exit(self, reason: str) -> bool:
        if self._busy:
            self._ending, self._exiting = reason, True  # what is under way goes on to the end that was asked for
            return False
        self.guarded(lambda: self.stop(reason))
        self._give_back()
        return True

    def _give_back(self) -> None:
        """Wait until the files are whole; a signal that waited for them is delivered then."""
        wait(self._writing)
        exits.unwatch(self)


def _leave_the_cores() -> None:
    """Let this thread run anywhere: engines bind themselves to cores, on which they spin."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _recorded(capture: Capture) -> Recorded:
    return Recorded(
        id=capture.id,
        status=capture.status,
        manifest=str(capture.manifest_path),
        files=tuple(str(artifact.path) for artifact in capture.artifacts),
        size_bytes=sum(artifact.size_bytes for artifact in capture.artifacts),
        events=sum(artifact.events or 0 for artifact in capture.artifacts),
        problems=tuple(capture.problems),
    )


def handle(
    command: str,
    payload: Mapping[str, Any],
    recorder: EngineRecorder,
    start: Callable[[CaptureRequest], None],
    stop: Callable[[str | None], None],
) -> Reply:
    """Carry out a command in a process of an engine. Never raises: a refusal is an answer.

    Args:
        command: ``start``, ``stop`` or ``status``.
        payload: of ``start``, a request as plain data; of ``stop``, the id of the ``request`` that is to end, its
            ``token`` if that is known, and ``reason`` if it ends before its time.
        recorder: the recorder of this process.
        start: takes a request.
        stop: ends the request that the recorder holds.
    """
    error = None
    try:
        match command:
            case "start":
                start(structure(payload, CaptureRequest, where=""))
            case "stop":
                if recorder.holds(payload["request"], payload.get("token")):
                    stop(payload.get("reason"))
            case "status":
                pass
            case _:
                error = f"There is no command {command!r}; expected start, stop or status."
    except Exception as refusal:  # noqa: BLE001  # the engine serves on
        error = describe(refusal)
    return recorder.reply(error)


def plain(reply: Reply) -> dict[str, Any]:
    """Turn a reply into data that any transport carries."""
    data: dict[str, Any] = unstructure(reply)
    return data
