"""What a server gives away of its output directory: manifests, and the artifacts that they name.

No link is followed below that directory, so nothing outside of it is reached. Manifests are replaced by rename, and
name artifacts when these are whole; the one thing that changes later is a directory that torch_npu's analysis is
still at work on.
"""

from __future__ import annotations

import io
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

import attrs

from profdeck.base.json_files import read_descriptor
from profdeck.records.manifest import decode_manifest, is_manifest
from profdeck_traces.base.errors import ProfdeckError, TraceError
from profdeck_traces.inputs.artifact_kinds import kind_of

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PASS = _READ | os.O_DIRECTORY


class NotServedError(ProfdeckError):
    """It is not given away; `status` is that of the answer."""

    def __init__(self, text: str, status: HTTPStatus) -> None:
        super().__init__(text)
        self.status = status


@attrs.define
class ServedFile:
    """A file that is open to be sent. The receiver closes it."""

    file: io.FileIO
    size_bytes: int
    tag: str
    """Names this version of the file, as the header ``ETag`` does."""

    @classmethod
    def of(cls, descriptor: int) -> ServedFile:
        """Take an open file."""
        about = os.fstat(descriptor)
        tag = f'"{about.st_ino:x}-{about.st_size:x}-{about.st_mtime_ns:x}"'
        return cls(io.FileIO(descriptor), about.st_size, tag)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Read a part; fewer bytes than asked for at the end, or if it has been cut off meanwhile."""
        return os.pread(self.file.fileno(), size_bytes, offset)

    def close(self) -> None:
        """Close it."""
        self.file.close()


def find(output: Path, place: str) -> ServedFile | Mapping[str, int]:
    """Open what is asked for.

    Args:
        output: the server's output directory.
        place: a path below it, with slashes.

    Returns:
        A manifest, an artifact or a file inside of one. For an artifact that is a directory, the files in it; for any
        other directory, the manifests in it; each with its size in bytes.

    Raises:
        NotServedError: there is no such thing, or it is being written.
    """
    parts = place.split("/")
    if {"", ".", ".."} & set(parts) or "\0" in place:
        raise _absent(output, place)
    try:
        return _found(output, parts)
    except PermissionError:
        text = f"{output / place} on {socket.gethostname()} may not be read by the server's user."
        raise NotServedError(text, HTTPStatus.FORBIDDEN) from None
    except (OSError, ValueError):  # also names that no file can have
        raise _absent(output, place) from None


def _found(output: Path, parts: list[str]) -> ServedFile | Mapping[str, int]:
    *above, name = parts
    inside = False  # of an artifact
    directory = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in above:
            inside = inside or _is_artifact(directory, part)
            below = os.open(part, _PASS, dir_fd=directory)
            os.close(directory)
            directory = below
        return _given(directory, name, output.joinpath(*parts), inside=inside)
    finally:
        os.close(directory)


def _given(directory: int, name: str, path: Path, *, inside: bool) -> ServedFile | Mapping[str, int]:
    artifact = inside or _is_artifact(directory, name)
    descriptor = os.open(name, _READ, dir_fd=directory)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISREG(kind) and (artifact or is_manifest(Path(name))):
            served = ServedFile.of(descriptor)
            descriptor = -1
            return served
        if not stat.S_ISDIR(kind):
            raise FileNotFoundError(path)
        if not artifact:
            return dict(_manifests(descriptor))
        with suppress(TraceError):  # the reader of the directory reports it
            of_plugin = kind_of(path)
            work = None if of_plugin is None else of_plugin.pending(path)
            if work is not None and work.alive:
                text = f"{path} is being analysed by process {work.pid} on {socket.gethostname()}: ask again later."
                raise NotServedError(text, HTTPStatus.CONFLICT)
        return dict(_files(descriptor))
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_artifact(directory: int, name: str) -> bool:
    """Tell whether a manifest in the directory names it; its own name begins with that of the manifest."""
    for end, letter in enumerate(name):
        if letter not in "._":
            continue
        beside = f"{name[:end]}.json"
        if beside == name or not is_manifest(Path(beside)):
            continue
        with suppress(OSError, ValueError):
            with open(os.open(beside, _READ, dir_fd=directory), "rb") as file:  # noqa: PTH123  # a descriptor
                manifest = decode_manifest(read_descriptor(file.fileno()))
            if any(record.name == name for record in manifest.artifacts):
                return True
    return False


def _manifests(directory: int) -> Iterator[tuple[str, int]]:
    for name in os.listdir(directory):
        if is_manifest(Path(name)) and (size := _size(directory, name)) is not None:
            yield name, size


def _files(directory: int) -> Iterator[tuple[str, int]]:
    for place, _, names, opened in os.fwalk(".", dir_fd=directory):
        for name in names:
            if (size := _size(opened, name)) is not None:
                yield os.path.normpath(f"{place}/{name}"), size


def _size(directory: int, name: str) -> int | None:
    """Return the size of a file; None for what is none, such as a link, or has vanished."""
    try:
        about = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return about.st_size if stat.S_ISREG(about.st_mode) else None


def _absent(output: Path, place: str) -> NotServedError:
    host = socket.gethostname()
    return NotServedError(
        f"There is no file {place!r} of a capture below {output} on {host}. Other ranks of the engine may have written "
        "on other hosts.",
        HTTPStatus.NOT_FOUND,
    )
