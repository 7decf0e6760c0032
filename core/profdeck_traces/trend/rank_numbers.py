"""The numbers of one rank in one capture that are followed over captures, and what explains them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import attrs

from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.step_names import GLOBAL_STEP, ITERATION
from profdeck_traces.findings.rank_view import RankView

STEPS = {"global_step": "global step", "mini_batch": "mini-batch", "engine_iteration": "profiler step"}
"""What the steps of a recorder are called, by their unit."""
BUSY, EXPOSED = "device busy", "exposed communication"
TOKENS = "tokens"
"""The last word of the names of rates of tokens."""


@attrs.frozen(kw_only=True)
class RankNumbers:
    """Of one rank in one capture; medians of its steps, and sums over them per step."""

    values: Mapping[str, float]
    """By what they are: times in microseconds, rates of tokens per second, shares of 1."""
    stages: Mapping[str, float]
    """Microseconds per step, without those in which a collective was open: these wait for other ranks."""
    classes: Mapping[str, float]
    """Kernel time by class, in microseconds per step."""
    idle: Mapping[str, float]
    """Device idle time by cause, in microseconds per step."""
    cold: bool = False
    """True if the trace has only a cold step."""
    excludes_cold: bool = False
    """True if the values exclude a cold step."""


def numbers_of(rank: RankSummary) -> RankNumbers:
    """Take the numbers from a summary."""
    view = RankView(rank, "", None)
    values: dict[str, float] = {}
    if view.kind == GLOBAL_STEP and view.durations_us:
        values[STEPS[rank.unit or GLOBAL_STEP]] = statistics.median(view.durations_us)
    for found in rank.iterations:
        if found.kind == ITERATION:
            of_stage = f"{found.stage} " if found.stage else ""
            values[f"{of_stage}iteration"] = found.p50_us
            if found.tokens_per_wall_s is not None:
                values[f"{of_stage}{TOKENS}"] = found.tokens_per_wall_s
    if values and rank.devices:
        values[BUSY] = view.of_devices("busy_us") / view.step_us if view.step_us else 0.0
        if exposed_us := view.of_devices("exposed_communication_us"):
            values[EXPOSED] = exposed_us
    steps = max(1, rank.host_times.steps) if rank.host_times else 1
    return RankNumbers(
        values=values,
        stages={stage.name: (stage.total_us - stage.communication_us) / steps for stage in view.stages},
        classes={of.category: view.per_step(of.total_us) for of in rank.categories},
        idle=view.idle,
        cold=view.is_cold,
        excludes_cold=bool(view.excluded),
    )
