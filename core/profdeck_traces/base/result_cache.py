"""A size-limited cache of results in the user's cache directory.

Results are stored by key with a checksum. Entries that are corrupt, were written by another version or could have been
written by another user are ignored. If the cache is lost or cannot be written, results are computed again.
"""

from __future__ import annotations

import logging
import os
import stat
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from profdeck_traces.base.files import replace_file, user_path

logger = logging.getLogger("profdeck")

CACHE_VARIABLE = "PROFDECK_CACHE"
"""Environment variable with the cache directory, or ``off`` to disable the cache."""
MAX_BYTES = 1 << 30
_MAX_FILES = 100_000
_MAGIC = b"profdeck results 1\n"
_MAX_RESULT_BYTES = 1 << 28
# Target fill level of an eviction. With 1.0, a full cache would evict files after each result.
_FILL_AFTER_EVICTION = 0.8


@attrs.frozen
class ResultCache:
    """Cache in a directory, which several processes can use at the same time."""

    directory: Path
    max_bytes: int = MAX_BYTES

    @classmethod
    def of_user(cls, environ: Mapping[str, str] = os.environ) -> ResultCache | None:
        """Return the user's cache, or ``None`` if it is disabled, cannot be created or is writable by other users.

        Raises:
            ConfigError: the environment variable contains an invalid path.
        """
        setting = environ.get(CACHE_VARIABLE, "")
        if setting == "off":
            return None
        try:
            directory = user_path(setting, CACHE_VARIABLE) if setting else _default_directory(environ)
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.stat()
        except (OSError, RuntimeError) as error:  # RuntimeError: the home directory is unknown
            logger.info("The result cache is disabled: %s", error)
            return None
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            logger.info(
                "The result cache is disabled: other users can write to %s. Set %s to another directory.",
                directory,
                CACHE_VARIABLE,
            )
            return None
        return cls(directory)

    def get(self, key: str) -> bytes | None:
        """Return a cached result, or ``None``. A corrupt entry is deleted."""
        path = self._path(key)
        try:
            # O_NOFOLLOW: a symbolic link could point to a file written by another user.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                data = file.read(_MAX_RESULT_BYTES + 1)
                os.utime(descriptor)  # eviction is ordered by modification time
        except OSError:
            return None
        content = content_of(key, data) if len(data) <= _MAX_RESULT_BYTES else None
        if content is None:
            path.unlink(missing_ok=True)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Store a result. Errors are logged, and a result larger than the limit is not stored."""
        if len(content) + len(_MAGIC) + 4 > min(_MAX_RESULT_BYTES, self.max_bytes):
            return
        path = self._path(key)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(path, framed(key, content), durable=False)
        except OSError as error:
            logger.debug("A result could not be cached: %s", error)

    def evict(self) -> None:
        """Delete the least recently used results if the cache exceeds its limits."""
        files = []
        for directory in _entries(self.directory):
            for entry in _entries(directory.path) if directory.is_dir(follow_symlinks=False) else ():
                with suppress(OSError):
                    # Directories are copies of runs, which profdeck_traces/inputs/url_copies.py manages.
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        files.append((status.st_mtime_ns, status.st_size, entry.path))
        total_bytes, count = sum(size_bytes for _, size_bytes, _ in files), len(files)
        if total_bytes <= self.max_bytes and count <= _MAX_FILES:
            return
        for _, size_bytes, path in sorted(files):
            if total_bytes <= _FILL_AFTER_EVICTION * self.max_bytes and count <= _FILL_AFTER_EVICTION * _MAX_FILES:
                break
            with suppress(OSError):
                Path(path).unlink()
            total_bytes, count = total_bytes - size_bytes, count - 1

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / key[2:]


def framed(key: str, content: bytes) -> bytes:
    """Return the data of a result file: a header, a checksum of the key and content, and the content."""
    return b"".join((_MAGIC, zlib.crc32(key.encode() + content).to_bytes(4, "little"), content))


def content_of(key: str, data: bytes) -> bytes | None:
    """Return the content of a result file, or ``None`` if it is corrupt or belongs to a different key."""
    content_start = len(_MAGIC) + 4
    content, checksum = data[content_start:], int.from_bytes(data[len(_MAGIC) : content_start], "little")
    is_intact = data.startswith(_MAGIC) and zlib.crc32(key.encode() + content) == checksum
    return content if is_intact else None


def _default_directory(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "profdeck" / "results"


def _entries(path: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []
