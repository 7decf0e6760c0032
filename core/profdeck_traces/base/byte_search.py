"""Imports stringzilla, which searches large buffers for substrings. The extra ``traces`` installs it."""

from __future__ import annotations

from profdeck_traces.base.errors import MissingLibraryError

try:
    import stringzilla as stringzilla  # noqa: PLC0414  # re-exported
except ImportError:
    raise MissingLibraryError.of("Reading traces needs", "stringzilla", "traces") from None
