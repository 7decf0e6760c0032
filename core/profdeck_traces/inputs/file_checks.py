"""Caches the results of file checks, and computes checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.artifact_kinds import FileCheck
from profdeck_traces.inputs.result_keys import FileIdentity, KeptResults

_decode = msgspec.json.Decoder(FileCheck).decode


class KeptChecks:
    """Reads and writes cached `FileCheck` results.

    Args:
        cache: The cache; ``None`` disables caching.
    """

    def __init__(self, cache: ResultCache | None) -> None:
        self._results = KeptResults(cache, "whole")

    def get(self, path: Path, *, with_sum: bool) -> FileCheck | None:
        """Return a trace's cached check result, or ``None`` if there is none or the file has changed.

        Args:
            path: The trace.
            with_sum: True if the result must include the SHA-256.
        """
        content = self._results.get(path, with_sum)
        try:
            return None if content is None else msgspec.structs.replace(_decode(content), kept=True)
        except msgspec.MsgspecError:
            return None

    def before(self, path: Path) -> FileIdentity | None:
        """Return a trace file's identity before it is read, or ``None`` if its check result cannot be cached."""
        return self._results.before(path)

    def put(self, before: FileIdentity | None, path: Path, check: FileCheck, *, with_sum: bool) -> None:
        """Cache a check result if the file's identity is still `before`."""
        self._results.put(before, path, msgspec.json.encode(check), with_sum)

    def evict(self) -> None:
        """Delete the least recently used results if the cache exceeds its limits."""
        self._results.evict()


def sha256_of(path: Path) -> str | None:
    """Return a file's SHA-256 as a hexadecimal string, or ``None`` if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
