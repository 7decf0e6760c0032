"""Captures that are asked for while a job runs: the notes with which they are asked for and agreed on."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import attrs
import msgspec

from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.json_files import JsonKind
from profdeck.base.processes import ProcessId
from profdeck.on_demand.stores import Store
from profdeck_traces.base.errors import describe_error

SCHEMA = 1
DEFAULT_IN_STEPS = 2
"""In how many global steps a capture begins by default, without warm-up. A rank that waits for the others in every step
can be one step ahead of them: it has begun step N + 1 when the first one sees the request at step N."""

MOST_STEPS = 1_000_000
"""What a request can ask for at most: in how many steps, and how many."""

REQUEST = "demand.json"
PROCESSES = "processes/"
BEAT = "demand.beat"
"""In a store of a job: changes every second while somebody waits for the capture."""
BEAT_S = 1.0
LOST_S = 15.0
"""After so long without a beat nobody waits any more."""
_TOKEN = re.compile(r"[0-9a-f]{16}")

T = TypeVar("T")


# What the notes hold. Times are Unix nanoseconds, for readers: nothing is decided by clocks.


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
    standing: bool = False
    """Whether the job asks itself, as its config says."""
    ready: bool = True
    """Whether steps may be decided on. Before, processes that do not look for it at every boundary begin to."""


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
    output: str = ""
    """Its output directory on its host."""
    at: ProcessId = attrs.field(factory=ProcessId)
    joined_ns: int = attrs.field(factory=time.time_ns)
    ended: bool = False
    """Whether it takes no requests any more."""
    looks_for: str | None = None
    """The last request for which it looks at every boundary, where it does not always."""
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
    incomplete: str | None = None
    """The reason why the process's captures are incomplete."""

    @classmethod
    def of(cls, identity: Identity, target: str | None, warmup_steps: int, output: str = "") -> JobProcess:
        """Describe this process."""
        return cls(
            role=identity.role,
            replica=identity.replica,
            rank=identity.rank,
            world_size=identity.world_size,
            target=target,
            warmup_steps=warmup_steps,
            output=output,
        )

    @property
    def name(self) -> str:
        """The process in words: ``trainer rank 0``."""
        role = self.role if self.replica is None else f"{self.role}/{self.replica}"
        return f"{role} ({self.target})" if self.target else f"{role} rank {self.rank}"

    def is_blind(self, request: OnDemandRequest) -> bool:
        """Tell whether this process of a store takes requests, and does not look for this one at every boundary yet."""
        return not self.gone and request.token not in (self.looks_for, self.token)

    @property
    def gone(self) -> bool:
        """Whether nothing can come of a request here any more, as far as can be known."""
        return self.ended or self.at.alive is False


_KINDS: dict[type, JsonKind[Any]] = {
    kind: JsonKind(kind) for kind in (OnDemandRequest, StepPlan, StartDecision, JobProcess)
}


# The side of who asks.


def default_in_steps(processes: Iterable[JobProcess]) -> int:
    """Return in how many global steps a capture begins by default: after the longest warm-up.

    Args:
        processes: those that are asked, one at least.
    """
    return DEFAULT_IN_STEPS + max(process.warmup_steps for process in processes)


def ask(store: Store, in_steps: int, steps: int, *, standing: bool = False) -> OnDemandRequest:
    """Ask the job of a run for a capture.

    Args:
        store: that of the job.
        in_steps: how many global steps after the one at which the request is first seen the capture begins, at least 1.
        steps: how many global steps are captured, at least 1.
        standing: whether the job asks itself.

    Raises:
        CaptureError: another request is pending, or the store does not take it.
    """
    request = OnDemandRequest(in_steps=in_steps, steps=steps, standing=standing, ready=not store.remote)
    text = encode(request)
    try:
        stands = store.create(REQUEST, text)
        if stands != text:
            _remove_abandoned(store)
            stands = store.create(REQUEST, text)
    except OSError as error:
        raise CaptureError(f"{store.address}/{REQUEST} cannot be written: {describe_error(error)}") from error
    if stands != text:
        raise _pending(store, None if stands is None else decode(stands, OnDemandRequest))
    return request


@contextlib.contextmanager
def beats(store: Store, request: OnDemandRequest) -> Iterator[None]:
    """Let the processes of a store know that somebody waits; without that they take the request back."""
    if not store.remote:
        yield
        return
    over = threading.Event()

    def beat() -> None:
        count = 0
        while not over.wait(BEAT_S if count else 0):
            count += 1
            with contextlib.suppress(OSError):
                store.put(BEAT, f"{request.token} {count}".encode())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def release(store: Store, request: OnDemandRequest) -> None:
    """Let the processes decide on the steps, now that all look for the request.

    Raises:
        OSError: the store cannot be reached.
    """
    store.put(REQUEST, encode(attrs.evolve(request, ready=True)))


