"""Rules that compare the servers of a fleet."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Sequence

from profdeck_traces.analysis.engine_iterations import EngineIteration
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.rank_sum_test import LEVEL, rank_test
from profdeck_traces.findings.engine_view import ServerView
from profdeck_traces.findings.rank_finding import RankFinding, ms, percent
from profdeck_traces.findings.rank_view import RankView

SLOW_SERVER, UNEVEN_SERVERS = "slow-server", "uneven-servers"


def slow_server(fleet: Sequence[ServerView]) -> Iterator[RankFinding]:
    """Report a server whose decode iterations take significantly longer than on the other servers, by over 10 %."""
    rated = [(server, server.decode_us) for server in fleet if server.decode_us is not None]
    if len(rated) < 2:
        return
    slow, slow_us = max(rated, key=lambda pair: pair[1])
    others = sorted((pair for pair in rated if pair[0] is not slow), key=lambda pair: pair[1])
    typical, _ = others[(len(others) - 1) // 2]
    usual_us = statistics.median(time_us for _, time_us in others)
    excess_us = slow_us - usual_us
    test = rank_test(*([iteration.period_us for iteration in server.decodes] for server in (typical, slow)))
    if excess_us <= 0.1 * usual_us or test is None or test.p_value >= LEVEL:
        return
    difference, cure = _difference(slow, typical, excess_us)
    yield slow.find(
        SLOW_SERVER,
        f"Decode iterations on {slow.views[0].label} take {ms(slow_us)}, on the other "
        f"server{'s' if len(others) > 1 else ''} {ms(usual_us)}, {difference}",
        cure,
        at=min(slow.decodes, key=lambda iteration: abs(iteration.period_us - slow_us)),
        gain_us=excess_us,
        step_us=slow_us,
        check=_diff_command(typical.views[0].rank, slow.views[0].rank),
    )


def _difference(slow: ServerView, typical: ServerView, excess_us: float) -> tuple[str, str]:
    """Return a description of the difference between two servers, and the cure."""
    batch, usual_batch = (
        statistics.fmean(iteration.decode_requests for iteration in server.decodes) for server in (slow, typical)
    )
    batches = f"with {batch:.1f} requests per batch"
    if batch > 1.1 * usual_batch:
        text = f"{batches} instead of {usual_batch:.1f}"
        return text, "send requests to the server with the fewest running requests"
    load = slow.views[0].rank.host_load
    other_load = typical.views[0].rank.host_load
    contention = load.describe_contention() if load else None
    if contention and not (other_load and other_load.describe_contention()):
        return f"{batches}; its machine was busy: {contention}", "reduce the CPU load on its host"
    owner = _owner_of_difference(slow.views[0].rank, typical.views[0].rank, excess_us)
    where = f"; most of the difference is in {owner}" if owner else ""
    return f"{batches}{where}", "compare the hardware, clocks and settings of this server with another server"


def _owner_of_difference(slow: RankSummary, typical: RankSummary, excess_us: float) -> str | None:
    """Return the owner on the critical path that explains over half of the difference per step, or ``None``."""
    if slow.account is None or typical.account is None:
        return None
    times = {owner.key: owner.time_us / typical.account.steps for owner in typical.account.owners}
    differences = [
        (owner.time_us / slow.account.steps - times.get(owner.key, 0.0), owner)
        for owner in slow.account.owners
        if owner.peer is None
    ]
    most_us, owner = max(differences, key=lambda pair: pair[0], default=(0.0, None))
    if owner is None or most_us <= 0.5 * excess_us:
        return None
    return " ".join(filter(None, [owner.kind, owner.name or owner.origin]))


def _diff_command(before: RankSummary, after: RankSummary) -> str:
    return shlex.join(["profdeck", "diff", before.path, after.path])


def uneven_servers(fleet: Sequence[ServerView]) -> Iterator[RankFinding]:
    """Report a server that runs for over 15 % of the time after most other servers in a capture have finished.

    If all servers recorded the same number of iterations, the end of the capture window may have stopped the
    recordings. Such captures are skipped.
    """
    by_capture: dict[str | None, list[tuple[ServerView, RankView, list[EngineIteration]]]] = {}
    for server in fleet:
        for view, iterations in server.by_trace:
            if iterations and view.rank.origin_unix_ns is not None:
                by_capture.setdefault(view.rank.capture, []).append((server, view, iterations))
    for recorded in by_capture.values():
        if len({len(iterations) for _, _, iterations in recorded}) < 2:
            continue
        spans = [
            (_unix_us(view, iterations[0], 0), _unix_us(view, iterations[-1], 1)) for _, view, iterations in recorded
        ]
        begin_us, end_us = min(start for start, _ in spans), max(end for _, end in spans)
        index = [end for _, end in spans].index(end_us)
        last, view, iterations = recorded[index]
        others_us = statistics.median(end for number, (_, end) in enumerate(spans) if number != index)
        alone_us, total_us = end_us - others_us, end_us - begin_us
        if alone_us <= 0.15 * total_us:
            continue
        tail = next(one for one in iterations if _unix_us(view, one, 1) > others_us)
        yield last.find(
            UNEVEN_SERVERS,
            f"{view.label} generates for {ms(alone_us)} ({percent(alone_us / total_us)} of the time) after "
            f"{'the other server has' if len(recorded) == 2 else 'most other servers have'} finished",
            "give each server the same number of tokens to generate, or move requests to idle servers",
            at=tail,
            gain_us=end_us - statistics.fmean(end for _, end in spans),
            time_us=alone_us,
            step_us=total_us,
        )


def _unix_us(view: RankView, iteration: EngineIteration, side: int) -> float:
    """Return the start (side 0) or the end (side 1) of an iteration as Unix time in microseconds."""
    return (view.rank.origin_unix_ns or 0) / 1000 + iteration.step.start_us + side * iteration.step.duration_us


RULES = {slow_server: (SLOW_SERVER,), uneven_servers: (UNEVEN_SERVERS,)}
"""Rules for the servers of one role, and the causes that each rule can report."""
