"""Manifests. A manifest describes one capture of one process: its settings, status and files.

Each process writes only its own manifests, so a crash affects one rank at most. Manifests are replaced by renaming, so
readers never see a partial manifest. The first manifest is written before recording starts, so that readers notice a
rank that crashes while recording.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import msgspec

from profdeck.base.errors import CaptureError
from profdeck.base.json_files import JsonKind
from profdeck.base.launchers import process_name
from profdeck.base.processes import ProcessId, cached_process_started, pid_namespace
from profdeck.config.targets import Policy
from profdeck.records.artifact import Artifact, ClockAnchor
from profdeck.records.capture import CaptureRecord
from profdeck.records.host_clock import MAX_CLOCK_OFFSET_NS, HostClock
from profdeck.records.request import MAX_RANKS
from profdeck.records.status import Status
from profdeck.records.targets import TargetRecord
from profdeck_traces.base.credentials import redact, redact_values
from profdeck_traces.base.documents import shortened
from profdeck_traces.base.errors import ProfdeckError, describe_error, to_text
from profdeck_traces.base.files import replace_or_overwrite
from profdeck_traces.inputs.host_load import HostLoad

_MAX_NUMBER = 1 << 53
"""The largest integer that all JSON readers represent exactly."""
_MAX_NAME_BYTES = 255
_MAX_DURATION_S = 1e6
_MIN_STEP_S = 1e-6
SCHEMA = 1


@attrs.frozen(kw_only=True)
class ArtifactRecord:
    """An artifact in a manifest. The fields except ``name`` are those of `profdeck.Artifact`."""

    name: str
    """Path relative to the manifest's directory."""
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
    worker_type: str | None = None
    """``prefill`` or ``decode`` if set in the engine's configuration; otherwise None, also in earlier versions."""
    host: str
    pid: int
    process_started: str | None
    """Start time of the process in clock ticks since boot. It distinguishes processes that have the same pid."""
    pid_namespace: str | None = None
    """PID namespace of the process, such as ``pid:[4026531836]``. None in manifests written by earlier versions."""
    process_name: str | None = None
    """The launcher's name for the process, such as an actor name. None if the launcher does not name processes."""
    joined_ns: int | None = None
    """Unix time at which the process created its profiler or received the request, in nanoseconds. None in manifests
    written by earlier versions."""
    first_step: int
    last_step: int
    """The last global step that had started. It is less than ``first_step`` if the capture ended during its warm-up."""
    stage: str | None
    window: dict[str, int] | None
    """The mini-batch window, as in the config."""
    target: str | None = None
    """The engine or server that this manifest describes, or None for a rank. The ranks of a target have their own
    manifests."""
    request: str | None = None
    """ID of the capture request, which is also the ID of the target's capture."""
    request_token: str | None = None
    """Token of the request. It distinguishes requests that have the same ID."""
    policy: Policy | None = None
    """For a fleet, the rule for the number of targets that had to start. The targets have their own manifests."""
    needed: int | None = None
    """For a fleet, the number of targets that had to start; None while the number of targets is unknown."""
    found: int | None = None
    """For a fleet, the number of targets that were found, including targets that were not selected. None in manifests
    written by earlier versions."""
    start_skew_ms: float | None = None
    """For a fleet, the time between the first and the last start request in milliseconds; None if fewer than two were
    sent."""
    targets: tuple[TargetRecord, ...] = ()
    """For a fleet, the result of each target, sorted by replica."""
    iterations: dict[str, int | None] | None = None
    """The requested engine iterations, as in the config; None for all."""
    demand: str | None = None
    """Token of the on-demand request; None if the config selects the capture."""
    cold_first_step: bool | None = None
    """True if the recorder started in the first step of each trace, without warm-up; this step took longer. None if
    unknown, or if the recorder has no cold first step."""
    backend: str
    versions: dict[str, str]
    """Versions of the libraries that recorded, by distribution name."""
    options: dict[str, Any]
    expected_ranks: tuple[int, ...]
    """The selected ranks of this role and replica."""
    more_follow: bool = False
    """True if this process may capture more stages of the same step. Set only in discrete mode with a finish task."""
    status: Status
    started_ns: int
    ended_ns: int | None
    stall_s: float | None = None
    """Time in seconds for which start and stop blocked an engine process; None if it was not measured. Excludes the
    overhead during the recording."""
    waits_for: str | None = None
    """The device that the capture is waiting for, or never received, and the current holder of the device."""
    waited_s: float | None = None
    """Time spent waiting for the device in seconds; None if the capture did not wait or is still waiting."""
    host_load: HostLoad | None = None
    """Load of the host and CPU time of the process during the recording. None for a target, or if the capture has not
    ended."""
    unrecorded_step_s: float | None = None
    """Median time in seconds between the starts of the last global steps before the capture, without the first step of
    the process. None for fewer than three such steps, for stages and engines, and in earlier versions."""
    clock: HostClock | None = None
    """For a target on another host, the offset of its clock relative to the requesting process."""
    collected_from: str | None = None
    """For a downloaded copy, ``HOST:PATH`` of the original. See `profdeck.engine.control.rank_files`."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    artifacts: tuple[ArtifactRecord, ...] = ()

    @property
    def role_and_replica(self) -> str:
        """The role, followed by the replica if there is one, such as ``rollout/2``."""
        return self.role if self.replica is None else f"{self.role}/{self.replica}"

    @property
    def credible_stall_s(self) -> float | None:
        """`stall_s`, or None if its value is implausible."""
        return self.stall_s if self.stall_s is not None and 0 <= self.stall_s <= _MAX_DURATION_S else None

    @property
    def credible_unrecorded_step_s(self) -> float | None:
        """`unrecorded_step_s`, or None if its value is implausible."""
        time_s = self.unrecorded_step_s
        return time_s if time_s is not None and _MIN_STEP_S <= time_s <= _MAX_DURATION_S else None

    @property
    def process(self) -> ProcessId:
        """The process that wrote the manifest."""
        return ProcessId(
            host=self.host, pid=self.pid, process_started=self.process_started, pid_namespace=self.pid_namespace
        )

    @property
    def under_way(self) -> bool | None:
        """True if the process is still running and recording; ``None`` if the process cannot be checked from here."""
        return self.status is Status.RECORDING and self.process.alive


@attrs.frozen(kw_only=True)
class ManifestWriter:
    """Fields that are the same in all manifests of a process, and the function that writes the manifests."""

    backend: str
    versions: Mapping[str, str]
    options: Mapping[str, Any] = attrs.field(converter=redact_values)
    expected_ranks: tuple[int, ...]
    more_follow: bool = False
    joined_ns: int = attrs.field(factory=time.time_ns)
    process_name: str | None = attrs.field(factory=process_name)
    write: Callable[[Path, bytes], None] = replace_or_overwrite
    """Function that writes a manifest, replacing any existing one. Fleets write their targets' manifests in batches."""