def read_plan(store: Store, request: OnDemandRequest) -> StepPlan | None:
    """Return what a request has come to; None as long as no process has seen it."""
    return read_note(store, plan_name(request.token), StepPlan)


def read_processes(store: Store) -> list[JobProcess]:
    """Return the processes that take requests or took some, by role and rank. What a smaller job has left is left out.

    Raises:
        OSError: the store cannot be reached.
    """
    notes = sorted(store.read_all(PROCESSES).items())
    found = [process for _, text in notes if (process := decode(text, JobProcess))]
    sizes: dict[tuple[str, int | None], int] = {}
    for process in sorted(found, key=lambda one: one.joined_ns):
        sizes[process.role, process.replica] = process.world_size
    return [process for process in found if process.rank < sizes[process.role, process.replica]]


def abandon(store: Store, request: OnDemandRequest, why: str | None = None) -> bool:
    """Take a request back.

    Args:
        store: that of the job.
        request: it.
        why: what to say of it, if not that this process has withdrawn it.

    Returns:
        Whether nothing is captured for it. False when its capture has begun somewhere: it goes on.

    Raises:
        OSError: the store cannot be reached.
    """
    by, token = why or str(ProcessId()), request.token
    plan = decide(store, plan_name(token), StepPlan(token=token, by=by, problem=f"it was withdrawn by {by}"))
    if plan is None or plan.first_step is not None:
        start = decide(store, start_name(token), StartDecision(token=token, begun=False, by=by))
        if start is None or start.begun:
            return False
    remove_request(store, request)
    return True


def remove_request(store: Store, request: OnDemandRequest) -> None:
    """Remove a request that is over, so that there can be another one. What was decided of it stays.

    Raises:
        OSError: the store cannot be reached.
    """
    text = store.read(REQUEST)
    found = None if text is None else decode(text, OnDemandRequest)
    if text is not None and (found is None or found.token == request.token):
        store.remove(REQUEST, text)


def _remove_abandoned(store: Store) -> None:
    """Withdraw the pending request if nobody waits for its capture any more."""
    found = read_note(store, REQUEST, OnDemandRequest)
    if found is not None and found.by.alive is False and not abandon(store, found):
        remove_request(store, found)


def _pending(store: Store, request: OnDemandRequest | None) -> CaptureError:
    if request is not None and request.standing:
        return CaptureError("A standing capture of this run is under way. Ask again when it is over.")
    who = "somebody" if request is None else str(request.by)
    text = f"A capture of this run was asked for by {who} and is not over yet. Wait until it is, or end that process."
    if store.remote:
        return CaptureError(f"{text} If it is gone, its request is taken back within {LOST_S + BEAT_S:g} seconds.")
    return CaptureError(f"{text} If nobody waits for it any more, remove {store.address}/{REQUEST}.")


# What both sides do.


def decide(store: Store, name: str, record: T) -> T | None:
    """Put a record in its place unless there is one, and return the one that stands: the same for all who ask.

    Returns:
        None if there is one that cannot be read, which on a file system without links it is for an instant.

    Raises:
        OSError: the store cannot be reached.
    """
    kind = type(record)
    text = store.read(name)
    if text is None:
        text = store.create(name, encode(record))
    return None if text is None else decode(text, kind)


def read_note(store: Store, name: str, kind: type[T]) -> T | None:
    """Read a note; None if it is absent or not understood, or the store cannot be reached."""
    try:
        text = store.read(name)
    except OSError:
        return None
    return None if text is None else decode(text, kind)


def decode(text: bytes, kind: type[T]) -> T | None:
    """Decode a note; None if it is not understood."""
    try:
        record = _KINDS[kind].decode(text)
    except ValueError:
        return None
    token = getattr(record, "token", None)
    if record.schema > SCHEMA or (token is not None and not _TOKEN.fullmatch(token)):
        return None
    found: T = record
    return found


def encode(record: Any) -> bytes:
    """Return a record as the JSON of its note."""
    return msgspec.json.format(msgspec.json.encode(attrs.asdict(record)), indent=1)


def plan_name(token: str) -> str:
    """Name the note that says the steps."""
    return f"demand.{token}.plan.json"


def start_name(token: str) -> str:
    """Name the note that says whether the capture begins."""
    return f"demand.{token}.start.json"


def abandonment(start: StartDecision) -> str:
    """Say who withdrew a request."""
    return f"it was withdrawn by {start.by}"
