"""Classifies and names vLLM iterations based on the scheduler's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from profdeck.engines import BatchKind
from profdeck_vllm.scheduler_state import read_state

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput


class _Scheduled(NamedTuple):
    """Token counts of one request after an iteration, assuming that no draft token is rejected."""

    tokens: int
    drafts: int


class IterationReader:
    """Reads the scheduler's outputs during one capture. Outputs must be passed in chronological order."""

    def __init__(self, *, detailed: bool) -> None:
        """Args:
        detailed: Include the attention work in the names. For requests with q scheduled tokens and a resulting context
            of k tokens, a name contains the sums ``sq`` (q), ``sk`` (k), ``sqsq`` (q * q) and ``sqsk`` (q * k).
        """
        self._detailed = detailed
        self._scheduled: dict[str, _Scheduled] = {}
        """Unfinished requests that were scheduled during the capture, by request ID."""

    @property
    def has_unfinished_requests(self) -> bool:
        """True if a request that was scheduled during the capture has not finished."""
        return bool(self._scheduled)

    def read_finished(self, output: SchedulerOutput) -> None:
        """Remove the requests that an output reports as finished."""
        for name in output.finished_req_ids:
            self._scheduled.pop(name, None)

    def describe(self, output: SchedulerOutput) -> tuple[BatchKind, str]:
        """Return the kind of a batch and the name of its iteration in the trace.

        A request is in prefill until it has generated a token, and again after a preemption. The name has the format of
        ``Worker.annotate_profile`` in vllm/v1/worker/gpu_worker.py (vLLM 0.32.0), followed by the result of `_details`.

        Args:
            output: The scheduler's output, with at least one scheduled token.
        """
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        prefill = {name for name, tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True) if not tokens}
        resumed = set(cached.resumed_req_ids)
        for request in output.scheduled_new_reqs:
            prefill.add(request.req_id)
            computed[request.req_id] = request.num_computed_tokens
            if _is_resumed(request):
                resumed.add(request.req_id)
        prefill |= resumed
        context, generation = _PhaseWork(), _PhaseWork()
        for name, tokens in output.num_scheduled_tokens.items():
            (context if name in prefill else generation).add(tokens, computed.get(name, 0) + tokens)
        if context.requests and generation.requests:
            batch = BatchKind.MIXED
        else:
            batch = BatchKind.PREFILL if context.requests else BatchKind.DECODE
        details = self._details(output, computed, resumed)
        if self._detailed:
            total = output.total_num_scheduled_tokens
            label = f"execute_{total}_{context.detailed('context')}_{generation.detailed('generation')}"
        else:
            label = f"execute_{context.short('context')}_{generation.short('generation')}"
        return batch, label + details

    def _details(self, output: SchedulerOutput, computed: dict[str, int], resumed: set[str]) -> str:
        """Format the scheduler's state and the non-zero counts.

        The counts are resumed requests with their tokens, draft tokens, and rejected draft tokens. The state is the
        number of waiting requests and the KV cache usage.

        The scheduler counts a draft token as computed when it schedules the token, and subtracts it if the model
        rejects it. Rejections are therefore known one iteration later.
        """
        drafts = rejected = 0
        for name, tokens in output.num_scheduled_tokens.items():
            previous = self._scheduled.get(name)
            if previous is not None and previous.drafts and name not in resumed:
                rejected += max(0, previous.tokens - computed.get(name, 0))
            of_request = len(output.scheduled_spec_decode_tokens.get(name, ()))
            drafts += of_request
            self._scheduled[name] = _Scheduled(computed.get(name, 0) + tokens, of_request)
        resumed_tokens = sum(output.num_scheduled_tokens.get(name, 0) for name in resumed)
        state = read_state(output)
        return "".join(
            [
                f"_resumed_{len(resumed)}({resumed_tokens})" if resumed else "",
                f"_draft_{drafts}" if drafts else "",
                f"_rejected_{rejected}" if rejected else "",
                f"_waiting_{state.waiting}_kv_{state.kv_percent}" if state is not None else "",
            ]
        )


def _is_resumed(request: NewRequestData) -> bool:
    """Return whether a request was preempted earlier. vLLM's V2 model runner receives such requests as new requests."""
    prefill_tokens = getattr(request, "prefill_token_ids", None)
    return prefill_tokens is not None and len(prefill_tokens) > len(request.prompt_token_ids or prefill_tokens)


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