def write_manifest(capture: CaptureRecord, recorder: ManifestWriter) -> None:
    """Write the capture's current state to its manifest, replacing the previous manifest.

    Raises:
        OSError: it cannot be written.
        CaptureError: a plugin has set a field of the capture to an invalid value.
    """
    capture.check_directory()
    for texts in (capture.problems, capture.notes):  # plugins may append exceptions
        texts[:] = map(to_text, texts)
    try:
        content = encode(manifest_of(capture, recorder))
        decode_manifest(content)
    except (TypeError, ValueError, AttributeError) as error:
        raise CaptureError(f"capture {capture.id} has an invalid value: {describe_error(error)}") from error
    recorder.write(capture.manifest_path, content)


def check_artifact(artifact: Artifact, directory: Path) -> None:
    """Check an artifact that a plugin returned.

    Raises:
        Exception: the artifact cannot be recorded in the manifest.
    """
    if not artifact.path.is_relative_to(directory):
        raise CaptureError(f"{artifact.path} is outside of {directory}")
    check_artifact_name(_ARTIFACT.decode(msgspec.json.encode(_artifact_record(artifact, directory))).name)


_MANIFEST = JsonKind(Manifest)
_ARTIFACT = JsonKind(ArtifactRecord)


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
    """Decode the contents of a manifest, such as the response of another host.

    Raises:
        ValueError: the content is not a valid manifest.
    """
    manifest = _MANIFEST.decode(content)
    _check_bounds(manifest)
    return manifest


