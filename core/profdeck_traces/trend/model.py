"""Data model of a trend. ``profdeck trend --json`` prints it as JSON."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class TrendPoint:
    """Value of one capture, over all ranks."""

    run: str
    """Path of the run directory."""
    capture: str
    first_step: int
    """First global step of the capture; 0 for servers captured from the command line."""
    started_ns: int
    """Start of the capture in Unix nanoseconds."""
    value: float
    """Mean over the ranks; for stalls, the maximum."""
    ranks: int
    """Number of ranks."""


@attrs.frozen(kw_only=True)
class TrendPart:
    """A stage, kernel class or idle cause that changed together with a series."""

    kind: str
    """``stage``, ``owner`` (on the critical path), ``class`` (kernel class) or ``idle`` (cause of idle time)."""
    name: str
    delta_us: float
    """Increase per step in microseconds. For stages and owners, the increase on the rank that changed most; otherwise,
    the mean over the ranks."""
    rank: int | None
    """Rank of the stage or owner, if it changed less than half as much on the other ranks; otherwise ``None``."""


@attrs.frozen(kw_only=True)
class TrendChange:
    """A statistically significant change of a series."""

    index: int
    """Index of the first point after the change."""
    before: float
    """Median of the points since the previous change."""
    after: float
    """Median of the points until the next change."""
    ratio: float | None
    """``after / before - 1``; ``None`` if `before` is 0."""
    p_value: float
    """Probability of such a change between its neighbors if the level is constant."""
    is_worse: bool
    """True if performance decreased."""
    parts: tuple[TrendPart, ...]
    """Parts that changed in the same direction, at most one of each kind."""
    busy_before: int = 0
    """Number of captures on a busy machine between the previous change and this one."""
    busy_after: int = 0
    """Number of captures on a busy machine between this change and the next one."""
    is_conclusive: bool = True
    """False if performance decreased and the machine was busy in most captures after the change but not before."""


@attrs.frozen(kw_only=True)
class TrendSeries:
    """One metric of a role or replica across captures."""

    role: str
    replica: int | None
    stage: str | None
    """Stage or batch kind of the captures, if they record only one."""
    what: str
    """Metric, such as ``global step``, ``mini-batch``, ``decode iteration``, ``decode tokens``, ``device busy``,
    ``exposed communication`` or ``stall``."""
    unit: str
    """``us``, ``tokens/s`` or ``share``."""
    points: tuple[TrendPoint, ...]
    """Points sorted by the start of the run, then by step and time."""
    changes: tuple[TrendChange, ...]
    kind: str = "metric"
    """``metric``, or for a part of the step, ``stage`` or ``owner``. Parts are listed only if they changed."""
    rank: int | None = None
    """Rank of a part; ``None`` for the mean over the ranks."""


@attrs.frozen(kw_only=True)
class Trend:
    """Metrics across captures, with their changes."""

    series: tuple[TrendSeries, ...]
    """Series sorted by role and replica, with step durations first and parts of the step last."""
    tested: int = 0
    """Number of series that were tested together, including parts that did not change."""
    left_out: int
    """Number of traces skipped because they are incomplete or have no step."""
    cold_left_out: int = 0
    """Number of traces skipped because they have only a cold step and the role has other traces."""
    cold_excluded: int = 0
    """Number of traces whose values exclude a cold step."""

    def to_dict(self) -> dict[str, Any]:
        """Return the trend as dicts, tuples and scalars."""
        return attrs.asdict(self)
