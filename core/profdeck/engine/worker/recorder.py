"""Recorder in one process of an engine. It processes one request at a time.

While the recorder is active, the engine's plugin calls `EngineRecorder.begin` and `EngineRecorder.end` around every
iteration. Otherwise, it makes no calls. No errors are raised into the engine: replies and manifests contain them.
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

_MAX_RESULTS = 64
"""Number of earlier requests whose results are kept, so that a client can read its result even after another client has
started a capture."""


class EngineRecorder:
    """Recorder for an engine process that runs batches."""

    def __init__(self, identity: Identity, device_type: str, versions: dict[str, str]) -> None:
        """Args:
        identity: rank and parallel coordinates of this process. Each request sets the role and the replica.
        device_type: torch type of the process's device.
        versions: versions of the engine's distributions, for the manifests.
        """
        self.identity = identity
        self._device_type = device_type
        self._versions = versions
        self._job: CaptureJob | None = None
        self._last_request: CaptureRequest | None = None
        self._results: dict[str, Reply] = {}
        """Final replies for earlier requests, by token, sorted from oldest to newest."""

    @property
    def active(self) -> bool:
        """True if the plugin must report iterations."""
        return self._job is not None and not self._job.over

    def start(self, request: CaptureRequest, *, at_once: bool = False) -> None:
        """Accept a request. Recording starts at the first iteration of its window.

        Args:
            request: the request.
            at_once: start recording immediately, for processes without iterations.

        Raises:
            ProfdeckError: the request is refused. An earlier request continues unchanged.
        """
        if self._job is not None:
            self._job.stop_if_due()
        if self._job is not None and self._job.state is not RequestState.ENDED:
            self._job.add_note(f"A second start ({request.id}) was refused.")
            raise TargetError(
                f"Capture {request.id} cannot start while capture {self._job.request.id} is {self._job.state} in this "
                "engine. Wait until it has ended, or stop it.",
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
        with job.measured_stall():
            job.prepare()
        if at_once:
            job.begin_now()
        self._replace(request, job)

    def _replace(self, request: CaptureRequest, job: CaptureJob | None) -> None:
        if self._last_request is not None:
            self._results[self._last_request.token] = self.reply()
            if len(self._results) > _MAX_RESULTS:
                del self._results[next(iter(self._results))]
        self._last_request, self._job = request, job

    def begin(self, batch: BatchKind | None, label: str) -> None:
        """Report the start of an iteration.

        Args:
            batch: kind of the iteration's batch.
            label: name of the iteration's annotation in the trace. Empty: no annotation.
        """
        if self._job is not None:
            self._job.call_safely(functools.partial(self._job.begin, batch, label))

    def end(self) -> None:
        """Report the end of an iteration."""
        if self._job is not None:
            self._job.call_safely(self._job.end)

    def report_idle(self) -> None:
        """Report that the engine has no unfinished requests.

        If the capture is stopped before the next iteration, it is complete even with fewer iterations than requested.
        """
        if self._job is not None:
            self._job.call_safely(self._job.report_idle)

    def matches(self, request: str, token: str | None) -> bool:
        """Return whether the last request has an ID and a token. If the token is None, only the ID is compared."""
        last = self._last_request
        return last is not None and last.id == request and token in {None, last.token}

    def stop(self, reason: str | None = None) -> None:
        """Stop the request. Do nothing if no request is active.

        If only the recording thread can stop the recorder, calls from other threads are deferred until the next
        iteration. The reply and the manifest contain a message about this.

        Args:
            reason: why the request is stopped early. None for a normal stop.
        """
        if self._job is not None:
            self._job.stop_or_defer(reason)

    def result(self, request: str, token: str | None) -> Reply | None:
        """Return the final reply for an earlier request, or None if the request is unknown or the most recent one.

        The arguments are the same as those of `matches`.
        """
        if self.matches(request, token):
            return None
        results = reversed(self._results.items())
        return next((reply for key, reply in results if reply.request == request and token in {None, key}), None)

    def reply(self, error: str | None = None, refusal: Outcome | None = None) -> Reply:
        """Return the state of the most recent request and, if a command was rejected, the message and the reason code.

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
            request=self._last_request.id if self._last_request else None,
            token=self._last_request.token if self._last_request else None,
            owner=self._last_request.owner if self._last_request else None,
            iterations=job.recorded if job else 0,
            captures=tuple(map(_to_recorded, job.ended)) if job else (),
            problems=(*job.problems, *job.pending) if job else (),
            error=error,
            refusal=refusal,
            waits_for=job.waits_for if job else None,
        )


def _to_recorded(capture: CaptureRecord) -> Recorded:
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
            if known, a ``reason`` if it is stopped early, and ``idle`` if the engine has no unfinished requests; for
            ``status``, optionally the ``request`` and ``token``.
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
                if recorder.matches(payload["request"], payload.get("token")):
                    if payload.get("idle"):
                        recorder.report_idle()
                    stop(payload.get("reason"))
            case "status":
                pass
            case _:
                error = f"Unknown command {command!r}. Expected start, stop or status."
                refusal = Outcome.REFUSED
    except Exception as problem:  # noqa: BLE001  # errors must not stop the engine
        error, refusal = describe_error(problem), target_error(problem).outcome
    reply = recorder.reply(error, refusal)
    # If another client has started a capture since, the command may refer to an earlier request.
    result = recorder.result(payload["request"], payload.get("token")) if "request" in payload else None
    return reply if result is None or error is not None else result


def reply_data(reply: Reply) -> dict[str, Any]:
    """Convert a reply to JSON data."""
    data: dict[str, Any] = unstructure(reply)
    return data
