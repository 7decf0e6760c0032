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
    """``stage``, ``class`` (kernel class) or ``idle`` (cause of idle time)."""
    name: str
    delta_us: float
    """Increase per step in microseconds: of the rank that changed most for a stage, else the mean over the ranks."""
    rank: int | None
    """Rank of the stage, if the stage changed by less than half as much on the other ranks; otherwise ``None``."""


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
    """Parts that changed in the same direction: at most one stage, one class and one cause of idle time."""


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


@attrs.frozen(kw_only=True)
class Trend:
    """Metrics across captures, with their changes."""

    series: tuple[TrendSeries, ...]
    """Series sorted by role and replica; step durations come first."""
    left_out: int
    """Number of traces skipped because they are incomplete or have no step."""
    cold_left_out: int = 0
    """Number of traces skipped because they have only a cold step and the role has other traces."""
    cold_excluded: int = 0
    """Number of traces whose values exclude a cold step."""

    def to_dict(self) -> dict[str, Any]:
        """Return the trend as dicts, tuples and scalars."""
        return attrs.asdict(self)
