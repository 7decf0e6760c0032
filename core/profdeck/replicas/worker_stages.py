"""Which batches a worker of a disaggregated fleet ever has: who waits for others records nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from profdeck.base.errors import CaptureError
from profdeck.config.targets import WorkerType
from profdeck.records.request import BatchKind
from profdeck.replicas.discovery import Target

_OF_WORKERS = {WorkerType.PREFILL: BatchKind.PREFILL, WorkerType.DECODE: BatchKind.DECODE}


def at_their_stages(targets: Sequence[Target], stages: Sequence[BatchKind]) -> tuple[list[Target], list[str]]:
    """Leave each prefill or decode worker the stage that it has, and leave out those that have none of the stages.

    Args:
        targets: all of them.
        stages: what is to be recorded; empty for everything.

    Returns:
        Those that record; and what to note of the others.

    Raises:
        CaptureError: none is left.
    """
    if not stages:
        return list(targets), []
    kept = [_at(target, stages) for target in targets]
    chosen = [target for target in kept if target is not None]
    others = Counter(one.worker_type for one, kept_one in zip(targets, kept, strict=True) if kept_one is None)
    notes = [
        f"Not asked, as {kind} workers have no batches of the stages {', '.join(stages)}: {count} of {len(targets)} "
        "targets."
        for kind, count in others.items()
    ]
    if not chosen:
        raise CaptureError(" ".join(["There is no target that has the stages.", *notes]))
    return chosen, notes


def _at(target: Target, stages: Sequence[BatchKind]) -> Target | None:
    own = _OF_WORKERS.get(target.worker_type or WorkerType.REGULAR)
    if own is None:
        return target
    return attrs.evolve(target, stages=(own,)) if own in stages else None
