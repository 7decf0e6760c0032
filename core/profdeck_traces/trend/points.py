"""Reads the metrics of each rank in each capture, using the cache for unchanged traces."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec

from profdeck_traces.analysis import cached_reading
from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.run_summary import summarise_run
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.host_load import HostLoad, with_other_load
from profdeck_traces.inputs.result_keys import KeptResults
from profdeck_traces.inputs.sources import TraceSource
from profdeck_traces.trend.rank_numbers import RankNumbers, numbers_of

_BATCH = 64
"""Number of summaries in memory at the same time."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RankNumbers).decode


@attrs.frozen(kw_only=True)
class RankPoint:
    """Metrics of one rank in one capture."""

    run: str
    capture: str
    role: str
    replica: int | None
    stage: str | None
    """Stage or batch kind of the capture, if it records only one."""
    rank: int
    first_step: int
    started_ns: int
    stall_s: float | None
    is_machine_busy: bool
    """True if the machine was busy during the recording, as in `profdeck_traces.inputs.host_load`."""
    numbers: RankNumbers


def read_points(
    sources: Sequence[TraceSource],
    *,
    processes: int = 1,
    cache: ResultCache | None = None,
    on_progress: Progress | None = None,
) -> tuple[list[RankPoint], int, list[TraceError]]:
    """Read the metrics of all ranks in all captures.

    Args:
        sources: Traces from `profdeck_traces.inputs.sources.recorded_sources`.
        processes: Number of traces to read in parallel.
        cache: Cache of results, or ``None``.
        on_progress: Called with the number of traces read so far and the total.

    Returns:
        A tuple of three items: the metrics of each rank in each capture, the number of traces that are incomplete or
        have no step, and the errors of the unreadable traces.
    """
    classifier, step_names = Classifier(), StepNames.load()
    cached = KeptResults(cache, "trend", *cached_reading.question(classifier, step_names))
    numbers: dict[int, RankNumbers | None] = {}
    for index, source in enumerate(sources):
        if (content := cached.get(source.path, *cached_reading.about(source))) is not None:
            numbers[index] = _decode(content) if content else None
    errors: list[TraceError] = []
    uncached = [index for index in range(len(sources)) if index not in numbers]
    for begin in range(0, len(uncached), _BATCH):
        batch = {str(sources[index].path): index for index in uncached[begin : begin + _BATCH]}
        before = {path: cached.before(sources[index].path) for path, index in batch.items()}
        summary, problems = summarise_run(
            [sources[index] for index in batch.values()], classifier=classifier, processes=processes, cache=cache
        )
        errors += problems
        for rank in summary.ranks:
            index = batch[rank.path]
            rank_numbers = numbers_of(rank) if rank.whole else None
            numbers[index] = rank_numbers
            content = b"" if rank_numbers is None else _encode(rank_numbers)
            cached.put(before[rank.path], sources[index].path, content, *cached_reading.about(sources[index]))
        if on_progress is not None:
            on_progress(min(begin + _BATCH, len(uncached)), len(uncached))
    loads = _loads(sources)
    points = [
        _point(sources[index], value, loads[index])
        for index, value in sorted(numbers.items())
        if value and value.values
    ]
    return points, len(numbers) - len(points), errors


def points_of(runs: Sequence[RunSummary], sources: Sequence[TraceSource]) -> list[RankPoint]:
    """Return the same metrics as `read_points`, from summaries.

    Args:
        runs: Summaries of the sources.
        sources: Traces from `profdeck_traces.inputs.sources.find_sources`. Traces outside runs are skipped.
    """
    numbers = {rank.path: numbers_of(rank) for run in runs for rank in run.ranks if rank.whole}
    return [
        _point(source, value, load)
        for source, load in zip(sources, _loads(sources), strict=True)
        if source.facts is not None and (value := numbers.get(str(source.path))) is not None and value.values
    ]


def _loads(sources: Sequence[TraceSource]) -> list[HostLoad | None]:
    """Return the load during each recording, including the CPU use of other processes."""
    facts = [source.facts for source in sources]
    places = [
        ((of.run, of.capture, of.host), (of.role, of.replica, of.rank)) if of is not None else (None, None)
        for of in facts
    ]
    return with_other_load([None if of is None else of.host_load for of in facts], places)


def _point(source: TraceSource, numbers: RankNumbers, load: HostLoad | None) -> RankPoint:
    facts = source.facts
    assert facts is not None  # noqa: S101  # the callers select traces with facts
    assert facts.rank is not None  # noqa: S101  # the callers select traces of ranks
    return RankPoint(
        run=facts.run,
        capture=facts.capture,
        role=facts.role,
        replica=facts.replica,
        stage=facts.stage,
        rank=facts.rank,
        first_step=facts.first_step,
        started_ns=facts.started_ns,
        stall_s=facts.stall_s,
        is_machine_busy=load is not None and load.describe_contention() is not None,
        numbers=numbers,
    )
