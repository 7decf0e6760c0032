"""Finds traces in files and directories."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.text import plural, shell_path
from profdeck_traces.inputs.artifact_kinds import files_below, is_trace_path, kind_of, kinds, size_to_read
from profdeck_traces.inputs.facts import RecordedTraces, TraceFacts, run_records
from profdeck_traces.inputs.file_formats import FileFormat, format_of, reader_of
from profdeck_traces.inputs.result_files import is_result, trace_of

_TRACES = (".trace.json", ".trace.json.gz")
_JSON = (".json", ".json.gz")
_RECORDER_PREFIXES = ("rank_", "target.", ".")

GRAPH_CAPTURES = "capture_traces"
"""Name of the directory in which engines store traces of graph captures."""


@attrs.frozen
class TraceSource:
    """A rank's trace: a file, or a directory that a plugin reads."""

    path: Path
    facts: TraceFacts | None = None
    """Facts from the run; ``None`` for a trace outside a run."""
    captures: Path | None = None
    """A graph-capture trace, or a directory of such traces."""

    @property
    def graph_captures(self) -> tuple[Path, ...]:
        """Graph-capture traces, from `captures` if it is set, or else from `GRAPH_CAPTURES` next to the trace.

        These traces contain the operators inside the graphs that the main trace launches.
        """
        path = self.captures or self.path.parent / GRAPH_CAPTURES
        if path.is_dir():
            return tuple(sorted(filter(_is_trace, files_below(path))))
        return (path,) if self.captures else ()

    @property
    def size_bytes(self) -> int:
        """Number of bytes to read for this trace, or 0 if there are none."""
        return size_to_read(self.path)

    @property
    def cold_first_step(self) -> bool:
        """True if the recorder started in the first step of the trace, without warm-up."""
        return self.facts is not None and self.facts.cold_first_step

    @property
    def last_step(self) -> int | None:
        """Last global step in the trace. ``None`` if unknown, or if the steps are not complete global steps."""
        is_counted = self.facts is not None and self.facts.unit == "global_step" and self.facts.stage is None
        return self.facts.last_step if self.facts is not None and is_counted else None

    @property
    def is_json(self) -> bool:
        """True if this is a Chrome trace, or an artifact that contains one."""
        kind = kind_of(self.path)
        return kind is None or kind.has_chrome_trace(self.path)

    @property
    def rank(self) -> int | None:
        """Rank from `facts`, or from the trace itself if it is outside a run. ``None`` if unknown."""
        if self.facts is not None:
            return self.facts.rank
        kind = kind_of(self.path)
        return None if kind is None else kind.rank(self.path)

    @property
    def label(self) -> str:
        """Display name, such as "rollout/2 rank 1". It is the file name if role and rank are unknown."""
        if self.facts is None:
            return self.path.name if self.rank is None else f"rank {self.rank}"
        if self.facts.rank is None:
            return self.facts.role_and_replica
        return f"{self.facts.role_and_replica} rank {self.facts.rank}"


def find_sources(paths: Sequence[Path], *, on_left_out: Callable[[Path, str], None] | None = None) -> list[TraceSource]:
    """Find the traces in the given paths, sorted by path and name, without duplicates.

    A path of a file, or of a directory that a plugin reads, is always treated as a trace. Other directories are
    searched for files whose names end in ``.trace.json`` or ``.trace.json.gz``, and for ``.json`` or ``.json.gz`` files
    that start like a trace. Files that manifests list and artifacts of plugins are found as well. Merged traces are
    skipped because the ranks' traces contain the same events. Graph-capture traces are skipped if they are next to a
    trace that uses them; see `TraceSource.graph_captures`.

    Args:
        paths: Files and directories.
        on_left_out: Called with the path and the reason for each skipped path: copies and other runs inside a run,
            merged traces, profiles of other tools, and directories that cannot be read.

    Raises:
        TraceError: There is no trace below a directory, or a file is a profile of another tool.
    """
    found = _FoundTraces()
    for argument in paths:
        path = argument
        if path.name in {"", ".."} and kind_of(path) is not None:
            # The manifest is in the parent directory and refers to the artifact by name.
            path = Path(os.path.abspath(path))  # noqa: PTH100  # does not resolve links
        recorded = run_records().traces(path)
        if is_trace_path(path):
            _reject_unreadable(path, is_recorded=path in recorded.facts)
            found.add(TraceSource(path, recorded.facts.get(path)))
            continue
        found.skip(recorded)
        for source in _sources_below(path, recorded, on_left_out):
            found.add(source)
    found.report_skipped(on_left_out)
    return [*found.sources.values()]


class _FoundTraces:
    """Traces of several paths. A trace counts once, even if two paths contain it under different names."""

    def __init__(self) -> None:
        self.sources: dict[Path, TraceSource] = {}
        self._skipped: dict[Path, tuple[Path, str]] = {}
        self._real_directory = functools.cache(os.path.realpath)

    def add(self, source: TraceSource) -> None:
        self.sources.setdefault(self._key(source.path), source)

    def skip(self, recorded: RecordedTraces) -> None:
        self._skipped |= {self._key(trace): report for trace, report in recorded.skipped.items()}

    def report_skipped(self, on_left_out: Callable[[Path, str], None] | None) -> None:
        """Report the directories of skipped traces that no other path includes."""
        if on_left_out is None:
            return
        reports = (report for trace, report in self._skipped.items() if trace not in self.sources)
        for path, reason in dict.fromkeys(reports):
            on_left_out(path, reason)

    def _key(self, path: Path) -> Path:
        return Path(self._real_directory(path.parent), path.name)


