"""Creates and replaces files atomically, measures file sizes and locks directories."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

# Errors from os.link where hard links are unavailable, such as on FAT and some network file systems.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_COPY_BYTES = 1 << 20


def file_size(path: Path) -> int:
    """Return the size of a file in bytes, or 0 if the file does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def publish(temporary: Path, path: Path) -> None:
    """Give a finished temporary file its name, in the same directory.

    Raises:
        FileExistsError: the name is taken; the temporary file is left where it is.
        OSError: the file system refuses.
    """
    try:
        os.link(temporary, path)  # unlike rename, fails if the name is taken
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))  # takes the name, or fails
        temporary.replace(path)
    else:
        temporary.unlink()


@contextmanager
def new_file(path: Path) -> Generator[BinaryIO, None, None]:
    """Provide an unbuffered file that appears at the end: complete and on disk (fsync), or not at all.

    Raises:
        FileExistsError: There is something at ``path``; it was left as it is.
        OSError: The file system refuses.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    partial = _temporary(path)
    try:
        with partial.open("xb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(path.parent)


def write_all(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    """Write all of it to an unbuffered file, which may take it in parts."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def append_file(file: BinaryIO, path: Path) -> None:
    """Append what a file has to an unbuffered one, within the kernel where it can do that."""
    with path.open("rb", buffering=0) as source:
        with suppress(OSError, AttributeError):  # not every system and file system can
            while os.copy_file_range(source.fileno(), file.fileno(), _COPY_BYTES):
                pass
        while data := source.read(_COPY_BYTES):
            write_all(file, data)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can sync a directory
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist yet, whole or not at all. Of several who try, one succeeds.

    Raises:
        FileExistsError: it exists.
        OSError: it cannot be written.
    """
    # Somebody waits for a start: what a power failure takes then, the end of the capture writes again.
    with _written(path, content, durable=False) as temporary:
        publish(temporary, path)


def replace_file(path: Path, content: bytes, *, durable: bool) -> None:
    """Write a file atomically, replacing any existing file.

    Args:
        path: path of the file.
        content: complete content of the file.
        durable: whether the file must survive a power failure after this call.

    Raises:
        OSError: the file cannot be written.
    """
    with _written(path, content, durable=durable) as temporary:
        temporary.replace(path)


@contextmanager
def _written(path: Path, content: bytes, *, durable: bool) -> Generator[Path, None, None]:
    """Write a temporary file next to `path` for the ``with`` block to move there. Delete it if the block raises."""
    temporary = _temporary(path)
    try:
        _write(temporary, content, durable=durable)
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write(path: Path, content: bytes, *, durable: bool) -> None:
    # Use few system calls, because each one lets other threads run and a fleet writes a thousand manifests at once.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    # The suffix is random, because processes on different hosts or in different containers can have the same pid.
    # The file name is shortened, because it can already have the maximum length.
    return path.with_name(f".{path.name[:128]}.{secrets.token_hex(8)}.tmp")


def directory_size(path: Path) -> int:
    """Return the total size of all files in a directory tree, in bytes. Symbolic links are not counted."""
    return sum(
        size
        for directory, _, names in os.walk(path)
        for name in names
        if (size := _own_size(os.path.join(directory, name)))  # noqa: PTH118 - raw data are thousands of files
    )


def _own_size(path: str) -> int:
    try:
        about = os.lstat(path)
    except OSError:
        return 0
    return about.st_size if stat.S_ISREG(about.st_mode) else 0


def link_or_copy(source: Path, path: Path) -> None:
    """Give a file a second name, or copy it where that name is on another file system.

    Raises:
        FileExistsError: the name is taken.
        OSError: it cannot be written.
    """
    try:
        path.hardlink_to(source)
    except FileExistsError:
        raise
    except OSError:
        with new_file(path) as file:
            append_file(file, source)


@contextmanager
def lock_directory(directory: Path) -> Generator[None, None, None]:
    """Hold an exclusive lock on a directory inside the block. The lock has no effect on file systems without locks.

    Raises:
        OSError: the directory cannot be opened.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
