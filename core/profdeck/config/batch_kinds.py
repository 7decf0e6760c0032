"""Kinds of batches in engine iterations."""

from __future__ import annotations

from enum import StrEnum


class BatchKind(StrEnum):
    """The kind of requests in the batch of an engine iteration."""

    PREFILL = "prefill"
    """Only requests whose prompt is being processed."""
    DECODE = "decode"
    """Only requests that generate tokens."""
    MIXED = "mixed"
    """Both kinds of requests, as with chunked prefill."""
