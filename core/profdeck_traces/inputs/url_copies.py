"""Keeps local copies of remote runs. Commands update the cached copy before they read it.

Servers are not trusted, so a file name that points outside the copy is an error. `fsspec.generic.rsync` is not used,
because it would write such files. fsspec's caching file systems are not used, because they provide no directory tree.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import msgspec

from profdeck_traces.base.credentials import redact_url
from profdeck_traces.base.files import directory_size, file_size, lock_directory, replace_file
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.base.text import plural
from profdeck_traces.inputs.urls import RemoteError, RemotePath, batches, is_url

MAX_BYTES = 50_000_000_000
"""Size limit of all copies together. Copies used within the last 24 hours are kept beyond this limit."""
_DAY_S = 86_400
_RUN_FILE = "run.json"
_VERSION_KEYS = (
    *("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "sha", "generation", "version_id", "versionId"),
    *("mtime", "modify", "modified", "LastModified", "last_modified", "updated", "created"),
)
"""Keys in fsspec's file information whose values change with the contents: digests, versions and times."""
_decode_versions = msgspec.json.Decoder(dict[str, str]).decode
_RETRY = "Files copied so far are kept. Repeat the command to continue."


def fetch(url: str, *, cache: bool = True, on_progress: Progress | None = None) -> Path:
    """Copy a run, capture or trace from a URL and return its local path.

    If the store reports versions, unchanged files are not copied again. HTTP directories report none.

    Args:
        url: URL of a file or directory. The last component ``latest`` selects the newest run.
        cache: If False, copy all files to a temporary directory.
        on_progress: called with the number of copied files and the number of files to copy.

    Raises:
        ProfdeckError: the URL cannot be read, or the copy cannot be written.
    """
    remote = RemotePath.from_url(url)
    remote.files.invalidate_cache()
    if _name(remote) == "latest" and not remote.read("exists", remote.path):
        remote = _newest_run(RemotePath.from_url(remote.url.rpartition("/")[0]))
    try:
        directory = _copy_directory(remote.url, cache=cache)
        with lock_directory(directory):
            _update(directory, remote, _list_files(remote), on_progress)
    except (OSError, ValueError) as error:  # ValueError: the server has a name that no local file can have
        advice = "Set PROFDECK_CACHE to a writable directory with enough space."
        raise remote.error("cannot be copied", error, advice) from None
    return directory / "files" / _name(remote)


def _name(remote: RemotePath) -> str:
    """Return a remote path's last component. Over HTTP, the path is a complete URL."""
    return (redact_url(remote.path) if is_url(remote.path) else remote.path).rpartition("/")[2]


def _newest_run(output: RemotePath) -> RemotePath:
    created_ns = {}
    for run in _runs(output):
        with suppress(FileNotFoundError, ValueError, TypeError, AttributeError):
            about = msgspec.json.decode(output.read("cat_file", f"{output.path}/{run}/{_RUN_FILE}"))
            created_ns[run] = int(about.get("created_ns", 0))
    if not created_ns:
        raise RemoteError(f"There is no run in {output}, so 'latest' cannot be resolved.")
    return output / max(created_ns, key=lambda run: (created_ns[run], run))


def _runs(output: RemotePath) -> list[str]:
    """Return the run names in a remote directory, sorted."""
    try:
        entries = output.read("ls", output.path, detail=True)
    except FileNotFoundError:
        return []
    names = sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")
    return [name for name in names if output.read("exists", f"{output.path}/{name}/{_RUN_FILE}")]


def _list_files(remote: RemotePath) -> dict[str, Mapping[str, Any]]:
    """Return fsspec's information about each remote file, keyed by the file's path in the copy.

    Raises:
        RemoteError: the URL does not exist, is a directory of runs, or contains an invalid file name.
    """
    with suppress(FileNotFoundError):  # over HTTP, this can also mean that the server does not reply
        info = remote.read("info", remote.path)
        if info["type"] == "file" and info.get("mimetype") != "text/html":  # over HTTP, a directory is an HTML page
            return {_name(remote): {**info, "name": remote.path}}
    if not remote.read("exists", f"{remote.path}/{_RUN_FILE}") and (runs := _runs(remote)):
        raise RemoteError(
            f"{remote} contains {plural(len(runs), 'run')}: {', '.join(runs[:5])}. Pass the URL of a run, such as "
            f"{remote / runs[0]}, or {remote / 'latest'} for the newest run."
        )
    listed: dict[str, Mapping[str, Any]] = {}
    with suppress(FileNotFoundError):
        for path, info in remote.read("find", remote.path, detail=True).items():
            name = path.removeprefix(f"{remote.path}/")
            name = f"{_name(remote)}/{unquote(name) if is_url(path) else name}"
            if PurePosixPath(name).as_posix() != name.rstrip("/") or ".." in PurePosixPath(name).parts:
                raise RemoteError(f"{remote} contains the invalid path {path!r}. Nothing was copied.")
            if not name.endswith("/"):  # some tools create an empty object for a directory
                listed[name] = {**info, "name": path}
    if not listed:
        raise RemoteError(f"{remote} does not exist or contains no files.")
    return listed


