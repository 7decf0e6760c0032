"""The run directory: its names, and the manifests that each process writes about itself.

::

    <output>/<run>/run.json
    <output>/<run>/step_000010/trainer/rank_0000_tp0-dp0.step10.trace.json.gz
    <output>/<run>/step_000010/trainer/rank_0000_tp0-dp0.step10.json
    <output>/<run>/step_000010/rollout/replica_002/rank_0001.step10.trace.json.gz
    <output>/<run>/step_000010/rollout/replica_002/target.step10.json    by whoever asked the engine for it
    <output>/<run>/step_000010/rollout/target.step10.json                by whoever asked a fleet of engines for it
    <output>/<run>/step_000010/finish.step10.json                        what was run when all of it had ended

`profdeck.demand` tells of the files with which captures are asked for, and `profdeck.finish` of that of a finish.

A process writes only its own manifest, always by rename, so a reader sees the old or the new one and a crash
costs one rank at most. The first manifest is written before recording starts: a rank that then dies is known.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from profdeck.capture import Artifact, Capture, ClockAnchor, Status
from profdeck.errors import CaptureError, ProfdeckError
from profdeck.files import publish
from profdeck.fleet.records import TargetRecord
from profdeck.identity import Identity
from profdeck.targets import Policy

SCHEMA = 1
RUN_FILE = "run.json"
RUN_VARIABLE = "PROFDECK_RUN"

# Launchers that name the job, the same in all of its processes; "none" is torchrun's default.
_JOB_IDS = (("TORCHELASTIC_RUN_ID", "torchrun"), ("SLURM_JOB_ID", "slurm"), ("RAY_JOB_ID", "ray"))


@attrs.frozen(kw_only=True)
class ArtifactRecord:
    """An artifact in a manifest; ``name`` is relative to the manifest's directory."""

    name: str
    kind: str
    size_bytes: int
    whole: bool
    events: int | None = None
    problem: str | None = None
    iterations: tuple[int, int] | None = None
    base_time_ns: int | None = None
    anchors: tuple[ClockAnchor, ...] = ()


@attrs.frozen(kw_only=True)
class Manifest:
    """What one rank says of one capture. Times are Unix nanoseconds."""

    schema: int
    profdeck: str
    capture: str
    role: str
    rank: int
    world_size: int
    replica: int | None
    parallel: dict[str, int]
    host: str
    pid: int
    process_started: str | None
    """When the process started, in the kernel's words; tells a process from a later one with the same pid."""
    first_step: int
    last_step: int
    """The last global step that was under way; below ``first_step`` if the capture ended while warming up."""
    stage: str | None
    window: dict[str, int] | None
    """The mini-batch window, as in the config."""
    target: str | None = None
    """The engine or server that this manifest is about, which has a manifest per rank besides; None for a rank."""
    request: str | None = None
    """The capture of the target that asked for this one; the target's own capture names itself."""
    request_token: str | None = None
    """The token of that request, which tells it from others of the same id."""
    policy: Policy | None = None
    """Of a fleet, whose targets have manifests of their own besides: how many had to start; None for all others."""
    needed: int | None = None
    """The same as a number; None as long as the number of targets is unknown."""
    start_skew_ms: float | None = None
    """Of a fleet: the time between the first and the last start that was sent; None if fewer than two were."""
    targets: tuple[TargetRecord, ...] = ()
    """Of a fleet: what came of each target, by replica."""
    iterations: dict[str, int | None] | None = None
    """The engine iterations that were asked for, as in the config; None for all."""
    demand: str | None = None
    """The token of the request that the capture was asked for with while the job ran; None where the config selects."""
    backend: str
    versions: dict[str, str]
    """Versions of what recorded, by distribution."""
    options: dict[str, Any]
    expected_ranks: tuple[int, ...]
    """The ranks of this role and replica that should have recorded this capture."""
    more_follow: bool = False
    """Whether this process may capture other stages of the same step; said in discrete mode, where a finish waits."""
    status: Status
    started_ns: int
    ended_ns: int | None
    stall_s: float | None = None
    """For how many seconds the start and the stop kept an engine's process from its work; None where nobody measured.
    The cost of recording while it runs is not in it."""
    waits_for: str | None = None
    """While it waits for its turn on a device, and when that never came: what is held and by whom."""
    waited_s: float | None = None
    """For how many seconds it waited for its turn; None if it did not wait, or still does."""
    collected_from: str | None = None
    """Of a copy: the host that it was fetched from, a colon and its path there; see `profdeck.engine.collect`."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    artifacts: tuple[ArtifactRecord, ...] = ()

    @property
    def role_and_replica(self) -> str:
        """The role, and behind a slash the replica if it has any: ``rollout/2``."""
        return self.role if self.replica is None else f"{self.role}/{self.replica}"

    @property
    def under_way(self) -> bool:
        """Whether a process that still runs is recording; of another host that cannot be known, and no is said."""
        return self.status is Status.RECORDING and is_running(self.host, self.pid, self.process_started)


@attrs.frozen(kw_only=True)
class Recorder:
    """What is the same in all manifests that a process writes."""

    backend: str
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    expected_ranks: tuple[int, ...]
    more_follow: bool = False
    write: Callable[[Path, bytes], None] = lambda path, content: replace(path, content, durable=True)
    """How a manifest takes the place of the one before; a fleet writes those of its targets together."""


def run_name(configured: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Name the run so that all processes of one job agree without talking to each other.

    In this order: ``PROFDECK_RUN``, the config's ``run``, the launcher's job id, the start time of the launcher
    on this host (torchrun on one node), the rendezvous address, and for a single process its own start time.
    """
    if chosen := environ.get(RUN_VARIABLE) or configured:
        return _component(chosen)
    for variable, launcher in _JOB_IDS:
        job = environ.get(variable, "none")
        if job != "none":
            return _component(f"{launcher}-{job}")
    world_size = environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        if environ.get("LOCAL_WORLD_SIZE") == world_size:
            return f"{_started_at(os.getppid())}-{os.getppid()}"
        return _component(f"job-{environ.get('MASTER_ADDR', 'unknown')}-{environ.get('MASTER_PORT', '0')}")
    return f"{_started_at(os.getpid())}-{os.getpid()}"


