"""Facts about profdeck runs for `profdeck_traces.inputs.facts`.

The modules that read manifests take 0.1 s to import, so they are imported only for paths that may contain manifests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from profdeck_traces.inputs.artifact_kinds import FileCheck, is_trace_path
from profdeck_traces.inputs.facts import CaptureMember, RecordedTraces, RunState, TraceFacts


class Records:
    """Implements `profdeck_traces.inputs.facts.RunRecords` by reading manifests of profdeck runs."""

    def traces(self, path: Path) -> RecordedTraces:
        """Return the recorded traces at a path; see `profdeck_traces.inputs.facts.RunRecords`."""
        if is_trace_path(path) and not _has_other_json(path):
            return RecordedTraces()
        from profdeck.verification.trace_facts import recorded_traces

        return recorded_traces(path)

    def state(self, paths: Sequence[Path], checks: Mapping[str, FileCheck]) -> RunState:
        """Return the state of all captures below the given directories.

        Args:
            paths: The directories.
            checks: Results of reading the traces, by path.
        """
        if not any(path.is_dir() for path in paths):
            return RunState()
        from profdeck.verification.trace_facts import run_state

        return run_state(paths, checks)

    def members(self, facts: TraceFacts) -> Sequence[CaptureMember]:
        """Return all known members of a trace's capture; see `profdeck_traces.inputs.facts.RunRecords`."""
        from profdeck.verification.trace_facts import capture_members

        return capture_members(facts)

    def newest_run(self, output: Path) -> Path | None:
        """Return the newest run in an output directory, or ``None`` if it contains no run."""
        from profdeck.records.run_directory import runs_below

        return next(iter(runs_below(output)), None)

    def is_run(self, directory: Path) -> bool:
        """Return True if a directory is a run directory."""
        from profdeck.records.run_directory import RUN_FILE

        return (directory / RUN_FILE).exists()


def _has_other_json(trace: Path) -> bool:
    """Return whether the trace's directory contains JSON files that may be manifests."""
    files = trace.parent.glob("*.json")
    return any(file.name != trace.name and not file.name.endswith(".trace.json") for file in files)
