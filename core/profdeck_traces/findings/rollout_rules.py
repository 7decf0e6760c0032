"""Rules that compare servers with the other roles of one capture.

They cover trainers and rollouts that take turns, weight updates and tool calls. All of them read the waits between
roles in the accounts, see `profdeck_traces.analysis.role_waits`.
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
from profdeck_traces.analysis.role_waits import NO_BATCH, not_judged
from profdeck_traces.analysis.step_names import GLOBAL_STEP
from profdeck_traces.findings.engine_view import ServerView
from profdeck_traces.findings.rank_finding import NotJudged, RankFinding, draft, ms, percent
from profdeck_traces.findings.rank_view import RankView

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
    for view in capture.others:
        for stage in view.stages:
            time_us = stage.total_us / view.host_steps
            if not _WEIGHTS.search(stage.name) or time_us <= 0.1 * view.host_step_us:
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
    """Return the stage in which a role calls tools while a server has no batch, if this takes at least `least_us`."""
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
    weight_sync: (WEIGHT_SYNC,),
    no_requests: (NO_REQUESTS, TOOL_CALL),
}
"""Rules for one capture, and the causes that each rule can report."""
