"""Classifies and names SGLang iterations based on the scheduler's batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck.engines import BatchKind

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler


def is_iteration(batch: ScheduleBatch) -> bool:
    """Return whether a batch runs the model. A batch whose prefill ran on another server does not."""
    return not batch.forward_mode.is_prebuilt()


def classify(batch: ScheduleBatch) -> BatchKind | None:
    """Return the kind of a batch, or None for the empty batches of data-parallel attention.

    The verification of draft tokens is decoding, although SGLang's ``is_extend`` includes it.
    """
    mode = batch.forward_mode
    if mode.is_idle():
        return None
    if mode.is_mixed():
        return BatchKind.MIXED
    if mode.is_decode() or mode.is_target_verify() or not mode.is_extend():
        return BatchKind.DECODE
    return BatchKind.PREFILL


def describe(batch: ScheduleBatch, scheduler: Scheduler) -> str:
    """Return the name of an iteration in the trace. See `profdeck_sglang.trace_names` for examples.

    Values that the SGLang release does not provide are omitted.
    """
    decoding, requests = len(batch.decoding_reqs or ()), batch.batch_size()
    mode = batch.forward_mode
    is_prefill = mode.is_extend() and not mode.is_target_verify()
    context, generation = (requests - decoding, decoding) if is_prefill else (0, requests)
    numbers: dict[str, int | None] = {"c": context, "g": generation}
    if is_prefill:
        tokens = batch.extend_num_tokens
        numbers |= {"c_toks": None if tokens is None else tokens - decoding, "g_toks": decoding}
        # After a retraction, SGLang prefills the prompt and the generated tokens again.
        decoding_requests = {id(request) for request in batch.decoding_reqs or ()}
        resumed = [
            (request, length)
            for request, length in zip(batch.reqs, batch.extend_lens or (), strict=False)
            if request.retraction_count and request.output_ids and id(request) not in decoding_requests
        ]
        numbers |= {"resumed": len(resumed), "resumed_toks": sum(length for _, length in resumed)}
        if not decoding:
            numbers["running"] = len(scheduler.running_batch.reqs)
    elif batch.spec_algorithm.is_none():
        numbers["g_toks"] = requests  # with speculative decoding, a request has several tokens
    numbers["waiting"] = len(scheduler.waiting_queue)
    numbers["kv"] = _kv_percent(scheduler)
    numbers["limit"] = _batch_limit(scheduler)
    return f"run_batch[{' '.join(f'{name}={number}' for name, number in numbers.items() if number is not None)}]"


def _kv_percent(scheduler: Scheduler) -> int | None:
    """Return the KV cache usage in percent, or None for SGLang releases without `pool_stats_observer`."""
    observer = getattr(scheduler, "pool_stats_observer", None)
    if observer is None:
        return None
    _, usage = observer.get_pool_stats().get_kv_token_stats()
    return int(100 * usage)


def _batch_limit(scheduler: Scheduler) -> int | None:
    """Return the maximum number of running requests in a batch, or None if this SGLang release doesn't provide it."""
    limit = getattr(scheduler, "max_running_requests", None)
    if limit is None:
        return None
    # Pipeline parallelism divides the limit between the batches in flight.
    stages = getattr(getattr(scheduler, "server_args", None), "pp_size", 1)
    return max(1, int(limit) // int(stages))
