"""What captures cost a job, by what an earlier run left: the times in its manifests."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from profdeck.base.errors import ProfdeckError
from profdeck.records.manifest import Manifest
from profdeck.records.run_directory import runs_below, step_directories
from profdeck.traces.captures import manifests_below
from profdeck.verification.reading import read_about

_MOST_RUNS = 20
_MOST_STEPS = 20
_FEWEST_CAPTURES = 2
_S_PER_NS = 1e-9


@attrs.frozen(kw_only=True)
class CaptureCost:
    """What the captures of one role cost."""

    run: Path
    captures: int
    """How many it was taken from."""
    capture_s: float
    """By how many seconds a capture made the job longer: the mean of the captures, of the slowest rank. Of engines,
    for how long its start and stop kept them from their work."""
    least_s: float
    most_s: float
    steps: int
    """How many global steps each had."""
    step_s: float | None
    """How many seconds a global step takes that is not captured; None where nothing tells."""
    options: Mapping[str, Any]
    """Those of the backend then."""


def cost_below(output: Path, role: str) -> CaptureCost | None:
    """Return what the captures of a role cost in the newest run of an output directory that can tell.

    Args:
        output: the output directory.
        role: whose captures.
    """
    for run in runs_below(output)[:_MOST_RUNS]:
        if (cost := cost_of(run, role)) is not None:
            return cost
    return None


def cost_of(run: Path, role: str) -> CaptureCost | None:
    """Return what the last captures of a role cost a run; None if it has fewer than two that follow on each other.

    The time from the end of a capture to the start of the next, over the steps between them, is what a step takes. What
    a capture took longer than its steps do is its cost: its start, what recording adds to each step, and its stop.

    Args:
        run: the run directory.
        role: whose captures.
    """
    try:
        warmup = _configured_warmup_steps(read_about(run))
        manifests = list(manifests_below(step_directories(run)[-_MOST_STEPS:]).values())
    except (ProfdeckError, OSError):
        return None
    of_role = [one for one in manifests if one.role == role and one.target is None]
    in_rows = list(_in_rows(manifests, warmup))
    if any(one.request is not None for one in of_role):
        costs = _stalls(of_role)
    else:
        in_rows = [row for row in in_rows if row.role == role]
        costs = _longer(in_rows)
    if len(costs) < _FEWEST_CAPTURES:
        return None
    return CaptureCost(
        run=run,
        captures=len(costs),
        capture_s=statistics.fmean(costs),
        least_s=min(costs),
        most_s=max(costs),
        steps=round(statistics.median(one.last_step - one.first_step + 1 for one in of_role)),
        step_s=_step_s(in_rows),
        options=of_role[-1].options,
    )


@attrs.frozen
class _Row:
    """The captures of one rank of a trainer, one after the other, in one process."""

    role: str
    warmup_steps: int
    captures: Sequence[Manifest]

    def gaps_s(self) -> Iterator[float]:
        """Return what a step took between each two captures."""
        for before, after in pairwise(self.captures):
            steps = after.first_step - self.warmup_steps - before.last_step - 1
            if steps > 0 and before.ended_ns is not None and before.ended_ns < after.started_ns:
                yield (after.started_ns - before.ended_ns) * _S_PER_NS / steps

    def taken_s(self) -> Iterator[tuple[str, float, int]]:
        """Return how long each capture took, and how many steps were in it.

        The first one, which loads what the others find loaded, is left out where there are enough.
        """
        for one in self.captures[len(self.captures) > _FEWEST_CAPTURES :]:
            steps = one.last_step - one.first_step + 1 + self.warmup_steps
            yield one.capture, ((one.ended_ns or 0) - one.started_ns) * _S_PER_NS, steps


def _in_rows(manifests: Iterable[Manifest], warmup: Mapping[str, int]) -> Iterator[_Row]:
    rows = defaultdict[tuple[object, ...], list[Manifest]](list)
    for one in manifests:
        # Those of stages and of mini-batches take no whole steps, and an engine has iterations of its own.
        takes_steps = one.stage is None and one.window is None and one.request is None and one.target is None
        if takes_steps and one.ended_ns is not None and one.first_step <= one.last_step:
            rows[one.role, one.replica, one.rank, one.host, one.pid, one.process_started].append(one)
    for (role, *_), captures in rows.items():
        default = int(any(one.cold_first_step is False for one in captures))
        yield _Row(str(role), warmup.get(str(role), default), sorted(captures, key=lambda one: one.started_ns))


def _step_s(rows: Sequence[_Row]) -> float | None:
    """Return what a step takes, on the rank whose gaps are shortest: others wait in theirs for its capture to end."""
    gaps = [statistics.median(found) for row in rows if (found := list(row.gaps_s()))]
    return min(gaps, default=None)


def _longer(rows: Sequence[_Row]) -> list[float]:
    """Return by how much each capture was longer than its steps are, on the rank where that is most."""
    step_s = _step_s(rows)
    if step_s is None:
        return []
    found = defaultdict[str, list[float]](list)
    for row in rows:
        for capture, seconds, steps in row.taken_s():
            found[capture].append(max(0.0, seconds - steps * step_s))
    return [max(costs) for costs in found.values()]


def _stalls(manifests: Iterable[Manifest]) -> list[float]:
    found = defaultdict[str, list[float]](list)
    for one in manifests:
        if (stall_s := one.credible_stall_s) is not None:
            found[one.capture].append(stall_s)
    return [max(stalls) for stalls in found.values()]


def _configured_warmup_steps(about: Mapping[str, Any]) -> dict[str, int]:
    """Return the configured warm-up steps by role. Roles without the setting are omitted."""
    config = about.get("config")
    roles = config.get("roles") if isinstance(config, dict) else None
    if not isinstance(roles, dict):
        return {}
    return {
        name: steps
        for name, role in roles.items()
        if isinstance(role, dict) and isinstance(steps := role.get("warmup_steps"), int) and steps >= 0
    }
