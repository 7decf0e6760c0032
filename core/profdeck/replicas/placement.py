"""Engines whose ranks have numbers in the whole job, such as rollouts that share GPUs with trainers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs import validators

from profdeck.base.errors import CaptureError
from profdeck.replicas.discovery import Target
from profdeck.replicas.member import target_key


def _ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(ranks)


@attrs.frozen
class PlacedEngine:
    """A target together with the GPU ranks of the job that it runs on.

    Where a host passes these, ``ranks`` of the role are GPU ranks of the job: of each engine the ranks record that run
    on them, and an engine on none of them is not asked.
    """

    target: Any
    """Target of the backend: an engine object, an actor that holds one, or a URL."""
    gpu_ranks: tuple[int, ...] = attrs.field(converter=_ranks, validator=validators.min_len(1))
    """Job rank of the GPU that each engine rank runs on, indexed by engine rank."""


def on_gpu_ranks(
    targets: Sequence[Target], placed: Mapping[object, Sequence[int]], ranks: str | Sequence[int]
) -> list[Target]:
    """Select what records when GPU ranks of the job are chosen.

    Args:
        targets: all targets of the role.
        placed: the GPU ranks of those whose placement is known, by `target_key`; the others are all selected.
        ranks: the chosen ranks, or ``all``.

    Raises:
        CaptureError: no target runs on any of them.
    """
    if isinstance(ranks, str):
        return list(targets)
    selected, everything = [], set[int]()
    for target in targets:
        mine = placed.get(target_key(target.handle))
        own = None if mine is None else tuple(rank for rank, gpu in enumerate(mine) if gpu in ranks)
        everything.update(mine or ())
        if own is None or own:
            selected.append(attrs.evolve(target, ranks=own))
    if not selected:
        raise CaptureError(
            f"ranks: {sorted(ranks)} are GPU ranks of this job, and no target runs on one of them; targets run on "
            f"{', '.join(map(str, sorted(everything)))}."
        )
    return selected
