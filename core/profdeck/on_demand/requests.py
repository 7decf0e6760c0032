"""Records and operations for capture requests: the request, the plan of steps, the start decision, process status."""

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
"""Default number of global steps until a capture begins, without warm-up.

Ranks that synchronize in every step can be one step apart. When the first rank reads the request at step N, another
rank may already have begun step N + 1.
"""

MOST_STEPS = 1_000_000
"""Upper limit of ``in_steps`` and ``steps`` in a request."""

REQUEST = "demand.json"
PROCESSES = "processes/"
BEAT = "demand.beat"
"""Note in a remote store that changes every second while the requester waits for the capture."""
BEAT_S = 1.0
LOST_S = 15.0
"""If a request has no heartbeat for this time, the processes of the job withdraw the request."""
_TOKEN = re.compile(r"[0-9a-f]{16}")

T = TypeVar("T")


# Times are Unix nanoseconds. They are only displayed, because the clocks of the hosts can differ.


@attrs.frozen(kw_only=True)
class OnDemandRequest:
    """A request to capture global steps of a running job."""

    schema: int = SCHEMA
    token: str = attrs.field(factory=lambda: secrets.token_hex(8))
    """Unique ID of the request."""
    requested_ns: int = attrs.field(factory=time.time_ns)
    by: ProcessId = attrs.field(factory=ProcessId)
    in_steps: int
    """Number of global steps between the step at which the first process reads the request and the capture."""
    steps: int
    """Number of global steps to capture."""
    standing: bool = False
    """True if the job itself made the request, as configured by ``steps``."""
    ready: bool = True
    """True if the processes may plan the steps. False until all processes check for the request at every boundary."""


@attrs.frozen(kw_only=True)
class StepPlan:
    """The planned steps of a request, or the reason why nothing is captured."""

    schema: int = SCHEMA
    token: str
    first_step: int | None = None
    """The first step to capture; None if nothing is captured."""
    last_step: int | None = None
    agreed_ns: int = attrs.field(factory=time.time_ns)
    by: str
    """Name of the process that wrote the plan."""
    at_step: int | None = None
    """The global step that was beginning in the process that wrote the plan."""
    problem: str | None = None
    """The reason why nothing is captured."""


@attrs.frozen(kw_only=True)
class StartDecision:
    """The decision to begin a planned capture or to withdraw it."""

    schema: int = SCHEMA
    token: str
    begun: bool
    by: str
    decided_ns: int = attrs.field(factory=time.time_ns)


@attrs.frozen(kw_only=True)
class JobProcess:
    """Status of a process that accepts capture requests."""

    schema: int = SCHEMA
    id: str = attrs.field(factory=lambda: secrets.token_hex(8))
    """Unique ID. A restarted process has a new ID."""
    role: str
    replica: int | None
    rank: int
    world_size: int
    target: str | None
    warmup_steps: int
    output: str = ""
    """Output directory on the host of the process."""
    at: ProcessId = attrs.field(factory=ProcessId)
    joined_ns: int = attrs.field(factory=time.time_ns)
    ended: bool = False
    """True if the process no longer accepts requests."""
    looks_for: str | None = None
    """In a remote store, the token of the last request for which the process checks every boundary."""
    token: str | None = None
    """Token of the last request that the process has read."""
    step: int | None = None
    """The global step that was beginning when the process read that request."""
    done: bool = False
    """True if the process has completed that request."""
    captures: tuple[str, ...] = ()
    """IDs of the captures that the process made for that request."""
    problem: str | None = None
    """The reason why the process captured nothing."""
    incomplete: str | None = None
    """The reason why the process's captures are incomplete."""

    @classmethod
    def from_identity(cls, identity: Identity, target: str | None, warmup_steps: int, output: str = "") -> JobProcess:
        """Return the initial status of this process."""
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
        """Display name, such as ``trainer rank 0``."""
        role = self.role if self.replica is None else f"{self.role}/{self.replica}"
        return f"{role} ({self.target})" if self.target else f"{role} rank {self.rank}"

    def is_unaware_of(self, request: OnDemandRequest) -> bool:
        """Return whether a live process of a remote store does not yet check for a request at every boundary."""
        return not self.is_gone and request.token not in (self.looks_for, self.token)

    @property
    def is_gone(self) -> bool:
        """True if the process has ended or no longer accepts requests. Processes on other hosts may be undetected."""
        return self.ended or self.at.alive is False


_KINDS: dict[type, JsonKind[Any]] = {
    kind: JsonKind(kind) for kind in (OnDemandRequest, StepPlan, StartDecision, JobProcess)
}


# Operations of the requester.


def default_in_steps(processes: Iterable[JobProcess]) -> int:
    """Return the default number of global steps until a capture begins, including the longest warm-up.

    Args:
        processes: the processes that receive the request; at least one.
    """
    return DEFAULT_IN_STEPS + max(process.warmup_steps for process in processes)


def create_request(store: Store, in_steps: int, steps: int, *, standing: bool = False) -> OnDemandRequest:
    """Request a capture of a running job. A pending request of a process that has ended is replaced.

    Args:
        store: the job's store.
        in_steps: number of global steps between the step at which the request is first read and the capture; at least
            1.
        steps: number of global steps to capture; at least 1.
        standing: True if the job itself makes the request.

    Raises:
        CaptureError: another request is pending, or the store cannot be written.
    """
    request = OnDemandRequest(in_steps=in_steps, steps=steps, standing=standing, ready=not store.remote)
    text = encode(request)
    try:
        stored_text = store.create(REQUEST, text)
        if stored_text != text:
            _remove_abandoned(store)
            stored_text = store.create(REQUEST, text)
    except OSError as error:
        raise CaptureError(f"{store.address}/{REQUEST} cannot be written: {describe_error(error)}") from error
    if stored_text != text:
        raise _pending_error(store, None if stored_text is None else decode(stored_text, OnDemandRequest))
    return request


