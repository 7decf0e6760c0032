"""Data model for findings, the performance problems detected in a run's traces.

Times are in microseconds, as in `profdeck_traces.analysis.model`.
"""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Evidence:
    """Time range of one trace where the problem is visible."""

    path: str
    start_us: float
    duration_us: float


@attrs.frozen(kw_only=True)
class Place:
    """Location of a problem. Fields that are unknown or do not apply are unset."""

    role: str | None = None
    replica: int | None = None
    """Server or engine, if the problem affects only one."""
    rank: int | None = None
    """Rank, if the problem affects only one."""
    stage: str | None = None
    """Stage of the step or, for an engine, batch kind."""
    file: str | None = None
    line: int | None = None
    """First line of the function."""
    function: str | None = None
    name: str | None = None
    """Operator, kernel or other name that distinguishes problems with the same cause."""


@attrs.frozen(kw_only=True)
class Finding:
    """A performance problem, with its evidence and a suggested action."""

    rule: str
    """Cause of the problem, such as ``host-bound``. ``docs/explanation/numbers.md`` describes all causes."""
    text: str
    """Description of the problem in one sentence, with numbers."""
    do: str
    """Suggested action."""
    gain_us: float | None
    """Upper bound of the time that can be saved per step, or per recording without steps. ``None`` if unknown."""
    share: float | None
    """`gain_us` as a fraction of the step or recording."""
    ranks: tuple[str, ...]
    """Affected ranks, worst first, such as ``trainer rank 3``."""
    evidence: Evidence | None
    id: str = ""
    """Identifier derived from the cause and place. It contains no measured values, so it is stable across runs."""
    time_us: float | None = None
    """Time that the problem takes per step, at most the step's duration; ``None`` if unknown. The gain can be smaller,
    because other work may become the bottleneck."""
    step_us: float | None = None
    """Duration of the step that ``gain_us`` and ``time_us`` refer to."""
    where: Place = Place()
    confidence: str = "medium"
    """``high`` if the trace records the cause directly, ``medium`` if it is inferred from times or names."""
    check: str | None = None
    """Command that shows the evidence."""


@attrs.frozen(kw_only=True)
class CauseState:
    """Result of checking a run for one cause."""

    cause: str
    """The cause, as in `Finding.rule`."""
    state: str
    """``found``, ``clear`` or ``not_judged``."""
    reason: str | None = None
    """Missing data, if the state is ``not_judged``."""
    findings: tuple[str, ...] = ()
    """IDs of the findings with this cause."""
