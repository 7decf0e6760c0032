"""Select the batch kinds that each worker of a disaggregated fleet records.

A request for a kind that a worker never runs would wait forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from profdeck.base.errors import CaptureError
from profdeck.config.targets import WorkerType
from profdeck.records.request import BatchKind
from profdeck.replicas.discovery import Target

_OF_WORKERS = {WorkerType.PREFILL: BatchKind.PREFILL, WorkerType.DECODE: BatchKind.DECODE}


def select_kinds(targets: Sequence[Target], kinds: Sequence[BatchKind]) -> tuple[list[Target], list[str]]:
    """Select the batch kind of each prefill or decode worker. Exclude workers that run none of the requested kinds.

    Args:
        targets: all targets.
        kinds: the kinds of batches to record; empty for all.

    Returns:
        The targets to record, and notes about the excluded targets.

    Raises:
        CaptureError: no target runs batches of these kinds.
    """
    if not kinds:
        return list(targets), []
    kept = [_select(target, kinds) for target in targets]
    chosen = [target for target in kept if target is not None]
    others = Counter(one.worker_type for one, kept_one in zip(targets, kept, strict=True) if kept_one is None)
    notes = [
        f"Excluded {count} of {len(targets)} targets: {worker} workers have no {' or '.join(kinds)} batches."
        for worker, count in others.items()
    ]
    if not chosen:
        raise CaptureError(" ".join(["No target has batches of these kinds.", *notes]))
    return chosen, notes


def _select(target: Target, kinds: Sequence[BatchKind]) -> Target | None:
    own = _OF_WORKERS.get(target.worker_type or WorkerType.REGULAR)
    if own is None:
        return target
    return attrs.evolve(target, batch_kinds=(own,)) if own in kinds else None
