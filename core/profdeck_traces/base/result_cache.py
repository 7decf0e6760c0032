"""Results that are kept for the next question, in the user's cache: by key, checked, bounded.

Nothing in it is trusted that anybody else could have written, that is damaged, or that another version wrote. Losing it
costs time alone, and so does a cache that cannot be written.
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

from profdeck_traces.base.files import replace_file

logger = logging.getLogger("profdeck")

CACHE_VARIABLE = "PROFDECK_CACHE"
"""The directory of the cache, or ``off``."""
MAX_BYTES = 1 << 30
_MOST_FILES = 100_000
_MAGIC = b"profdeck results 1\n"
_MOST_RESULT_BYTES = 1 << 28
# So much is left when the cache is full: it is not tidied up at each result then.
_LEFT = 0.8


@attrs.frozen
class ResultCache:
    """A directory of results. Several processes may use it at the same time."""

    directory: Path
    max_bytes: int = MAX_BYTES

    @classmethod
    def of_user(cls, environ: Mapping[str, str] = os.environ) -> ResultCache | None:
        """Return the cache of this user; ``None`` where it is switched off, or others may write to it."""
        named = environ.get(CACHE_VARIABLE, "")
        if named == "off":
            return None
        try:
            directory = Path(named) if named else _default(environ)
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = directory.stat()
        except (OSError, RuntimeError) as error:  # there is no room, no permission, or no home
            logger.info("Nothing is kept of what is read: %s", error)
            return None
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            logger.info("%s is not used: others may write to it. %s names another.", directory, CACHE_VARIABLE)
            return None
        return cls(directory)

    def get(self, key: str) -> bytes | None:
        """Return a result, if it is there and whole."""
        path = self._path(key)
        try:
            # A link could lead to what somebody else wrote.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                data = file.read(_MOST_RESULT_BYTES + 1)
                os.utime(descriptor)  # what is used last goes last
        except OSError:
            return None
        body = len(_MAGIC) + 4
        if data.startswith(_MAGIC) and len(data) <= _MOST_RESULT_BYTES:
            content = data[body:]
            if zlib.crc32(key.encode() + content) == int.from_bytes(data[len(_MAGIC) : body], "little"):
                return content
        path.unlink(missing_ok=True)
        return None

    def put(self, key: str, content: bytes) -> None:
        """Keep a result; whatever goes wrong is logged."""
        if len(content) + len(_MAGIC) + 4 > min(_MOST_RESULT_BYTES, self.max_bytes):
            return
        path = self._path(key)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            checksum = zlib.crc32(key.encode() + content).to_bytes(4, "little")
            replace_file(path, b"".join((_MAGIC, checksum, content)), durable=False)
        except OSError as error:
            logger.debug("A result is not kept: %s", error)

    def tidy_up(self) -> None:
        """Remove what was not used for longest, if there is more than the cache may hold."""
        found = []
        for directory in _entries(self.directory):
            for entry in _entries(directory.path) if directory.is_dir(follow_symlinks=False) else ():
                with suppress(OSError):
                    if not entry.is_file(
                        follow_symlinks=False
                    ):  # a copy of a run, see profdeck_traces/inputs/url_copies.py
                        continue
                    about = entry.stat(follow_symlinks=False)
                    found.append((about.st_mtime_ns, about.st_size, entry.path))
        total, count = sum(size for _, size, _ in found), len(found)
        if total <= self.max_bytes and count <= _MOST_FILES:
            return
        for _, size, path in sorted(found):
            if total <= _LEFT * self.max_bytes and count <= _LEFT * _MOST_FILES:
                break
            with suppress(OSError):
                Path(path).unlink()
            total, count = total - size, count - 1

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / key[2:]


def _default(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "profdeck" / "results"


def _entries(path: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []
