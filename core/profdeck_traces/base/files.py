"""Creates and replaces files atomically, measures file sizes, locks directories and parses paths entered by users."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from profdeck_traces.base.errors import ConfigError

# Errors from os.link where hard links are unavailable, such as on FAT and some network file systems.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_COPY_BYTES = 1 << 20


def file_size(path: Path) -> int:
    """Return the size of a file in bytes, or 0 if the file does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def sha256_of(path: Path) -> str | None:
    """Return a file's SHA-256 as a hexadecimal string, or ``None`` if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def publish(temporary: Path, path: Path) -> None:
    """Rename a complete temporary file to `path`, in the same directory, without replacing an existing file.

    Raises:
        FileExistsError: `path` exists. The temporary file is kept.
        OSError: The file cannot be renamed.
    """
    try:
        os.link(temporary, path)  # unlike rename, link fails if the path exists
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))  # reserve the path, or fail
        temporary.replace(path)
    else:
        temporary.unlink()


@contextmanager
def new_file(path: Path) -> Generator[BinaryIO, None, None]:
    """Yield an unbuffered binary file that is created at `path` when the block ends without an error.

    The file is synced to disk (fsync) before it appears at `path`. If the block raises, no file is created.

    Raises:
        FileExistsError: `path` exists. It is not changed.
        OSError: The file cannot be written.
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
    """Write all data to an unbuffered file, whose ``write`` may write only a part."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[file.write(remaining) :]


def append_file(file: BinaryIO, path: Path) -> None:
    """Append the contents of the file at `path` to an unbuffered file. If possible, the kernel copies the data."""
    with path.open("rb", buffering=0) as source:
        with suppress(OSError, AttributeError):  # some systems and file systems do not support it
            while os.copy_file_range(source.fileno(), file.fileno(), _COPY_BYTES):
                pass
        while data := source.read(_COPY_BYTES):
            write_all(file, data)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot sync a directory
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, content: bytes, *, private: bool = False) -> None:
    """Create a file atomically. If several processes try, only one succeeds.

    Args:
        path: Path of the file.
        content: Complete contents of the file.
        private: If True, only this user can read the file.

    Raises:
        FileExistsError: The file exists.
        OSError: The file cannot be written.
    """
    # No fsync: it would delay the start of a capture. The file is rewritten when the capture ends.
    with _temporary_with(path, content, durable=False, private=private) as temporary:
        publish(temporary, path)


def replace_file(path: Path, content: bytes | memoryview, *, durable: bool, private: bool = False) -> None:
    """Write a file atomically, replacing any existing file.

    Args:
        path: Path of the file.
        content: Complete contents of the file.
        durable: If True, sync the file to disk (fsync), so that it survives a power failure.
        private: If True, only this user can read the file.

    Raises:
        OSError: The file cannot be written.
    """
    with _temporary_with(path, content, durable=durable, private=private) as temporary:
        temporary.replace(path)


def replace_or_overwrite(path: Path, content: bytes) -> None:
    """Replace a JSON file durably, like `replace_file`. If the disk is full, overwrite the existing file in place.

    This requires that the existing file has enough blocks. Until its new size is set, it is padded with spaces, so that
    readers never see invalid JSON.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        replace_file(path, content, durable=True)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not _overwrite(path, content):
            raise


def _overwrite(path: Path, content: bytes) -> bool:
    """Overwrite a file without allocating disk blocks. Return False if that is impossible."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            is_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if is_own and len(content) <= status.st_blocks * 512:
                os.pwrite(descriptor, content.ljust(status.st_size), 0)
                os.ftruncate(descriptor, len(content))
                os.fsync(descriptor)
                return True
        finally:
            os.close(descriptor)
    return False


@contextmanager
def _temporary_with(
    path: Path, content: bytes | memoryview, *, durable: bool, private: bool
) -> Generator[Path, None, None]:
    """Write a temporary file next to `path` for the ``with`` block to move there. Delete it if the block raises."""
    temporary = _temporary(path)
    try:
        _write(temporary, content, durable=durable, mode=0o600 if private else 0o666)
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write(path: Path, content: bytes | memoryview, *, durable: bool, mode: int) -> None:
    # Make few system calls: each one lets other threads run, and a fleet writes a thousand manifests at once.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
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
        if (size := _regular_file_size(os.path.join(directory, name)))  # noqa: PTH118 - faster for thousands of files
    )


def _regular_file_size(path: str) -> int:
    """Return the size of a regular file, or 0 for any other path."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def link_or_copy(source: Path, path: Path) -> None:
    """Create `path` as a hard link to `source`. If hard links are not possible, copy the file.

    Raises:
        FileExistsError: `path` exists.
        OSError: The file cannot be written.
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
        OSError: The directory cannot be opened.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def user_path(path: str | os.PathLike[str], source: str | None = None) -> Path:
    """Parse a path that a user entered: expand ``~`` once, as a shell does, and reject environment variables.

    Args:
        path: The path.
        source: Where the path was entered, for error messages, such as the name of an environment variable.

    Raises:
        ConfigError: the home directory is unknown, or the path contains ``$`` and does not exist.
    """
    text = os.fspath(path)
    subject = f"{source}: {text!r}" if source else repr(text)
    expanded = os.path.expanduser(text)  # noqa: PTH111 - pathlib would also expand ./~
    if text.startswith("~") and expanded == text:
        raise ConfigError(f"{subject} starts with a home directory that cannot be resolved. Use the full path.")
    result = Path(expanded)
    if str(result).startswith("~"):
        result = Path.cwd() / result  # in a directory named ~, so that a second call does not expand it
    if any("$" in level.name and not os.path.lexists(level) for level in (result, *result.parents)):
        raise ConfigError(f"{subject} contains an environment variable, which is not expanded. Use the full path.")
    return result
