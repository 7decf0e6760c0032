"""What a trend says, as data: the documented, stable JSON of ``profdeck trend --json``."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class TrendPoint:
    """What one capture says, over the ranks that recorded it."""

    run: str
    """The directory of its run."""
    capture: str
    first_step: int
    """The first global step of the capture; of servers that were captured by hand, 0."""
    started_ns: int
    """When it began, in Unix nanoseconds."""
    value: float
    """The mean of the ranks; of stalls, the longest."""
    ranks: int
    """Of how many ranks."""


@attrs.frozen(kw_only=True)
class TrendPart:
    """A part that changed with a series."""

    kind: str
    """``stage``, ``class`` of kernels, or cause of ``idle`` time."""
    name: str
    delta_us: float
    """By how much it is longer per step, of the rank that changed most; of a class and of idle time, the mean of the
    ranks."""
    rank: int | None
    """The rank whose stage changed, if those of the others changed less than half as much; ``None`` for all of them."""


@attrs.frozen(kw_only=True)
class TrendChange:
    """A change of level, which chance gives seldom."""

    index: int
    """Of the first point after it."""
    before: float
    """The median of the points from the change before to this one."""
    after: float
    """The median of the points from here to the next change."""
    ratio: float | None
    """``after / before - 1``; ``None`` if there was nothing before."""
    p_value: float
    """How often chance alone gives such a change anywhere between its neighbours."""
    is_worse: bool
    """Whether it means slower."""
    parts: tuple[TrendPart, ...]
    """What changed with it in the same direction: at most one stage, one class and one cause of idle time."""


@attrs.frozen(kw_only=True)
class TrendSeries:
    """One number of a role, or of a replica of it, over captures."""

    role: str
    replica: int | None
    stage: str | None
    """The stage or kind of batch that the captures are of, where they are of one."""
    what: str
    """Such as ``global step``, ``mini-batch``, ``decode iteration``, ``decode tokens``, ``device busy``,
    ``exposed communication``, ``stall``."""
    unit: str
    """``us``, ``tokens/s`` or ``share``."""
    points: tuple[TrendPoint, ...]
    """By run in the order in which the runs began, then by step and time."""
    changes: tuple[TrendChange, ...]


@attrs.frozen(kw_only=True)
class Trend:
    """How the numbers of captures change."""

    series: tuple[TrendSeries, ...]
    """By role and replica; first what decides how long it takes."""
    left_out: int
    """Number of traces skipped because they are incomplete or have no step."""
    cold_left_out: int = 0
    """Number of traces skipped because they have only a cold step and the role has other traces."""
    cold_excluded: int = 0
    """Number of traces whose values exclude a cold step."""

    def to_dict(self) -> dict[str, Any]:
        """Return the trend as dicts, tuples and scalars."""
        return attrs.asdict(self)
