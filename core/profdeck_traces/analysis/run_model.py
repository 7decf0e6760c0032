"""Findings of a summary: what stands out in the traces of a run.

Times are microseconds, as in `profdeck_traces.analysis.model`.
"""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Evidence:
    """Where to look: a part of one trace."""

    path: str
    start_us: float
    duration_us: float


@attrs.frozen(kw_only=True)
class Finding:
    """Something that stands out, in one sentence, and what to do about it."""

    rule: str
    """Its id, such as ``host-bound``; ``docs/explanation/numbers.md`` says when each applies."""
    text: str
    """The sentence, with numbers."""
    do: str
    """What to do."""
    gain_us: float | None
    """At most so much of a step, or of the recording where it has no steps, can be gained; ``None`` where no bound is
    known."""
    share: float | None
    """The same as a fraction of the step."""
    ranks: tuple[str, ...]
    """Whom it is about, worst first, such as ``trainer rank 3``."""
    evidence: Evidence | None
