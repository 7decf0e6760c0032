"""Classifies vLLM iterations from the scheduler's output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck.engines import BatchKind

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def describe(output: SchedulerOutput, *, detailed: bool) -> tuple[BatchKind, str]:
    """Return the kind of a batch and the name of its iteration in the trace.

    A request is in prefill until it has generated a token, and again after a preemption. The names match vLLM's
    ``Worker.annotate_profile`` in vllm/v1/worker/gpu_worker.py (0.32.0).

    Args:
        output: the scheduler's output, with at least one token.
        detailed: include the attention work. A request has q scheduled tokens and a resulting context of k tokens. The
            sums over all requests are ``sq`` (q), ``sk`` (k), ``sqsq`` (q * q) and ``sqsk`` (q * k).
    """
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    prefill = {request for request, tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True) if not tokens}
    prefill.update(cached.resumed_req_ids)
    for request in output.scheduled_new_reqs:
        prefill.add(request.req_id)
        computed[request.req_id] = request.num_computed_tokens
    context, generation = _PhaseWork(), _PhaseWork()
    for name, tokens in output.num_scheduled_tokens.items():
        (context if name in prefill else generation).add(tokens, computed.get(name, 0) + tokens)
    if context.requests and generation.requests:
        batch = BatchKind.MIXED
    else:
        batch = BatchKind.PREFILL if context.requests else BatchKind.DECODE
    if detailed:
        total = output.total_num_scheduled_tokens
        return batch, f"execute_{total}_{context.detailed('context')}_{generation.detailed('generation')}"
    return batch, f"execute_{context.short('context')}_{generation.short('generation')}"


class _PhaseWork:
    """Token sums over the requests of one phase in a batch."""

    def __init__(self) -> None:
        self.requests = self.sq = self.sk = self.sqsq = self.sqsk = 0

    def add(self, tokens: int, context: int) -> None:
        self.requests += 1
        self.sq += tokens
        self.sk += context
        self.sqsq += tokens * tokens
        self.sqsk += tokens * context

    def short(self, phase: str) -> str:
        return f"{phase}_{self.requests}({self.sq})"

    def detailed(self, phase: str) -> str:
        return f"{phase}_{self.requests}(sq{self.sq}sk{self.sk}sqsq{self.sqsq}sqsk{self.sqsk})"
