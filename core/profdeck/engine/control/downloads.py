"""Fetches the manifest of a rank and what it names from another host, and stands them into the run here.

The manifest comes first, and says of each artifact that it is still to come; it says so no more when they are there. So
the run tells where the files are, whatever ends this process. An artifact appears whole or not at all. Nothing that is
here is replaced, and what is here already is not fetched again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

import attrs
import msgspec

from profdeck.base.blocking import run_in_thread
from profdeck.base.errors import CaptureError
from profdeck.base.json_files import JSON_OBJECT
from profdeck.engine.engine import FileHost, RemoteFiles
from profdeck.records.manifest import SCHEMA, ArtifactRecord, Manifest, decode_manifest, read_manifest
from profdeck.records.status import Status
from profdeck_traces import check_trace
from profdeck_traces.base.errors import ProfdeckError, describe_error
from profdeck_traces.base.files import file_size, new_file, replace_file, write_new
from profdeck_traces.inputs.artifact_kinds import kind_named

_AT_ONCE = 8
"""How many files are fetched at once by all that runs in an event loop: more make no disk and no network faster."""
_POLL_S = 0.5
_MOST_WAIT_S = 60.0
"""How much longer than those whose answers come may a rank write whose answers do not."""

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@attrs.frozen
class Downloaded:
    """What has been brought of one manifest."""

    manifest: Manifest
    sizes_bytes: tuple[int, ...]
    """Of the artifacts that were fetched."""
    left: Mapping[str, str]
    """By name, why the other artifacts are not here."""


@attrs.frozen
class Downloader:
    """Fetches from one host."""

    files: RemoteFiles
    source: FileHost
    until: float
    """When no more time is left, by `time.monotonic`."""
    late: str
    """What to say then."""

    async def listed(self, place: PurePosixPath) -> Mapping[str, int]:
        """Return the names and sizes of the manifests in a directory.

        Raises:
            ProfdeckError: they are not to be had.
        """
        async with in_time(self.until, self.late), _slot():
            return await self.files.listed(str(place)) or {}

    async def bring(self, place: PurePosixPath, path: Path, is_it: Callable[[Manifest], bool]) -> Downloaded | None:
        """Bring a manifest and its artifacts here.

        Args:
            place: where it is.
            path: where it belongs.
            is_it: tells it from manifests of other captures.

        Returns:
            What came of it; None if it is that of another capture.

        Raises:
            ProfdeckError: the manifest is not to be had, or its name is taken here.
            OSError: it cannot be written.
        """
        ended = await self._ended(place, is_it)
        if ended is None:
            return None
        content, manifest = ended
        for record in manifest.artifacts:
            beside = record.name.startswith((f"{path.stem}.", f"{path.stem}_")) and record.name.isprintable()
            if not beside or "/" in record.name:
                raise CaptureError(f"its manifest names {record.name!r}, which is no file beside it")
        copy = _Copy(path, content, f"{self.source.host}:{PurePosixPath(self.source.output, place)}")
        fresh = await run_in_thread(copy.begin)
        if not fresh:
            there = await run_in_thread(read_manifest, path)
            if not is_it(there):
                raise CaptureError(f"its name is taken here: {path} is of another capture")
            if there.collected_from is None:  # a directory that hosts share, of which this one learnt late
                return Downloaded(manifest, (), {})
        records = manifest.artifacts
        found = await asyncio.gather(*(self._artifact(place.parent, record, path, fresh) for record in records))
        outcomes = {record.name: outcome for record, outcome in zip(records, found, strict=True)}
        left = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
        await run_in_thread(copy.close, left)
        return Downloaded(manifest, tuple(size for size in outcomes.values() if isinstance(size, int) and size), left)

    async def _ended(self, place: PurePosixPath, is_it: Callable[[Manifest], bool]) -> tuple[bytes, Manifest] | None:
        """Read a manifest when its process has ended the capture; None if it is another one."""
        until, late = min(self.until, time.monotonic() + _MOST_WAIT_S), "its process was still recording"
        while True:
            async with in_time(self.until, self.late), _slot():
                content = await self.files.read(str(place))
            try:
                manifest = decode_manifest(content)
            except ValueError as error:
                raise CaptureError(f"its manifest cannot be read: {error}") from None
            if manifest.schema > SCHEMA:
                raise CaptureError(f"its manifest was written by profdeck {manifest.profdeck} in a later format")
            if not is_it(manifest):
                return None
            if manifest.status is not Status.RECORDING:
                return content, manifest
            async with in_time(until, late):
                await asyncio.sleep(_POLL_S)

    async def _artifact(
        self,
        directory: PurePosixPath,
        record: ArtifactRecord,
        manifest: Path,
        fresh: bool,  # noqa: FBT001  # by position
    ) -> int | str:
        """Bring an artifact here; returns its size, 0 for one that was here, or why it is not here."""
        path, place = manifest.parent / record.name, str(directory / record.name)
        if (not fresh and _is_here(path, record)) or not (record.size_bytes or record.whole):
            return 0  # or it has never been written
        if fresh and path.exists():
            return f"its name is taken here by another file, {path}"
        try:
            async with in_time(self.until, self.late):
                if _is_directory(record):
                    return await self._directory(place, path)
                return await self._file(place, path, record)
        except (ProfdeckError, OSError) as error:
            return 0 if _is_here(path, record) else describe_error(error)  # another process may have fetched it

    async def _file(self, place: str, path: Path, record: ArtifactRecord) -> int:
        async with _slot():
            _check_room(path, record.size_bytes)
            async with _new_file(path) as file:
                await self.files.fetch(place, file, record.size_bytes)
                await run_in_thread(_check, Path(file.name), record)
        return record.size_bytes

    async def _directory(self, place: str, path: Path) -> int:
        """Bring an artifact that is a directory; one file after the other, over one connection."""
        sizes = await self._sizes(place)
        async with _slot():
            _check_room(path, sum(sizes.values()))
            partial = path.with_name(f".profdeck-{secrets.token_hex(8)}.tmp")
            try:
                partial.mkdir()
                for name, size in sizes.items():
                    if {"", ".", ".."} & set(name.split("/")):
                        raise CaptureError(f"{name!r} in it leads out of it")
                    await self._member(f"{place}/{name}", partial / name, size)
                await run_in_thread(partial.rename, path)
            finally:
                await run_in_thread(shutil.rmtree, partial, True)  # noqa: FBT003  # ignore_errors
        return sum(sizes.values())

    async def _sizes(self, place: str) -> Mapping[str, int]:
        """Ask for the files of a directory until it is whole."""
        while True:
            async with _slot():
                if (sizes := await self.files.listed(place)) is not None:
                    return sizes
            await asyncio.sleep(_POLL_S)

    async def _member(self, place: str, path: Path, size_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb", buffering=0) as file:
            await self.files.fetch(place, file, size_bytes)
            if file.tell() != size_bytes:
                raise CaptureError(f"{path.name} in it came with {file.tell():,} bytes instead of {size_bytes:,}")


@attrs.frozen
class _Copy:
    """The copy of a manifest. Keys that this version of profdeck does not know are kept."""

    path: Path
    content: bytes
    origin: str
    """The host, a colon, and the path there."""

    def begin(self) -> bool:
        """Write it, with all artifacts still to come; False if there is something of its name.

        Raises:
            OSError: it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        document = self._document()
        waiting = {record["name"]: "it has not been fetched yet" for record in document["artifacts"]}
        try:
            write_new(self.path, self._encoded(waiting))
        except FileExistsError:
            return False
        return True

    def close(self, left: Mapping[str, str]) -> None:
        """Write it as it is.

        Args:
            left: by name, why an artifact is not here.

        Raises:
            OSError: it cannot be written.
        """
        replace_file(self.path, self._encoded(left), durable=True)

    def _document(self) -> dict[str, Any]:
        return JSON_OBJECT.decode(self.content)

    def _encoded(self, left: Mapping[str, str]) -> bytes:
        document = self._document() | {"collected_from": self.origin}
        for record in document["artifacts"]:
            if reason := left.get(record["name"]):
                there = PurePosixPath(self.origin).with_name(record["name"])
                record["whole"], record["problem"] = False, f"not here but at {there}: {reason}"
        return msgspec.json.format(msgspec.json.encode(document), indent=1)


