"""Downloads a rank's manifest and its artifacts from another host into the local run.

The manifest is written first and marks each artifact as missing. After the downloads, it is replaced by its final
version. If this process is killed, the run therefore still states the location of the files. Artifacts appear
atomically. Existing files are neither replaced nor downloaded again.
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

_MAX_DOWNLOADS = 8
"""Maximum number of concurrent downloads per event loop. More do not increase the throughput of disk and network."""
_POLL_S = 0.5
_MAX_WAIT_S = 60.0
"""Maximum time to wait for the files of a rank whose state is unknown, after all other ranks have finished."""

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@attrs.frozen
class Downloaded:
    """Result of downloading one manifest and its artifacts."""

    manifest: Manifest
    sizes_bytes: tuple[int, ...]
    """Sizes of the downloaded artifacts."""
    missing: Mapping[str, str]
    """Names of the artifacts that could not be downloaded, with the reasons."""


@attrs.frozen
class Downloader:
    """Downloads files from one host."""

    files: RemoteFiles
    source: FileHost
    deadline_s: float
    """Time at which downloads stop, as returned by `time.monotonic`."""
    timeout_message: str
    """Error message after the deadline."""

    async def list_manifests(self, directory: PurePosixPath) -> Mapping[str, int]:
        """Return the names and sizes of the manifests in a directory.

        Raises:
            ProfdeckError: the host does not send the list.
        """
        async with time_limit(self.deadline_s, self.timeout_message), _slot():
            return await self.files.list_files(str(directory)) or {}

    async def download(
        self, source_path: PurePosixPath, path: Path, is_expected: Callable[[Manifest], bool]
    ) -> Downloaded | None:
        """Download a manifest and its artifacts.

        Args:
            source_path: path of the manifest on the host, relative to `FileHost.output`.
            path: local destination of the manifest.
            is_expected: returns False for manifests of other captures.

        Returns:
            The result, or None if the manifest belongs to another capture.

        Raises:
            ProfdeckError: the manifest cannot be downloaded, or another capture has a local manifest of this name.
            OSError: the manifest cannot be written.
        """
        result = await self._read_final_manifest(source_path, is_expected)
        if result is None:
            return None
        content, manifest = result
        for record in manifest.artifacts:
            is_valid = record.name.startswith((f"{path.stem}.", f"{path.stem}_")) and record.name.isprintable()
            if not is_valid or "/" in record.name:
                raise CaptureError(f"its manifest lists {record.name!r}, which is not a valid artifact name")
        copy = _ManifestCopy(path, content, f"{self.source.host}:{PurePosixPath(self.source.output, source_path)}")
        is_new = await run_in_thread(copy.create)
        if not is_new:
            local_manifest = await run_in_thread(read_manifest, path)
            if not is_expected(local_manifest):
                raise CaptureError(f"another capture already has a file of this name: {path}")
            if local_manifest.collected_from is None:  # shared directory; its file system showed the manifest late
                return Downloaded(manifest, (), {})
        records = manifest.artifacts
        results = await asyncio.gather(
            *(self._artifact(source_path.parent, record, path, is_new) for record in records)
        )
        results_by_name = {record.name: result for record, result in zip(records, results, strict=True)}
        missing = {name: result for name, result in results_by_name.items() if isinstance(result, str)}
        await run_in_thread(copy.finish, missing)
        sizes = [result for result in results_by_name.values() if isinstance(result, int) and result]
        return Downloaded(manifest, tuple(sizes), missing)

    async def _read_final_manifest(
        self, path: PurePosixPath, is_expected: Callable[[Manifest], bool]
    ) -> tuple[bytes, Manifest] | None:
        """Wait until a manifest is final and return it. Return None if it belongs to another capture."""
        deadline_s = min(self.deadline_s, time.monotonic() + _MAX_WAIT_S)
        while True:
            async with time_limit(self.deadline_s, self.timeout_message), _slot():
                content = await self.files.read(str(path))
            try:
                manifest = decode_manifest(content)
            except ValueError as error:
                raise CaptureError(f"its manifest cannot be read: {error}") from None
            if manifest.schema > SCHEMA:
                raise CaptureError(f"its manifest has a newer format, written by profdeck {manifest.profdeck}")
            if not is_expected(manifest):
                return None
            if manifest.status is not Status.RECORDING:
                return content, manifest
            async with time_limit(deadline_s, "its process was still recording"):
                await asyncio.sleep(_POLL_S)

    async def _artifact(
        self,
        directory: PurePosixPath,
        record: ArtifactRecord,
        manifest: Path,
        is_new: bool,  # noqa: FBT001  # private
    ) -> int | str:
        """Download an artifact.

        Args:
            directory: directory of the artifact on the host.
            record: the artifact.
            manifest: path of the local manifest.
            is_new: False if an earlier download may have created the artifact.

        Returns:
            Its size; 0 if the artifact exists locally or was never written; or the error.
        """
        path, source_path = manifest.parent / record.name, str(directory / record.name)
        if (not is_new and _exists(path, record)) or not (record.size_bytes or record.whole):
            return 0
        if is_new and path.exists():
            return f"another file already has this name: {path}"
        try:
            async with time_limit(self.deadline_s, self.timeout_message):
                if _is_directory(record):
                    return await self._directory(source_path, path)
                return await self._file(source_path, path, record)
        except (ProfdeckError, OSError) as error:
            return 0 if _exists(path, record) else describe_error(error)  # another process may have downloaded it

    async def _file(self, source_path: str, path: Path, record: ArtifactRecord) -> int:
        async with _slot():
            _check_free_space(path, record.size_bytes)
            async with _new_file(path) as file:
                await self.files.fetch(source_path, file, record.size_bytes)
                await run_in_thread(_check_content, Path(file.name), record)
        return record.size_bytes

    async def _directory(self, source_path: str, path: Path) -> int:
        """Download the files of a directory one after the other, over one connection."""
        sizes = await self._wait_for_sizes(source_path)
        async with _slot():
            _check_free_space(path, sum(sizes.values()))
            partial = path.with_name(f".profdeck-{secrets.token_hex(8)}.tmp")
            try:
                partial.mkdir()
                for name, size in sizes.items():
                    if {"", ".", ".."} & set(name.split("/")):
                        raise CaptureError(f"it contains {name!r}, which points outside the directory")
                    await self._member(f"{source_path}/{name}", partial / name, size)
                await run_in_thread(partial.rename, path)
            finally:
                await run_in_thread(shutil.rmtree, partial, True)  # noqa: FBT003  # ignore_errors
        return sum(sizes.values())

    async def _wait_for_sizes(self, path: str) -> Mapping[str, int]:
        """Poll a directory until it is complete. Return its file sizes by name."""
        while True:
            async with _slot():
                if (sizes := await self.files.list_files(path)) is not None:
                    return sizes
            await asyncio.sleep(_POLL_S)

    async def _member(self, source_path: str, path: Path, size_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb", buffering=0) as file:
            await self.files.fetch(source_path, file, size_bytes)
            if file.tell() != size_bytes:
                raise CaptureError(f"its file {path.name} has {file.tell():,} bytes, expected {size_bytes:,}")


@attrs.frozen
class _ManifestCopy:
    """Local copy of a manifest. Keys unknown to this version of profdeck are preserved."""

    path: Path
    content: bytes
    origin: str
    """``HOST:PATH`` of the original."""

    def create(self) -> bool:
        """Write the manifest with all artifacts marked as missing. Return False if the file exists.

        Raises:
            OSError: the manifest cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        document = self._document()
        pending = {record["name"]: "it has not been downloaded yet" for record in document["artifacts"]}
        try:
            write_new(self.path, self._encode(pending))
        except FileExistsError:
            return False
        return True

    def finish(self, missing: Mapping[str, str]) -> None:
        """Replace the manifest by its final version.

        Args:
            missing: names of missing artifacts, with the reasons.

        Raises:
            OSError: the manifest cannot be written.
        """
        replace_file(self.path, self._encode(missing), durable=True)

    def _document(self) -> dict[str, Any]:
        return JSON_OBJECT.decode(self.content)

    def _encode(self, missing: Mapping[str, str]) -> bytes:
        document = self._document() | {"collected_from": self.origin}
        for record in document["artifacts"]:
            if reason := missing.get(record["name"]):
                location = PurePosixPath(self.origin).with_name(record["name"])
                record["whole"], record["problem"] = False, f"not on this host but at {location}: {reason}"
        return msgspec.json.format(msgspec.json.encode(document), indent=1)


