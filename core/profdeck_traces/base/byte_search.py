"""Imports stringzilla, a library for fast substring search, or raises an error with install instructions."""

from __future__ import annotations

from profdeck_traces.base.errors import MissingLibraryError

try:
    import stringzilla as stringzilla  # noqa: PLC0414  # re-exported
except ImportError:
    raise MissingLibraryError.for_library("Reading traces needs", "stringzilla", "traces") from None