def _copy_directory(url: str, *, cache: bool) -> Path:
    """Return the cache directory for the copy of `url`, creating it if necessary.

    Without a cache, or if its directory cannot be created, use a temporary directory that is deleted when this process
    exits.
    """
    results = ResultCache.of_user() if cache else None
    if results is not None:
        directory = results.directory / "copies" / hashlib.sha256(url.encode()).hexdigest()[:16]
        with suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.is_dir():
            with suppress(OSError):  # another process deletes the same copies, or the cache is read-only
                _delete_old_copies(directory)
            return directory
    directory = Path(tempfile.mkdtemp(prefix="profdeck-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _delete_old_copies(current: Path) -> None:
    """Delete the least recently used copies beyond `MAX_BYTES`, except those used within the last day."""
    os.utime(current)
    total_bytes = 0
    for used_s, directory in sorted(((path.stat().st_mtime, path) for path in current.parent.iterdir()), reverse=True):
        total_bytes += directory_size(directory)
        if total_bytes > MAX_BYTES and used_s < time.time() - _DAY_S:
            shutil.rmtree(directory, ignore_errors=True)


def _update(
    directory: Path, remote: RemotePath, listed: Mapping[str, Mapping[str, Any]], on_progress: Progress | None
) -> None:
    """Update a copy's ``files`` directory to match the remote files.

    ``index.json`` contains the versions of the files that were copied completely.
    """
    from profdeck_traces.inputs.remote_limits import LimitedCallback

    files, index = directory / "files", directory / "index.json"
    versions: dict[str, str] = {}
    with suppress(OSError, ValueError):
        versions = _decode_versions(index.read_bytes())
    _delete_missing(files, listed)
    changed = [
        name
        for name, info in listed.items()
        if versions.get(name) != _version(info) or file_size(files / name) != info["size"]
    ]
    if not changed:
        return
    callback = LimitedCallback({info["name"]: info["size"] for info in listed.values()})
    if on_progress:
        callback.hooks["progress"] = lambda _, done, **__: on_progress(done, len(changed))
    for interrupted in directory.glob("partial-*"):
        shutil.rmtree(interrupted, ignore_errors=True)
    # Use a unique directory, because fsspec can still be writing other files after an error.
    with tempfile.TemporaryDirectory(prefix="partial-", dir=directory, ignore_cleanup_errors=True) as partial:
        for batch in batches(changed):
            temporary = [Path(partial, str(number)) for number in range(len(batch))]
            try:
                remote.files.get([listed[name]["name"] for name in batch], list(map(str, temporary)), callback=callback)
            except Exception as error:  # noqa: BLE001  # as in `RemotePath.read`
                raise remote.error("cannot be copied", error, _RETRY) from None
            for name, path in zip(batch, temporary, strict=True):
                if listed[name]["size"] not in {None, file_size(path)}:
                    raise RemoteError(f"{remote}: {name} changed during the copy. {_RETRY}")
                (files / name).parent.mkdir(parents=True, exist_ok=True)
                path.replace(files / name)
                versions[name] = _version(listed[name]) or ""
            replace_file(index, msgspec.json.encode(versions), durable=False)


def _version(info: Mapping[str, Any]) -> str | None:
    """Return a value that changes whenever the remote file changes, or None if the store reports no such value.

    ``Last-Modified`` and weak ETags are ignored because their resolution can be as coarse as one second.
    """
    from fsspec.utils import tokenize

    versions = {key: str(info[key]) for key in _VERSION_KEYS if info.get(key)}
    return None if not versions or versions.get("ETag", "").startswith("W/") else str(tokenize(info))


def _delete_missing(files: Path, listed: Container[str]) -> None:
    """Delete local files that are not in the remote listing, and empty directories."""
    for path in sorted(files.rglob("*"), reverse=True):
        if path.is_dir():
            with suppress(OSError):  # the directory is not empty
                path.rmdir()
        elif path.relative_to(files).as_posix() not in listed:
            path.unlink()
