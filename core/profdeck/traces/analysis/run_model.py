"""What a summary of a run says beside its traces: the state of each capture, and what stands out.

Times are microseconds, as in `profdeck.traces.analysis.model`.
"""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class CaptureStatus:
    """Whether one rank of one capture is there, or one target of it if that failed."""

    run: str
    """Its directory."""
    capture: str
    role: str
    replica: int | None
    stage: str | None
    first_step: int
    last_step: int
    rank: int | None
    """``None`` for a target as a whole, such as a server."""
    host: str | None
    status: str
    """``complete``, ``recording``, ``partial``, ``failed`` or ``missing``, as `profdeck ls` says it."""
    problem: str | None


@attrs.frozen(kw_only=True)
class RecordingAbout:
    """With what a role was recorded."""

    role: str
    backend: str
    versions: str
    """Of what recorded: ``torch 2.13.0``."""
    options: str
    """All options of the backend, as a JSON object."""
    profdeck: str
    """Its version."""


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
