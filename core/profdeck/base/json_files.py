"""Small JSON files that other processes, other hosts or anybody may have written."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

_MOST_BYTES = 64 << 20


class JsonKind(Generic[T]):
    """Reader for JSON data of one class.

    Create instances at module level, next to the class, and never in a function. msgspec caches type information on the
    class before the information is complete. If another thread, or a finalizer in the same thread, decodes the class in
    the meantime, the process crashes with a segmentation fault.
    """

    def __init__(self, kind: type[T]) -> None:
        self._decode = msgspec.json.Decoder(kind).decode

    def read(self, path: Path) -> T:
        """Read a small file.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read, or is no regular file.
            ValueError: it is too large, or not of this kind.
        """
        return self.decode(read_whole(path))

    def decode(self, content: bytes) -> T:
        """Decode it.

        Raises:
            ValueError: it is no JSON, or of another kind.
        """
        try:
            return self._decode(content)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            raise ValueError(str(error)) from None


JSON_OBJECT = JsonKind(dict[str, Any])


def read_whole(path: Path) -> bytes:
    """Read a small file. Only regular files are opened: a pipe would wait for a writer, a device has no end.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read, or is no regular file.
        ValueError: it is too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor
        return read_bounded(file.fileno())


def read_bounded(descriptor: int) -> bytes:
    """Read an open file whole.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is too large.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file")
    with open(descriptor, "rb", closefd=False) as file:  # as above
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return content
