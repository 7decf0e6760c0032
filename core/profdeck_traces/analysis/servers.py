"""Statistics for each server in a fleet."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from profdeck_traces.analysis.engine_iterations import EngineIteration, iterations_of, server_label, traces_of_servers
from profdeck_traces.analysis.model import RankSummary, ServerSummary
from profdeck_traces.analysis.step_names import DECODE

_US_PER_S = 1_000_000


def servers_of(ranks: Sequence[RankSummary]) -> tuple[ServerSummary, ...]:
    """Return statistics for each server whose traces have engine iterations, sorted by run, role and replica."""
    servers = [_server(traces, server_label(traces, ranks)) for traces in traces_of_servers(ranks)]
    return tuple(sorted(servers, key=lambda server: (server.run or "", server.role or "", server.replica or 0)))


def _server(traces: Sequence[RankSummary], label: str) -> ServerSummary:
    first = traces[0]
    iterations = [iteration for trace in traces for iteration in iterations_of(trace)]
    decodes_us = [iteration.period_us for iteration in iterations if iteration.step.stage == DECODE]
    p50, p99 = np.percentile(decodes_us, [50, 99]).tolist() if decodes_us else (None, None)
    batches = [iteration.decode_requests for iteration in iterations if iteration.decode_requests]
    prefill_tokens = [iteration.step.prefill_tokens for iteration in iterations if _has_prefill(iteration)]
    return ServerSummary(
        label=label,
        run=first.run,
        role=first.role,
        replica=first.replica,
        rank=first.rank,
        iterations=len(iterations),
        tokens_per_s=_tokens_per_s(iterations),
        decode_p50_us=p50,
        decode_p99_us=p99,
        prefill_tokens=None if None in prefill_tokens else sum(filter(None, prefill_tokens)),
        batch_size=statistics.fmean(batches) if batches else None,
        idle_us=sum(iteration.pause_us for iteration in iterations if not iteration.has_more_work),
    )


def _has_prefill(iteration: EngineIteration) -> bool:
    return iteration.step.stage != DECODE


def _tokens_per_s(iterations: Sequence[EngineIteration]) -> float | None:
    """Return decode tokens per second, or ``None`` if a batch has no token count. The time includes pauses."""
    decodes = [iteration.step.decode_tokens for iteration in iterations if iteration.decode_requests]
    time_us = sum(iteration.step.duration_us + iteration.pause_us for iteration in iterations)
    if not decodes or None in decodes or not time_us:
        return None
    return sum(filter(None, decodes)) * _US_PER_S / time_us