def _reject_unreadable(path: Path, *, is_recorded: bool) -> None:
    """Reject special files and profiles in other tools' formats.

    Args:
        path: Path of a single trace.
        is_recorded: True if a manifest lists the trace.
    """
    if kind_of(path) is not None or is_recorded:
        return
    if is_result(path):
        raise TraceError(f"{path} is the stored analysis of a trace. Pass the trace instead: {trace_of(path)}")
    if path.exists() and not path.is_file():
        raise TraceError(f"{path} is not a regular file.")
    if (reader := reader_of(path)) is not None:
        raise TraceError(f"{path} is not a Chrome trace. It is {reader}.")


def _sources_below(
    path: Path, recorded: RecordedTraces, on_left_out: Callable[[Path, str], None] | None
) -> list[TraceSource]:
    """Return the traces in a directory tree.

    Args:
        path: The directory.
        recorded: The recorded traces in it.
        on_left_out: See `find_sources`.
    """
    facts, other_runs = recorded.facts, set(recorded.other_runs)
    below = set(facts)
    for file in files_below(path, on_error=functools.partial(_report_unreadable, on_left_out)):
        if file in facts or file in recorded.skipped or not other_runs.isdisjoint(file.parents):
            continue
        if _is_special(file):
            reason: str | None = "is not a regular file"
        elif _is_trace(file):
            below.add(file)
            continue
        else:
            reason = _reason_to_skip(file)
        if on_left_out is not None and reason is not None:
            on_left_out(file, reason)
    # JSON files next to a plugin's artifact belong to it, unless their names or manifests identify them as traces.
    of_plugins = {file.parent for file in below if kind_of(file) is not None}
    below = {file for file in below if file.parent not in of_plugins or _has_trace_name(file) or file in facts}
    directories = {file.parent for file in below}
    below = {file for file in below if file.parent.name != GRAPH_CAPTURES or file.parent.parent not in directories}
    sources = [TraceSource(file, facts.get(file)) for file in sorted(below)]
    sources = [source for source in sources if source.facts is None or source.facts.rank is not None]
    if not sources:
        for skipped, reason in recorded.skipped.values():
            raise TraceError(f"No trace found in {path}: {skipped} {reason}.")
        reason = _capture_statuses([path]) or f" (expected names ending in {' or '.join(_endings())})."
        raise TraceError(f"No trace found in {path}{reason}")
    return sources


def _is_special(file: Path) -> bool:
    """Return True for pipes, sockets and devices. These are not opened, because opening a pipe can block."""
    return file.exists() and not file.is_file() and kind_of(file) is None


def recorded_sources(
    paths: Sequence[Path], *, on_left_out: Callable[[Path, str], None] | None = None
) -> list[TraceSource]:
    """Return each rank trace that a manifest in the given paths lists, without duplicates.

    Args:
        paths: Runs, or directories and traces in runs.
        on_left_out: See `find_sources`.

    Raises:
        TraceError: There is no such trace, or a path does not exist.
    """
    found = _FoundTraces()
    for path in paths:
        if not os.path.lexists(path):
            raise TraceError(f"{path} does not exist.")
        recorded = run_records().traces(path)
        found.skip(recorded)
        if on_left_out is not None:
            for directory, reason in recorded.unreadable:
                on_left_out(directory, reason)
        for trace, facts in recorded.facts.items():
            if facts.rank is not None:
                found.add(TraceSource(trace, facts))
    found.report_skipped(on_left_out)
    if not found.sources:
        reason = _capture_statuses(paths) or ". Pass runs recorded by profdeck."
        raise TraceError(f"No trace with a manifest found in {', '.join(map(str, paths))}{reason}")
    return [*found.sources.values()]


def _capture_statuses(paths: Sequence[Path]) -> str:
    """Return the end of an error message for a run without traces: the capture statuses, and how to list them."""
    captures = run_records().state(paths, {}).captures
    if not captures:
        return ""
    counts = ", ".join(f"{count} {status}" for status, count in Counter(item.status for item in captures).items())
    run = shell_path(Path(captures[0].run))
    return f": {plural(len(captures), 'capture')} ({counts}). For the reasons: profdeck ls {run}"


def _has_trace_name(path: Path) -> bool:
    return path.name.endswith(_TRACES) or kind_of(path) is not None


def _is_trace(path: Path) -> bool:
    if _has_trace_name(path):
        return True
    return path.name.endswith(_JSON) and format_of(path) is FileFormat.TRACE


def _report_unreadable(on_left_out: Callable[[Path, str], None] | None, error: OSError) -> None:
    if on_left_out is not None:
        on_left_out(Path(error.filename), f"cannot be read: {error.strerror}")


def _reason_to_skip(path: Path) -> str | None:
    if path.name.startswith(_RECORDER_PREFIXES):  # other files of captures
        return None
    if path.name.endswith(_JSON) and format_of(path) is FileFormat.MERGED:
        return "is a merged trace. The traces of its ranks are read instead"
    reader = reader_of(path)
    return None if reader is None else f"is {reader}"


def _endings() -> list[str]:
    return [".trace.json[.gz]", *(kind.suffix for kind in kinds() if kind.suffix)]
