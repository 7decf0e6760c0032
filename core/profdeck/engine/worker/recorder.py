"""Records in one process of an engine, one request at a time, while the engine serves.

The engine's plugin calls `EngineRecorder.begin` and `EngineRecorder.end` around every iteration while the recorder is
active, and nothing at all while it is not. Nothing here raises into the engine: what fails is in the reply and in the
manifests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from profdeck.backends.backend_setup import structure_options
from profdeck.base.errors import TargetError, target_error
from profdeck.base.identity import Identity
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import structure, unstructure
from profdeck.engine.worker.device import device_backend
from profdeck.engine.worker.job import CaptureJob
from profdeck.records.capture import CaptureRecord
from profdeck.records.request import BatchKind, CaptureRequest, Recorded, Reply, RequestState
from profdeck_traces.base.errors import describe_error


class EngineRecorder:
    """Recorder for an engine process that runs batches."""

    def __init__(self, identity: Identity, device_type: str, versions: dict[str, str]) -> None:
        """Args:
        identity: the place of this process in the engine; role and replica come with the requests.
        device_type: the type of device that it runs on, in torch's words.
        versions: versions of the engine by distribution, for the manifests.
        """
        self.identity = identity
        self._device_type = device_type
        self._versions = versions
        self._job: CaptureJob | None = None
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
        if self._job is not None:
            self._job.stop_if_due()
        if self._job is not None and self._job.state is not RequestState.ENDED:
            self._job.note(f"A second start ({request.id}) was refused.")
            raise TargetError(
                f"Capture {self._job.request.id} is {self._job.state} in this engine; {request.id} cannot start "
                "before its files are whole. Wait until it has ended, or stop it.",
                Outcome.ALREADY_ACTIVE,
            )
        if not request.selects(self.identity.rank):
            self._replace(request, None)
            return
        cls = device_backend(self._device_type)
        backend = cls(structure_options(cls, request.options, where="options"))
        backend.preflight()
        identity = attrs.evolve(self.identity, role=request.role, replica=request.replica)
        versions = dict(filter(None, (library.installed() for library in cls.libraries))) | self._versions
        job = CaptureJob(request, identity, backend, versions)
        with job.holding_up():
            job.prepare()
        if at_once:
            job.begin_now()
        self._replace(request, job)

    def _replace(self, request: CaptureRequest, job: CaptureJob | None) -> None:
        if self._job is not None:
            self._job.release_if_ended()
        self._last, self._job = request, job

    def begin(self, batch: BatchKind | None, label: str) -> None:
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
        """End the request, before its time if there is a reason. Harmless when there is nothing to end.

        Where only the thread that records may end it, another one asks it to: the reply says that this is pending
        until the next iteration, and so does the manifest.
        """
        if self._job is not None:
            self._job.stop_here_or_later(reason)

    def reply(self, error: str | None = None, refusal: Outcome | None = None) -> Reply:
        """Return the state of the recorder and, if a command was rejected, the message and the reason code.

        This method also stops a capture that has exceeded ``max_capture_s``, if the calling thread may stop it. An idle
        engine runs no iteration that would stop the capture.
        """
        job = self._job
        if job is not None:
            job.stop_if_due()
            job.release_if_ended()
        return Reply(
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            host=self.identity.host,
            pid=self.identity.pid,
            state=job.state if job else RequestState.IDLE,
            request=self._last.id if self._last else None,
            token=self._last.token if self._last else None,
            owner=self._last.owner if self._last else None,
            iterations=job.recorded if job else 0,
            captures=tuple(map(_recorded, job.ended)) if job else (),
            problems=(*job.problems, *job.pending) if job else (),
            error=error,
            refusal=refusal,
            waits_for=job.waits_for if job else None,
        )


def _recorded(capture: CaptureRecord) -> Recorded:
    return Recorded(
        id=capture.id,
        status=capture.status,
        manifest=str(capture.manifest_path),
        files=tuple(str(artifact.path) for artifact in capture.artifacts),
        size_bytes=sum(artifact.size_bytes for artifact in capture.artifacts),
        events=sum(artifact.events or 0 for artifact in capture.artifacts),
        problems=tuple(capture.problems),
        duration_s=None if capture.ended_ns is None else (capture.ended_ns - capture.started_ns) / 1e9,
        stall_s=capture.stall_s,
    )


def handle_command(
    command: str,
    payload: Mapping[str, Any],
    recorder: EngineRecorder,
    start: Callable[[CaptureRequest], None],
    stop: Callable[[str | None], None],
) -> Reply:
    """Execute a command in an engine process. Errors are part of the reply and are never raised.

    Args:
        command: ``start``, ``stop`` or ``status``.
        payload: for ``start``, a request as plain data; for ``stop``, the ID of the ``request`` to stop, its ``token``
            if known, and a ``reason`` if it is stopped early.
        recorder: the recorder of this process.
        start: function that starts the request passed to it.
        stop: function that stops the recorder's request. It receives the reason.
    """
    error = refusal = None
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
                refusal = Outcome.REFUSED
    except Exception as problem:  # noqa: BLE001  # the engine serves on
        error, refusal = describe_error(problem), target_error(problem).outcome
    return recorder.reply(error, refusal)


def reply_data(reply: Reply) -> dict[str, Any]:
    """Convert a reply to JSON data."""
    data: dict[str, Any] = unstructure(reply)
    return data
