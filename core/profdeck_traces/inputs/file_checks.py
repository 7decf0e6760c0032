"""Caches the results of file checks, which may also come from result files next to traces."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.artifact_kinds import FileCheck
from profdeck_traces.inputs.result_files import read_result
from profdeck_traces.inputs.result_keys import FileIdentity, KeptResults

_decode = msgspec.json.Decoder(FileCheck).decode


class KeptChecks:
    """Reads and writes cached `FileCheck` results.

    Args:
        cache: The cache; ``None`` disables caching.
    """

    def __init__(self, cache: ResultCache | None) -> None:
        self._cache, self._results = cache, KeptResults(cache, "whole")

    def get(self, path: Path, *, with_sum: bool) -> FileCheck | None:
        """Return a trace's check result from the cache or its result file, or ``None`` if the trace must be read.

        Args:
            path: The trace.
            with_sum: True if the result must include the SHA-256.
        """
        if self._cache is None:
            return None
        if (content := self._results.get(path, with_sum)) is not None:
            with suppress(msgspec.MsgspecError):
                return msgspec.structs.replace(_decode(content), kept=True)
        before = self.before(path)
        if (result := read_result(path)) is None:
            return None
        self.put(before, path, result.check, with_sum=with_sum)
        return msgspec.structs.replace(result.check, kept=True)

    def before(self, path: Path) -> FileIdentity | None:
        """Return a trace file's identity before it is read, or ``None`` if its check result cannot be cached."""
        return self._results.before(path)

    def put(self, before: FileIdentity | None, path: Path, check: FileCheck, *, with_sum: bool) -> None:
        """Cache a check result if the file's identity is still `before`."""
        self._results.put(before, path, msgspec.json.encode(check), with_sum)

    def evict(self) -> None:
        """Delete the least recently used results if the cache exceeds its limits."""
        self._results.evict()
