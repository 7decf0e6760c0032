"""Judges an engine's answers to a start and a stop."""

from __future__ import annotations

from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.records.capture import EngineCapture
from profdeck.records.request import Answer, CaptureRequest, Reply, RequestState

AT_REST = frozenset({RequestState.IDLE, RequestState.ENDED})
"""Where a process neither records nor writes."""


def check_started(request: CaptureRequest, answer: Answer) -> None:
    """Raise TargetError unless every process that is to record does."""
    refused = [f"{rank_and_host(reply)}: {reply.error}" for reply in answer.ranks if reply.error]
    refused += [f"The {name}: {reply.error}" for name, reply in answer.frontends.items() if reply.error]
    if refused:
        outcome = Outcome.from_refusals(reply.refusal for reply in answer.all)
        raise TargetError(" ".join(dict.fromkeys(refused)), outcome)
    world = max((reply.world_size for reply in answer.ranks), default=0)
    if absent := [rank for rank in request.ranks if request.ranks != "all" and int(rank) >= world]:
        text = f"The ranks {absent} are not in this engine, whose ranks are 0 to {world - 1}."
        raise TargetError(text, Outcome.REFUSED)


def judge(capture: EngineCapture, asked: CaptureRequest, answer: Answer) -> Outcome:
    """Say in the capture what is missing of what was asked for."""
    answered = {reply.rank: reply for reply in answer.ranks}
    took, missing = [], False
    for rank in capture.expected_ranks or ():
        reply = answered.get(rank)
        if reply is None:  # its answers do not come to this process: its manifest tells
            continue
        if reply.token != asked.token:
            capture.problems.append(f"Rank {rank} knows nothing of the capture; was its process restarted?")
            missing = True
            continue
        took.append(reply)
        if not any(recorded.size_bytes for recorded in reply.captures):  # `files` has what could not be written too
            capture.problems.append(f"Rank {rank} left no file.")
            missing = True
        capture.problems += [f"Rank {rank}: {problem}" for problem in _problems(reply)]
    for name, reply in answer.frontends.items():
        if reply.token == asked.token:
            capture.problems += [f"The {name}: {problem}" for problem in _problems(reply)]
    if any(reply.state not in AT_REST for reply in answer.all):
        return Outcome.TIMED_OUT
    if missing:
        return Outcome.FILES_MISSING
    return Outcome.ENDED_BY_ITSELF if took and all(_full(asked, reply) for reply in took) else Outcome.FLUSHED


def _full(asked: CaptureRequest, reply: Reply) -> bool:
    """Tell whether a rank has recorded all iterations that it was asked for."""
    kinds = max(len(asked.batch_kinds), 1)
    return asked.iterations is not None and reply.iterations >= asked.iterations.count * kinds


def _problems(reply: Reply) -> list[str]:
    own = [problem for recorded in reply.captures for problem in recorded.problems]
    return list(dict.fromkeys([*own, *reply.problems]))


def rank_and_host(reply: Reply) -> str:
    """Name a rank and its host."""
    return f"rank {reply.rank} on {reply.host}"
