"""Evaluation of an engine's replies to start and stop commands."""

from __future__ import annotations

from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.records.capture import EngineCapture
from profdeck.records.request import Answer, CaptureRequest, Reply, RequestState

INACTIVE = frozenset({RequestState.IDLE, RequestState.ENDED})
"""States without a running capture and without files to write."""


def is_active(reply: Reply, request: CaptureRequest) -> bool:
    """Return whether a process is still recording a request or writing its files."""
    return reply.token == request.token and reply.state not in INACTIVE


def check_started(request: CaptureRequest, answer: Answer) -> None:
    """Raise TargetError if a process refused the start, or if a selected rank does not exist."""
    errors = [f"{rank_and_host(reply)}: {reply.error}" for reply in answer.ranks if reply.error]
    errors += [f"The {name}: {reply.error}" for name, reply in answer.frontends.items() if reply.error]
    if errors:
        outcome = Outcome.from_refusals(reply.refusal for reply in answer.all)
        raise TargetError(" ".join(dict.fromkeys(errors)), outcome)
    world_size = max((reply.world_size for reply in answer.ranks), default=0)
    if invalid := [rank for rank in request.ranks if request.ranks != "all" and int(rank) >= world_size]:
        text = f"This engine does not have the ranks {invalid}. Its ranks are 0 to {world_size - 1}."
        raise TargetError(text, Outcome.REFUSED)


def evaluate_stop(capture: EngineCapture, request: CaptureRequest, answer: Answer) -> Outcome:
    """Return the outcome of a stop, and add missing files and the ranks' problems to the capture's problems."""
    replies_by_rank = {reply.rank: reply for reply in answer.ranks}
    participants, missing = [], False
    for rank in capture.expected_ranks or ():
        reply = replies_by_rank.get(rank)
        if reply is None:  # this rank's replies do not reach this process; its manifest has the result
            continue
        if reply.token != request.token:
            cause = "may have been restarted" if reply.token is None else "has since recorded too many other captures"
            capture.problems.append(f"Rank {rank} has no record of the capture. Its process {cause}.")
            missing = True
            continue
        participants.append(reply)
        if not any(
            recorded.size_bytes for recorded in reply.captures
        ):  # `files` also lists files that were not written
            capture.problems.append(f"Rank {rank} wrote no file.")
            missing = True
        capture.problems += [f"Rank {rank}: {problem}" for problem in _problems(reply)]
    for name, reply in answer.frontends.items():
        if reply.token == request.token:
            capture.problems += [f"The {name}: {problem}" for problem in _problems(reply)]
    if any(is_active(reply, request) for reply in answer.all):
        return Outcome.TIMED_OUT
    if missing:
        return Outcome.FILES_MISSING
    ended_early = bool(participants) and all(_has_all_iterations(request, reply) for reply in participants)
    return Outcome.ENDED_BY_ITSELF if ended_early else Outcome.FLUSHED


def _has_all_iterations(request: CaptureRequest, reply: Reply) -> bool:
    """Return whether a rank has recorded all requested iterations."""
    kinds = max(len(request.batch_kinds), 1)
    return request.iterations is not None and reply.iterations >= request.iterations.count * kinds


def _problems(reply: Reply) -> list[str]:
    capture_problems = [problem for recorded in reply.captures for problem in recorded.problems]
    return list(dict.fromkeys([*capture_problems, *reply.problems]))


def rank_and_host(reply: Reply) -> str:
    """Return the rank and host of a reply, for messages."""
    return f"rank {reply.rank} on {reply.host}"