@contextlib.asynccontextmanager
async def in_time(until: float, late: str) -> AsyncIterator[None]:
    """Give up at a time.

    Raises:
        CaptureError: it has come.
    """
    if (left_s := until - time.monotonic()) <= 0:
        raise CaptureError(late)
    try:
        async with asyncio.timeout(left_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise CaptureError(late) from None


def _slot() -> asyncio.Semaphore:
    return _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE))


@contextlib.asynccontextmanager
async def _new_file(path: Path) -> AsyncIterator[BinaryIO]:
    """Do what `new_file` does, without blocking the event loop while all is brought to the disk."""
    opened = new_file(path)
    file = opened.__enter__()
    try:
        yield file
    except BaseException:
        opened.__exit__(*sys.exc_info())
        raise
    closing = asyncio.ensure_future(run_in_thread(opened.__exit__, None, None, None))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await closing  # it appears in any case
        raise


def _is_here(path: Path, record: ArtifactRecord) -> bool:
    """Tell whether an artifact is there that a copied manifest names; directories appear whole."""
    return path.is_dir() if _is_directory(record) else path.is_file() and file_size(path) == record.size_bytes


def _is_directory(record: ArtifactRecord) -> bool:
    kind = kind_named(record.kind)
    return kind is not None and bool(kind.suffix)


def _check_room(path: Path, size_bytes: int) -> None:
    """Refuse to fill a file system, which a job needs for other things.

    Raises:
        OSError: there is not enough room.
    """
    free = shutil.disk_usage(path.parent).free
    if free < size_bytes:
        raise OSError(errno.ENOSPC, f"{size_bytes:,} bytes are needed and {free:,} are free", str(path.parent))


def _check(path: Path, record: ArtifactRecord) -> None:
    """Check what has come.

    Raises:
        ProfdeckError: it is not what the manifest says.
    """
    if (size := file_size(path)) != record.size_bytes:
        raise CaptureError(f"it came with {size:,} bytes where {record.size_bytes:,} were written")
    if record.kind == "trace" and record.whole and (problem := check_trace(path).problem):
        raise CaptureError(f"it came damaged: {problem}")
