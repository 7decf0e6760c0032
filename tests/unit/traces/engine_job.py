"""Generated engine traces for tests: a fleet of servers that run the given iterations."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from captured_runs import FIRST_NS, write_record
from profdeck.base.identity import Identity
from profdeck.records.artifact import ClockAnchor
from profdeck.records.capture import CaptureRecord, Unit

MAIN, PID = 100, 4000
WAIT = ("work.py(9): receive", "<built-in method acquire of _thread.lock object at 0x7f1>")
"""Python frames during a wait."""


@attrs.frozen(kw_only=True)
class Batch:
    """One engine iteration. Times are in milliseconds."""

    ms: float
    decodes: int = 0
    prefills: int = 0
    tokens: int = 0
    """Prefill tokens."""
    pause_ms: float = 0.05
    """Time until the next iteration."""
    details: str = ""
    """Suffix of the vLLM name, such as ``_draft_8``."""
    operator: str = "aten::mm"
    """Operator in the iteration."""
    operator_share: float = 0.98
    """Share of the iteration that the operator takes."""
    awaits: bool = False
    """True to record the pause as a wait for a lock."""
    sglang: str | None = None
    """Text in the brackets of an SGLang name. If ``None``, the iteration has a vLLM name."""

    @property
    def name(self) -> str:
        """Name of the annotation."""
        if self.sglang is not None:
            return f"run_batch[{self.sglang}]"
        return f"execute_context_{self.prefills}({self.tokens})_generation_{self.decodes}({self.decodes}){self.details}"


def decode(count: int, ms: float, requests: int = 4, **more: Any) -> list[Batch]:
    """Return decode iterations of roughly equal duration."""
    return [Batch(ms=ms * (1 + 0.001 * (number % 7)), decodes=requests, **more) for number in range(count)]


def write_server(run: Path, batches: Sequence[Batch], replica: int | None = None, *, first_ns: int = FIRST_NS) -> None:
    """Write the trace and the manifest of one server of the role ``rollout``.

    Args:
        run: Directory of the run.
        batches: Iterations of the server.
        replica: Replica number of the server.
        first_ns: Origin of the trace in Unix nanoseconds.
    """
    events: list[dict[str, Any]] = []
    now = 1000.0
    for batch in batches:
        time_us = batch.ms * 1000
        events += [
            _event("user_annotation", batch.name, now, time_us),
            _event("cpu_op", batch.operator, now + 0.01 * time_us, batch.operator_share * time_us),
        ]
        if batch.awaits:
            events += [_event("python_function", frame, now + time_us, batch.pause_ms * 1000) for frame in WAIT]
        now += time_us + batch.pause_ms * 1000
    name = "rollout" if replica is None else f"rollout/replica_{replica:03d}"
    write_events(run / "step_000000" / name, events, Identity(role="rollout", replica=replica), first_ns)


def write_events(directory: Path, events: Sequence[dict[str, Any]], identity: Identity, first_ns: int) -> None:
    """Write a trace and its manifest. The recording starts at time 0 of the trace and lasts 10 s."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {
        "distributedInfo": {"rank": identity.rank, "world_size": 1},
        "baseTimeNanoseconds": first_ns,
        "traceEvents": events,
    }
    raw = directory / "raw.json.gz"
    raw.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    unit = Unit.ENGINE_ITERATION if identity.role == "rollout" else Unit.GLOBAL_STEP
    capture = CaptureRecord(
        id="step0",
        directory=directory,
        identity=identity,
        first_step=0,
        current_step=0,
        started_ns=first_ns,
        unit=unit,
    )
    write_record(capture, raw, tuple(ClockAnchor(first_ns + round(us * 1000), 100, str(us)) for us in (0, 10_000_000)))


def write_trainer(
    run: Path,
    stages: Sequence[tuple[str, float, bool]],
    *,
    first_ns: int = FIRST_NS,
    stacks: Sequence[str] = (),
    role: str = "trainer",
) -> None:
    """Write the trace and the manifest of a trainer with one step.

    Args:
        run: Directory of the run.
        stages: Name and duration in milliseconds of each stage, and whether it runs operators.
        first_ns: Unix time of the trace's origin.
        stacks: Python frames of the stages without operators, outermost first.
        role: Role of the trainer.
    """
    events: list[dict[str, Any]] = []
    now = 1000.0
    for name, ms, works in stages:
        events.append(_event("user_annotation", name, now, ms * 1000))
        if not works:
            events += [_event("python_function", frame, now, ms * 1000) for frame in stacks]
        if works:
            events.append(_event("cpu_op", "aten::mm", now, ms * 1000))
        now += ms * 1000
    step = _event("user_annotation", "ProfilerStep#0", 1000.0, now - 1000.0)
    write_events(run / "step_000000" / role, [step, *events], Identity(role=role), first_ns)


def write_fleet(run: Path, *servers: Sequence[Batch]) -> Path:
    """Write the traces of several servers, and return the run directory."""
    for replica, batches in enumerate(servers):
        write_server(run, batches, replica)
    return run


def _event(category: str, name: str, start_us: float, duration_us: float) -> dict[str, Any]:
    event = {"ph": "X", "cat": category, "name": name, "pid": PID, "tid": MAIN, "args": {}}
    return event | {"ts": start_us, "dur": duration_us}
