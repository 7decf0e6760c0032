"""Kinds of batches of engine iterations."""

from __future__ import annotations

from enum import StrEnum


class BatchKind(StrEnum):
    """The requests in the batch of an engine iteration."""

    PREFILL = "prefill"
    """Only requests whose prompt is being read."""
    DECODE = "decode"
    """Only requests that generate."""
    MIXED = "mixed"
    """Both, as with chunked prefill."""
