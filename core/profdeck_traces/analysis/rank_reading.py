"""What reading the trace of one rank gives."""

from __future__ import annotations

import attrs

from profdeck_traces.analysis.collectives import Collectives
from profdeck_traces.analysis.model import RankSummary


@attrs.frozen
class RankReading:
    """A summary, and what is needed of the trace to compare it with those of other ranks."""

    summary: RankSummary
    collectives: Collectives
