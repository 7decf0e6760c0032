"""What was read of a Chrome trace and is kept: under a key by which it is found only where nothing changed since.

A key holds what the file was (size, times, inode, and the bytes at its end, which of gzip are checksum and length),
what was asked, and the code that answered. Nothing is kept of a file that has just changed: it may change again
within the resolution of its times. Artifacts of other kinds are read each time.
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

# Kernels count time in ticks of 10 ms at most, file systems such as FAT in steps of two seconds.
_UNSETTLED_NS, _UNSETTLED_COARSE_NS = 100_000_000, 2_000_000_000
_NS_PER_S = 1_000_000_000
_END_BYTES = 4096


@attrs.frozen
class FileIdentity:
    """What a file was at some moment."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    """When its content or status changed, which no program can set."""
    end: bytes
    """SHA-256 of its last 4 KiB."""


def identity_of(path: Path) -> FileIdentity | None:
    """Return what the file of a Chrome trace is now; ``None`` of anything else, and where it may change unnoticed."""
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


class KeptResults:
    """The results of one way of asking, such as a summary by some rules.

    Args:
        cache: Where they are kept; ``None`` keeps nothing.
        asked: What the answer depends on besides the file: plain data.
    """

    def __init__(self, cache: ResultCache | None, *asked: Any) -> None:
        self._cache = cache
        self._asked = asked

    def get(self, path: Path, *about: Any) -> bytes | None:
        """Return what is kept of a trace.

        Args:
            path: The trace.
            about: What else the answer depends on.
        """
        if self._cache is None or (identity := identity_of(path)) is None:
            return None
        return self._cache.get(self._key(identity, about))

    def before(self, path: Path) -> FileIdentity | None:
        """Return what a trace is before it is read; ``None`` if nothing will be kept of it."""
        return None if self._cache is None else identity_of(path)

    def put(self, before: FileIdentity | None, path: Path, content: bytes, *about: Any) -> None:
        """Keep what was read, if the file is still what it was before that."""
        if self._cache is not None and before is not None and identity_of(path) == before:
            self._cache.put(self._key(before, about), content)

    def evict(self) -> None:
        """Keep the cache within its bounds."""
        if self._cache is not None:
            self._cache.evict()

    def _key(self, identity: FileIdentity, about: tuple[Any, ...]) -> str:
        # As Python writes it, which takes any text and number.
        content = repr([_code(), attrs.astuple(identity), self._asked, about])
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


@functools.cache
def _code() -> list[Any]:
    """Return what tells one state of the code that reads traces from another."""
    root = Path(__file__).parents[1]
    newest_ns = max(path.stat().st_mtime_ns for path in root.rglob("*.py"))
    plugins = [(name, point.value, _version(point)) for name, point in installed(TRACE_NAMES).items()]
    return [__version__, newest_ns, plugins]


def _version(point: metadata.EntryPoint) -> str | None:
    return point.dist.version if point.dist else None
