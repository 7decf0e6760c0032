"""Rules for the engine iterations of one server.

Thresholds without a source are our own. Sources: the paper on chunked prefill (Sarathi-Serve, OSDI 2024) for prefill
next to decode, and the performance guides of vLLM and SGLang.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from profdeck_traces.analysis.engine_iterations import EngineIteration
from profdeck_traces.analysis.step_names import MIXED, PREFILL
from profdeck_traces.base.text import plural
from profdeck_traces.findings.engine_view import ServerView
from profdeck_traces.findings.rank_finding import MACHINE_BUSY, NotJudged, RankFinding, ms, percent

Result = RankFinding | NotJudged

PREFILL_NEXT_TO_DECODE, PREFILL_BOUND = "prefill-next-to-decode", "prefill-bound"
LONG_TAIL = "long-tail"
REQUEST_QUEUE, KV_PRESSURE, PREEMPTION = "request-queue", "kv-pressure", "preemption"
HOST_BETWEEN, SAMPLER, SPECULATION = "host-between-iterations", "sampler", "rejected-speculation"
DETOKENISATION = "detokenisation"

_FEWEST_DECODES = 10
_SAMPLING_OPERATORS = frozenset(
    f"aten::{name}" for name in ("sort", "topk", "multinomial", "exponential_", "cumsum", "kthvalue", "searchsorted")
)
_FULL_KV_PERCENT = 90
_MIN_WAITING = 0.1


def prefill_next_to_decode(server: ServerView) -> Iterator[Result]:
    """Report prefills that delay decoding by over 5 % of the time.

    A prefill counts if it takes at least two usual decode periods and longer than nine of ten decode iterations. This
    excludes delays with another cause. If over a third of the iterations count, smaller chunks would not help.
    """
    prefills = [iteration for iteration in server.iterations if iteration.step.stage in {PREFILL, MIXED}]
    if any(iteration.step.stage == PREFILL and iteration.step.decode_requests is None for iteration in prefills):
        yield from _no_prefills("the iterations do not state which requests wait during a prefill")
        return
    usual_us = server.decode_us
    if usual_us is None:
        yield from _no_prefills("fewer than three decode iterations were recorded")
        return
    decodes_us = sorted(iteration.period_us for iteration in server.decodes)
    least_us = max(2 * usual_us, decodes_us[9 * len(decodes_us) // 10])
    holding = [
        iteration
        for iteration in prefills
        if iteration.held_requests and iteration.prefill_tokens and iteration.period_us >= least_us
    ]
    excess_us = sum(iteration.period_us - usual_us for iteration in holding)
    if not holding or excess_us <= 0.05 * server.time_us:
        return
    worst = max(holding, key=lambda iteration: iteration.period_us)
    decodes = plural(worst.held_requests, "decode")
    share = percent(excess_us / server.time_us)
    if 3 * len(holding) > len(server.iterations):
        yield server.find(
            PREFILL_BOUND,
            f"{len(holding)} of {len(server.iterations)} iterations prefill prompts next to decodes, and delay them by "
            f"{share} of the time",
            "cache shared prefixes, or add servers for the prefills",
            at=worst,
            gain_us=excess_us / len(server.iterations),
            stage=worst.step.stage,
            confidence="high",
        )
        return
    cost = f"; {len(holding)} such iterations cost {share}" if len(holding) > 1 else f", {share}"
    yield server.find(
        PREFILL_NEXT_TO_DECODE,
        f"A prefill of {worst.prefill_tokens:,} tokens next to {decodes} held {_them(worst)} for {ms(worst.period_us)} "
        f"instead of {ms(usual_us)}{cost} of the time",
        "limit the number of prefill tokens in one iteration, so that long prompts are split over more iterations",
        at=worst,
        gain_us=excess_us / len(server.iterations),
        stage=worst.step.stage,
        confidence="high",
    )


def _no_prefills(reason: str) -> Iterator[NotJudged]:
    yield from (NotJudged(cause, reason) for cause in (PREFILL_NEXT_TO_DECODE, PREFILL_BOUND))


def _them(iteration: EngineIteration) -> str:
    return "them" if iteration.held_requests > 1 else "it"


def long_tail(server: ServerView) -> Iterator[Result]:
    """Report servers that run at most a quarter of their peak number of requests for over 15 % of the time.

    Each such tail lasts until the recording ends, or until a prefill starts the next wave of requests.
    """
    if len(server.decodes) < _FEWEST_DECODES:
        yield NotJudged(LONG_TAIL, f"fewer than {_FEWEST_DECODES} decode iterations were recorded")
        return
    for _, iterations in server.by_trace:
        peak = max((iteration.decode_requests for iteration in iterations), default=0)
        tails = _tails_of(iterations, peak / 4)
        tail = [iteration for of_wave in tails for iteration in of_wave]
        time_us = sum(iteration.period_us for iteration in iterations)
        tail_us = sum(iteration.period_us for iteration in tail)
        if peak < 4 or tail_us <= 0.15 * time_us or not tail:
            continue
        mean = sum(iteration.decode_requests * iteration.period_us for iteration in tail) / tail_us
        which = ms(tail_us) if len(tails) == 1 else f"{len(tails)} periods, {ms(tail_us)} in all"
        yield server.find(
            LONG_TAIL,
            f"For {percent(tail_us / time_us)} of the time ({which}), only {mean:.1f} of up to {peak} requests are "
            "still generating on average",
            "start other requests before the longest ones finish, for example by partial rollouts",
            at=tail[0],
            time_us=tail_us / len(iterations),
            gain_us=tail_us * (1 - mean / peak) / len(iterations),
            step_us=time_us / len(iterations),
        )


def _tails_of(iterations: Sequence[EngineIteration], limit: float) -> list[list[EngineIteration]]:
    """Return each sequence of at least ten iterations that only decode, for at most `limit` requests.

    A sequence follows an iteration that decodes more requests. It lasts until the recording ends or a prefill starts.
    """
    tails: list[list[EngineIteration]] = []
    tail: list[EngineIteration] = []
    falls = False
    for iteration in iterations:
        if iteration.step.stage in {PREFILL, MIXED} or not 0 < iteration.decode_requests <= limit:
            if iteration.step.stage in {PREFILL, MIXED} and len(tail) >= _FEWEST_DECODES:
                tails.append(tail)
            falls, tail = iteration.decode_requests > limit, []
        elif falls:
            tail.append(iteration)
    return [*tails, tail] if len(tail) >= _FEWEST_DECODES else tails


def queue_and_kv_cache(server: ServerView) -> Iterator[Result]:
    """Report requests that spend over 10 % of their time waiting because the batch or the KV cache is full."""
    waiting = [
        (iteration, iteration.step.details.waiting_requests)
        for iteration in server.iterations
        if iteration.step.details is not None and iteration.step.details.waiting_requests is not None
    ]
    used = server.numbers("kv_percent")
    if not waiting:
        yield NotJudged(REQUEST_QUEUE, "the iteration names do not contain the length of the queue")
    if not waiting or used is None:
        yield NotJudged(KV_PRESSURE, "the iteration names do not contain the usage of the KV cache")
    queued = [(iteration, count) for iteration, count in waiting if count]
    if not queued:
        return
    periods_us = [iteration.period_us for iteration, _ in waiting]
    if not any(iteration.period_us for iteration, _ in queued):
        return
    mean = statistics.fmean((count for _, count in waiting), periods_us)
    running = statistics.fmean((_running(iteration) for iteration, _ in waiting), periods_us)
    # Little's law: the mean numbers of waiting and running requests are proportional to the mean waiting and run times.
    share = mean / (mean + running)
    if share <= _MIN_WAITING:
        return
    time_us = share * server.iteration_us
    text = f"A request waits for {percent(share)} of its time ({mean:.1f} requests wait on average, {running:.1f} run)"
    worst, _ = max(queued, key=lambda pair: pair[1])
    kv = [
        iteration.step.details.kv_percent
        for iteration, _ in queued
        if iteration.step.details is not None and iteration.step.details.kv_percent is not None
    ]
    most = max(_running(iteration) for iteration in server.iterations)
    limits = server.numbers("max_requests")
    is_full = bool(kv) and statistics.median(kv) >= _FULL_KV_PERCENT
    # An engine can also reserve KV cache space for tokens that running requests haven't generated yet.
    is_reserved = bool(kv) and limits is not None and most < 0.9 * min(limits)
    if is_full or is_reserved:
        kv_percent = f"{statistics.median(kv):.0f}%"
        reason = (
            f"because the KV cache is {kv_percent} full"
            if is_full or limits is None
            else f"although at most {most} of {min(limits)} run: the KV cache, {kv_percent} full, likely has no room "
            "for the tokens of another request"
        )
        yield server.find(
            KV_PRESSURE,
            f"{text}, {reason}",
            "give the KV cache more memory",
            at=worst,
            time_us=time_us,
            confidence="high" if is_full else "medium",
        )
        return
    if most and 2 * sum(_running(iteration) == most for iteration, _ in queued) > len(queued):
        is_limit = limits is not None and most >= min(limits)
        reason = (
            f"because the batch is at its limit of {plural(most, 'request')}"
            if is_limit
            else f"while at most {plural(most, 'request')} run{'s' if most == 1 else ''} at a time"
        )
        yield server.find(
            REQUEST_QUEUE,
            f"{text}, {reason}",
            "raise the engine's limit on running requests, or add servers",
            at=worst,
            time_us=time_us,
            confidence="high" if is_limit else "medium",
        )


def _running(iteration: EngineIteration) -> int:
    details = iteration.step.details
    return (iteration.step.requests or 0) + ((details and details.running_requests) or 0)


def preemption(server: ServerView) -> Iterator[Result]:
    """Report preempted requests if recomputing their tokens takes over 1 % of the time."""
    resumed = [
        (iteration, details.resumed_requests or 0, details.resumed_tokens or 0)
        for iteration in server.iterations
        if (details := iteration.step.details) is not None and details.resumed_requests
    ]
    if not resumed:
        if server.numbers("resumed_requests") is None:
            yield NotJudged(PREEMPTION, "the iteration names contain no preempted requests")
        return
    time_us = sum(
        iteration.period_us * tokens / max(tokens, iteration.prefill_tokens + (iteration.step.decode_tokens or 0))
        for iteration, _, tokens in resumed
        if tokens
    )
    if time_us > 0.01 * server.time_us:
        requests, tokens = sum(count for _, count, _ in resumed), sum(tokens for *_, tokens in resumed)
        worst, *_ = max(resumed, key=lambda one: one[0].period_us)
        yield server.find(
            PREEMPTION,
            f"{plural(requests, 'preempted request')} computed {tokens:,} tokens a second time, "
            f"{percent(time_us / server.time_us)} of the time",
            "lower the number of running requests, so that the KV cache holds all of them",
            at=worst,
            gain_us=time_us / len(server.iterations),
            confidence="high",
        )


def host_between_iterations(server: ServerView) -> Iterator[Result]:
    """Report pauses between iterations that take over 10 % of the time while the engine has requests.

    If a device was recorded, only its idle time counts. On a busy machine, this is not judged, because the engine may
    be waiting for a CPU during the pauses.
    """
    if server.has_device:
        yield NotJudged(HOST_BETWEEN, "a device was recorded, so only its idle time counts")
        return
    if any(view.is_contended for view in server.views):
        yield NotJudged(HOST_BETWEEN, MACHINE_BUSY)
        return
    pauses = [iteration.pause_us for iteration in server.iterations if iteration.has_more_work]
    time_us = sum(pauses)
    if time_us > 0.1 * server.time_us:
        name = _stage_between(server)
        where = f", most of it in {name}" if name else ""
        yield server.find(
            HOST_BETWEEN,
            f"{percent(time_us / server.time_us)} of the time, {ms(time_us / len(pauses))} after each iteration, the "
            f"engine has requests but runs no batch{where}",
            "schedule and process outputs while the model runs",
            at=max((one for one in server.iterations if one.has_more_work), key=lambda one: one.pause_us),
            gain_us=time_us / len(server.iterations),
        )


def _stage_between(server: ServerView) -> str | None:
    """Return the stage in which the engine spends most of its time outside iterations, if the trace has stages."""
    for view in server.views:
        times = view.rank.host_times
        inside_us = sum(iteration.step.duration_us for iteration in server.iterations)
        stages = [stage for stage in times.stages if "idle" not in stage.name.lower()] if times else []
        outside = [stage for stage in stages if stage.total_us < 0.5 * inside_us]
        if outside:
            return max(outside, key=lambda stage: stage.total_us).name
    return None


def sampler(server: ServerView) -> Iterator[Result]:
    """Report sampling that takes over 10 % of the operator or device time, and over 5 % of the server's time."""
    times = [view.rank.attributed for view in server.views if view.rank.attributed is not None]
    total_us = sum(one.total_us for one in times)
    if not total_us:
        yield NotJudged(SAMPLER, "no operators were recorded")
        return
    rows = [row for one in times for row in one.operators if row.name in _SAMPLING_OPERATORS]
    time_us = sum(row.time_us for row in rows)
    if time_us > 0.1 * total_us and time_us > 0.05 * server.time_us:
        worst = max(rows, key=lambda row: row.time_us)
        work = "device work" if times[0].basis == "device" else "time in operators"
        yield server.find(
            SAMPLER,
            f"Sampling takes {percent(time_us / total_us)} of the {work}, most of it in {worst.name}",
            "use the engine's fused kernels for sampling",
            gain_us=time_us / len(server.iterations),
            key=worst.name,
        )


def detokenisation(server: ServerView) -> Iterator[Result]:
    """Report detokenization if it takes over 10 % of the server's time on the engine's critical path."""
    accounts = [view.rank.account for view in server.views if view.rank.account is not None]
    owners = [
        owner
        for account in accounts
        for owner in account.owners
        if "detok" in f"{owner.name} {owner.annotation} {owner.line}".lower()
    ]
    time_us = sum(owner.time_us for owner in owners)
    if not owners:
        yield NotJudged(DETOKENISATION, "the trace shows no detokenising, which often runs in a process of its own")
    elif time_us > 0.1 * server.time_us:
        worst = max(owners, key=lambda owner: owner.time_us)
        yield server.find(
            DETOKENISATION,
            f"Converting tokens to text takes {percent(time_us / server.time_us)} of the time",
            "detokenise in another process, or for several tokens at once",
            gain_us=time_us / len(server.iterations),
            stage=worst.annotation,
            line=worst.line,
        )


def rejected_speculation(server: ServerView) -> Iterator[Result]:
    """Report speculative decoding if over half of at least 20 draft tokens were rejected."""
    drafts = sum(server.numbers("draft_tokens") or ())
    if drafts < 20:
        yield NotJudged(SPECULATION, "the iterations state fewer than 20 draft tokens")
        return
    rejected = sum(server.numbers("rejected_tokens") or ())
    if rejected > 0.5 * drafts:
        yield server.find(
            SPECULATION,
            f"The model rejects {percent(min(1.0, rejected / drafts))} of {drafts:,} draft tokens",
            "draft fewer tokens per request",
            confidence="high",
        )


RULES = {
    prefill_next_to_decode: (PREFILL_NEXT_TO_DECODE, PREFILL_BOUND),
    long_tail: (LONG_TAIL,),
    queue_and_kv_cache: (REQUEST_QUEUE, KV_PRESSURE),
    preemption: (PREEMPTION,),
    host_between_iterations: (HOST_BETWEEN,),
    sampler: (SAMPLER,),
    detokenisation: (DETOKENISATION,),
    rejected_speculation: (SPECULATION,),
}
"""Rules for one server, and the causes that each rule can report."""
