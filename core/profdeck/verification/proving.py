"""Proves single files by reading them, or finds that they were proved before and did not change since."""

from __future__ import annotations

import hashlib
from pathlib import Path

import attrs
import msgspec

from profdeck.base.errors import ProfdeckError, describe
from profdeck.base.progress import Meter
from profdeck.base.result_cache import ResultCache
from profdeck.traces.kept_results import KeptResults
from profdeck.traces.kinds import TRACE, ArtifactKind
from profdeck.traces.reading.integrity import check_trace
from profdeck.verification.reports import ArtifactReport


class _Proof(msgspec.Struct):
    """What reading a trace to its end found."""

    events: int
    whole: bool
    problem: str | None


_decode = msgspec.json.Decoder(_Proof).decode


class Prover:
    """Reads the files of a run.

    Args:
        meter: Told of the bytes read.
        cache: Where it is kept what was found.
    """

    def __init__(self, meter: Meter, cache: ResultCache | None = None) -> None:
        self.meter = meter
        self._proofs, self._sums = KeptResults(cache, "whole"), KeptResults(cache, "sha256")
        self._added = False

    def read(self, report: ArtifactReport, kind: ArtifactKind | None) -> ArtifactReport:
        """Read a file to its end, if it is known how."""
        if report.kind != TRACE and kind is None:
            return report
        try:
            return self._trace(report) if kind is None else self._of_kind(report, kind)
        except (OSError, ProfdeckError) as error:
            return attrs.evolve(report, whole=False, problem=f"cannot be read: {error}")
        except Exception as error:  # a plugin's kind may raise anything, and costs its own artifact only
            if kind is None:
                raise
            return attrs.evolve(report, whole=False, problem=f"cannot be read: {describe(error)}")

    def sha256(self, path: Path) -> str | None:
        """Return the SHA-256 of a file; ``None`` if it cannot be read."""
        if kept := self._sums.get(path):
            return kept.hex()
        before = self._sums.before(path)
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256")
        except OSError:
            return None
        self._sums.put(before, path, found.digest())
        return found.hexdigest()

    def finish(self) -> None:
        """Keep the cache within its bounds."""
        if self._added:
            self._proofs.tidy_up()

    def _trace(self, report: ArtifactReport) -> ArtifactReport:
        if kept := self._proofs.get(report.path):
            proof = _decode(kept)
        else:
            before = self._proofs.before(report.path)
            check = check_trace(report.path, on_progress=self.meter.within)
            proof = _Proof(check.events, check.whole, check.problem)
            self._proofs.put(before, report.path, msgspec.json.encode(proof))
            self._added = True
        return attrs.evolve(
            report, events=proof.events, whole=proof.whole, problem=proof.problem, kept=kept is not None
        )

    def _of_kind(self, report: ArtifactReport, kind: ArtifactKind) -> ArtifactReport:
        found = kind.check(report.path, self.meter.within)
        return attrs.evolve(
            report,
            events=found.events,
            # The recorder may have seen what cannot be told any more.
            whole=report.whole and found.whole,
            problem=" ".join(filter(None, [report.problem, found.problem])) or None,
            notes=found.notes,
        )
