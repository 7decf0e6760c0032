"""Copies of what is at URLs, for the commands that read: kept in the user's cache, brought up to date by each command.

What is at the other end may be written by anybody: a name that would lead out of the copy is refused.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import msgspec

from profdeck_traces.base.errors import ProfdeckError, describe_error
from profdeck_traces.base.files import directory_size, file_size, lock_directory, replace_file
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.urls import Place, RemoteError

MAX_BYTES = 50_000_000_000
"""What all copies may have together; those that were used longest ago go."""
_AT_ONCE = 4
_INDEX = "index.json"
_RUN_FILE = "run.json"
_LATEST = "latest"
# By which file systems tell one version of a file from another.
_VERSION = ("ETag", "etag", "md5Hash", "generation", "version_id", "LastModified", "last_modified", "mtime", "updated")


@attrs.frozen
class _Index:
    """What is in a copy."""

    files: dict[str, str] = attrs.field(factory=dict)
    """The version of each file, by its path in the copy."""


_decode_index = msgspec.json.Decoder(_Index).decode


def fetch(url: str, *, on_progress: Progress | None = None) -> Path:
    """Copy a run, a capture or a trace from a URL; what is here and did not change is not fetched again.

    Args:
        url: of a file or a directory; ``latest`` at its end means the newest run beside it.
        on_progress: told of bytes.

    Raises:
        ProfdeckError: it cannot be read, is nothing that could be copied, or there is no room.
    """
    place = Place.of(url)
    place.files.invalidate_cache()
    if place.name == _LATEST and not place.ask("exists", place.path):
        place = _newest(place.parent)
    found = _listed(place)
    directory = _directory(place)
    with lock_directory(directory):
        _copy(place, found, directory, on_progress)
    return directory / place.name


def _newest(above: Place) -> Place:
    """Return the newest run in a directory.

    Raises:
        RemoteError: there is none.
    """
    begun = []
    for name in _runs(above):
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, AttributeError):
            about = msgspec.json.decode(above.ask("cat_file", f"{above.path}/{name}/{_RUN_FILE}"))
            begun.append((int(about.get("created_ns", 0)), name))
    if not begun:
        raise RemoteError(f"There is no run in {above}, so 'latest' cannot be resolved.")
    return above / max(begun)[1]


def _runs(above: Place) -> list[str]:
    try:
        found = above.ask("glob", f"{above.path}/*/{_RUN_FILE}")
    except FileNotFoundError:
        return []
    return sorted(path.split("/")[-2] for path in found)


def _listed(place: Place) -> dict[str, Mapping[str, Any]]:
    """Return what is known of each file to copy, by its path in the copy.

    Raises:
        RemoteError: there is nothing, or several runs, or a name leads elsewhere.
    """
    try:
        if place.ask("isfile", place.path):
            return {place.name: place.ask("info", place.path)}
        if not place.ask("exists", f"{place.path}/{_RUN_FILE}") and (runs := _runs(place)):
            raise RemoteError(
                f"{place} holds {len(runs)} run(s): {', '.join(runs[:5])}. Name one, such as {place / runs[0]}; "
                f"{place / _LATEST} is the newest."
            )
        found = place.ask("find", place.path, detail=True)
    except FileNotFoundError:
        found = {}
    listed = {}
    for path, info in found.items():
        below = PurePosixPath(str(path).removeprefix(f"{place.path}/"))
        if below.is_absolute() or ".." in below.parts or "\0" in str(below):
            raise RemoteError(
                f"{place} has a file named {str(path)!r}, which is no place below it. Nothing was copied."
            )
        if not str(path).endswith("/"):  # what some tools make for a directory
            listed[f"{place.name}/{below}"] = info
    if not listed:
        raise RemoteError(f"{place} does not exist, or there is no file in it.")
    return listed


def _directory(place: Place) -> Path:
    """Return the directory of the copy, and make it."""
    cache = ResultCache.of_user()
    try:
        if cache is None:
            directory = Path(tempfile.mkdtemp(prefix="profdeck-"))
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
            return directory
        directory = cache.directory / "copies" / hashlib.sha256(place.url.encode()).hexdigest()[:16]
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ProfdeckError(f"{error.filename} cannot be made: {describe_error(error)}") from None
    return directory


def _copy(place: Place, found: Mapping[str, Mapping[str, Any]], directory: Path, on_progress: Progress | None) -> None:
    versions = {name: _version(info) for name, info in found.items()}
    try:
        known = _decode_index((directory / _INDEX).read_bytes()).files
    except (OSError, ValueError):
        known = {}
    left = [
        name
        for name, info in found.items()
        if known.get(name) != versions[name] or file_size(directory / name) != info.get("size")
    ]
    total = sum(int(found[name].get("size") or 0) for name in left)
    _make_room(directory, total)
    done, lock = 0, threading.Lock()

    def copy(name: str) -> None:
        nonlocal done
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        source = place if name == place.name else place / name.removeprefix(f"{place.name}/")
        _get(source, path, found[name].get("size"))
        with lock:
            known[name] = versions[name]
            done += int(found[name].get("size") or 0)
            if on_progress:
                on_progress(done, total)

    try:
        for name in set(known) - set(found):
            (directory / name).unlink(missing_ok=True)
            del known[name]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(copy, left):
                pass
    except OSError as error:
        raise ProfdeckError(f"{directory} cannot be written: {describe_error(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            replace_file(directory / _INDEX, msgspec.json.encode(attrs.asdict(_Index(known))), durable=False)


def _get(source: Place, path: Path, size_bytes: int | None) -> None:
    part = path.with_name(f".{path.name[:128]}.part")
    try:
        source.files.get_file(source.path, str(part))
    except Exception as error:  # as in `Place.ask`
        part.unlink(missing_ok=True)
        advice = "What was fetched before is kept; call again to go on."
        raise source.failed("cannot be fetched", error, advice) from error
    if size_bytes is not None and file_size(part) != size_bytes:
        part.unlink(missing_ok=True)
        raise RemoteError(f"{source} changed while it was fetched. Call again.")
    part.replace(path)


def _version(info: Mapping[str, Any]) -> str:
    return repr([info.get("size"), *(str(info.get(key)) for key in _VERSION)])


def _make_room(directory: Path, needed_bytes: int) -> None:
    """Delete copies that were used longest ago where all would have too much.

    Raises:
        RemoteError: the disk has no room.
    """
    others = sorted(_other_copies(directory))
    total = needed_bytes + sum(size_bytes for _, _, size_bytes in others)
    for _, other, size_bytes in others:
        if total <= MAX_BYTES:
            break
        shutil.rmtree(other, ignore_errors=True)
        total -= size_bytes
    free_bytes = shutil.disk_usage(directory).free
    if needed_bytes > free_bytes:
        raise RemoteError(
            f"{needed_bytes:,} bytes are to be fetched, and {directory} has room for {free_bytes:,}. PROFDECK_CACHE "
            "names another directory."
        )


def _other_copies(directory: Path) -> Iterator[tuple[float, Path, int]]:
    if directory.parent.name != "copies":  # one of its own, that goes at the end
        return
    for other in directory.parent.iterdir():
        if other != directory:
            with contextlib.suppress(OSError):
                yield (other / _INDEX).stat().st_mtime, other, directory_size(other)