@contextlib.asynccontextmanager
async def time_limit(deadline_s: float, message: str) -> AsyncIterator[None]:
    """Cancel the block at a deadline, as returned by `time.monotonic`.

    Raises:
        CaptureError: the deadline has passed. `message` is its message.
    """
    if (remaining_s := deadline_s - time.monotonic()) <= 0:
        raise CaptureError(message)
    try:
        async with asyncio.timeout(remaining_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise CaptureError(message) from None


def _slot() -> asyncio.Semaphore:
    return _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MAX_DOWNLOADS))


@contextlib.asynccontextmanager
async def _new_file(path: Path) -> AsyncIterator[BinaryIO]:
    """Async version of `new_file`. It runs the final sync to disk in a thread."""
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
        await closing  # the thread cannot be cancelled, so wait for the file
        raise


def _exists(path: Path, record: ArtifactRecord) -> bool:
    """Return whether an artifact exists locally. Directories appear atomically, so their sizes are not compared."""
    return path.is_dir() if _is_directory(record) else path.is_file() and file_size(path) == record.size_bytes


def _is_directory(record: ArtifactRecord) -> bool:
    kind = kind_named(record.kind)
    return kind is not None and bool(kind.suffix)


def _check_free_space(path: Path, size_bytes: int) -> None:
    """Check before a download that it does not fill the file system, which the job also uses.

    Raises:
        OSError: not enough space is available.
    """
    free = shutil.disk_usage(path.parent).free
    if free < size_bytes:
        raise OSError(errno.ENOSPC, f"{size_bytes:,} bytes are required, {free:,} are free", str(path.parent))


def _check_content(path: Path, record: ArtifactRecord) -> None:
    """Compare a downloaded file with its record in the manifest.

    Raises:
        ProfdeckError: the size differs, or a complete trace is corrupt.
    """
    if (size := file_size(path)) != record.size_bytes:
        raise CaptureError(f"the download has {size:,} bytes, expected {record.size_bytes:,}")
    if record.kind == "trace" and record.whole and (problem := check_trace(path).problem):
        raise CaptureError(f"the download is corrupt: {problem}")
