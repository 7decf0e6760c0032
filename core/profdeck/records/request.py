"""What a process of an engine is asked for, and what it answers: plain data, which crosses processes and hosts."""

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


MOST_RANKS = 1 << 16
"""An engine that says that it has more is not believed: everything would wait for them."""


@attrs.frozen(kw_only=True)
class CaptureRequest:
    """A request for a capture, sent to the processes of an engine."""

    id: str = attrs.field(validator=validators.matches_re(_ID))
    output: Path
    """The directory that holds the runs; nothing is written outside of it."""
    run: str = attrs.field(validator=validators.matches_re(_ID))
    role: str = attrs.field(validator=validators.matches_re(NAME))
    replica: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    first_step: int = attrs.field(default=0, validator=validators.ge(0))
    ranks: str | tuple[int, ...] = attrs.field(default=(0,))
    """``all`` or the ranks of the engine that record."""
    iterations: Iterations | None = None
    """Which engine iterations; all from the first one to the stop, if None."""
    batch_kinds: tuple[BatchKind, ...] = ()
    """Batch kinds to record. Each kind has its own captures and counts. If empty, one capture contains all kinds."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """The options of the device's backend."""
    engine: Mapping[str, Any] = attrs.field(factory=dict)
    """What only the engine's plugin reads."""
    token: str = attrs.field(factory=functools.partial(secrets.token_hex, 8))
    """Tells this request from others of the same id, so that who is refused cannot end what runs."""
    owner: ProcessId | None = None
    """The process that asks, and that will stop it; None for requests that somebody makes by hand."""

    @ranks.validator
    def _all_or_ranks(self, _: object, ranks: str | tuple[int, ...]) -> None:
        if ranks != "all" and (isinstance(ranks, str) or not ranks or min(ranks) < 0):
            raise ValueError(f"ranks: expected 'all', a range such as 0..7 or a list such as [0, 8], got {ranks!r}")

    def by_kind(self) -> CaptureRequest:
        """Return a copy that records each batch kind separately, or this request if it already selects batch kinds."""
        return self if self.batch_kinds else attrs.evolve(self, batch_kinds=tuple(BatchKind))

    def selects(self, rank: int) -> bool:
        """Tell whether a rank of the engine records."""
        return self.ranks == "all" or rank in self.ranks


class RequestState(StrEnum):
    """The state of a request in an engine process."""

    IDLE = "idle"
    """It was asked for nothing, or this rank was not selected."""
    ARMED = "armed"
    """It waits for the first iteration of the window, or for its turn on the device: `Reply.waits_for`."""
    RECORDING = "recording"
    WRITING = "writing"
    """The recording has ended and its files are being written."""
    ENDED = "ended"


@attrs.frozen(kw_only=True)
class Recorded:
    """A capture that a process of an engine has ended."""

    id: str
    status: Status
    manifest: str
    """The path on that process's host."""
    files: tuple[str, ...]
    size_bytes: int
    events: int
    problems: tuple[str, ...]
    duration_s: float | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """From its begin until its files were whole. Left out before, as older readers do not know it."""
    stall_s: float | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """How long its start and stop kept the process from its work. Left out as above."""


@attrs.frozen(kw_only=True)
class Reply:
    """The reply of one engine process to a command."""

    rank: int = attrs.field(validator=validators.and_(validators.ge(0), validators.lt(MOST_RANKS)))
    world_size: int = attrs.field(validator=validators.and_(validators.ge(0), validators.le(MOST_RANKS)))
    host: str
    pid: int
    state: RequestState
    request: str | None = None
    """The id of the last request."""
    token: str | None = None
    """Its token."""
    iterations: int = 0
    """Iterations recorded for it so far."""
    captures: tuple[Recorded, ...] = ()
    """What has been written for it."""
    problems: tuple[str, ...] = ()
    """What kept it from recording what was asked for."""
    error: str | None = None
    """Why the command was refused; nothing has changed then."""
    refusal: Outcome | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """The code of the refusal, where one is told. Left out when there is none, as older readers do not know it."""
    owner: ProcessId | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """The process that made the last request, where it is known. Left out when it is not, as above."""
    waits_for: str | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """What it waits for before its window can begin, and who holds that: a device that somebody else records. Left out
    when it does not wait, as above."""


@attrs.frozen(kw_only=True)
class Answer:
    """The replies of an engine's processes to a command."""

    ranks: tuple[Reply, ...]
    """One per worker whose answer reaches the one that asked."""
    frontends: Mapping[str, Reply] = attrs.field(factory=dict)
    """By name, those of processes that are no worker, as far as they record."""
    recording: tuple[int, ...] | None = attrs.field(default=None, metadata=OMIT_IF_NONE)
    """The ranks that record, where the engine chose them: `CaptureRequest.ranks` are then those of each of its parts,
    such as the stages of a pipeline. Left out else, as older readers do not know it."""

    def request(self, request: CaptureRequest) -> CaptureRequest:
        """Return a request that they have taken, with the ranks that it has come to mean."""
        return request if self.recording is None else attrs.evolve(request, ranks=self.recording)

    @property
    def all(self) -> tuple[Reply, ...]:
        """The replies of all processes."""
        return (*self.ranks, *self.frontends.values())
