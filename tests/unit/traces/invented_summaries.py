"""Helpers that create trace summaries from invented times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from profdeck_traces.analysis.detail_model import PerStep
from profdeck_traces.analysis.model import (
    CategorySummary,
    KernelSummary,
    OperatorSummary,
    RankSummary,
    RunSummary,
    StepSummary,
)

CATEGORIES = {"gemm": "gemm", "[gemm]": "gemm", "nccl": "communication", "copy": "memory", "gelu": "elementwise"}

Group = tuple[str, str | None]
STEP: Group = ("global_step", None)
DECODE: Group = ("iteration", "decode")
PREFILL: Group = ("iteration", "prefill")


def per_step(times: Sequence[float], group: Group | None) -> PerStep | None:
    median = statistics.median(times)
    if group is None or len(times) == 1 or not median:
        return None
    kind, stage = group
    return PerStep(
        kind=kind,
        stage=stage,
        steps=len(times),
        measured=min(len(times), 256),
        median_us=median,
        mad_us=deviation(times),
    )


def deviation(times: Sequence[float]) -> float:
    median = statistics.median(times)
    return statistics.median(abs(time - median) for time in times)


def kernel(
    name: str, times: Sequence[float], share: float, group: Group | None, *, count: int | None = None
) -> KernelSummary:
    total = sum(times)
    count = sum(time > 0 for time in times) if count is None else count
    return KernelSummary(
        name=name,
        category=CATEGORIES.get(name, "unclassified"),
        kind="kernel",
        count=count,
        total_us=total,
        mean_us=total / count if count else 0,
        max_us=max(times),
        share=share,
        per_step=per_step(times, group),
    )


def trace(
    kernels: Mapping[str, Sequence[float]] | None = None,
    *,
    operators: Mapping[str, Sequence[float]] | None = None,
    steps: Sequence[float | tuple[str, float]] | None = None,
    group: Group | None = STEP,
    path: str = "a.json",
    role: str | None = "trainer",
    replica: int | None = None,
    rank: int | None = 0,
    capture: str | None = "step10",
    **members: Any,
) -> RankSummary:
    """Create a trace summary. All times are in microseconds.

    Args:
        kernels: The times in each step, by kernel name.
        operators: The times in each step, by operator name.
        steps: Durations of the steps. For iterations, pairs of stage and duration. By default, 1,000 us for each step.
        group: The kind and stage of the steps, or None for a trace without steps.
        path: The path of the trace.
        role: The role of the rank.
        replica: The replica of the rank.
        rank: The number of the rank.
        capture: The capture of the trace.
        members: Other members of the summary.
    """
    kernels, operators = kernels or {}, operators or {}
    if steps is None:
        times_of_any = next(iter([*kernels.values(), *operators.values()]), ())
        steps = [1000] * len(times_of_any) if group else ()
    total = math.fsum(sum(times) for times in kernels.values())
    by_category: dict[str, list[Sequence[float]]] = {}
    for name, times in kernels.items():
        by_category.setdefault(CATEGORIES.get(name, "unclassified"), []).append(times)
    categories = {
        name: [sum(of_step) for of_step in zip(*of_kernels, strict=True)] for name, of_kernels in by_category.items()
    }
    staged = [step if isinstance(step, tuple) else (None, step) for step in steps]
    common: dict[str, Any] = {
        "path": path,
        "role": role,
        "replica": replica,
        "rank": rank,
        "world_size": None,
        "host": None,
        "capture": capture,
        "whole": True,
        "problem": None,
        "events": 100,
        "span_us": total,
        "busy_us": total if kernels else None,
        "idle_us": total / 2 if kernels else None,
        "communication_us": sum(kernels.get("nccl", (0,))) if kernels else None,
        "overlap_us": 0.0 if kernels else None,
        "graph_launches": 0,
        "kernels": tuple(
            kernel(name, times, sum(times) / total if total else 0, group) for name, times in kernels.items()
        ),
        "categories": tuple(
            CategorySummary(
                category=name,
                count=len(times),
                total_us=sum(times),
                share=sum(times) / total if total else 0,
                per_step=per_step(times, group),
            )
            for name, times in categories.items()
        ),
        "copies": (),
        "operators": tuple(
            OperatorSummary(
                name=name,
                count=len(times),
                self_us=sum(times),
                total_us=sum(times),
                max_us=max(times),
                per_step=per_step(times, group),
            )
            for name, times in operators.items()
        ),
        "annotations": (),
        "devices": (),
        "steps": tuple(
            StepSummary(
                kind="iteration" if stage else "global_step",
                name=f"step {number}",
                step=number,
                stage=stage,
                pid=1,
                start_us=0,
                duration_us=duration,
                requests=None,
                prefill_tokens=None,
                decode_tokens=None,
                device_us=None,
            )
            for number, (stage, duration) in enumerate(staged)
        ),
        "iterations": (),
    }
    return RankSummary(**(common | members))


def run(*ranks: RankSummary) -> RunSummary:
    return RunSummary(ranks=ranks, skew=())
