"""Facts about traces, read from the recorder's files in the run directory.

A provider in the recorder's package reads these files.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from profdeck_traces.base import entry_points
from profdeck_traces.inputs.artifact_kinds import FileCheck
from profdeck_traces.inputs.host_load import HostLoad

CLOCK_ANCHOR = "profdeck.clock_anchor"
"""Name of the marker event of a clock anchor. Statistics exclude this event."""

RUN_RECORDS = "profdeck_traces.run_records"
"""Entry-point group of the provider, which is named ``profdeck``: a class that implements `RunRecords`."""
_PROVIDER = "profdeck"

ENGINE_ITERATION = "engine_iteration"
"""`TraceFacts.unit` of recordings of engines."""


@attrs.frozen(kw_only=True)
class TraceFacts:
    """Facts about one trace in a run."""

    run: str
    """Path of the run directory."""
    capture: str
    role: str
    replica: int | None
    rank: int | None
    """``None`` for a file that contains all ranks of a target."""
    world_size: int
    stage: str | None
    host: str
    unit: str
    """Unit of the recorder's steps: ``global_step``, ``mini_batch`` or ``engine_iteration``."""
    cold_first_step: bool
    """True if the recorder started in the first step of the trace, without warm-up."""
    first_step: int
    """First global step of the capture."""
    started_ns: int
    """Start of the capture in Unix nanoseconds."""
    stall_s: float | None
    """Time in seconds for which the start and the stop of the capture blocked the job."""
    has_digest: bool
    """True if the run contains the SHA-256 of the trace file."""
    clock_offset_ns: int | None
    """Offset from times in the trace to Unix time on `clock_host`; ``None`` without clock anchors."""
    base_time_ns: int | None
    """``baseTimeNanoseconds`` of the trace, in Unix nanoseconds."""
    clock_host: str
    """Host that `clock_offset_ns` refers to."""
    clock_error_ns: int | None
    """Maximum error of `clock_offset_ns`."""

    last_step: int | None = None
    """Last global step that started during the capture, or ``None`` if unknown."""
    host_load: HostLoad | None = None
    """Host load during the capture, or ``None`` if it was not recorded."""
    unrecorded_step_s: float | None = None
    """Median duration of the global steps before the capture, from start to start, or ``None`` if unknown."""
    recorded_from_ns: int | None = None
    """Time of the first clock anchor in Unix nanoseconds on `clock_host`; ``None`` if there are no clock anchors."""
    recorded_until_ns: int | None = None
    """Time of the last clock anchor in Unix nanoseconds on `clock_host`; ``None`` if there are no clock anchors."""
    worker_type: str | None = None
    """Server type: ``regular``, ``prefill`` or ``decode``; ``None`` if unknown."""
    fleet_size: int | None = None
    """Number of servers in this server's fleet, including servers that were not recorded; ``None`` if unknown."""
    data_parallel_rank: int | None = None
    """Data-parallel coordinate of the rank; ``None`` if there is none."""

    @property
    def role_and_replica(self) -> str:
        """Role and replica, such as ``rollout/2``, or only the role if it has no replicas."""
        return self.role if self.replica is None else f"{self.role}/{self.replica}"


@attrs.frozen
class CaptureMember:
    """A process, server or role in a capture, with or without a trace."""

    role: str
    replica: int | None = None
    rank: int | None = None
    """``None`` for a server or role whose ranks are unknown."""


@attrs.frozen(kw_only=True)
class CaptureStatus:
    """Capture status for one rank, or for a target whose capture failed."""

    run: str
    """Path of the run directory."""
    capture: str
    role: str
    replica: int | None
    stage: str | None
    first_step: int
    last_step: int
    rank: int | None
    """``None`` for a target, such as a server."""
    host: str | None
    status: str
    """``complete``, ``recording``, ``partial``, ``failed`` or ``missing``, as in `profdeck ls`."""
    problem: str | None


@attrs.frozen(kw_only=True)
class RecordingAbout:
    """Software versions and backend options used to record a role."""

    role: str
    backend: str
    versions: str
    """Versions of the recorder, such as ``torch 2.13.0``."""
    options: str
    """Options of the backend, as a JSON object."""
    profdeck: str
    """Version of profdeck."""


@attrs.frozen(kw_only=True)
class RunState:
    """Status of the captures in one or more directories, with the settings used to record them."""

    captures: tuple[CaptureStatus, ...] = ()
    recordings: tuple[RecordingAbout, ...] = ()
    silent_roles: tuple[str, ...] = ()
    """Configured roles without any capture."""
    unreadable: tuple[str, ...] = ()
    """Directories, manifests and ``run.json`` files that cannot be read."""


@attrs.frozen(kw_only=True)
class RecordedTraces:
    """Traces that a recorder wrote."""

    facts: Mapping[Path, TraceFacts] = attrs.field(factory=dict)
    """Facts by trace path."""
    skipped: Mapping[Path, tuple[Path, str]] = attrs.field(factory=dict)
    """Traces that do not count, such as copies. Maps their paths to the path and the reason to report."""
    other_runs: tuple[Path, ...] = ()
    """Runs inside another run. None of their files count."""
    unreadable: tuple[tuple[Path, str], ...] = ()
    """Directories and manifests that cannot be read, and the reasons."""


class RunRecords(Protocol):
    """Reads the files that a recorder writes next to its traces."""

    def traces(self, path: Path) -> RecordedTraces:
        """Return the recorded traces at a path, which is a trace or a directory."""

    def state(self, paths: Sequence[Path], checks: Mapping[str, FileCheck]) -> RunState:
        """Return the status of all captures in the given directories.

        Args:
            paths: The directories.
            checks: Results of checking the traces, by path.
        """

    def members(self, facts: TraceFacts) -> Sequence[CaptureMember]:
        """Return all known members of a trace's capture, including those outside the paths that were read."""

    def newest_run(self, output: Path) -> Path | None:
        """Return the path of the newest run in an output directory, or None if there is no run."""

    def is_run(self, directory: Path) -> bool:
        """Return True if the directory is a run directory."""


class NoRecords:
    """Provider that returns no facts, used if no recorder is installed."""

    def traces(self, path: Path) -> RecordedTraces:  # noqa: ARG002
        """Return no traces."""
        return RecordedTraces()

    def state(self, paths: Sequence[Path], checks: Mapping[str, FileCheck]) -> RunState:  # noqa: ARG002
        """Return an empty state."""
        return RunState()

    def members(self, facts: TraceFacts) -> Sequence[CaptureMember]:  # noqa: ARG002
        """Return no members."""
        return ()

    def newest_run(self, output: Path) -> Path | None:  # noqa: ARG002
        """Return ``None``."""
        return None

    def is_run(self, directory: Path) -> bool:  # noqa: ARG002
        """Return False."""
        return False


@functools.cache
def run_records() -> RunRecords:
    """Return the installed provider, or `NoRecords` if there is none.

    Raises:
        BrokenPluginError: The provider cannot be imported.
    """
    if _PROVIDER not in entry_points.installed(RUN_RECORDS):
        return NoRecords()
    provider: RunRecords = entry_points.load(RUN_RECORDS, _PROVIDER)()
    return provider
