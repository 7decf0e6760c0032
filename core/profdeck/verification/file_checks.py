"""Proves files by reading them, several at a time, or finds that they were proved before and did not change since."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from profdeck.verification.report_model import ArtifactReport
from profdeck_traces import check_trace
from profdeck_traces.base.errors import MissingLibraryError, ProfdeckError, TraceError, describe_error
from profdeck_traces.base.files import file_size
from profdeck_traces.base.parallel import map_traces
from profdeck_traces.base.progress import Meter, Progress
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.artifact_kinds import TRACE, ArtifactKind
from profdeck_traces.inputs.file_checks import KeptProofs, Proof, sha256_of


@attrs.frozen
class TraceToProve:
    """A trace, and what to find of it."""

    path: Path
    with_sum: bool
    """Whether to compute its SHA-256, too."""

    def __str__(self) -> str:
        return str(self.path)


@attrs.frozen
class KnownProblems:
    """Problems that another reader found in files. Files without a problem are not read."""

    by_path: Mapping[str, str]

    def read(self, report: ArtifactReport, kind: ArtifactKind | None) -> ArtifactReport:  # noqa: ARG002  # as in Prover
        """Add the known problem of a file to its report."""
        problem = self.by_path.get(str(report.path))
        return report if problem is None else attrs.evolve(report, whole=False, problem=problem)

    def is_original(self, path: Path, sha256: str) -> bool:  # noqa: ARG002  # as in Prover
        """Return True: the file is not read."""
        return True


class Prover:
    """Reads the files of a run.

    Args:
        total_bytes: The size of all of them.
        cache: Where it is kept what was found.
        processes: How many traces are read at the same time.
        on_progress: Told of the bytes read, of all.
    """

    def __init__(
        self, total_bytes: int, *, cache: ResultCache | None, processes: int, on_progress: Progress | None
    ) -> None:
        self._meter = Meter(total_bytes, on_progress)
        self._cache, self._processes = cache, processes
        self._proofs: dict[Path, Proof] = {}

    def read_traces(self, traces: Sequence[TraceToProve]) -> None:
        """Read all traces to their ends that were not, or not as they are now."""
        proofs = KeptProofs(self._cache)
        left = []
        for trace in traces:
            if (kept := proofs.get(trace.path, with_sum=trace.with_sum)) is None:
                left.append(trace)
            else:
                self._proofs[trace.path] = kept
        if not left:
            return
        sizes = [file_size(trace.path) for trace in left]
        prove = functools.partial(_prove, proofs=proofs)
        found = map_traces(prove, left, sizes, processes=self._processes, on_progress=self._meter.within)
        for trace, proof in zip(left, found, strict=True):
            self._proofs[trace.path] = _unreadable(proof) if isinstance(proof, TraceError) else proof
        self._meter.passed(sum(sizes))
        proofs.tidy_up()

    def read(self, report: ArtifactReport, kind: ArtifactKind | None) -> ArtifactReport:
        """Say what was found of a trace, or read an artifact of another kind to its end, if it is known how."""
        if kind is not None:
            found = self._of_kind(report, kind)
            self._meter.passed(report.size_bytes)
            return found
        if report.kind != TRACE or (proof := self._proofs.get(report.path)) is None:
            return report
        return attrs.evolve(report, events=proof.events, whole=proof.whole, problem=proof.problem, kept=proof.kept)

    def is_original(self, path: Path, sha256: str) -> bool:
        """Return True if a file has this SHA-256."""
        return sha256 == (self._proofs[path].sha256 if path in self._proofs else sha256_of(path))

    def _of_kind(self, report: ArtifactReport, kind: ArtifactKind) -> ArtifactReport:
        try:
            found = kind.check(report.path, self._meter.within)
        except MissingLibraryError:
            raise  # the environment's problem, not the artifact's
        except (OSError, ProfdeckError) as error:
            return attrs.evolve(report, whole=False, problem=f"cannot be read: {error}")
        except Exception as error:  # noqa: BLE001 - a plugin's kind may raise anything, and costs its own artifact only
            return attrs.evolve(report, whole=False, problem=f"cannot be read: {describe_error(error)}")
        return attrs.evolve(
            report,
            events=found.events,
            # The recorder may have seen what cannot be told any more.
            whole=report.whole and found.whole,
            problem=" ".join(filter(None, [report.problem, found.problem])) or None,
            notes=found.notes,
        )


def _prove(trace: TraceToProve, on_progress: Progress | None, *, proofs: KeptProofs) -> Proof:
    before = proofs.before(trace.path)
    try:
        check = check_trace(trace.path, on_progress=on_progress)
    except (OSError, ProfdeckError) as error:
        return _unreadable(error)
    # Of what is damaged nobody asks whether it is the file that was written.
    sha256 = sha256_of(trace.path) if trace.with_sum and check.whole else None
    proof = Proof(whole=check.whole, problem=check.problem, events=check.events, sha256=sha256)
    proofs.put(before, trace.path, proof, with_sum=trace.with_sum)
    return proof


def _unreadable(error: Exception) -> Proof:
    return Proof(whole=False, problem=f"cannot be read: {error}", events=None, sha256=None)
