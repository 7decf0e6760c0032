"""Files that a server exposes for download from its output directory: manifests and the artifacts listed in them.

Links below that directory are not followed, so files outside it are not accessible. Manifests are replaced by rename
and list only complete artifacts. The exception is a directory that an analysis of its artifact plugin still changes.
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

_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_FLAGS = _FILE_FLAGS | os.O_DIRECTORY


class NotServedError(ProfdeckError):
    """The requested path is not available. `status` is the HTTP status of the response."""

    def __init__(self, text: str, status: HTTPStatus) -> None:
        super().__init__(text)
        self.status = status


@attrs.define
class ServedFile:
    """An open file. The receiver closes it."""

    file: io.FileIO
    size_bytes: int
    tag: str
    """``ETag`` of this version of the file."""

    @classmethod
    def from_descriptor(cls, descriptor: int) -> ServedFile:
        """Wrap an open file descriptor. The instance closes the descriptor."""
        status = os.fstat(descriptor)
        tag = f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"'
        return cls(io.FileIO(descriptor), status.st_size, tag)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Read bytes from a position. The result is shorter at the end of the file."""
        return os.pread(self.file.fileno(), size_bytes, offset)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def open_path(output: Path, path: str) -> ServedFile | Mapping[str, int]:
    """Open a file, or list a directory.

    Args:
        output: the server's output directory.
        path: a path relative to it, with slashes.

    Returns:
        For a manifest, an artifact or a file in an artifact: the open file. For an artifact that is a directory: the
        sizes of its files in bytes, by name. For any other directory: the sizes of the manifests in it, by name.

    Raises:
        NotServedError: the path does not exist, cannot be read, is not part of a capture, or is being written.
    """
    parts = path.split("/")
    if {"", ".", ".."} & set(parts) or "\0" in path:
        raise _not_found(output, path)
    try:
        return _open_parts(output, parts)
    except PermissionError:
        text = f"The server's user has no permission to read {output / path} on {socket.gethostname()}."
        raise NotServedError(text, HTTPStatus.FORBIDDEN) from None
    except (OSError, ValueError):  # ValueError: the name cannot be encoded
        raise _not_found(output, path) from None


def _open_parts(output: Path, parts: list[str]) -> ServedFile | Mapping[str, int]:
    *parents, name = parts
    in_artifact = False
    directory = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parents:
            in_artifact = in_artifact or _is_artifact(directory, part)
            child = os.open(part, _DIRECTORY_FLAGS, dir_fd=directory)
            os.close(directory)
            directory = child
        return _open_entry(directory, name, output.joinpath(*parts), in_artifact=in_artifact)
    finally:
        os.close(directory)


def _open_entry(directory: int, name: str, path: Path, *, in_artifact: bool) -> ServedFile | Mapping[str, int]:
    is_artifact = in_artifact or _is_artifact(directory, name)
    descriptor = os.open(name, _FILE_FLAGS, dir_fd=directory)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) and (is_artifact or is_manifest(Path(name))):
            served = ServedFile.from_descriptor(descriptor)
            descriptor = -1
            return served
        if not stat.S_ISDIR(mode):
            raise FileNotFoundError(path)
        if not is_artifact:
            return dict(_manifest_sizes(descriptor))
        with suppress(TraceError):  # reported by the reader of the artifact
            kind = kind_of(path)
            analysis = None if kind is None else kind.pending(path)
            if analysis is not None and analysis.alive:
                text = f"Process {analysis.pid} on {socket.gethostname()} is analysing {path}. Retry later."
                raise NotServedError(text, HTTPStatus.CONFLICT)
        return dict(_file_sizes(descriptor))
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_artifact(directory: int, name: str) -> bool:
    """Return whether a manifest in the directory lists a name. Artifact names start with the manifest's stem."""
    for end, letter in enumerate(name):
        if letter not in "._":
            continue
        manifest_name = f"{name[:end]}.json"
        if manifest_name == name or not is_manifest(Path(manifest_name)):
            continue
        with suppress(OSError, ValueError):
            descriptor = os.open(manifest_name, _FILE_FLAGS, dir_fd=directory)
            with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor
                manifest = decode_manifest(read_descriptor(file.fileno()))
            if any(record.name == name for record in manifest.artifacts):
                return True
    return False


def _manifest_sizes(directory: int) -> Iterator[tuple[str, int]]:
    for name in os.listdir(directory):
        if is_manifest(Path(name)) and (size := _size(directory, name)) is not None:
            yield name, size


def _file_sizes(directory: int) -> Iterator[tuple[str, int]]:
    for parent, _, names, descriptor in os.fwalk(".", dir_fd=directory):
        for name in names:
            if (size := _size(descriptor, name)) is not None:
                yield os.path.normpath(f"{parent}/{name}"), size


def _size(directory: int, name: str) -> int | None:
    """Return the size of a regular file, or None for other types, links and missing files."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _not_found(output: Path, path: str) -> NotServedError:
    host = socket.gethostname()
    return NotServedError(
        f"No capture file {path!r} found in {output} on {host}. Other ranks of the engine may have written their files "
        "to other hosts.",
        HTTPStatus.NOT_FOUND,
    )
