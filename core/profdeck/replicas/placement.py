"""Selection of engines by GPU ranks of the job, for example rollout engines that share GPUs with trainers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs import validators

from profdeck.base.errors import CaptureError
from profdeck.replicas.discovery import Target
from profdeck.replicas.member import target_key


def _to_tuple(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(ranks)


@attrs.frozen
class PlacedEngine:
    """A target, and the GPU ranks of the job that it runs on.

    If a host passes placed engines, ``ranks`` of the role selects GPU ranks of the job. The engine ranks on these GPUs
    record. Engines that run on none of them do not record.
    """

    target: Any
    """Target of the backend: an engine object, an actor that holds one, or a URL."""
    gpu_ranks: tuple[int, ...] = attrs.field(converter=_to_tuple, validator=validators.min_len(1))
    """Job rank of the GPU that each engine rank runs on, indexed by engine rank."""


def on_gpu_ranks(
    targets: Sequence[Target], placements: Mapping[object, Sequence[int]], ranks: str | Sequence[int]
) -> list[Target]:
    """Select the targets, and their engine ranks, that run on the selected GPU ranks.

    Args:
        targets: all targets of the role.
        placements: GPU ranks of the placed engines, by `target_key`. All other targets are selected.
        ranks: the selected GPU ranks, or ``all``.

    Raises:
        CaptureError: no target runs on the selected GPU ranks.
    """
    if isinstance(ranks, str):
        return list(targets)
    selected, all_gpu_ranks = [], set[int]()
    for target in targets:
        gpu_ranks = placements.get(target_key(target.handle))
        if gpu_ranks is None:
            selected.append(target)
            continue
        all_gpu_ranks.update(gpu_ranks)
        if engine_ranks := tuple(rank for rank, gpu_rank in enumerate(gpu_ranks) if gpu_rank in ranks):
            selected.append(attrs.evolve(target, ranks=engine_ranks))
    if not selected:
        raise CaptureError(
            f"ranks: {sorted(ranks)} are GPU ranks of this job, and no target runs on them. Targets run on the GPU "
            f"ranks {', '.join(map(str, sorted(all_gpu_ranks)))}."
        )
    return selected
