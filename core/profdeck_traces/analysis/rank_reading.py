"""Reading of one rank's trace, with or without the facts from its manifest."""

from __future__ import annotations

from typing import Any

import attrs

from profdeck_traces.account.arrivals import Arrivals
from profdeck_traces.account.idle_periods import IdlePeriods
from profdeck_traces.analysis.collectives import Collectives
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.recording_cost import recording_cost
from profdeck_traces.inputs.facts import TraceFacts
from profdeck_traces.inputs.sources import TraceSource


@attrs.frozen
class RankReading:
    """Summary of a trace, and the collective calls and paths used to compare it with other ranks."""

    summary: RankSummary
    collectives: Collectives
    arrivals: Arrivals
    """Paths to the collectives, with one value per call of `collectives`."""
    idle: IdlePeriods
    origin_ns: int
    """Start time of the first event, in nanoseconds on the trace's clock."""
    base_ns: int
    """``baseTimeNanoseconds`` of the trace; 0 if it has none."""
    facts: TraceFacts | None = None
    """Facts about the trace, or ``None`` if it has no manifest."""

    def with_facts(self, source: TraceSource) -> RankReading:
        """Return a copy of the reading with the path and facts of a source.

        The reading itself depends only on the trace and on ``cold_first_step``, so a cached reading stays valid when
        other facts change. For example, an engine's clock is written to another manifest.
        """
        facts, path = source.facts, str(source.path)
        if facts is None:
            return attrs.evolve(
                self,
                summary=attrs.evolve(self.summary, path=path),
                collectives=attrs.evolve(self.collectives, path=path),
            )
        offset_ns = facts.clock_offset_ns
        identity: dict[str, Any] = {
            "path": path,
            "role": facts.role,
            "replica": facts.replica,
            "rank": facts.rank,
            "host": facts.host,
            "capture": facts.capture,
            "run": facts.run,
        }
        return attrs.evolve(
            self,
            facts=facts,
            summary=attrs.evolve(
                self.summary,
                **identity,
                world_size=facts.world_size,
                unit=facts.unit,
                host_load=facts.host_load,
                recording_cost=recording_cost(self.summary.steps, facts.unrecorded_step_s),
                origin_unix_ns=self.summary.origin_unix_ns if offset_ns is None else self.origin_ns + offset_ns,
            ),
            collectives=attrs.evolve(
                self.collectives,
                **identity,
                anchor_offset_ns=None if offset_ns is None else offset_ns - self.base_ns,
            ),
        )
