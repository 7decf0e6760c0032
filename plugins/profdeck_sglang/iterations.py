"""Classifies SGLang iterations from the scheduler's batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck.engines import BatchKind

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def is_iteration(batch: ScheduleBatch) -> bool:
    """Return whether a batch runs the model. A batch whose prefill ran on another server does not."""
    return not batch.forward_mode.is_prebuilt()


def classify(batch: ScheduleBatch) -> BatchKind | None:
    """Return the kind of a batch, or None for the empty batches of data-parallel attention.

    The verification of draft tokens is decoding, although SGLang's ``is_extend`` includes it.
    """
    mode = batch.forward_mode
    if mode.is_idle():
        return None
    if mode.is_mixed():
        return BatchKind.MIXED
    if mode.is_decode() or mode.is_target_verify() or not mode.is_extend():
        return BatchKind.DECODE
    return BatchKind.PREFILL
