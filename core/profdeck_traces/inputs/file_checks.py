"""What reading a trace file to its end proved, and where that is kept."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.result_keys import FileIdentity, KeptResults


class Proof(msgspec.Struct):
    """What reading a trace to its end found."""

    whole: bool
    problem: str | None
    events: int | None
    """``None`` where it cannot be read."""
    sha256: str | None
    """Of the file, as far as somebody wants to compare it."""
    kept: bool = False
    """Whether it was found before, and the file did not change since."""


_decode = msgspec.json.Decoder(Proof).decode


class KeptProofs:
    """Proofs in a cache.

    Args:
        cache: Where they are kept; ``None`` keeps nothing.
    """

    def __init__(self, cache: ResultCache | None) -> None:
        self._results = KeptResults(cache, "whole")

    def get(self, path: Path, *, with_sum: bool) -> Proof | None:
        """Return what was proved of a trace, if nothing changed since.

        Args:
            path: The trace.
            with_sum: Whether its SHA-256 is wanted, too.
        """
        content = self._results.get(path, with_sum)
        try:
            return None if content is None else msgspec.structs.replace(_decode(content), kept=True)
        except msgspec.MsgspecError:
            return None

    def before(self, path: Path) -> FileIdentity | None:
        """Return what a trace is before it is read; ``None`` if nothing will be kept of it."""
        return self._results.before(path)

    def put(self, before: FileIdentity | None, path: Path, proof: Proof, *, with_sum: bool) -> None:
        """Keep what was proved, if the file is still what it was before that."""
        self._results.put(before, path, msgspec.json.encode(proof), with_sum)

    def tidy_up(self) -> None:
        """Keep the cache within its bounds."""
        self._results.tidy_up()


def sha256_of(path: Path) -> str | None:
    """Return the SHA-256 of a file; ``None`` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
