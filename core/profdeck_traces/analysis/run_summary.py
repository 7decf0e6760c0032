"""What many traces say: each of them, and how the ranks stood to each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import attrs

from profdeck_traces.account.owned_path import RankWaits
from profdeck_traces.analysis import cached_reading
from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.clocks import match_teams
from profdeck_traces.analysis.collective_skew import skew_of_team
from profdeck_traces.analysis.model import RankSummary, RunSummary
from profdeck_traces.analysis.pictures import reduced
from profdeck_traces.analysis.rank_labels import places_in_paths
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.analysis.rank_waits import assign_waits, waits_on_paths
from profdeck_traces.analysis.role_waits import assign_role_waits
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
from profdeck_traces.inputs.host_load import with_other_load
from profdeck_traces.inputs.result_files import question_text, read_result
from profdeck_traces.inputs.result_keys import FileIdentity, KeptResults
from profdeck_traces.inputs.sources import TraceSource

_PICTURES = "pictures"
"""Part of the cache key that marks an entry as pictures."""


def summarise_run(  # noqa: PLR0913 - what to read, and where
    sources: Sequence[TraceSource],
    *,
    classifier: Classifier | None = None,
    buckets: int = 0,
    processes: int = 1,
    cache: ResultCache | None = None,
    on_progress: Progress | None = None,
) -> tuple[RunSummary, list[TraceError]]:
    """Summarise traces of several ranks, roles and engines.

    The result does not depend on `processes` and `cache`.

    Args:
        sources: The traces; :func:`profdeck_traces.inputs.sources.find_sources` finds them.
        classifier: Assigns kernel classes. Default: the built-in table.
        buckets: Number of intervals in each picture. Must divide `FINEST_BUCKETS` evenly; 0 for no pictures.
        processes: Number of traces to read in parallel, each in its own process.
        cache: Cache of results. Files that have not changed since they were read are not read again.
        on_progress: Called with the number of bytes read so far and the total.

    Returns:
        The summary of the readable traces, in the order of the sources, and the errors of the other traces.
    """
    how = _How(
        classifier or Classifier(),
        StepNames.load(),
        with_pictures=bool(buckets),
        cache=cache,
    )
    in_order = _readings(sources, how, processes, on_progress)
    readings = _with_places([reading for reading in in_order if not isinstance(reading, TraceError)])
    teams = match_teams([reading.collectives for reading in readings])
    accounts = assign_role_waits(readings, assign_waits(readings, teams))
    summaries = [
        attrs.evolve(reading.summary, account=account) for reading, account in zip(readings, accounts, strict=True)
    ]
    ranks = _with_other_load(_with_typical(summaries, buckets))
    summary = RunSummary(ranks=ranks, skew=tuple(map(skew_of_team, teams)), servers=servers_of(ranks))
    return summary, [error for error in in_order if isinstance(error, TraceError)]


def rank_waits(
    sources: Sequence[TraceSource],
    *,
    processes: int = 1,
    cache: ResultCache | None = None,
    on_progress: Progress | None = None,
) -> list[RankWaits | None]:
    """Return each trace's waits for other ranks on its critical path, or ``None`` for a trace if they are unknown.

    See `summarise_run` for the arguments.
    """
    how = _How(Classifier(), StepNames.load(), with_pictures=False, cache=cache)
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
    """Return, for each trace, either the result of reading it or the error raised."""
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
    with_pictures: bool = attrs.field(kw_only=True)
    """True if the caller needs pictures. If there is a cache, they are always generated in case a report needs them."""
    cache: ResultCache | None = attrs.field(kw_only=True)

    @property
    def results(self) -> KeptResults:
        """Cached results for this classifier and these step names."""
        return KeptResults(self.cache, *cached_reading.question(self.classifier, self.step_names))

    def kept(self, source: TraceSource) -> RankReading | None:
        """Return a reading from the cache or the trace's result file, or ``None`` if the trace must be read."""
        about = cached_reading.about(source)
        content = self.results.get(source.path, *about)
        pictures = self.results.get(source.path, *about, _PICTURES) if self.with_pictures else None
        if content is not None and (pictures is not None or not self.with_pictures):
            with suppress(ValueError):
                return cached_reading.from_bytes(content, source, pictures)
        before = self.results.before(source.path)
        question = [*cached_reading.question(self.classifier, self.step_names), *about]
        result = read_result(source.path)
        if result is None or result.question != question_text(*question):
            return None
        try:
            reading = cached_reading.from_bytes(result.reading, source, result.pictures if self.with_pictures else None)
        except ValueError:
            return None
        self.results.put(before, source.path, result.reading, *about)
        self.results.put(before, source.path, result.pictures, *about, _PICTURES)
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
            cold_first_step=source.cold_first_step,
            last_step=source.last_step,
            pictures=self.with_pictures or self.cache is not None,
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
        """Cache a reading and its pictures if the trace file still has the identity `before`."""
        content, pictures = cached_reading.to_bytes(reading), cached_reading.pictures_to_bytes(reading)
        if content is not None and pictures is not None:
            about = cached_reading.about(source)
            self.results.put(before, source.path, content, *about)
            self.results.put(before, source.path, pictures, *about, _PICTURES)

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


def _with_other_load(ranks: Sequence[RankSummary]) -> tuple[RankSummary, ...]:
    """Add the CPU use of other processes to each rank's load, based on all ranks of its host in the same capture."""
    places = [
        ((rank.run, rank.capture, rank.host or rank.path), (rank.role, rank.replica, rank.rank)) for rank in ranks
    ]
    loads = with_other_load([rank.host_load for rank in ranks], places)
    return tuple(attrs.evolve(rank, host_load=load) for rank, load in zip(ranks, loads, strict=True))


def _with_typical(ranks: Sequence[RankSummary], buckets: int) -> tuple[RankSummary, ...]:
    """Keep only the pictures of the entire recording and the typical step, reduced to `buckets` intervals.

    If `buckets` is 0, remove all pictures.
    """
    if not buckets:
        return tuple(attrs.evolve(rank, timelines=()) if rank.timelines else rank for rank in ranks)
    typical = typical_steps(ranks)
    shown = []
    for rank in ranks:
        pictures = rank.timelines[:1]
        if len(rank.timelines) > 1:
            pictures += (rank.timelines[1 + candidates(rank).index(typical[rank.path])],)
        timelines = tuple(reduced(picture, buckets) for picture in pictures)
        shown.append(attrs.evolve(rank, timelines=timelines) if timelines else rank)
    return tuple(shown)