class RunDirectory:
    """The directory of one run, as the processes of the job write it."""

    def __init__(self, output: Path, name: str, about: Mapping[str, Any]) -> None:
        self.path = output / name
        self._output = output
        self._about = about
        self._inside: set[Path] = set()
        """Directories that have been found to be inside of the output directory."""

    def prepare(self) -> None:
        """Create the run directory and its ``run.json``; whoever comes first writes it.

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

    def claim(self, capture: Capture, recorder: Recorder) -> None:
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
                write_new(capture.manifest_path, _encode(_manifest(capture, recorder)))
            except FileExistsError:
                take += 1
                capture.id = f"{wanted}-take{take}"
            else:
                return

    def directory(self, first_step: int, identity: Identity) -> Path:
        """Name the directory of a step's artifacts for a process."""
        directory = self.path / f"step_{first_step:06d}" / identity.role
        return directory if identity.replica is None else replica_directory(directory, identity.replica)

    def _make(self, directory: Path) -> None:
        """Create a directory of a role or a replica, which no link may lead out of the output directory."""
        if directory.parent in self._inside:
            with contextlib.suppress(FileExistsError):
                directory.mkdir()  # what is new in there is inside as well; a fleet has a directory per replica
                return
        self._check_inside(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._inside.add(directory.parent)

    def _check_inside(self, path: Path) -> None:
        output = self._output.resolve()
        if not path.resolve().is_relative_to(output):
            raise CaptureError(
                f"{path} leads to {path.resolve()}, outside of the output directory {output}. "
                "Remove that link, or set output to where the files should go."
            )


def replica_directory(role: Path, replica: int) -> Path:
    """Name the directory of a replica, in that of its role."""
    return role / f"replica_{replica:03d}"


def write_manifest(capture: Capture, recorder: Recorder) -> None:
    """Replace the capture's manifest by its present state, in the way of the recorder.

    Raises:
        OSError: it cannot be written.
    """
    recorder.write(capture.manifest_path, _encode(_manifest(capture, recorder)))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; keys of later versions are passed over.

    Raises:
        ProfdeckError: it cannot be read or is not a manifest of a known schema.
    """
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise ProfdeckError(f"{path}: not a readable manifest: {error}.") from None
    if manifest.schema > SCHEMA:
        raise ProfdeckError(
            f"{path}: written by profdeck {manifest.profdeck} in a later format; update profdeck to read it."
        )
    return manifest


def is_manifest(file: Path) -> bool:
    """Tell a manifest from the other files of a rank by its name; plain traces end in ``.json`` as well."""
    return (
        file.name.startswith(("rank_", "target."))
        and file.name.endswith(".json")
        and not file.name.endswith(".trace.json")
    )


def process_started(pid: int) -> str | None:
    """Say when a process of this host started, in clock ticks since boot; None if that cannot be known.

    Source: field 22 of ``/proc/<pid>/stat`` (proc(5)).
    """
    fields = process_stat(pid)
    return fields[19] if len(fields) > 19 else None  # noqa: PLR2004  # as above, counted from the third


def is_running(host: str, pid: int, started: str | None) -> bool:
    """Tell whether a process still runs; on another host that cannot be known, and no is said.

    Args:
        host: its host, as `socket.gethostname` names it there.
        pid: its process id.
        started: what `process_started` said of it, which tells it from a later process with the same id.
    """
    if host != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not has_ended(process_stat(pid)) and process_started(pid) == started


def has_ended(stat: list[str]) -> bool:
    """Tell of what `process_stat` says whether a process has ended, and its parent has not asked for its exit code yet.

    One whose first thread has ended is a zombie already, and holds its files and locks until the last one has. Source:
    fields 3 and 20 of ``/proc/<pid>/stat`` (proc(5)).
    """
    return stat[:1] in (["Z"], ["X"]) and int(stat[17]) <= 1


def process_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the third one, the state, on; none if they cannot be read."""
    try:
        # The second is the name, in parentheses; it may have any characters.
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


@functools.lru_cache(maxsize=1)
def _started(own_pid: int) -> str | None:
    """Say when this process started, which does not change; a fleet has a manifest per target."""
    return process_started(own_pid)


def _manifest(capture: Capture, recorder: Recorder) -> Manifest:
    from profdeck import __version__

    identity, fleet = capture.identity, capture.fleet
    return Manifest(
        schema=SCHEMA,
        profdeck=__version__,
        capture=capture.id,
        role=identity.role,
        rank=identity.rank,
        world_size=identity.world_size,
        replica=identity.replica,
        parallel=dict(identity.parallel),
        host=identity.host,
        pid=identity.pid,
        process_started=_started(identity.pid),
        first_step=capture.first_step,
        last_step=capture.current_step,
        stage=capture.stage,
        window=attrs.asdict(capture.window) if capture.window else None,
        target=capture.target,
        request=capture.request.id if capture.request else None,
        request_token=capture.request.token if capture.request else None,
        policy=fleet.policy if fleet else None,
        needed=fleet.needed if fleet else None,
        start_skew_ms=fleet.start_skew_ms if fleet else None,
        targets=fleet.targets if fleet else (),
        iterations=attrs.asdict(capture.iterations) if capture.iterations else None,
        demand=capture.demand,
        backend=recorder.backend,
        versions=dict(recorder.versions),
        options=dict(recorder.options),
        expected_ranks=recorder.expected_ranks if capture.expected_ranks is None else capture.expected_ranks,
        more_follow=recorder.more_follow,
        status=capture.status,
        started_ns=capture.started_ns,
        ended_ns=capture.ended_ns,
        stall_s=None if capture.stall_s is None else round(capture.stall_s, 6),
        waits_for=capture.waits_for,
        waited_s=None if capture.waited_s is None else round(capture.waited_s, 6),
        problems=tuple(capture.problems),
        notes=tuple(capture.notes),
        artifacts=tuple(_artifact_record(artifact, capture.directory) for artifact in capture.artifacts),
    )


def _artifact_record(artifact: Artifact, directory: Path) -> ArtifactRecord:
    fields = attrs.asdict(artifact, recurse=False, filter=lambda attribute, _: attribute.name != "path")
    return ArtifactRecord(name=str(artifact.path.relative_to(directory)), **fields)


def _encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist yet, whole or not at all. Of several who try, one succeeds.

    Raises:
        FileExistsError: it exists.
        OSError: it cannot be written.
    """
    temporary = _temporary(path)
    try:
        # Somebody waits for a start: what a power failure takes then, the end of the capture writes again.
        _write(temporary, content, durable=False)
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace(path: Path, content: bytes, *, durable: bool) -> None:
    """Write a file in the place of the one that may be there.

    Args:
        path: its path.
        content: all of it.
        durable: whether it must outlast a power failure from now on.

    Raises:
        OSError: it cannot be written.
    """
    temporary = _temporary(path)
    try:
        _write(temporary, content, durable=durable)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write(path: Path, content: bytes, *, durable: bool) -> None:
    # Few system calls, between which other threads run: a fleet writes a thousand manifests at once.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    # By chance: processes of several hosts and containers can have the same pid.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


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
