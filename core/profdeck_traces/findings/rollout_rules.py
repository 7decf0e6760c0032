"""Rules that compare servers with the other roles of one capture.

They cover trainers and rollouts that take turns, weight updates and tool calls. All of them read the waits between
roles from the accounts (see `profdeck_traces.analysis.role_waits`).
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from profdeck_traces.account.model import Account, OwnerTime
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.analysis.engine_iterations import EngineIteration
from profdeck_traces.analysis.role_waits import NO_BATCH
from profdeck_traces.analysis.step_names import GLOBAL_STEP
from profdeck_traces.findings.engine_view import ServerView
from profdeck_traces.findings.rank_finding import NotJudged, RankFinding, draft, ms, percent
from profdeck_traces.findings.rank_view import RankView
from profdeck_traces.reading.event_names import is_weight_sync

IDLE_TRAINER, IDLE_ROLLOUT, WEIGHT_SYNC = "idle-trainer", "idle-rollout", "weight-sync"
NO_REQUESTS, TOOL_CALL, IDLE_DECODE = "no-requests", "tool-call", "idle-decode"

_ASYNCHRONOUS = "generate the next batch while this batch is trained (asynchronous, one step off-policy)"
_LEAST_IDLE = 0.2
_TOOL = re.compile(
    r"(?:^|[^a-z])(?:tool|env(?:ironment)?|sandbox|function_call|code_exec\w*)(?:$|[^a-z])", re.IGNORECASE
)


@attrs.frozen
class _Capture:
    """Servers and other ranks of one capture."""

    servers: Sequence[tuple[ServerView, RankView, list[EngineIteration]]]
    others: Sequence[RankView]


def captures_of(servers: Sequence[ServerView], views: Sequence[RankView]) -> list[_Capture]:
    """Group traces by run and capture. Captures without servers are omitted."""
    groups: dict[tuple[str | None, str | None], _Capture] = {}
    for server in servers:
        for view, iterations in server.by_trace:
            if iterations:
                key = view.rank.run, view.rank.capture
                found = groups.setdefault(key, _Capture([], []))
                groups[key] = attrs.evolve(found, servers=[*found.servers, (server, view, iterations)])
    for view in views:
        key = view.rank.run, view.rank.capture
        if key in groups and view.rank.engine is None:
            groups[key] = attrs.evolve(groups[key], others=[*groups[key].others, view])
    return [*groups.values()]


def turns(capture: _Capture) -> Iterator[RankFinding | NotJudged]:
    """Report trainers and servers that spend over 20 % of their time waiting for each other."""
    for view in capture.others:
        account = view.rank.account
        if view.kind != GLOBAL_STEP or account is None:
            continue
        found = _wait(account, is_own=False)
        if isinstance(found, str):
            yield NotJudged(IDLE_TRAINER, found)
        elif found is not None:
            where = f", in {found.stage}" if found.stage else ""
            yield draft(
                view,
                IDLE_TRAINER,
                f"{view.label} waits {ms(found.time_us / account.steps)} of {view.each} ({percent(found.share)}) "
                f"for {found.peer}, mostly {found.activity}{where}",
                _ASYNCHRONOUS,
                gain_us=found.time_us / account.steps,
                step_us=account.time_us / account.steps,
                stage=found.stage,
            )
    if capture.others:
        yield from _idle_servers(capture, IDLE_ROLLOUT, _ASYNCHRONOUS)


def idle_decode(capture: _Capture) -> Iterator[RankFinding | NotJudged]:
    """Report decode servers whose waits for prefill servers take over 20 % of their accounts."""
    yield from _idle_servers(capture, IDLE_DECODE, "use more prefill servers")


def _idle_servers(capture: _Capture, cause: str, do: str) -> Iterator[RankFinding | NotJudged]:
    """Yield findings about server waits: for their own role if `cause` is `IDLE_DECODE`, otherwise for other roles."""
    for server, view, iterations in capture.servers:
        account = view.rank.account
        found = _wait(account, is_own=cause == IDLE_DECODE, role=view.rank.role) if account else None
        if isinstance(found, str):
            yield NotJudged(cause, found)
        elif found is not None and account is not None:
            yield server.find(
                cause,
                f"{server.label} runs no batch for {ms(found.time_us)} ({percent(found.share)} of the time) "
                f"while {found.peer} works, mostly {found.activity}",
                do,
                at=max(iterations, key=lambda iteration: iteration.pause_us),
                gain_us=found.time_us,
                step_us=account.time_us,
                stage=found.activity,
            )


@attrs.frozen
class _Wait:
    """Waits in an account, with the peer, peer activity and stage of the waiting process that take the most time."""

    time_us: float
    share: float
    peer: str
    activity: str
    stage: str | None


def _wait(account: Account, *, is_own: bool, role: str | None = None) -> _Wait | str | None:
    """Return the waits for the given role if `is_own`, otherwise for other roles.

    If the waits take at most 20 % of the account, return the reason they were not assigned, or ``None``.
    """
    waits = [wait for wait in _role_waits(account) if ((wait.peer or "").partition("/")[0] == role) is is_own]
    time_us = sum(wait.time_us for wait in waits)
    if time_us <= _LEAST_IDLE * account.time_us:
        unassigned = account.unassigned_waits
        return next((waits.reason for waits in unassigned if (waits.roles == (role,)) is is_own), None)
    sums = Counter[str](), Counter[str](), Counter[str]()
    for wait in waits:
        activity = " ".join(filter(None, [wait.awaited, wait.name]))
        for counter, text in zip(sums, (wait.peer, activity, wait.annotation), strict=True):
            counter[text or ""] += round(wait.time_us)
    peer, activity, stage = (max(counter, key=counter.__getitem__) for counter in sums)
    return _Wait(time_us, time_us / account.time_us, peer, activity, stage or None)


def _role_waits(account: Account | None) -> list[OwnerTime]:
    return [owner for owner in account.owners if owner.kind == OwnerKind.WAIT_FOR_ROLE.label] if account else []


def weight_sync(capture: _Capture) -> Iterator[RankFinding]:
    """Report a stage named after a weight update that takes over 10 % of the step, in a job with servers."""
    for view in capture.others:
        for stage in view.stages:
            time_us = stage.total_us / view.host_steps
            if not is_weight_sync(stage.name) or time_us <= 0.1 * view.host_step_us:
                continue
            stopped_us, label = max(
                (
                    sum(wait.time_us for wait in _role_waits(of_server.rank.account) if wait.awaited == stage.name),
                    server.label,
                )
                for server, of_server, _ in capture.servers
            )
            yield draft(
                view,
                WEIGHT_SYNC,
                f"{stage.name} takes {percent(time_us / view.host_step_us)} of {view.each} ({ms(time_us)})"
                + (f"; {label} waits {ms(stopped_us)} for it in the recording" if stopped_us else ""),
                "transfer the weights from device to device in large buckets",
                gain_us=time_us,
                step_us=view.host_step_us,
                stage=stage.name,
            )


def no_requests(capture: _Capture) -> Iterator[RankFinding | NotJudged]:
    """Report at least three pauses without requests that take over a quarter of the recording in total.

    Each pause must exceed five typical iterations. If a trainer is in a stage named after tools for most of this time,
    the pauses are reported as tool calls. If the server waits for a trainer for most of it, they are skipped.
    """
    for server, view, iterations in capture.servers:
        usual_us = statistics.median(iteration.period_us for iteration in iterations)
        pauses = [one for one in iterations if not one.has_more_work and one.pause_us > 5 * usual_us]
        idle_us = sum(one.pause_us for one in pauses)
        time_us = idle_us + sum(one.period_us for one in iterations)
        if len(pauses) < 3 or idle_us <= 0.25 * time_us:
            continue
        tool = _tool(capture, server.label, idle_us / 2)
        if tool is None and sum(wait.time_us for wait in _role_waits(view.rank.account)) > idle_us / 2:
            continue
        yield server.find(
            TOOL_CALL if tool else NO_REQUESTS,
            f"The server has no requests for {percent(idle_us / time_us)} of the time: {len(pauses)} pauses of "
            f"{ms(idle_us / len(pauses))} on average{tool or ''}",
            "run tool calls concurrently, so that the server generates for other conversations"
            if tool
            else "keep more requests in flight, so that some generate while others wait for their client",
            at=max(pauses, key=lambda one: one.pause_us),
            gain_us=idle_us,
            step_us=time_us,
            confidence="high",
        )


def _tool(capture: _Capture, server: str, least_us: float) -> str | None:
    """Return the stage in which a role calls tools for at least `least_us` while a server has no batch, or ``None``."""
    for view in capture.others:
        stages = Counter[str]()
        for wait in _role_waits(view.rank.account):
            if (wait.peer, wait.awaited) == (server, NO_BATCH) and wait.annotation and _TOOL.search(wait.annotation):
                stages[wait.annotation] += round(wait.time_us)
        for stage, time_us in stages.most_common(1):
            if time_us >= least_us:
                return f", while {view.label} is in {stage}"
    return None


RULES = {
    turns: (IDLE_TRAINER, IDLE_ROLLOUT),
    idle_decode: (IDLE_DECODE,),
    weight_sync: (WEIGHT_SYNC,),
    no_requests: (NO_REQUESTS, TOOL_CALL),
}
"""Rules for one capture, and the causes that each rule can report."""
