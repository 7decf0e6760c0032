"""Synthetic traces with many annotation names, nested Python frames, devices or steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

COUNTS = {"names": 12_000, "frames": 10_000, "devices": 10_000, "steps": 50_000}


def trace(kind: str, count: int) -> str:
    """Return a trace as JSON text with `count` items of one kind: annotation names, frames, devices or steps."""
    events = [*_KINDS[kind](count), _event("cpu_op", "aten::mm", (10 * count, 2))]
    return json.dumps({"traceEvents": events})


def _names(count: int) -> Iterator[dict[str, Any]]:
    return (_event("user_annotation", f"stage {number:x}", (10 * number, 8)) for number in range(count))


def _frames(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        args = {"Python id": number, "Python parent id": number - 1}
        yield _event("python_function", f"model.py({number % 50}): f", (number, 2 * (count - number)), args=args)


def _devices(count: int) -> Iterator[dict[str, Any]]:
    yield _event("cpu_op", "aten::mm", (0, 2))
    for number in range(count):
        yield _event("kernel", "gemm", (10 * number, 8), (number, 7), {"device": number, "stream": 7})


def _steps(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield _event("user_annotation", f"ProfilerStep#{number}", (100 * number, 100))
        yield _event("cuda_runtime", "cudaLaunchKernel", (100 * number + 5, 5), args={"correlation": number})
        yield _event("kernel", "gemm", (100 * number + 30, 50), (0, 7), {"correlation": number, "stream": 7})


def _event(
    category: str,
    name: str,
    times: tuple[int, int],
    track: tuple[int, int] = (1, 1),
    args: dict[str, int] | None = None,
) -> dict[str, Any]:
    (ts, dur), (pid, tid) = times, track
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args or {}}


_KINDS = {"names": _names, "frames": _frames, "devices": _devices, "steps": _steps}
