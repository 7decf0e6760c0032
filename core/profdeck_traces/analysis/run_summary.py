"""What many traces say: each of them, and how the ranks stood to each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import attrs

from profdeck_traces.account.owned_path import RankWaits
from profdeck_traces.analysis import cached_reading
from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.clocks import match_teams
from profdeck_traces.analysis.collective_skew import skew_of_team
from profdeck_traces.analysis.model import RankSummary, RunSummary
from profdeck_traces.analysis.rank_labels import places_in_paths
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.analysis.rank_waits import assign_waits, waits_on_paths
from profdeck_traces.analysis.servers import servers_of
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.analysis.typical_step import candidates, typical_steps
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import sha256_of
from profdeck_traces.base.parallel import map_traces
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.artifact_kinds import FileCheck
from profdeck_traces.inputs.file_checks import KeptChecks
from profdeck_traces.inputs.result_files import question_text, read_result
from profdeck_traces.inputs.result_keys import FileIdentity, KeptResults
from profdeck_traces.inputs.sources import TraceSource


def summarise_run(  # noqa: PLR0913 - what to read, and where
    sources: Sequence[TraceSource],
    *,
    classifier: Classifier | None = None,
    buckets: int = 0,
    kept_buckets: int = 0,
    processes: int = 1,
    cache: ResultCache | None = None,
    on_progress: Progress | None = None,
) -> tuple[RunSummary, list[TraceError]]:
    """Summarise traces of several ranks, roles and engines.

    The result does not depend on `processes` and `cache`.

    Args:
        sources: The traces; :func:`profdeck_traces.inputs.sources.find_sources` finds them.
        classifier: Assigns kernel classes. Default: the built-in table.
        buckets: Number of intervals in the pictures of each trace; 0 for no pictures.
        kept_buckets: Number of intervals in the pictures that are cached for later calls if this call requests none.
        processes: Number of traces to read in parallel, each in its own process.
        cache: Cache of results. Files that have not changed since they were read are not read again.
        on_progress: Called with the number of bytes read so far and the total.

    Returns:
        The summary of the readable traces, in the order of the sources, and the errors of the other traces.
    """
    how = _How(
        classifier or Classifier(),
        StepNames.load(),
        buckets=buckets or (kept_buckets if cache is not None else 0),
        with_pictures=bool(buckets),
        cache=cache,
    )
    in_order = _readings(sources, how, processes, on_progress)
    readings = _with_places([reading for reading in in_order if not isinstance(reading, TraceError)])
    if not buckets:
        readings = list(map(_without_pictures, readings))
    teams = match_teams([reading.collectives for reading in readings])
    accounts = assign_waits(readings, teams)
    summaries = [
        attrs.evolve(reading.summary, account=account) for reading, account in zip(readings, accounts, strict=True)
    ]
    ranks = _with_typical(summaries)
    summary = RunSummary(ranks=ranks, skew=tuple(map(skew_of_team, teams)), servers=servers_of(ranks))
    return summary, [error for error in in_order if isinstance(error, TraceError)]


def rank_waits(
    sources: Sequence[TraceSource],
    *,
    processes: int = 1,
    cache: ResultCache | None = None,
    on_progress: Progress | None = None,
) -> list[RankWaits | None]:
    """Return the waits for other ranks on the critical path of each trace, ``None`` if they are unknown.

    The arguments are those of `summarise_run`.
    """
    how = _How(Classifier(), StepNames.load(), buckets=0, with_pictures=False, cache=cache)
    in_order = _readings(sources, how, processes, on_progress)
    places = [place for place, reading in enumerate(in_order) if not isinstance(reading, TraceError)]
    readings = _with_places([reading for reading in in_order if not isinstance(reading, TraceError)])
    waits = waits_on_paths(readings, match_teams([reading.collectives for reading in readings]))
    found: list[RankWaits | None] = [None] * len(sources)
    for place, of_rank in zip(places, waits, strict=True):
        found[place] = of_rank
    return found


def _readings(
    sources: Sequence[TraceSource], how: _How, processes: int, on_progress: Progress | None
) -> list[RankReading | TraceError]:
    """Return the reading or the error of each trace."""
    found: dict[int, RankReading | TraceError] = {}
    if how.cache is not None:
        found = {index: reading for index, source in enumerate(sources) if (reading := how.kept(source)) is not None}
    left = [index for index in range(len(sources)) if index not in found]
    if left:
        to_read = [sources[index] for index in left]
        sizes = [source.size_bytes for source in to_read]
        read = map_traces(how.read, to_read, sizes, processes=processes, on_progress=on_progress)
        how.results.evict()
        found |= dict(zip(left, read, strict=True))
    return [found[index] for index in range(len(sources))]


@attrs.frozen
class _How:
    """How to read a trace, or to find what was read of it. Goes to other processes."""

    classifier: Classifier
    step_names: StepNames
    buckets: int = attrs.field(kw_only=True)
    """How many parts the pictures have that are made."""
    with_pictures: bool = attrs.field(kw_only=True)
    """Whether they are wanted now."""
    cache: ResultCache | None = attrs.field(kw_only=True)

    @property
    def results(self) -> KeptResults:
        """What is kept of this question."""
        return KeptResults(self.cache, *cached_reading.question(self.classifier, self.step_names))

    def kept(self, source: TraceSource) -> RankReading | None:
        """Return a reading from the cache or the trace's result file, or ``None`` if the trace must be read."""
        content = self.results.get(source.path, *self._about(source, with_pictures=self.with_pictures))
        if content is not None:
            with suppress(ValueError):
                return cached_reading.from_bytes(content, source)
        before = self.results.before(source.path)
        question = [*cached_reading.question(self.classifier, self.step_names), *cached_reading.about(source)]
        result = read_result(source.path)
        if result is None or result.question != question_text(*question):
            return None
        buckets = self.buckets if self.with_pictures else 0
        try:
            reading = cached_reading.from_bytes(result.readings.get(buckets, b""), source)
        except ValueError:
            return None
        for with_pictures in {bool(self.buckets), False}:
            if (content := result.readings.get(self.buckets if with_pictures else 0)) is not None:
                self.results.put(before, source.path, content, *self._about(source, with_pictures=with_pictures))
        KeptChecks(self.cache).put(before, source.path, result.check, with_sum=_has_digest(source))
        return reading

    def read(self, source: TraceSource, on_progress: Progress | None) -> RankReading:
        """Read a trace, and keep what was found."""
        from profdeck_traces.analysis.summary import read_summary

        before = self.results.before(source.path)
        reading = read_summary(
            source,
            classifier=self.classifier,
            step_names=self.step_names,
            buckets=self.buckets,
            on_progress=on_progress,
        )
        found = reading.summary
        if found.problem and not (found.events or found.kernels or found.device_steps or found.communication):
            raise TraceError(f"{source.path}: {found.problem}")
        if before is not None:
            self._keep(before, source, reading)
            if found.whole:
                self._keep_check(before, source, found)
        return reading.with_facts(source)

    def _keep(self, before: FileIdentity, source: TraceSource, reading: RankReading) -> None:
        """Keep what was found in a trace that is still what it was before, with pictures and without."""
        for with_pictures in (True, False) if self.buckets else (False,):
            content = cached_reading.to_bytes(reading if with_pictures else _without_pictures(reading))
            if content is not None:
                self.results.put(before, source.path, content, *self._about(source, with_pictures=with_pictures))

    def _about(self, source: TraceSource, *, with_pictures: bool) -> list[Any]:
        return [*cached_reading.about(source), self.buckets if with_pictures else 0]

    def _keep_check(self, before: FileIdentity, source: TraceSource, found: RankSummary) -> None:
        """Keep for `profdeck ls` that a trace was read to its end."""
        with_sum = _has_digest(source)
        sha256 = sha256_of(source.path) if with_sum else None
        check = FileCheck(whole=True, problem=None, events=found.events, sha256=sha256)
        KeptChecks(self.cache).put(before, source.path, check, with_sum=with_sum)


def _has_digest(source: TraceSource) -> bool:
    return source.facts is not None and source.facts.has_digest


def _with_places(readings: Sequence[RankReading]) -> list[RankReading]:
    """Add the ranks and replicas that are known only from the paths."""
    places = places_in_paths([reading.summary for reading in readings])
    return [
        attrs.evolve(
            reading,
            summary=attrs.evolve(reading.summary, rank=rank, replica=replica),
            collectives=attrs.evolve(reading.collectives, rank=rank, replica=replica),
        )
        for reading, (rank, replica) in zip(readings, places, strict=True)
    ]


def _without_pictures(reading: RankReading) -> RankReading:
    return attrs.evolve(reading, summary=attrs.evolve(reading.summary, timelines=()))


def _with_typical(ranks: Sequence[RankSummary]) -> tuple[RankSummary, ...]:
    """Return the traces with the pictures of all that was recorded and of the typical step alone."""
    typical = typical_steps(ranks)
    found = []
    for rank in ranks:
        whole, *of_steps = rank.timelines or (None,)
        kept = [of_steps[candidates(rank).index(typical[rank.path])]] if of_steps else []
        found.append(attrs.evolve(rank, timelines=(whole, *kept)) if whole else rank)
    return tuple(found)
