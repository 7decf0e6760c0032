"""Selects the batch kinds that each worker of a disaggregated fleet records.

A worker would wait forever for a kind of batch that it never runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from profdeck.base.errors import CaptureError
from profdeck.config.targets import WorkerType
from profdeck.records.request import BatchKind
from profdeck.replicas.discovery import Target

_KIND_BY_WORKER_TYPE = {WorkerType.PREFILL: BatchKind.PREFILL, WorkerType.DECODE: BatchKind.DECODE}


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
    results = [_select(target, kinds) for target in targets]
    selected = [target for target in results if target is not None]
    excluded = Counter(target.worker_type for target, result in zip(targets, results, strict=True) if result is None)
    notes = [
        f"Excluded {count} of {len(targets)} targets: {worker_type} workers have no {' or '.join(kinds)} batches."
        for worker_type, count in excluded.items()
    ]
    if not selected:
        raise CaptureError(" ".join(["No target has batches of these kinds.", *notes]))
    return selected, notes


def _select(target: Target, kinds: Sequence[BatchKind]) -> Target | None:
    kind = _KIND_BY_WORKER_TYPE.get(target.worker_type or WorkerType.REGULAR)
    if kind is None:
        return target
    return attrs.evolve(target, batch_kinds=(kind,)) if kind in kinds else None