@contextlib.contextmanager
def send_heartbeats(store: Store, request: OnDemandRequest) -> Iterator[None]:
    """Send heartbeats to a remote store inside the block. Without heartbeats, the job withdraws the request."""
    if not store.remote:
        yield
        return
    ended = threading.Event()

    def send() -> None:
        count = 0
        while not ended.wait(BEAT_S if count else 0):
            count += 1
            with contextlib.suppress(OSError):
                store.put(BEAT, f"{request.token} {count}".encode())

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def mark_ready(store: Store, request: OnDemandRequest) -> None:
    """Allow the processes to plan the steps. Call this after all processes have seen the request.

    Raises:
        OSError: the store cannot be reached.
    """
    store.put(REQUEST, encode(attrs.evolve(request, ready=True)))


def read_plan(store: Store, request: OnDemandRequest) -> StepPlan | None:
    """Return the plan of a request; None if no process has written it yet."""
    return read_note(store, plan_name(request.token), StepPlan)


def read_processes(store: Store) -> list[JobProcess]:
    """Return the status of all processes, sorted by file name.

    If the job was restarted with fewer ranks, processes with higher ranks are skipped.

    Raises:
        OSError: the store cannot be reached.
    """
    notes = sorted(store.read_all(PROCESSES).items())
    processes = [process for _, text in notes if (process := decode(text, JobProcess))]
    sizes: dict[tuple[str, int | None], int] = {}
    for process in sorted(processes, key=lambda process: process.joined_ns):
        sizes[process.role, process.replica] = process.world_size
    return [process for process in processes if process.rank < sizes[process.role, process.replica]]


def withdraw(store: Store, request: OnDemandRequest, withdrawn_by: str | None = None) -> bool:
    """Withdraw a request and remove it from the store.

    Args:
        store: the job's store.
        request: the request.
        withdrawn_by: description of the withdrawing party. Default: this process.

    Returns:
        True if nothing is captured. False if a process has begun the capture; the capture then continues.

    Raises:
        OSError: the store cannot be reached.
    """
    by, token = withdrawn_by or str(ProcessId()), request.token
    plan = decide(store, plan_name(token), StepPlan(token=token, by=by, problem=f"it was withdrawn by {by}"))
    if plan is None or plan.first_step is not None:
        start = decide(store, start_name(token), StartDecision(token=token, begun=False, by=by))
        if start is None or start.begun:
            return False
    remove_request(store, request)
    return True


def remove_request(store: Store, request: OnDemandRequest) -> None:
    """Remove a completed request, so that another request can be made. Its plan and start decision are kept.

    Raises:
        OSError: the store cannot be reached.
    """
    text = store.read(REQUEST)
    stored_request = None if text is None else decode(text, OnDemandRequest)
    if text is not None and (stored_request is None or stored_request.token == request.token):
        store.remove(REQUEST, text)


def _remove_abandoned(store: Store) -> None:
    """Withdraw the pending request if the process that made it has ended."""
    request = read_note(store, REQUEST, OnDemandRequest)
    if request is not None and request.by.alive is False and not withdraw(store, request):
        remove_request(store, request)


def _pending_error(store: Store, request: OnDemandRequest | None) -> CaptureError:
    if request is not None and request.standing:
        return CaptureError("A scheduled capture of this run is in progress. Try again after it has ended.")
    requester = "another process" if request is None else str(request.by)
    text = (
        f"A capture of this run, requested by {requester}, is pending. Wait until it has ended, or stop that process."
    )
    if store.remote:
        return CaptureError(
            f"{text} If that process has ended, the job withdraws its request within {LOST_S + BEAT_S:g} seconds."
        )
    return CaptureError(f"{text} If that process has ended, remove {store.address}/{REQUEST}.")


# Operations of both the requester and the job.


def decide(store: Store, name: str, record: T) -> T | None:
    """Create a note unless it exists, and return the stored record. All callers receive the same record.

    Returns:
        None if the stored note cannot be decoded. On file systems without hard links, this can happen while another
        process is writing the note.

    Raises:
        OSError: the store cannot be reached.
    """
    kind = type(record)
    text = store.read(name)
    if text is None:
        text = store.create(name, encode(record))
    return None if text is None else decode(text, kind)


def read_note(store: Store, name: str, kind: type[T]) -> T | None:
    """Read a note. Return None if it does not exist or cannot be decoded, or if the store cannot be reached."""
    try:
        text = store.read(name)
    except OSError:
        return None
    return None if text is None else decode(text, kind)


def decode(text: bytes, kind: type[T]) -> T | None:
    """Decode a note. Return None if it is invalid or was written by a newer version of profdeck."""
    try:
        record = _KINDS[kind].decode(text)
    except ValueError:
        return None
    token = getattr(record, "token", None)
    if record.schema > SCHEMA or (token is not None and not _TOKEN.fullmatch(token)):
        return None
    decoded: T = record
    return decoded


def encode(record: Any) -> bytes:
    """Return the JSON text of a record."""
    return msgspec.json.format(msgspec.json.encode(attrs.asdict(record)), indent=1)


def plan_name(token: str) -> str:
    """Return the name of a request's `StepPlan` note."""
    return f"demand.{token}.plan.json"


def start_name(token: str) -> str:
    """Return the name of a request's `StartDecision` note."""
    return f"demand.{token}.start.json"


def withdrawal_reason(start: StartDecision) -> str:
    """Return the message that names the process that withdrew a request."""
    return f"it was withdrawn by {start.by}"
