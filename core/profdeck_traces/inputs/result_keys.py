"""Cache keys for results from Chrome traces.

A key contains the file's identity (size, times, inode and last bytes, which in gzip files are checksum and length), the
question and the version of the code. Results for a recently changed file are not cached, because the file can change
again within the resolution of its timestamps. Results for artifacts of plugins are not cached.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from profdeck_traces.base.entry_points import TRACE_NAMES, installed
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.base.version import __version__
from profdeck_traces.inputs.artifact_kinds import kind_of

# Timestamps have a resolution of at most 10 ms, or 2 s on file systems such as FAT.
_UNSETTLED_NS, _UNSETTLED_COARSE_NS = 100_000_000, 2_000_000_000
_NS_PER_S = 1_000_000_000
_END_BYTES = 4096


@attrs.frozen
class FileIdentity:
    """State of a file: a change of its content changes this."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    """Time of the last status change, which programs cannot set."""
    end: bytes
    """SHA-256 of the last 4 KiB."""


def identity_of(path: Path) -> FileIdentity | None:
    """Return the identity of a Chrome trace file, or ``None`` for other files or if it could change undetected."""
    if kind_of(path) is not None:
        return None
    try:
        with path.open("rb", buffering=0) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                return None
            file.seek(max(0, about.st_size - _END_BYTES))
            end = file.read(_END_BYTES)
    except OSError:
        return None
    is_coarse = about.st_ctime_ns % _NS_PER_S == 0
    unsettled_ns = _UNSETTLED_COARSE_NS if is_coarse else _UNSETTLED_NS
    if max(about.st_mtime_ns, about.st_ctime_ns) + unsettled_ns > time.time_ns():
        return None
    return FileIdentity(
        about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns, hashlib.sha256(end).digest()
    )


@functools.cache
def code_files() -> tuple[Path, ...]:
    """Return this package's Python files and its compiled library, if any, sorted by path."""
    return tuple(sorted(path for path in Path(__file__).parents[1].rglob("*") if path.suffix in {".py", ".so"}))


class KeptResults:
    """Cached results of one question about traces, such as a summary by certain rules.

    Args:
        cache: Cache, or ``None`` to cache nothing.
        question: Parameters of the question, as plain data.
    """

    def __init__(self, cache: ResultCache | None, *question: Any) -> None:
        self._cache = cache
        self._question = question

    def get(self, path: Path, *parameters: Any) -> bytes | None:
        """Return the cached result for a trace, or ``None``.

        Args:
            path: The trace.
            parameters: Parameters of the question for this trace.
        """
        if self._cache is None or (identity := identity_of(path)) is None:
            return None
        return self._cache.get(self._key(identity, parameters))

    def before(self, path: Path) -> FileIdentity | None:
        """Return a trace file's identity before it is read, or ``None`` if its result cannot be cached."""
        return None if self._cache is None else identity_of(path)

    def put(self, before: FileIdentity | None, path: Path, content: bytes, *parameters: Any) -> None:
        """Cache a result if the file's identity is still `before`."""
        if self._cache is not None and before is not None and identity_of(path) == before:
            self._cache.put(self._key(before, parameters), content)

    def evict(self) -> None:
        """Delete the least recently used results if the cache exceeds its limits."""
        if self._cache is not None:
            self._cache.evict()

    def _key(self, identity: FileIdentity, parameters: tuple[Any, ...]) -> str:
        # JSON cannot encode all strings and numbers of a trace.
        content = repr([_code_version(), attrs.astuple(identity), self._question, parameters])
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


@functools.cache
def _code_version() -> list[Any]:
    """Return values that change if the code that reads traces changes."""
    changes = [(path.name, path.stat().st_mtime_ns) for path in code_files()]
    plugins = [(name, point.value, _version(point)) for name, point in installed(TRACE_NAMES).items()]
    return [__version__, changes, plugins]


def _version(point: metadata.EntryPoint) -> str | None:
    return point.dist.version if point.dist else None
