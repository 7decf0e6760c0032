"""Uploads runs to URLs, for `profdeck upload` and the listener ``upload``.

Artifacts are uploaded before their manifests, and ``run.json`` is uploaded last. A reader therefore never sees a
manifest whose artifacts are missing. Local files are not changed.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from profdeck.after_capture.finish_record import input_path, read_record
from profdeck.after_capture.work_in_progress import (
    describe_running_analysis,
    describe_running_finish,
    is_finish_record,
)
from profdeck.backends.hookspecs import hookimpl
from profdeck.records.manifest import is_manifest, read_manifest
from profdeck.records.run_directory import RUN_FILE, step_directories
from profdeck_traces.base.credentials import redact_url
from profdeck_traces.base.errors import ConfigError, MissingLibraryError, ProfdeckError, describe_error
from profdeck_traces.base.files import lock_directory
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.text import plural
from profdeck_traces.inputs.artifact_kinds import files_below
from profdeck_traces.inputs.result_files import is_result, result_path, trace_of
from profdeck_traces.inputs.urls import RemoteError, RemotePath, batches, is_url

URL_VARIABLE = "PROFDECK_UPLOAD"
"""Environment variable with the URL of a directory for runs."""
# Part size of s3fs's multipart uploads. The ETag of an object uploaded in this way depends on the part size.
_PART_BYTES = 50 << 20
_READ_BYTES = 1 << 20


@attrs.frozen(kw_only=True)
class Upload:
    """Result of an upload."""

    place: RemotePath
    """The uploaded run."""
    files: int
    """Number of uploaded files."""
    size_bytes: int
    there: int
    """Number of files that the store already had."""
    waits_for: tuple[str, ...]
    """Reasons why captures were left for a later upload."""


class UploadListener:
    """Listener that uploads the run to the URL in ``PROFDECK_UPLOAD`` after each capture.

    Files that are already in the store are skipped.
    """

    def __init__(self) -> None:
        """Raises:
        ConfigError: ``PROFDECK_UPLOAD`` is not set to a valid URL.
        MissingLibraryError: fsspec is not installed.
        """
        directory_url()
        # Do not import fsspec here, because recording processes also create listeners and must not load it.
        if importlib.util.find_spec("fsspec") is None:
            raise MissingLibraryError.for_library("The listener 'upload' needs", "fsspec", "upload")

    @hookimpl
    def capture_finished(self, manifest: Mapping[str, Any]) -> None:
        """Upload the run."""
        result = upload(Path(manifest["directory"]).parent, directory_url(), compare_artifacts=False)
        sys.stdout.write(f"{plural(result.files, 'file')}, {result.size_bytes:,} bytes to {result.place}\n")


def directory_url(url: str | None = None) -> str:
    """Return the validated URL of the directory to which runs are uploaded.

    Args:
        url: the URL. Default: the value of the environment variable ``PROFDECK_UPLOAD``.

    Raises:
        ConfigError: the URL is missing, is a local path, or contains an environment variable.
    """
    source = "" if url is not None else f"{URL_VARIABLE}: "
    url = os.environ.get(URL_VARIABLE, "") if url is None else url
    if not url and source:
        raise ConfigError(f"{URL_VARIABLE} is not set. Set it to the URL of a directory, such as s3://bucket/profiles.")
    shown = f"{source}{redact_url(url)!r}"
    if not is_url(url):
        raise ConfigError(f"{shown} is not a URL. Use the URL of a directory, such as s3://bucket/profiles.")
    if "$" in url:
        raise ConfigError(f"{shown} contains an environment variable, which is not expanded. Use the full URL.")
    return url


def upload(run: Path, url: str, *, compare_artifacts: bool = True, on_progress: Progress | None = None) -> Upload:
    """Upload a run's finished captures to ``URL/NAME``, where ``NAME`` is the name of the run.

    Manifests, their artifacts, HTML pages and the records of finish tasks are uploaded; other files are not. Captures
    that are still being recorded or analysed are left for a later upload.

    Args:
        run: the run directory.
        url: URL of a directory, such as ``s3://bucket/profiles``.
        compare_artifacts: whether to compare artifacts by digest, which requires reading them. If False, or if the
            store has no digests, only their sizes are compared.
        on_progress: called with the number of uploaded files and the number of files to upload.

    Raises:
        ProfdeckError: the directory is not a run, or the URL cannot be used.
    """
    from fsspec.callbacks import Callback

    from profdeck.verification.run_report import read_about  # not at the top: recording processes import this module

    about, run, remote = read_about(run), run.resolve(), RemotePath.from_url(url)
    remote /= run.name
    try:
        with lock_directory(run):
            stored, plan = _list_stored(about, remote), _plan_upload(run)

            def is_stored(file: Path) -> bool:
                target = remote / file.relative_to(run).as_posix()
                has_digest = bool(_digest(stored.get(target.path, {})))
                trusts_size = file in plan.artifacts and not (has_digest and compare_artifacts)
                return _is_stored(file, target, stored, trusts_size=trusts_size)

            groups = ([*plan.artifacts, *plan.documents], plan.manifests, [run / RUN_FILE])
            changed = [[file for file in files if not is_stored(file)] for files in groups]
            sent = list(itertools.chain(*changed))
            callback = Callback()
            if on_progress:
                callback.hooks["progress"] = lambda _, done, **__: on_progress(done, len(sent))
            for files in itertools.chain(*map(batches, changed)):
                targets = [(remote / file.relative_to(run).as_posix()).path for file in files]
                try:
                    remote.files.put(list(map(str, files)), targets, callback=callback)
                except Exception as error:  # noqa: BLE001  # as in `RemotePath.read`
                    advice = "Files sent so far are kept. Repeat the upload to continue."
                    raise remote.error("cannot be written", error, advice) from None
            size_bytes = sum(file.stat().st_size for file in sent)
    except OSError as error:
        raise ProfdeckError(f"{run} cannot be read: {describe_error(error)}") from error
    present = sum(map(len, groups)) - len(sent)
    return Upload(place=remote, files=len(sent), size_bytes=size_bytes, there=present, waits_for=tuple(plan.unfinished))


def upload_check(run: Path, url: str) -> Callable[[Path], str | None]:
    """Return a function that checks whether the store has identical copies of all files in a step's directory.

    The function returns None if all copies exist, otherwise a reason to keep the step.

    Args:
        run: the run directory.
        url: the URL that was passed to `upload`.

    Raises:
        ProfdeckError: the directory is not a run, or the URL cannot be used.
    """
    from profdeck.verification.run_report import read_about  # as above

    about, run, remote = read_about(run), run.resolve(), RemotePath.from_url(url)
    remote /= run.name
    stored = _list_stored(about, remote)

    def reason_to_keep(step: Path) -> str | None:
        for file in sorted(step.resolve().rglob("*")):
            if (file.is_dir() and not file.is_symlink()) or _is_replaceable(file):
                continue
            name = file.relative_to(run).as_posix()
            try:
                if file.is_symlink() or not _is_stored(file, remote / name, stored):
                    return f"{remote} has no identical copy of {name}"
            except OSError as error:
                return f"{name} cannot be read: {describe_error(error)}"
        return None

    return reason_to_keep


def _is_replaceable(file: Path) -> bool:
    """Return whether a file is the result of an existing trace, and can therefore be recomputed."""
    return is_result(file) and trace_of(file).is_file()


def _is_stored(
    file: Path, remote: RemotePath, stored: Mapping[str, Mapping[str, Any]], *, trusts_size: bool = False
) -> bool:
    """Return whether the store has an identical copy of a file.

    Args:
        file: the local file.
        remote: the path of its copy in the store.
        stored: the store's information about its files, by path.
        trusts_size: whether to compare only the sizes. This is sufficient for artifacts, whose names are never reused.
    """
    info = stored.get(remote.path, {})
    if info.get("size") != file.stat().st_size:
        return False
    return trusts_size or _digest(info) in _digests(file) or _has_content(remote, file)


def _digest(info: Mapping[str, Any]) -> str:
    """Return the digest that a store reports for a file, or an empty string if it reports none."""
    return str(info.get("ETag") or info.get("md5Hash") or "").strip('"')


def _list_stored(about: Mapping[str, Any], remote: RemotePath) -> dict[str, Mapping[str, Any]]:
    """Return what the store reports about each file of this run, by path.

    Raises:
        RemoteError: the store has a different run of the same name, or does not reply.
    """
    remote.files.invalidate_cache()
    try:
        stored_about = msgspec.json.decode(remote.read("cat_file", f"{remote.path}/{RUN_FILE}"))
    except (FileNotFoundError, ValueError):  # ValueError: an interrupted upload
        stored_about = about
    if stored_about != about:
        raise RemoteError(
            f"{remote} is a different run with the same name. It was not changed. Choose another URL, or rename the "
            "local run."
        )
    try:
        return dict(remote.read("find", remote.path, detail=True))
    except FileNotFoundError:
        return {}


@attrs.frozen
class _UploadPlan:
    """Files of a run that can be uploaded."""

    artifacts: dict[Path, None] = attrs.field(factory=dict)
    documents: list[Path] = attrs.field(factory=list)
    """HTML pages, and the records of finish tasks with their input files."""
    manifests: list[Path] = attrs.field(factory=list)
    unfinished: list[str] = attrs.field(factory=list)
    """Reasons why other captures are left for a later upload."""


def _plan_upload(run: Path) -> _UploadPlan:
    plan = _UploadPlan(documents=sorted(file for file in run.glob("*.html") if not file.is_symlink()))
    manifests = list[Path]()
    for step in step_directories(run):
        for file in sorted(files_below(step)):
            if file.is_symlink():
                continue
            if is_manifest(file):
                manifests += _add_manifest(file, step.name, plan)
            elif is_finish_record(file):
                if describe_running_finish(file) is None and not _has_credentials(file):
                    plan.documents.extend([file, *filter(Path.exists, [input_path(file)])])
            elif file.suffix == ".html":
                plan.documents.append(file)
    # An artifact can be named like a manifest, so exclude artifacts here.
    plan.manifests.extend(file for file in manifests if file not in plan.artifacts)
    return plan


def _has_credentials(record: Path) -> bool:
    """Return whether the record of a finish task contains credentials."""
    try:
        return read_record(record).has_credentials
    except (OSError, ProfdeckError):
        return True


def _add_manifest(file: Path, step: str, plan: _UploadPlan) -> list[Path]:
    """Add a manifest's artifacts to the plan. If its capture is unfinished, add the reasons instead.

    Returns:
        A list with the manifest; empty if it cannot be uploaded yet.
    """
    try:
        manifest = read_manifest(file)
    except ProfdeckError:
        return [file]  # readers of the copy report the same error
    artifacts = [file.parent / record.name for record in manifest.artifacts]
    reasons = [reason for path in artifacts if (reason := describe_running_analysis(path))]
    if manifest.under_way is not False:
        reasons = [f"rank {manifest.rank} of {manifest.role} may still be recording"]
    if reasons:
        plan.unfinished.extend(f"{step}: {reason}" for reason in reasons)
        return []
    for artifact in artifacts:
        files = sorted(artifact.rglob("*")) if artifact.is_dir() else [artifact, result_path(artifact)]
        plan.artifacts.update((path, None) for path in files if path.is_file() and not path.is_symlink())
    return [file]


def _digests(file: Path) -> set[str]:
    """Return the digests that a store might report for a file.

    These are the MD5 digest as hex and base64, and the ETag of a multipart upload to S3.
    """
    md5, parts = hashlib.md5(usedforsecurity=False), list[bytes]()
    with file.open("rb") as opened:
        while part := opened.read(_PART_BYTES):
            md5.update(part)
            parts.append(hashlib.md5(part, usedforsecurity=False).digest())
    of_parts = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    return {md5.hexdigest(), base64.b64encode(md5.digest()).decode(), f"{of_parts}-{len(parts)}"}


def _has_content(remote: RemotePath, file: Path) -> bool:
    """Return whether a remote file has the same contents as a local file of the same size.

    Digests are not sufficient, because the ETag of an encrypted object is not a digest of its contents.
    """
    try:
        with remote.files.open(remote.path, "rb") as stored, file.open("rb") as local:
            return all(stored.read(len(part)) == part for part in iter(lambda: local.read(_READ_BYTES), b""))
    except Exception as error:  # noqa: BLE001  # as in `RemotePath.read`
        raise remote.error("cannot be read", error) from None
