"""Captures that are asked for while a job runs: the files with which they are asked for and agreed on."""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path
from typing import Any, TypeVar

import attrs
import msgspec

from profdeck.base.errors import CaptureError, describe
from profdeck.base.files import write_new
from profdeck.base.identity import Identity
from profdeck.base.json_files import decode_json, read_json
from profdeck.base.processes import ProcessId

SCHEMA = 1
DEFAULT_IN_STEPS = 2
"""In how many global steps a capture begins by default, without warm-up. A rank that waits for the others in every step
can be one step ahead of them: it has begun step N + 1 when the first one sees the request at step N."""

MOST_STEPS = 1_000_000
"""What a request can ask for at most: in how many steps, and how many."""

REQUEST = "demand.json"
PROCESSES = "processes"
_TOKEN = re.compile(r"[0-9a-f]{16}")

T = TypeVar("T")


# What the files hold. Times are Unix nanoseconds, for readers: nothing is decided by clocks.


@attrs.frozen(kw_only=True)
class OnDemandRequest:
    """What is asked of a job."""

    schema: int = SCHEMA
    token: str = attrs.field(factory=lambda: secrets.token_hex(8))
    """Tells this request from all others."""
    requested_ns: int = attrs.field(factory=time.time_ns)
    by: ProcessId = attrs.field(factory=ProcessId)
    in_steps: int
    """How many global steps after the one at which it is first seen the capture begins."""
    steps: int
    """How many global steps are captured."""


@attrs.frozen(kw_only=True)
class StepPlan:
    """What has become of a request: the steps, or why there are none."""

    schema: int = SCHEMA
    token: str
    first_step: int | None = None
    """The first step that is captured; None if nothing will be."""
    last_step: int | None = None
    agreed_ns: int = attrs.field(factory=time.time_ns)
    by: str
    """Who decided."""
    at_step: int | None = None
    """The global step that a process was beginning when it decided."""
    problem: str | None = None
    """Why there are no steps."""


@attrs.frozen(kw_only=True)
class StartDecision:
    """Whether a planned capture begins."""

    schema: int = SCHEMA
    token: str
    begun: bool
    by: str
    decided_ns: int = attrs.field(factory=time.time_ns)


@attrs.frozen(kw_only=True)
class JobProcess:
    """A process that takes requests, and what it does with the last one that it knows of."""

    schema: int = SCHEMA
    id: str = attrs.field(factory=lambda: secrets.token_hex(8))
    """Tells it from an earlier process in the same place."""
    role: str
    replica: int | None
    rank: int
    world_size: int
    target: str | None
    warmup_steps: int
    at: ProcessId = attrs.field(factory=ProcessId)
    joined_ns: int = attrs.field(factory=time.time_ns)
    ended: bool = False
    """Whether it takes no requests any more."""
    token: str | None = None
    """The last request that it knows of."""
    step: int | None = None
    """The global step that it was beginning when it learnt of it."""
    done: bool = False
    """Whether nothing more will come of that request here."""
    captures: tuple[str, ...] = ()
    """The ids of what it captured for it."""
    problem: str | None = None
    """Why it captured nothing."""

    @classmethod
    def of(cls, identity: Identity, target: str | None, warmup_steps: int) -> JobProcess:
        """Describe this process."""
        return cls(
            role=identity.role,
            replica=identity.replica,
            rank=identity.rank,
            world_size=identity.world_size,
            target=target,
            warmup_steps=warmup_steps,
        )

    @property
    def name(self) -> str:
        """The process in words: ``trainer rank 0``."""
        role = self.role if self.replica is None else f"{self.role}/{self.replica}"
        return f"{role} ({self.target})" if self.target else f"{role} rank {self.rank}"

    @property
    def gone(self) -> bool:
        """Whether nothing can come of a request here any more, as far as can be known."""
        return self.ended or self.at.alive is False


# The side of who asks.


def ask(run: Path, in_steps: int, steps: int) -> OnDemandRequest:
    """Ask the job of a run for a capture.

    Args:
        run: the run directory.
        in_steps: how many global steps after the one at which the request is first seen the capture begins, at least 1.
        steps: how many global steps are captured, at least 1.

    Raises:
        CaptureError: another request is pending, or the file cannot be written.
    """
    request = OnDemandRequest(in_steps=in_steps, steps=steps)
    try:
        try:
            write_new(run / REQUEST, encode(request))
        except FileExistsError:
            _remove_abandoned(run)
            write_new(run / REQUEST, encode(request))
    except FileExistsError:
        raise _pending(run, read_file(run / REQUEST, OnDemandRequest)) from None
    except OSError as error:
        raise CaptureError(f"{run / REQUEST} cannot be written: {describe(error)}") from error
    return request


