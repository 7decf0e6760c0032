"""Small JSON files that other processes, other hosts or anybody may have written."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_MOST_BYTES = 64 << 20
_learning = threading.Lock()


def read_json(path: Path, kind: type[T]) -> T:
    """Read such a file.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read, or is no regular file.
        ValueError: it is too large, or not of this kind.
    """
    return decode_json(read_whole(path), kind)


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
        raise OSError(errno.EINVAL, "is no regular file")
    with open(descriptor, "rb", closefd=False) as file:  # as above
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return content


def decode_json(content: bytes, kind: type[T]) -> T:
    """Decode JSON of a kind.

    Raises:
        ValueError: it is none, or of another kind.
    """
    try:
        decoded: T = json_decoder(kind)(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return decoded


def json_decoder(kind: Any) -> Callable[[bytes | memoryview], Any]:
    """Return what decodes JSON of a kind, and raises what msgspec raises.

    To be used for all classes that several threads decode. msgspec keeps what it learns of a class on the class, from
    before it has learned it all; a thread that finds it unfinished ends the process by a segmentation fault.
    """
    with _learning:
        return msgspec.json.Decoder(kind).decode
