"""Layout of the run directory, and creation of its files and directories.

::

    <output>/<run>/run.json
    <output>/<run>/step_000010/trainer/rank_0000_tp0-dp0.step10.trace.json.gz
    <output>/<run>/step_000010/trainer/rank_0000_tp0-dp0.step10.json
    <output>/<run>/step_000010/rollout/replica_002/rank_0001.step10.trace.json.gz
    <output>/<run>/step_000010/rollout/replica_002/target.step10.json    written by the process that requested it
    <output>/<run>/step_000010/rollout/target.step10.json                written by the process that requested it
    <output>/<run>/step_000010/finish.step10.json                        record of the finish task

`profdeck.on_demand.watch` describes the files of capture requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.json_files import JSON_OBJECT
from profdeck.base.launchers import installed_launchers
from profdeck.base.processes import process_started
from profdeck.records.capture import CaptureRecord, Unit
from profdeck.records.identity_conflicts import describe_conflict, is_conflict
from profdeck.records.manifest import SCHEMA, Manifest, ManifestWriter, encode, manifest_of, read_manifest
from profdeck.records.request import BatchKind, CaptureRequest
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.base.files import write_new

logger = logging.getLogger("profdeck")

RUN_FILE = "run.json"
RUN_VARIABLE = "PROFDECK_RUN"

_STEP = re.compile(r"step_(\d{6,18})")
_MAX_TAKES = 1000
_END_OF_TIME_NS = 1 << 63


def run_name(configured: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return a run name on which all processes of a job agree without communication.

    The first available value is used:

    - ``PROFDECK_RUN``
    - the config's ``run``
    - the launcher's job ID
    - the launcher's start time, if all processes are on this host
    - the rendezvous address
    - the start time of a single process
    """
    if chosen := environ.get(RUN_VARIABLE) or configured:
        return _component(chosen)
    launchers = installed_launchers()
    for launcher in launchers:
        if name := launcher.job_name(environ):
            return _component(name)
    for launcher in launchers:
        world_size = environ.get(launcher.world_size, "1")
        if launcher.rendezvous is None or world_size == "1":
            continue
        if environ.get(launcher.local_world_size) == world_size:
            return f"{_started_at(os.getppid())}-{os.getppid()}"
        host, port = launcher.rendezvous
        return _component(f"job-{environ.get(host, 'unknown')}-{environ.get(port, '0')}")
    return f"{_started_at(os.getpid())}-{os.getpid()}"