def read_plan(run: Path, request: OnDemandRequest) -> StepPlan | None:
    """Return what a request has come to; None as long as no process has seen it."""
    return read_file(plan_path(run, request.token), StepPlan)


def read_processes(run: Path) -> list[JobProcess]:
    """Return the processes that take requests or took some, without those that a smaller job has left behind."""
    found = [process for file in sorted((run / PROCESSES).glob("*.json")) if (process := read_file(file, JobProcess))]
    sizes: dict[tuple[str, int | None], int] = {}
    for process in sorted(found, key=lambda one: one.joined_ns):
        sizes[process.role, process.replica] = process.world_size
    return [process for process in found if process.rank < sizes[process.role, process.replica]]


def withdraw(run: Path, request: OnDemandRequest) -> bool:
    """Take a request back.

    Returns:
        Whether nothing is captured for it. False when its capture has begun somewhere: it goes on.

    Raises:
        OSError: the run directory cannot be written.
    """
    by, token = str(ProcessId()), request.token
    plan = decide(plan_path(run, token), StepPlan(token=token, by=by, problem=f"it was withdrawn by {by}"))
    if plan is None or plan.first_step is not None:
        start = decide(start_path(run, token), StartDecision(token=token, begun=False, by=by))
        if start is None or start.begun:
            return False
    forget(run, request)
    return True


def forget(run: Path, request: OnDemandRequest) -> None:
    """Remove a request that is over, so that there can be another one. What was decided of it stays.

    Raises:
        OSError: it cannot be removed.
    """
    # Taken aside first: it could be that of another one by now, if somebody removed this by hand.
    aside = run / f".{REQUEST}.{secrets.token_hex(4)}.tmp"
    try:
        (run / REQUEST).rename(aside)
    except FileNotFoundError:
        return
    found = read_file(aside, OnDemandRequest)
    if found is not None and found.token != request.token:
        aside.replace(run / REQUEST)
    else:
        aside.unlink()


def _remove_abandoned(run: Path) -> None:
    """Withdraw the pending request if nobody waits for its capture any more."""
    found = read_file(run / REQUEST, OnDemandRequest)
    if found is not None and found.by.alive is False and not withdraw(run, found):
        forget(run, found)


def _pending(run: Path, request: OnDemandRequest | None) -> CaptureError:
    who = "somebody" if request is None else str(request.by)
    return CaptureError(
        f"A capture of this run was asked for by {who} and is not over yet. Wait until it is, or end that process. "
        f"If nobody waits for it any more, remove {run / REQUEST}."
    )


# What both sides do.


def decide(path: Path, record: T) -> T | None:
    """Put a record in its place unless there is one, and return the one that stands: the same for all who ask.

    Returns:
        None if there is one that cannot be read, which on a file system without links it is for an instant.

    Raises:
        OSError: the place cannot be written.
    """
    kind = type(record)
    if (found := read_file(path, kind)) is not None:
        return found
    try:
        write_new(path, encode(record))
    except FileExistsError:
        return read_file(path, kind)
    return record


def read_file(path: Path, kind: type[T]) -> T | None:
    """Read a file of a request; None if it is absent or not understood."""
    try:
        return decode(bytes(read_json(path, msgspec.Raw)), kind)
    except (OSError, ValueError):
        return None


def decode(text: bytes, kind: type[T]) -> T | None:
    """Decode a file of a request; None if it is not understood."""
    try:
        record: Any = decode_json(text, kind)
    except ValueError:
        return None
    token = getattr(record, "token", None)
    if record.schema > SCHEMA or (token is not None and not _TOKEN.fullmatch(token)):
        return None
    found: T = record
    return found


def encode(record: Any) -> bytes:
    """Return a record as the JSON of its file."""
    return msgspec.json.format(msgspec.json.encode(attrs.asdict(record)), indent=1)


def plan_path(run: Path, token: str) -> Path:
    """Name the file that says the steps."""
    return run / f"demand.{token}.plan.json"


def start_path(run: Path, token: str) -> Path:
    """Name the file that says whether the capture begins."""
    return run / f"demand.{token}.start.json"


def withdrawal(start: StartDecision) -> str:
    """Say who withdrew a request."""
    return f"it was withdrawn by {start.by}"
