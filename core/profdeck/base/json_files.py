"""Small JSON files from untrusted sources, such as other processes and hosts."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

_MAX_BYTES = 64 << 20


class JsonKind(Generic[T]):
    """Reader for JSON data of one class.

    Create instances at module level, next to the class, and never in a function. msgspec caches type information on the
    class before the information is complete. If another thread, or a finalizer in the same thread, decodes the class in
    the meantime, the process crashes with a segmentation fault.
    """

    def __init__(self, kind: type[T]) -> None:
        self._decode = msgspec.json.Decoder(kind).decode

    def read(self, path: Path) -> T:
        """Read and decode a file.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: the file cannot be read, or is not a regular file.
            ValueError: the file is larger than 64 MiB, or its content is invalid.
        """
        return self.decode(read_regular_file(path))

    def decode(self, content: bytes) -> T:
        """Decode JSON text.

        Raises:
            ValueError: the content is not JSON, or does not match the class.
        """
        try:
            return self._decode(content)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            raise ValueError(str(error)) from None


JSON_OBJECT = JsonKind(dict[str, Any])


def read_regular_file(path: Path) -> bytes:
    """Read a file of at most 64 MiB.

    Other file types are rejected, because reading a pipe can block and reading a device may never end.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the file is too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor
        return read_descriptor(file.fileno())


def read_descriptor(descriptor: int) -> bytes:
    """Read an open file of at most 64 MiB.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the file is too large.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file")
    with open(descriptor, "rb", closefd=False) as file:  # as above
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB")
    return content
