"""A rank's manifest: what one process says of one capture.

A process writes only its own manifest, always by rename, so a reader sees the old or the new one and a crash
costs one rank at most. The first manifest is written before recording starts: a rank that then dies is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import msgspec

from profdeck.base.json_files import JsonKind
from profdeck.base.processes import cached_process_started, is_running
from profdeck.config.targets import Policy
from profdeck.records.artifact import Artifact, ClockAnchor
from profdeck.records.capture import CaptureRecord
from profdeck.records.host_clock import MOST_APART_NS, HostClock
from profdeck.records.status import Status
from profdeck.records.targets import TargetRecord
from profdeck_traces.base.documents import shortened
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.base.files import replace_file

_MOST_RANKS = 1 << 16
_LARGEST = 1 << 53
_LONGEST_NAME = 255
_LONGEST_STALL_S = 1e6
SCHEMA = 1


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
    sha256: str | None = None
    base_time_ns: int | None = None
    anchors: tuple[ClockAnchor, ...] = ()


@attrs.frozen(kw_only=True)
class Manifest:
    """The manifest of one rank in one capture. Times are Unix nanoseconds."""

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
    cold_first_step: bool | None = None
    """True if the recorder started in the first step of each trace, without warm-up; this step took longer. None if
    unknown, or if the recorder has no cold first step."""
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
    clock: HostClock | None = None
    """Of a target on another host: how its clock stood to that of `host`, which asked."""
    collected_from: str | None = None
    """Of a copy: the host that it was fetched from, a colon and its path there; see
    `profdeck.engine.control.rank_files`."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    artifacts: tuple[ArtifactRecord, ...] = ()

    @property
    def role_and_replica(self) -> str:
        """The role, and behind a slash the replica if it has any: ``rollout/2``."""
        return self.role if self.replica is None else f"{self.role}/{self.replica}"

    @property
    def credible_stall_s(self) -> float | None:
        """`stall_s`, if it is one that can be."""
        return self.stall_s if self.stall_s is not None and 0 <= self.stall_s <= _LONGEST_STALL_S else None

    @property
    def under_way(self) -> bool:
        """Whether a process that still runs is recording; of another host that cannot be known, and no is said."""
        return self.status is Status.RECORDING and is_running(self.host, self.pid, self.process_started)


@attrs.frozen(kw_only=True)
class ManifestWriter:
    """What is the same in all manifests that a process writes."""

    backend: str
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    expected_ranks: tuple[int, ...]
    more_follow: bool = False
    write: Callable[[Path, bytes], None] = lambda path, content: replace_file(path, content, durable=True)
    """How a manifest takes the place of the one before; a fleet writes those of its targets together."""


def write_manifest(capture: CaptureRecord, recorder: ManifestWriter) -> None:
    """Replace the capture's manifest by its present state, in the way of the recorder.

    Raises:
        OSError: it cannot be written.
    """
    recorder.write(capture.manifest_path, encode(manifest_of(capture, recorder)))


_MANIFEST = JsonKind(Manifest)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Keys added by later versions are ignored.

    Raises:
        ProfdeckError: the file cannot be read or is not a manifest with a known schema.
    """
    try:
        manifest = _MANIFEST.read(path)
        _check_bounds(manifest)
    except (OSError, ValueError) as error:
        raise ProfdeckError(f"{path}: not a readable manifest: {getattr(error, 'strerror', None) or error}.") from None
    if manifest.schema > SCHEMA:
        raise ProfdeckError(
            f"{path}: written by profdeck {manifest.profdeck} in a later format; update profdeck to read it."
        )
    return manifest


def decode_manifest(content: bytes) -> Manifest:
    """Decode a manifest that another host wrote.

    Raises:
        ValueError: it is none.
    """
    manifest = _MANIFEST.decode(content)
    _check_bounds(manifest)
    return manifest


def _check_bounds(manifest: Manifest) -> None:
    """Check what would cost its reader too much, or lead out of the run.

    Raises:
        ValueError: there is something of that kind.
    """
    numbers = [manifest.rank, manifest.world_size, manifest.replica or 0, manifest.first_step, manifest.last_step]
    numbers += [manifest.pid, manifest.started_ns >> 20, (manifest.ended_ns or 0) >> 20]
    clock = manifest.clock
    if clock is not None and max(abs(clock.offset_ns), abs(clock.error_ns)) > MOST_APART_NS:
        raise ValueError("it says of a clock that it is off by more than ten years")
    if any(abs(number) > _LARGEST for number in numbers) or len(manifest.expected_ranks) > _MOST_RANKS:
        raise ValueError(f"it has numbers that no job has, such as more than {_MOST_RANKS:,} ranks")
    for record in manifest.artifacts:
        place = PurePosixPath(record.name)
        if place.is_absolute() or not record.name or any(part in {"..", "."} for part in place.parts):
            raise ValueError(f"it names {shortened(repr(record.name))}, which is no file beside it")
        if any(len(os.fsencode(part)) > _LONGEST_NAME for part in place.parts) or "\0" in record.name:
            raise ValueError(f"it names {shortened(repr(record.name))}, which no file can be called")


def is_manifest(file: Path) -> bool:
    """Return whether a file name is a manifest name. Names of uncompressed traces also end in ``.json``."""
    return (
        file.name.startswith(("rank_", "target."))
        and file.name.endswith(".json")
        and not file.name.endswith(".trace.json")
    )


def manifest_of(capture: CaptureRecord, recorder: ManifestWriter) -> Manifest:
    """Say in a manifest what a capture is at now."""
    from profdeck_traces.base.version import __version__

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
        process_started=cached_process_started(identity.pid),
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
        cold_first_step=capture.cold_first_step,
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
        clock=capture.clock,
        problems=tuple(capture.problems),
        notes=tuple(capture.notes),
        artifacts=tuple(_artifact_record(artifact, capture.directory) for artifact in capture.artifacts),
    )


def _artifact_record(artifact: Artifact, directory: Path) -> ArtifactRecord:
    fields = attrs.asdict(artifact, recurse=False, filter=lambda attribute, _: attribute.name != "path")
    return ArtifactRecord(name=str(artifact.path.relative_to(directory)), **fields)


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as the JSON of its file."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)
