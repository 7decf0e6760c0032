"""Checks a run's files by reading them completely. Traces with a cached result are not read again."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs

from profdeck.verification.report_model import ArtifactReport
from profdeck_traces.base.errors import MissingLibraryError, ProfdeckError, TraceError, describe_error
from profdeck_traces.base.files import file_size, sha256_of
from profdeck_traces.base.parallel import map_traces
from profdeck_traces.base.progress import Meter, Progress
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.artifact_kinds import TRACE, ArtifactKind, FileCheck
from profdeck_traces.inputs.file_checks import KeptChecks

if TYPE_CHECKING:
    from profdeck_traces import TraceCheck


@attrs.frozen
class TraceToCheck:
    """A trace to read."""

    path: Path
    with_sum: bool
    """True to also compute its SHA-256."""

    def __str__(self) -> str:
        return str(self.path)


@attrs.frozen
class KnownChecks:
    """Results of earlier checks, provided by the caller. No files are read."""

    _checks: Mapping[str, FileCheck]
    """Results by real path, because the caller and the manifests can refer to a file by different paths."""

    @classmethod
    def by_path(cls, checks: Mapping[str, FileCheck]) -> Self:
        """Use results by path."""
        return cls({os.path.realpath(path): check for path, check in checks.items()})

    def _get(self, path: Path) -> FileCheck | None:
        return self._checks.get(os.path.realpath(path)) if self._checks else None

    def read(self, report: ArtifactReport, kind: ArtifactKind | None) -> ArtifactReport:  # noqa: ARG002  # as in FileChecker
        """Return the report, updated with the file's check result if there is one."""
        check = self._get(report.path)
        if check is None:
            return report
        events = report.events if check.events is None else check.events
        return attrs.evolve(report, events=events, whole=check.whole, problem=check.problem)

    def is_original(self, path: Path, sha256: str) -> bool:
        """Return whether a file's SHA-256 is `sha256`. An unknown SHA-256 counts as equal."""
        check = self._get(path)
        return check is None or check.sha256 in {None, sha256}


class FileChecker:
    """Checks files by reading them completely.

    Args:
        total_bytes: Total size of the files.
        cache: Cache of results; ``None`` to read all files.
        processes: Number of traces to read in parallel.
        on_progress: Called with the number of bytes read so far and the total.
    """

    def __init__(
        self, total_bytes: int, *, cache: ResultCache | None, processes: int, on_progress: Progress | None
    ) -> None:
        self._meter = Meter(total_bytes, on_progress)
        self._cache, self._processes = cache, processes
        self._checks: dict[Path, FileCheck] = {}

    def read_traces(self, traces: Sequence[TraceToCheck]) -> None:
        """Check all traces. Files that have not changed since a cached check are not read again."""
        cached = KeptChecks(self._cache)
        left = []
        for trace in traces:
            if (kept := cached.get(trace.path, with_sum=trace.with_sum)) is None:
                left.append(trace)
            else:
                self._checks[trace.path] = kept
        if not left:
            return
        from profdeck_traces import check_trace  # slow to import; forked processes inherit it

        sizes = [file_size(trace.path) for trace in left]
        check = functools.partial(_check, read=check_trace, cached=cached)
        found = map_traces(check, left, sizes, processes=self._processes, on_progress=self._meter.within)
        for trace, result in zip(left, found, strict=True):
            self._checks[trace.path] = _unreadable(result) if isinstance(result, TraceError) else result
        self._meter.passed(sum(sizes))
        cached.evict()

    def read(self, report: ArtifactReport, kind: ArtifactKind | None) -> ArtifactReport:
        """Return the report, updated with the file's check result.

        This method reads artifacts of plugins itself. For traces, call `read_traces` first.
        """
        if kind is not None:
            found = self._of_kind(report, kind)
            self._meter.passed(report.size_bytes)
            return found
        if report.kind != TRACE or (check := self._checks.get(report.path)) is None:
            return report
        return attrs.evolve(report, events=check.events, whole=check.whole, problem=check.problem, kept=check.kept)

    def is_original(self, path: Path, sha256: str) -> bool:
        """Return whether a file's SHA-256 is `sha256`."""
        return sha256 == (self._checks[path].sha256 if path in self._checks else sha256_of(path))

    def _of_kind(self, report: ArtifactReport, kind: ArtifactKind) -> ArtifactReport:
        try:
            found = kind.check(report.path, self._meter.within)
        except MissingLibraryError:
            raise  # the environment's problem, not the artifact's
        except (OSError, ProfdeckError) as error:
            return attrs.evolve(report, whole=False, problem=f"cannot be read: {error}")
        except Exception as error:  # noqa: BLE001 - a plugin may raise any exception, which affects only its artifact
            return attrs.evolve(report, whole=False, problem=f"cannot be read: {describe_error(error)}")
        return attrs.evolve(
            report,
            events=found.events,
            # Keep the recorder's result, because some problems are not visible in the file.
            whole=report.whole and found.whole,
            problem=" ".join(filter(None, [report.problem, found.problem])) or None,
            notes=found.notes,
        )


def _check(
    trace: TraceToCheck, on_progress: Progress | None, *, read: Callable[..., TraceCheck], cached: KeptChecks
) -> FileCheck:
    before = cached.before(trace.path)
    try:
        found = read(trace.path, on_progress=on_progress)
    except (OSError, ProfdeckError) as error:
        return _unreadable(error)
    sha256 = sha256_of(trace.path) if trace.with_sum and found.whole else None
    check = FileCheck(whole=found.whole, problem=found.problem, events=found.events, sha256=sha256)
    cached.put(before, trace.path, check, with_sum=trace.with_sum)
    return check


def _unreadable(error: Exception) -> FileCheck:
    return FileCheck(whole=False, problem=f"cannot be read: {error}", events=None, sha256=None)
