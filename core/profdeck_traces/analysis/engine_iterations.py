"""Engine iterations of a trace, sorted by time, and the pauses between them.

An engine has unfinished requests after an iteration if requests are decoding in or alongside the next iteration.
Otherwise, the engine is idle during the pause after the iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs

from profdeck_traces.analysis.model import RankSummary, StepSummary
from profdeck_traces.analysis.rank_labels import label_of, of_run, runs_of, strangers
from profdeck_traces.analysis.step_names import ITERATION, MIXED, PREFILL


@attrs.frozen
class EngineIteration:
    """One engine iteration. Times are in microseconds."""

    step: StepSummary
    index: int
    """Position in the trace, starting at 0 and including cold iterations."""
    next_start_us: float | None
    """Start of the next iteration in the trace; ``None`` for the last one."""
    has_more_work: bool
    """True if the engine has unfinished requests until the next iteration."""

    @property
    def pause_us(self) -> float:
        """Time from the end of this iteration to the start of the next; 0 for the last iteration."""
        if self.next_start_us is None:
            return 0.0
        return max(0.0, self.next_start_us - self.step.start_us - self.step.duration_us)

    @property
    def period_us(self) -> float:
        """Time between the starts of this iteration and the next, or the duration if the engine has no more work."""
        return self.step.duration_us + (self.pause_us if self.has_more_work else 0.0)

    @property
    def decode_requests(self) -> int:
        """Number of requests that generate a token in this iteration."""
        return decode_requests(self.step)

    @property
    def prefill_tokens(self) -> int:
        """Number of prompt tokens in this iteration. 0 if unknown."""
        return self.step.prefill_tokens or 0

    @property
    def held_requests(self) -> int:
        """Number of requests that wait for their next token while this iteration runs a prefill."""
        if self.step.stage == PREFILL:
            details = self.step.details
            return (details and details.running_requests) or 0
        return self.decode_requests if self.step.stage == MIXED else 0


def decode_requests(step: StepSummary) -> int:
    """Return the number of decoding requests, or 0 if unknown."""
    if step.decode_requests is not None:
        return step.decode_requests
    if step.stage == MIXED:
        return step.decode_tokens or 0
    return 0 if step.stage == PREFILL else step.requests or 0


def all_iterations(rank: RankSummary) -> list[EngineIteration]:
    """Return all engine iterations in a trace, including cold ones."""
    steps = [step for step in rank.steps if step.kind == ITERATION]
    return [
        EngineIteration(
            step,
            index,
            following.start_us if following else None,
            following is not None and _continues(step, following),
        )
        for index, (step, following) in enumerate(itertools.zip_longest(steps, steps[1:]))
    ]


def iterations_of(rank: RankSummary) -> list[EngineIteration]:
    """Return the engine iterations in a trace. Exclude cold iterations unless all iterations are cold."""
    found = all_iterations(rank)
    return [iteration for iteration in found if not iteration.step.cold] or found


def _continues(step: StepSummary, following: StepSummary) -> bool:
    """Return whether the engine has unfinished requests between two iterations."""
    if step.pid != following.pid:
        return False
    details = following.details
    return bool(decode_requests(following) or (details and details.running_requests))


def traces_of_servers(ranks: Sequence[RankSummary]) -> list[list[RankSummary]]:
    """Return the traces of each server that has iterations.

    A server has several traces if it has several captures. Tensor-parallel ranks run the same batches, so only the
    traces of the first recorded rank are returned. Each unrelated trace is treated as a separate server.
    """
    unrelated = strangers(ranks)
    servers: dict[tuple[str | int | None, ...], list[RankSummary]] = {}
    for rank in ranks:
        if any(step.kind == ITERATION for step in rank.steps):
            key = rank.run, rank.role, rank.replica, rank.path if rank.path in unrelated else None
            servers.setdefault(key, []).append(rank)
    return [_first_rank(traces) for traces in servers.values()]


def _first_rank(traces: Sequence[RankSummary]) -> list[RankSummary]:
    numbers = [trace.rank for trace in traces if trace.rank is not None]
    return [trace for trace in traces if trace.rank == min(numbers)] if numbers else [*traces]


def server_label(traces: Sequence[RankSummary], ranks: Sequence[RankSummary]) -> str:
    """Return the label of a server, such as ``rollout/1``.

    Args:
        traces: Traces of the server.
        ranks: All traces of the summary.
    """
    first = traces[0]
    return label_of(first.role, first.replica, None, first.path) + of_run(first.run, runs_of(ranks))