class RunDirectory:
    """The directory of one run. Creates its files and directories."""

    def __init__(self, output: Path, name: str, about: Mapping[str, Any]) -> None:
        """Args:
        output: the output directory, which contains all runs.
        name: the name of the run.
        about: the contents of ``run.json``, without its schema and creation time.
        """
        self.path = output / name
        self._output = output
        self._about = about
        self._checked: set[Path] = set()
        """Directories that were verified to be inside the output directory."""

    def prepare(self) -> None:
        """Create the run directory and its ``run.json``; the first process writes it.

        Raises:
            OSError: the directory or the file cannot be created.
            CaptureError: a symbolic link leads outside of the output directory.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._check_inside(self.path)
        if (self.path / RUN_FILE).exists():
            return
        record = {"schema": SCHEMA, "created_ns": time.time_ns(), **self._about}
        with contextlib.suppress(FileExistsError):
            write_new(self.path / RUN_FILE, msgspec.json.format(msgspec.json.encode(record), indent=1))

    def reserve(self, capture: CaptureRecord, recorder: ManifestWriter) -> None:
        """Create the capture's directory and first manifest.

        If the file names are in use, change the capture's ID to an unused one, such as ``step10-take2``. This happens
        if a job repeats a step, for example after a restart from a checkpoint. Existing files are never overwritten.

        Raises:
            OSError: the directory or the manifest cannot be created.
            CaptureError: a symbolic link leads outside of the output directory.
        """
        self._make(capture.directory)
        requested_id, take = capture.id, 1
        while True:
            manifest = manifest_of(capture, recorder)
            try:
                write_new(capture.manifest_path, encode(manifest))
            except FileExistsError:
                if take == _MAX_TAKES:  # the file system might report this for every name
                    raise
                _report_conflict(capture, manifest)
                take += 1
                capture.id = f"{requested_id}-take{take}"
            except FileNotFoundError:  # another process has just removed its capture and the empty directory
                self._make(capture.directory)
            else:
                capture.real_directory = capture.directory.resolve()
                return

    def capture_of(
        self,
        request: CaptureRequest,
        identity: Identity,
        batch: BatchKind | None,
        *,
        count: int = 1,
        first_iteration: int | None = None,
    ) -> CaptureRecord:
        """Return a new capture of an engine process for a request.

        Args:
            request: the request that the engine received.
            identity: the identity of the process.
            batch: the kind of batches to record; None for all kinds.
            count: number of this capture among the request's captures of the same kind, counted from 1.
            first_iteration: the first iteration to record.
        """
        name = f"{request.id}-{batch}" if batch else request.id
        return CaptureRecord(
            id=f"{name}-{count}" if count > 1 else name,
            directory=self.directory(request.first_step, identity),
            identity=identity,
            first_step=request.first_step,
            current_step=request.first_step,
            stage=batch,
            unit=Unit.ENGINE_ITERATION,
            iterations=request.iterations,
            first_iteration=first_iteration,
            request=request,
        )

    def directory(self, first_step: int, identity: Identity) -> Path:
        """Return the directory for a process's files of one step."""
        directory = self.path / f"step_{first_step:06d}" / identity.role
        return directory if identity.replica is None else replica_directory(directory, identity.replica)

    def _make(self, directory: Path) -> None:
        """Create the directory of a role or a replica.

        Raises:
            OSError: the directory cannot be created.
            CaptureError: a symbolic link leads outside of the output directory.
        """
        if directory.parent in self._checked:
            # A new directory in a checked directory needs no check. This saves time for fleets with many replicas.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                directory.mkdir()
                return
        self._check_inside(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._checked.add(directory.parent)

    def _check_inside(self, path: Path) -> None:
        try:
            output, target = self._output.resolve(), path.resolve()
        except RuntimeError as error:  # before Python 3.13: a loop of symbolic links
            raise CaptureError(f"Cannot resolve {path}: {error}. Remove the symbolic link.") from None
        if not target.is_relative_to(output):
            raise CaptureError(
                f"{path} resolves to {target}, outside of the output directory {output}. "
                "Remove the symbolic link, or set output to the directory for the files."
            )


def _report_conflict(capture: CaptureRecord, manifest: Manifest) -> None:
    """Report a problem if the existing manifest is from another active process with the same role and rank."""
    with contextlib.suppress(ProfdeckError):  # `profdeck ls` reports manifests that cannot be read
        earlier = read_manifest(capture.manifest_path)
        if is_conflict(manifest, earlier) and (problem := describe_conflict(earlier)) not in capture.problems:
            logger.warning("Capture %s: %s", capture.id, problem)
            capture.report_problem(problem)


def remove_capture(capture: CaptureRecord) -> None:
    """Remove the manifest of a capture that recorded nothing, and its directories if they are empty.

    Raises:
        OSError: the manifest cannot be removed.
    """
    capture.manifest_path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the directory contains files of another process
        for path in (capture.directory, *capture.directory.parents):
            path.rmdir()
            if _STEP.fullmatch(path.name):
                break


def runs_below(output: Path) -> list[Path]:
    """Return the run directories in an output directory, sorted from newest to oldest by `created_ns`."""
    return sorted((file.parent for file in output.glob(f"*/{RUN_FILE}")), key=created_ns, reverse=True)


def step_directories(run: Path) -> list[Path]:
    """Return the directories of a run's global steps, sorted by step."""
    steps = [path for path in run.iterdir() if _STEP.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step_")))


def created_ns(run: Path) -> int:
    """Return the creation time of a run in Unix nanoseconds, or 0 if its ``run.json`` cannot be read.

    If ``run.json`` has no valid creation time, its modification time is used.
    """
    file = run / RUN_FILE
    try:
        created = JSON_OBJECT.read(file).get("created_ns")
        if type(created) is int and 0 <= created < _END_OF_TIME_NS:
            return created
        return file.stat().st_mtime_ns
    except (OSError, ValueError):
        return 0


def is_step_directory(name: str) -> bool:
    """Return whether a name is that of a step directory."""
    return _STEP.fullmatch(name) is not None


def run_of(file: Path, replica: int | None) -> Path:
    """Return the run directory that contains a file of a rank or target.

    Args:
        file: absolute path of a file in ``<run>/step_000010/<role>`` or, for a replica, in
            ``<run>/step_000010/<role>/replica_002``.
        replica: the replica in the manifest.
    """
    return file.parents[min(2 if replica is None else 3, len(file.parents) - 1)]


def replica_directory(role: Path, replica: int) -> Path:
    """Return the directory of a replica in the directory of its role."""
    return role / f"replica_{replica:03d}"


def _component(name: str) -> str:
    """Convert text to a safe file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip("._-")[:128] or "run"


def _started_at(pid: int) -> str:
    """Return the start time of a process in local time, such as ``20260131-101500``; the current time if unknown."""
    try:
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()
            if line.startswith("btime ")
        )
        started = boot + int(process_started(pid) or "") / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, StopIteration):
        started = time.time()
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
