"""Capture requests to the processes of an engine, and their replies. Both are sent between processes and hosts."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
from attrs import validators

from profdeck.base.identity import NAME
from profdeck.base.outcome import Outcome
from profdeck.base.processes import ProcessId
from profdeck.config.batch_kinds import BatchKind as BatchKind  # noqa: PLC0414  # re-exported
from profdeck.config.schedule import Iterations
from profdeck.config.structuring import OMIT_IF_NONE
from profdeck.records.status import Status

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

MAX_RANKS = 1 << 16
"""Larger numbers are treated as invalid, because captures would wait for ranks that do not exist."""


@attrs.frozen(kw_only=True)
class CaptureRequest:
    """A request for a capture, sent to the processes of an engine."""

    id: str = attrs.field(validator=validators.matches_re(_ID))
    output: Path
    """The directory of all runs. No file is written outside of it."""
    run: str = attrs.field(validator=validators.matches_re(_ID))
    role: str = attrs.field(validator=validators.matches_re(NAME))
    replica: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    first_step: int = attrs.field(default=0, validator=validators.ge(0))
    ranks: str | tuple[int, ...] = attrs.field(default=(0,))
    """``all``, or the engine ranks that record."""
    iterations: Iterations | None = None
    """The engine iterations to record. If None, all iterations until the stop."""
    batch_kinds: tuple[BatchKind, ...] = ()
    """Batch kinds to record. Each kind has its own captures and counts. If empty, one capture contains all kinds."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of the device backend."""
    engine: Mapping[str, Any] = attrs.field(factory=dict)
    """Settings that are specific to the engine's plugin."""
    token: str = attrs.field(factory=functools.partial(secrets.token_hex, 8))
    """Distinguishes requests that have the same ID, so that a refused client cannot stop another client's capture."""
    owner: ProcessId | None = None
    """The requesting process, which also stops the capture. None if a user sent the request directly."""

    @property
    def key(self) -> dict[str, str]:
        """The request's ID and token, for the payload of ``stop`` and ``status`` commands."""
        return {"request": self.id, "token": self.token}

    @ranks.validator
    def _all_or_ranks(self, _: object, ranks: str | tuple[int, ...]) -> None:
        if ranks != "all" and (isinstance(ranks, str) or not ranks or min(ranks) < 0):
            raise ValueError(f"ranks: expected 'all', a range such as 0..7 or a list such as [0, 8], got {ranks!r}")

    def by_kind(self) -> CaptureRequest:
        """Return a copy that records each batch kind separately, or this request if it already selects batch kinds."""
        return self if self.batch_kinds else attrs.evolve(self, batch_kinds=tuple(BatchKind))

    def selects(self, rank: int) -> bool:
        """Return whether a rank of the engine records."""
        return self.ranks == "all" or rank in self.ranks


class RequestState(StrEnum):
    """The state of a request in an engine process."""

    IDLE = "idle"
    """There is no request, or this rank is not selected."""
    ARMED = "armed"
    """The process waits for the first iteration of the window, or for the device (see `Reply.waits_for`)."""
    RECORDING = "recording"
    WRITING = "writing"
    """The recording has ended and its files are being written."""
    ENDED = "ended"


@attrs.frozen(kw_only=True)
class Recorded:
    """A finished capture of an engine process."""

    id: str
    status: Status
    manifest: str
    """Path of the manifest on the host of the process."""
    files: tuple[str, ...]
    size_bytes: int
    events: int
    problems: tuple[str, ...]
    duration_s: float | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """Time in seconds until the files were complete. Omitted if None, because older readers reject unknown keys."""
    stall_s: float | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """Time in seconds for which start and stop blocked the process. Omitted if None, as above."""


@attrs.frozen(kw_only=True)
class Reply:
    """The reply of one engine process to a command."""

    rank: int = attrs.field(validator=validators.and_(validators.ge(0), validators.lt(MAX_RANKS)))
    world_size: int = attrs.field(validator=validators.and_(validators.ge(0), validators.le(MAX_RANKS)))
    host: str
    pid: int
    state: RequestState
    request: str | None = None
    """ID of the last request."""
    token: str | None = None
    """Token of the last request."""
    iterations: int = 0
    """Number of iterations recorded so far for the last request."""
    captures: tuple[Recorded, ...] = ()
    """The finished captures of the last request."""
    problems: tuple[str, ...] = ()
    """Reasons why data of the last request is missing."""
    error: str | None = None
    """Reason why the command was refused. A refused command has no effect."""
    refusal: Outcome | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """Code of the refusal, if there is one. Omitted if None, because older readers reject unknown keys."""
    owner: ProcessId | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """The process that sent the last request, if known. Omitted if None, as above."""
    waits_for: str | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """The device that the process waits for, and the current holder of the device. Omitted if None, as above."""


@attrs.frozen(kw_only=True)
class Answer:
    """The replies of an engine's processes to a command."""

    ranks: tuple[Reply, ...]
    """One reply per worker. Workers whose replies do not reach the client are missing."""
    frontends: Mapping[str, Reply] = attrs.field(factory=dict)
    """Replies of recording processes that are not workers, by name."""
    recording: tuple[int, ...] | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """The recording ranks, if the engine selected them. `CaptureRequest.ranks` then applies to each part of the engine,
    such as a pipeline stage. Omitted if None, because older readers reject unknown keys."""

    def request(self, request: CaptureRequest) -> CaptureRequest:
        """Return an accepted request, with its ranks replaced by the recording ranks if the engine selected them."""
        return request if self.recording is None else attrs.evolve(request, ranks=self.recording)

    @property
    def all(self) -> tuple[Reply, ...]:
        """The replies of all processes."""
        return (*self.ranks, *self.frontends.values())
