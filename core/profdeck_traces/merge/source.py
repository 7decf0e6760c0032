"""What is merged."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Protocol

import attrs

from profdeck_traces.base.errors import TraceError
from profdeck_traces.inputs.artifact_kinds import chrome_trace
from profdeck_traces.reading.stream import read_chunks

_HEAD_BYTES = 1 << 18


class EventFilter(Protocol):
    """Chooses events; goes to other processes, so that it must be possible to pickle it."""

    def apply(self, array: bytes) -> bytes:
        """Return a JSON array of those objects of ``array``, one as well, that are to be kept, in the same layout."""


@attrs.frozen
class MergeSource:
    """One trace to merge."""

    path: Path
    """A Chrome trace, plain or gzip, or an artifact that has one."""
    label: str
    """Put in front of the names of its processes, such as ``"rollout/2 rank 1 (tp1)"``."""
    sort_index: int
    """The place of its processes in the viewer; sources with the same one stay in the order given."""
    shift_ns: int = 0
    """Added to all of its times, for clocks that are apart."""
    select: EventFilter | None = None
    """Which of its events are merged; all, if not given."""

    @property
    def file(self) -> Path:
        """The Chrome trace.

        Raises:
            TraceError: There is none in the directory.
        """
        return chrome_trace(self.path)

    def head(self) -> bytes:
        """Return the first 256 KiB of its text; nothing where it cannot be read, which is said later."""
        with suppress(TraceError):
            chunks = read_chunks(self.file, _HEAD_BYTES)
            try:
                return bytes(next(chunks, b""))
            finally:
                chunks.close()
        return b""
