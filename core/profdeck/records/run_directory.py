"""The run directory: its names, and the manifests that each process writes about itself.

::

    <output>/<run>/run.json
    <output>/<run>/step_000010/trainer/rank_0000_tp0-dp0.step10.trace.json.gz
    <output>/<run>/step_000010/trainer/rank_0000_tp0-dp0.step10.json
    <output>/<run>/step_000010/rollout/replica_002/rank_0001.step10.trace.json.gz
    <output>/<run>/step_000010/rollout/replica_002/target.step10.json    by the process that asked the engine
    <output>/<run>/step_000010/rollout/target.step10.json                by the process that asked a fleet
    <output>/<run>/step_000010/finish.step10.json                        what was run when all of it had ended

`profdeck.on_demand.watch` lists the files with which captures are asked for, and `profdeck.after_run.start` of that
of a finish.

A process writes only its own manifest, always by rename, so a reader sees the old or the new one and a crash
costs one rank at most. The first manifest is written before recording starts: a rank that then dies is known.
"""

from __future__ import annotations

import contextlib
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
from profdeck.records.manifest import SCHEMA, ManifestWriter, encode, manifest_of
from profdeck.records.request import BatchKind, CaptureRequest
from profdeck_traces.base.files import write_new

RUN_FILE = "run.json"
RUN_VARIABLE = "PROFDECK_RUN"

_STEP = re.compile(r"step_(\d{6,18})")


def run_name(configured: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return a run name on which all processes of a job agree without communication.

    The first available value is used: ``PROFDECK_RUN``, the config's ``run``, the launcher's job ID, the launcher's
    start time if all processes are on this host, the rendezvous address, or the start time of a single process.
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


_MOST_TAKES = 1000


class RunDirectory:
    """The directory of one run, as the processes of the job write it."""

    def __init__(self, output: Path, name: str, about: Mapping[str, Any]) -> None:
        self.path = output / name
        self._output = output
        self._about = about
        self._inside: set[Path] = set()
        """Directories that have been found to be inside of the output directory."""

    def prepare(self) -> None:
        """Create the run directory and its ``run.json``; the first process writes it.

        Raises:
            OSError: it cannot be created or written.
            CaptureError: it leads out of the output directory.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._check_inside(self.path)
        if (self.path / RUN_FILE).exists():
            return
        record = {"schema": SCHEMA, "created_ns": time.time_ns(), **self._about}
        with contextlib.suppress(FileExistsError):
            write_new(self.path / RUN_FILE, msgspec.json.format(msgspec.json.encode(record), indent=1))

    def reserve(self, capture: CaptureRecord, recorder: ManifestWriter) -> None:
        """Create the capture's directory and first manifest; moves on to a free id if the names are taken.

        Names are taken when a job repeats a step, after a restart from a checkpoint, say. Nothing is overwritten.

        Raises:
            OSError: something cannot be created or written.
            CaptureError: the directory leads out of the output directory.
        """
        self._make(capture.directory)
        wanted, take = capture.id, 1
        while True:
            try:
                write_new(capture.manifest_path, encode(manifest_of(capture, recorder)))
            except FileExistsError:
                if take == _MOST_TAKES:  # a file system that says so of every name
                    raise
                take += 1
                capture.id = f"{wanted}-take{take}"
            except FileNotFoundError:  # another process has just withdrawn its capture, and the directory with it
                self._make(capture.directory)
            else:
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
        """Return the capture that a process of an engine makes for a request, not begun.

        Args:
            request: what the engine is asked for.
            identity: who the process is.
            batch: the kind of batches that it records; None for all.
            count: which of that kind it is, counted from 1.
            first_iteration: the first iteration that it records.
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
        """Name the directory of a step's artifacts for a process."""
        directory = self.path / f"step_{first_step:06d}" / identity.role
        return directory if identity.replica is None else replica_directory(directory, identity.replica)

    def _make(self, directory: Path) -> None:
        """Create a directory of a role or a replica, which no link may lead out of the output directory."""
        if directory.parent in self._inside:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                directory.mkdir()  # what is new in there is inside as well; a fleet has a directory per replica
                return
        self._check_inside(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._inside.add(directory.parent)

    def _check_inside(self, path: Path) -> None:
        try:
            output, target = self._output.resolve(), path.resolve()
        except RuntimeError as error:  # before Python 3.13: links that lead back to themselves
            raise CaptureError(f"{path} leads nowhere: {error}. Remove that link.") from None
        if not target.is_relative_to(output):
            raise CaptureError(
                f"{path} leads to {target}, outside of the output directory {output}. "
                "Remove that link, or set output to where the files should go."
            )


def remove_capture(capture: CaptureRecord) -> None:
    """Remove the first manifest of a capture that recorded nothing, and the directories that are empty without it.

    Raises:
        OSError: the manifest cannot be removed.
    """
    capture.manifest_path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process has something in it
        for path in (capture.directory, *capture.directory.parents):
            path.rmdir()
            if _STEP.fullmatch(path.name):
                break


def runs_below(output: Path) -> list[Path]:
    """Return the runs in an output directory, the newest first, by what their ``run.json`` says or else its file."""
    return sorted((file.parent for file in output.glob(f"*/{RUN_FILE}")), key=created_ns, reverse=True)


def step_directories(run: Path) -> list[Path]:
    """Return the directories of the global steps of a run, the first one first."""
    found = [path for path in run.iterdir() if _STEP.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def created_ns(run: Path) -> int:
    """Return when a run began, in Unix nanoseconds; 0 where nothing tells."""
    file = run / RUN_FILE
    try:
        created = JSON_OBJECT.read(file).get("created_ns")
        return created if isinstance(created, int) else file.stat().st_mtime_ns
    except (OSError, ValueError):
        return 0


def run_of(file: Path, replica: int | None) -> Path:
    """Return the run that a file of a rank or target lies in, by its place below it.

    Args:
        file: Below ``<run>/step_000010/<role>`` or, of a replica, ``<run>/step_000010/<role>/replica_002``.
        replica: As the manifest says it.
    """
    above = 2 if replica is None else 3
    if len(file.parents) > above:
        return file.parents[above]
    parents = Path(os.path.abspath(file)).parents  # noqa: PTH100 - links stay as they are
    return parents[min(above, len(parents) - 1)]


def replica_directory(role: Path, replica: int) -> Path:
    """Name the directory of a replica, in that of its role."""
    return role / f"replica_{replica:03d}"


def _component(name: str) -> str:
    """Make one safe path component of any text."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip("._-")[:128] or "run"


def _started_at(pid: int) -> str:
    """Say when a process started, as local time; now, where the kernel does not tell."""
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
