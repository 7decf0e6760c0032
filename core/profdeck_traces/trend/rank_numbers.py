"""Metrics of one rank in one capture, and the parts that can explain their changes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import attrs

from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.owner_names import name_of_owner
from profdeck_traces.analysis.step_names import GLOBAL_STEP, ITERATION
from profdeck_traces.findings.rank_view import RankView

STEPS = {"global_step": "global step", "mini_batch": "mini-batch", "engine_iteration": "profiler step"}
"""Metric name of a step's duration, by the unit of the recorder's steps."""
BUSY, EXPOSED = "device busy", "exposed communication"
_WAITS = frozenset({OwnerKind.COLLECTIVE.label, OwnerKind.WAIT_FOR_THREAD.label, OwnerKind.SYNCHRONISATION.label})
TOKENS = "tokens"
"""Last word in metric names of token rates."""


@attrs.frozen(kw_only=True)
class RankNumbers:
    """Metrics of one rank in one capture."""

    values: Mapping[str, float]
    """Values by metric: durations in microseconds, token rates per second, fractions."""
    stages: Mapping[str, float]
    """Stage durations in microseconds per step, excluding time in collectives, where a rank can wait for others."""
    classes: Mapping[str, float]
    """Kernel time by class, in microseconds per step."""
    idle: Mapping[str, float]
    """Device idle time by cause, in microseconds per step."""
    owners: Mapping[str, float]
    """Time of each named owner on the critical path, in microseconds per step, excluding collectives and waits."""
    cold: bool = False
    """True if the trace has only a cold step."""
    excludes_cold: bool = False
    """True if the values exclude a cold step."""


def numbers_of(rank: RankSummary) -> RankNumbers:
    """Compute the metrics from a rank's summary."""
    view = RankView(rank, "", None)
    values: dict[str, float] = {}
    if view.kind == GLOBAL_STEP and view.durations_us:
        values[STEPS[rank.unit or GLOBAL_STEP]] = statistics.median(view.durations_us)
    for statistic in rank.iterations:
        if statistic.kind == ITERATION:
            prefix = f"{statistic.stage} " if statistic.stage else ""
            values[f"{prefix}iteration"] = statistic.p50_us
            if statistic.tokens_per_wall_s is not None:
                values[f"{prefix}{TOKENS}"] = statistic.tokens_per_wall_s
    if values and rank.devices:
        values[BUSY] = view.of_devices("busy_us") / view.step_us if view.step_us else 0.0
        if exposed_us := view.of_devices("exposed_communication_us"):
            values[EXPOSED] = exposed_us
    steps = max(1, rank.host_times.steps) if rank.host_times else 1
    return RankNumbers(
        values=values,
        stages={stage.name: (stage.total_us - stage.communication_us) / steps for stage in view.stages},
        classes={summary.category: view.per_step(summary.total_us) for summary in rank.categories},
        idle=view.idle,
        owners=_owners(rank),
        cold=view.is_cold,
        excludes_cold=bool(view.excluded),
    )


def _owners(rank: RankSummary) -> dict[str, float]:
    owners: dict[str, float] = {}
    for owner in rank.account.owners if rank.account else ():
        name = name_of_owner(owner)
        if rank.account and name is not None and owner.kind not in _WAITS:
            owners[name] = owners.get(name, 0.0) + owner.time_us / rank.account.steps
    return owners
