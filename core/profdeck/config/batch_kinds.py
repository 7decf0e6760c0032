"""Kinds of batches in engine iterations."""

from __future__ import annotations

from enum import StrEnum


class BatchKind(StrEnum):
    """Kind of an engine's batch, determined by the requests in the batch."""

    PREFILL = "prefill"
    """All requests in the batch process their prompts."""
    DECODE = "decode"
    """All requests in the batch generate tokens."""
    MIXED = "mixed"
    """The batch contains both kinds of requests, as with chunked prefill."""
