"""Sends runs to URLs. Each file is compared with the one at the other end, and nothing here is deleted.

What has been compared is recorded in the run (`profdeck.records.uploaded`), so that the next call sends only what is
new. A manifest is sent after what it names, and ``run.json`` last: a reader at the other end sees no capture of which
a part is to come.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import msgspec

from profdeck.after_capture.finish_record import input_path
from profdeck.after_capture.run_walk import artifact_at_work, finish_at_work, is_record_of_finish, may_record
from profdeck.records.manifest import is_manifest, read_manifest
from profdeck.records.run_directory import RUN_FILE, step_directories
from profdeck.records.uploaded import UploadedFile, UploadedPart, read_uploaded, write_uploaded
from profdeck.verification.run_report import read_about
from profdeck_traces.base.errors import ProfdeckError, describe_error
from profdeck_traces.base.files import lock_directory
from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.artifact_kinds import files_below
from profdeck_traces.inputs.urls import Place, RemoteError

_AT_ONCE = 4
_PART_BYTES = 50 << 20
"""How s3fs cuts what it sends in several parts. Of another cut the digest does not match, and the file is read back."""
_READ_BYTES = 1 << 20
_OF_RUN = "run"


@attrs.frozen(kw_only=True)
class Uploaded:
    """What a call has sent. Sizes are in bytes."""

    place: Place
    files: int = 0
    size_bytes: int = 0
    there: int = 0
    """How many files were there before."""
    waits_for: tuple[str, ...] = ()
    """What stays out until a later call, and why, in words."""


@attrs.frozen
class _Digests:
    """Of one file, by all ways in which an object store may tell the digest of an object."""

    sha256: str
    md5: str
    of_parts: str
    """As S3 makes the ETag of an object that was sent in parts."""

    @classmethod
    def of(cls, file: Path) -> _Digests:
        sha256, md5, parts = hashlib.sha256(), hashlib.md5(usedforsecurity=False), list[bytes]()
        with file.open("rb") as opened:
            while part := opened.read(_PART_BYTES):
                parts.append(hashlib.md5(part, usedforsecurity=False).digest())
                sha256.update(part)
                md5.update(part)
        of_parts = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
        return cls(sha256.hexdigest(), md5.hexdigest(), f"{of_parts}-{len(parts)}")

    def told_by(self, info: Mapping[str, Any]) -> bool:
        """Tell whether what a file system says of a file has one of the digests."""
        tag = str(info.get("ETag", "")).strip('"')
        of_google = str(info.get("md5Hash", ""))
        return tag in {self.md5, self.of_parts} or of_google == base64.b64encode(bytes.fromhex(self.md5)).decode()


def upload(run: Path, url: str, *, on_progress: Progress | None = None) -> Uploaded:
    """Send what has ended of a run to the directory of its name below a URL.

    Captures that are being recorded or analysed stay out, and so does what no manifest names.

    Args:
        run: the run directory.
        url: of a directory, such as ``s3://bucket/profiles``.
        on_progress: told of bytes.

    Raises:
        ProfdeckError: it is no run, or the URL cannot be used; the message says what to do. What was sent before is
            recorded.
    """
    read_about(run)
    run = run.resolve()
    place = Place.of(url) / run.name
    with lock_directory(run):
        _refuse_another(run, place)
        known = read_uploaded(run)
        parts = [_Part(directory.name, *_of_step(directory)) for directory in step_directories(run)]
        parts.append(_Part(_OF_RUN, [*run.glob("*.html"), run / RUN_FILE]))
        sender = _Sender(run, place, on_progress)
        for part in parts:
            sender.expect(part, known.get(part.name))
        for part in parts:
            sender.send(part)
    waits = tuple(why for part in parts for why in part.at_work)
    return Uploaded(place=place, files=sender.files, size_bytes=sender.size_bytes, there=sender.there, waits_for=waits)


@attrs.define
class _Part:
    """The files of a step, in the order in which they are sent."""

    name: str
    files: list[Path]
    at_work: list[str] = attrs.field(factory=list)
    known: dict[str, UploadedFile] = attrs.field(factory=dict)
    """What has been compared before."""


def _of_step(directory: Path) -> tuple[list[Path], list[str]]:
    """Return the files of a step that have ended, manifests last, and why others stay out."""
    artifacts, others, manifests, why = list[Path](), list[Path](), list[Path](), list[str]()
    for file in sorted(files_below(directory)):
        if is_manifest(file):
            try:
                manifest = read_manifest(file)
            except ProfdeckError:
                manifests.append(file)  # what is wrong with it is to be seen there as well
                continue
            if may_record(manifest):
                why.append(f"{directory.name}: rank {manifest.rank} of {manifest.role} records, or its host is gone")
                continue
            named = [file.parent / record.name for record in manifest.artifacts]
            pending = [told for path in named if (told := artifact_at_work(path))]
            if pending:
                why += [f"{directory.name}: {told}" for told in pending]
                continue
            artifacts += (found for path in named for found in _files_of(path))
            manifests.append(file)
        elif is_record_of_finish(file):
            if finish_at_work(file) is None:
                others += [file, *filter(Path.exists, [input_path(file)])]
        elif file.suffix == ".html":
            others.append(file)
    once = dict.fromkeys(artifacts)
    # The name of an artifact can look like a manifest's name.
    return [*once, *others, *(file for file in manifests if file not in once)], why


def _files_of(artifact: Path) -> Iterator[Path]:
    found = sorted(artifact.rglob("*")) if artifact.is_dir() else [artifact]
    yield from (file for file in found if file.is_file() and not file.is_symlink())


def _refuse_another(run: Path, place: Place) -> None:
    """Refuse to mix two runs of one name.

    Raises:
        RemoteError: another one is there, or the place does not answer.
    """
    try:
        there = place.ask("cat_file", f"{place.path}/{RUN_FILE}")
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError, ValueError):
        if msgspec.json.decode(there) == msgspec.json.decode((run / RUN_FILE).read_bytes()):
            return
    raise RemoteError(
        f"{place} is another run of this name, and was left as it is. Choose another URL, or another name for the run."
    )


class _Sender:
    """Sends the parts of one run."""

    def __init__(self, run: Path, place: Place, on_progress: Progress | None) -> None:
        self.files = self.size_bytes = self.there = 0
        self._run = run
        self._place = place
        self._on_progress = on_progress
        self._total = self._done = 0
        self._lock = threading.Lock()

    def expect(self, part: _Part, known: UploadedPart | None) -> None:
        """Count what is to be sent of a part."""
        if known is not None and known.url == str(self._place):
            for file in part.files:
                name = self._name(file)
                before = known.files.get(name)
                if before is not None and (before.size_bytes, before.modified_ns) == _version(file):
                    part.known[name] = before
        left = [file for file in part.files if self._name(file) not in part.known]
        self.there += len(part.files) - len(left)
        self._total += sum(_version(file)[0] for file in left)
        if not left and known is not None and known.whole == (not part.at_work):
            part.files.clear()  # nothing is new: its record stays

    def send(self, part: _Part) -> None:
        """Send what is to be sent of a part, and record what is there.

        Raises:
            RemoteError: a file cannot be sent.
        """
        if not part.files:
            return
        left = [file for file in part.files if self._name(file) not in part.known]
        found = dict(part.known)
        last = [file for file in left if is_manifest(file) or file.name == RUN_FILE]
        problem: RemoteError | None = None
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for files in ([file for file in left if file not in last], last):
                if problem is None:
                    problem = self._send_all(files, pool.map, found)
        whole = problem is None and not part.at_work
        record = UploadedPart(name=part.name, url=str(self._place), files=found, whole=whole)
        try:
            write_uploaded(self._run, record)
        except OSError as error:
            raise ProfdeckError(f"{self._run} cannot be written: {describe_error(error)}") from None
        if problem is not None:
            raise problem

    def _send_all(
        self, files: Iterable[Path], map_: Callable[..., Iterator[Any]], found: dict[str, UploadedFile]
    ) -> RemoteError | None:
        problem = None
        for name, sent in map_(self._attempt, files):
            if isinstance(sent, RemoteError):
                problem = problem or sent
            else:
                found[name] = sent
        return problem

    def _attempt(self, file: Path) -> tuple[str, UploadedFile | RemoteError]:
        name = self._name(file)
        try:
            return name, self._sent(file, self._place / name)
        except RemoteError as error:
            return name, error
        except OSError as error:
            return name, RemoteError(f"{file} cannot be read: {describe_error(error)}")

    def _sent(self, file: Path, place: Place) -> UploadedFile:
        version, digests = _version(file), _Digests.of(file)
        was_there = _is_same(place, version[0], digests)
        if not was_there:
            _put(file, place)
            if not _is_same(place, version[0], digests):
                raise RemoteError(
                    f"{place} is not what was sent: it differs from {file}. Something else writes there, or changes "
                    "the file here; try again."
                )
        with self._lock:
            self.files += not was_there
            self.there += was_there
            self.size_bytes += 0 if was_there else version[0]
            self._done += version[0]
            if self._on_progress:
                self._on_progress(self._done, self._total)
        return UploadedFile(size_bytes=version[0], modified_ns=version[1], sha256=digests.sha256)

    def _name(self, file: Path) -> str:
        return file.relative_to(self._run).as_posix()


def _version(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_size, about.st_mtime_ns


def _put(file: Path, place: Place) -> None:
    try:
        try:
            place.files.put_file(str(file), place.path)
        except FileNotFoundError:
            _make_directories(place)
            place.files.put_file(str(file), place.path)
    except Exception as error:  # as in `Place.ask`
        advice = "What was sent before is there; call again to go on."
        raise place.failed("cannot be written", error, advice) from error


def _make_directories(place: Place) -> None:
    """Make the directories above a file, where the file system has any. A bucket is not made: its name may be wrong."""
    first, *below = place.path.rpartition("/")[0].lstrip("/").split("/")
    path = place.path[: place.path.index(first)] + first
    for name in below:
        path = f"{path}/{name}"
        if not place.files.isdir(path):
            with contextlib.suppress(FileExistsError):  # made for another file meanwhile
                place.files.mkdir(path, create_parents=False)


def _is_same(place: Place, size_bytes: int, digests: _Digests) -> bool:
    """Compare a file at the other end: by the digest that is told there, else by reading it back."""
    place.files.invalidate_cache()
    try:
        info = place.ask("info", place.path)
        if info.get("size") != size_bytes:
            return False
        return digests.told_by(info) or _sha256(place) == digests.sha256
    except FileNotFoundError:
        return False


def _sha256(place: Place) -> str:
    digest = hashlib.sha256()
    try:
        with place.files.open(place.path, "rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
    except Exception as error:  # as in `Place.ask`
        raise place.failed("cannot be read back", error) from error
    return digest.hexdigest()
