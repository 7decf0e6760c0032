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
class Finding:
    """A performance problem, with its evidence and a suggested action."""

    rule: str
    """Id of the rule, such as ``host-bound``. ``docs/explanation/numbers.md`` describes the rules."""
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
