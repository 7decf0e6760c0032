"""What an iteration of SGLang holds, read from the scheduler's batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck.engines import BatchKind

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def runs(batch: ScheduleBatch) -> bool:
    """Tell whether a batch enters the model: those whose prompts another server has read do not."""
    return not batch.forward_mode.is_prebuilt()


def kind(batch: ScheduleBatch) -> BatchKind | None:
    """Return the kind of a batch; None for the empty ones that data-parallel attention runs beside its neighbours.

    SGLang counts the verification of drafted tokens as an extension of the sequences; it is a part of decoding.
    """
    mode = batch.forward_mode
    if mode.is_idle():
        return None
    if mode.is_mixed():
        return BatchKind.MIXED
    if mode.is_decode() or mode.is_target_verify() or not mode.is_extend():
        return BatchKind.DECODE
    return BatchKind.PREFILL
