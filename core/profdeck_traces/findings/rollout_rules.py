"""Rules that compare servers with the other roles of one capture.

They cover trainers and rollouts that take turns, weight updates and tool calls. Ranks are compared by Unix time, so
traces without a Unix time are skipped.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from profdeck_traces.account.model import Account, OwnerTime
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.analysis.detail_model import Period
from profdeck_traces.analysis.engine_iterations import EngineIteration
from profdeck_traces.analysis.role_waits import not_judged
from profdeck_traces.analysis.step_names import GLOBAL_STEP
from profdeck_traces.findings.engine_view import ServerView
from profdeck_traces.findings.rank_finding import NotJudged, RankFinding, draft, ms, percent
from profdeck_traces.findings.rank_view import RankView
from profdeck_traces.reading.intervals import Spans, complement, intersection, total, union

IDLE_TRAINER, IDLE_ROLLOUT, WEIGHT_SYNC = "idle-trainer", "idle-rollout", "weight-sync"
NO_REQUESTS, TOOL_CALL = "no-requests", "tool-call"

_ASYNCHRONOUS = "generate the next batch while this batch is trained (asynchronous, one step off-policy)"
_LEAST_IDLE = 0.2
# "Update" alone is ambiguous: update_policy trains, but update_weights sends weights to the servers.
_WEIGHTS = re.compile(
    r"weights?[^a-z]*(?:sync|updat|transfer|broadcast|reshard|refit)"
    r"|(?:sync|updat|transfer|broadcast|push|reshard|refit)[a-z]*[^a-z]*weight"
    r"|(?:param(?:eter)?s?|policy|model|rollout|engine)[^a-z]*(?:sync|transfer|broadcast|reshard|refit)"
    r"|(?:sync|transfer|broadcast|push|reshard|refit)[a-z]*[^a-z]*(?:param|policy|model|rollout|engine)",
    re.IGNORECASE,
)
_TOOL = re.compile(
    r"(?:^|[^a-z])(?:tool|env(?:ironment)?|sandbox|function_call|code_exec\w*)(?:$|[^a-z])", re.IGNORECASE
)


@attrs.frozen
class _Capture:
    """Servers and other ranks of one capture."""

    servers: Sequence[tuple[ServerView, RankView, list[EngineIteration]]]
    others: Sequence[RankView]

    def iterations(self) -> Spans:
        """Return the periods in which any server has requests, in Unix nanoseconds."""
        spans = [
            _unix(view, iteration.step.start_us, iteration.period_us)
            for _, view, iterations in self.servers
            for iteration in iterations
        ]
        return _union(spans)

    def recorded(self) -> Spans:
        """Return the period in which all servers were recorded, in Unix nanoseconds."""
        spans = [_unix(view, 0.0, view.rank.span_us) for _, view, _ in self.servers]
        return _union([(max(start for start, _ in spans), min(end for _, end in spans))])


def captures_of(servers: Sequence[ServerView], views: Sequence[RankView]) -> list[_Capture]:
    """Group the traces that have a Unix time by run and capture. Captures without servers are omitted."""
    groups: dict[tuple[str | None, str | None], _Capture] = {}
    for server in servers:
        for view, iterations in server.by_trace:
            if iterations and view.rank.origin_unix_ns is not None:
                key = view.rank.run, view.rank.capture
                found = groups.setdefault(key, _Capture([], []))
                groups[key] = attrs.evolve(found, servers=[*found.servers, (server, view, iterations)])
    for view in views:
        key = view.rank.run, view.rank.capture
        if key in groups and view.rank.engine is None and view.rank.origin_unix_ns is not None:
            groups[key] = attrs.evolve(groups[key], others=[*groups[key].others, view])
    return [*groups.values()]


def turns(capture: _Capture) -> Iterator[RankFinding | NotJudged]:
    """Report trainers and servers whose waits for each other take over 20 % of their accounts."""
    for view in capture.others:
        if view.kind == GLOBAL_STEP and (account := view.rank.account) is not None:
            found = _wait(account)
            if found is None:
                yield from _unknown(IDLE_TRAINER, account)
                continue
            time_us, peer, activity, stage = found
            where = f", in {stage}" if stage else ""
            share = percent(time_us / account.time_us)
            yield draft(
                view,
                IDLE_TRAINER,
                f"{view.label} waits {ms(time_us / account.steps)} of {view.each} ({share}) "
                f"for {peer}, mostly {activity}{where}",
                _ASYNCHRONOUS,
                gain_us=time_us / account.steps,
                step_us=account.time_us / account.steps,
                stage=stage or None,
            )
    for server, view, iterations in capture.servers:
        if capture.others and (account := view.rank.account) is not None:
            found = _wait(account)
            if found is None:
                yield from _unknown(IDLE_ROLLOUT, account)
                continue
            time_us, peer, activity, _ = found
            yield server.find(
                IDLE_ROLLOUT,
                f"{server.label} runs no batch for {ms(time_us)} ({percent(time_us / account.time_us)} of the time) "
                f"while {peer} works, mostly {activity}",
                _ASYNCHRONOUS,
                at=max(iterations, key=lambda iteration: iteration.pause_us),
                gain_us=time_us,
                step_us=account.time_us,
                stage=activity,
            )


def _wait(account: Account) -> tuple[float, str, str, str] | None:
    """Return the time of waits for other roles, and the most common peer, activity and stage of this process.

    Return ``None`` if the waits take at most 20 % of the account. An empty stage is none.
    """
    waits = _role_waits(account)
    time_us = sum(wait.time_us for wait in waits)
    if time_us <= _LEAST_IDLE * account.time_us:
        return None
    sums = Counter[str](), Counter[str](), Counter[str]()
    for wait in waits:
        activity = " ".join(filter(None, [wait.awaited, wait.name]))
        for counter, text in zip(sums, (wait.peer, activity, wait.annotation), strict=True):
            counter[text or ""] += round(wait.time_us)
    peer, activity, stage = (max(counter, key=counter.__getitem__) for counter in sums)
    return time_us, peer, activity, stage


def _role_waits(account: Account | None) -> list[OwnerTime]:
    return [owner for owner in account.owners if owner.kind == OwnerKind.WAIT_FOR_ROLE.label] if account else []


def _unknown(cause: str, account: Account) -> Iterator[NotJudged]:
    reason = not_judged(account)
    if reason is not None:
        yield NotJudged(cause, reason)


def weight_sync(capture: _Capture) -> Iterator[RankFinding]:
    """Report a stage named after a weight update that takes over 10 % of the step, in a job with servers."""
    generating, recorded = capture.iterations(), capture.recorded()
    for view in capture.others:
        for stage in view.stages:
            time_us = stage.total_us / view.host_steps
            if not _WEIGHTS.search(stage.name) or time_us <= 0.1 * view.host_step_us:
                continue
            spans = _union([_unix(view, period.start_us, period.duration_us) for period in _periods(view, stage.name)])
            known = total(intersection(spans, recorded))
            stopped = total(intersection(intersection(spans, recorded), _without(recorded, generating)))
            servers = f"; the servers run no batch for {percent(stopped / known)} of it" if known else ""
            yield draft(
                view,
                WEIGHT_SYNC,
                f"{stage.name} takes {percent(time_us / view.host_step_us)} of {view.each} ({ms(time_us)}){servers}",
                "transfer the weights from device to device in large buckets",
                gain_us=time_us,
                step_us=view.host_step_us,
                stage=stage.name,
            )


def no_requests(capture: _Capture) -> Iterator[RankFinding | NotJudged]:
    """Report at least three pauses without requests that take over a quarter of the recording in total.

    Each pause must exceed five typical iterations. If another role is in a stage named after tools, the pauses are
    reported as tool calls. If most of this time is assigned to another role, they are skipped.
    """
    for server, view, iterations in capture.servers:
        usual_us = statistics.median(iteration.period_us for iteration in iterations)
        pauses = [one for one in iterations if not one.has_more_work and one.pause_us > 5 * usual_us]
        idle_us = sum(one.pause_us for one in pauses)
        time_us = idle_us + sum(one.period_us for one in iterations)
        if len(pauses) < 3 or idle_us <= 0.25 * time_us:
            continue
        spans = _union([_unix(view, one.step.start_us + one.step.duration_us, one.pause_us) for one in pauses])
        stages = [(other, stage) for other in capture.others if (stage := _stage_during(other, spans))]
        tool = next(((other, stage) for other, stage in stages if _TOOL.search(stage)), None)
        if tool is None and sum(wait.time_us for wait in _role_waits(view.rank.account)) > 0.5 * idle_us:
            continue
        during = f", while {tool[0].label} is in {tool[1]}" if tool else ""
        yield server.find(
            TOOL_CALL if tool else NO_REQUESTS,
            f"The server has no requests for {percent(idle_us / time_us)} of the time: {len(pauses)} pauses of "
            f"{ms(idle_us / len(pauses))} on average{during}",
            "run tool calls concurrently, so that the server generates for other conversations"
            if tool
            else "keep more requests in flight, so that some generate while others wait for their client",
            at=max(pauses, key=lambda one: one.pause_us),
            gain_us=idle_us,
            step_us=time_us,
            confidence="high",
        )


def _stage_during(view: RankView, spans: Spans) -> str | None:
    """Return the stage that covers the largest part of the spans, or ``None`` if it covers less than 60 %."""
    times = {
        name: total(intersection(_union([_unix(view, one.start_us, one.duration_us) for one in periods]), spans))
        for name in {period.name for period in view.rank.stage_periods}
        if (periods := _periods(view, name))
    }
    name = max(times, key=lambda name: times[name], default=None)
    return name if name is not None and times[name] >= 0.6 * total(spans) > 0 else None


def _periods(view: RankView, name: str | None) -> list[Period]:
    return [period for period in view.rank.stage_periods if period.name == name]


def _unix(view: RankView, start_us: float, duration_us: float) -> tuple[int, int]:
    start_ns = (view.rank.origin_unix_ns or 0) + round(start_us * 1000)
    return start_ns, start_ns + round(duration_us * 1000)


def _union(spans: Sequence[tuple[int, int]]) -> Spans:
    filled = [span for span in spans if span[0] < span[1]]
    starts, ends = np.array(filled, dtype=np.int64).reshape(-1, 2).T
    return union(starts, ends)


def _without(spans: Spans, others: Spans) -> Spans:
    """Return the parts of the spans that are outside the others."""
    if not len(spans[0]):
        return spans
    begin, end = int(spans[0][0]), int(spans[1][-1])
    inside = intersection(others, (spans[0][:1], spans[1][-1:]))
    return intersection(spans, complement(inside, begin, end))


RULES = {
    turns: (IDLE_TRAINER, IDLE_ROLLOUT),
    weight_sync: (WEIGHT_SYNC,),
    no_requests: (NO_REQUESTS, TOOL_CALL),
}
"""Rules for one capture, and the causes that each rule can report."""