def _check_bounds(manifest: Manifest) -> None:
    """Reject numbers that are too expensive to process, and artifact paths that point outside the run directory.

    Raises:
        ValueError: a number or an artifact name is invalid.
    """
    numbers = [manifest.rank, manifest.world_size, manifest.replica or 0, manifest.first_step, manifest.last_step]
    numbers += [manifest.pid, manifest.started_ns >> 20, (manifest.ended_ns or 0) >> 20]
    clock = manifest.clock
    if clock is not None and max(abs(clock.offset_ns), abs(clock.error_ns)) > MAX_CLOCK_OFFSET_NS:
        raise ValueError("the clock offset exceeds ten years")
    if any(abs(number) > _MAX_NUMBER for number in numbers) or len(manifest.expected_ranks) > MAX_RANKS:
        raise ValueError(f"a number is out of range (more than {MAX_RANKS:,} ranks, for example)")
    for record in manifest.artifacts:
        check_artifact_name(record.name)


def check_artifact_name(name: str) -> None:
    """Check an artifact's path, which is relative to the directory of its manifest.

    Raises:
        ValueError: the path leads out of the directory, or is not a valid file name.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise ValueError(f"artifact {shortened(repr(name))}: the path is not below the manifest's directory")
    if any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in path.parts) or "\0" in name:
        raise ValueError(f"artifact {shortened(repr(name))}: the name is too long or has a null character")


def is_manifest(file: Path) -> bool:
    """Return whether a file name is a manifest name. Names of uncompressed traces also end in ``.json``."""
    return (
        file.name.startswith(("rank_", "target."))
        and file.name.endswith(".json")
        and not file.name.endswith(".trace.json")
    )


def manifest_of(capture: CaptureRecord, recorder: ManifestWriter) -> Manifest:
    """Return a manifest with the current state of a capture."""
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
        worker_type=identity.worker_type,
        host=identity.host,
        pid=identity.pid,
        process_started=cached_process_started(identity.pid),
        pid_namespace=pid_namespace(),
        process_name=recorder.process_name,
        joined_ns=recorder.joined_ns,
        first_step=capture.first_step,
        last_step=capture.current_step,
        stage=capture.stage,
        window=attrs.asdict(capture.window) if capture.window else None,
        target=capture.target,
        request=capture.request.id if capture.request else None,
        request_token=capture.request.token if capture.request else None,
        policy=fleet.policy if fleet else None,
        needed=fleet.needed if fleet else None,
        found=fleet.found if fleet else None,
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
        host_load=capture.host_load,
        unrecorded_step_s=None if capture.unrecorded_step_s is None else round(capture.unrecorded_step_s, 9),
        clock=capture.clock,
        problems=tuple(map(redact, capture.problems)),
        notes=tuple(map(redact, capture.notes)),
        artifacts=tuple(_artifact_record(artifact, capture.directory) for artifact in capture.artifacts),
    )


def _artifact_record(artifact: Artifact, directory: Path) -> ArtifactRecord:
    fields = attrs.asdict(artifact, recurse=False, filter=lambda attribute, _: attribute.name != "path")
    return ArtifactRecord(name=str(artifact.path.relative_to(directory)), **fields)


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest as JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)
