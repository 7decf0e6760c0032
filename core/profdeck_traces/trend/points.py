"""Reads the numbers of all captures below some paths; what did not change since is taken from the cache."""

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
from profdeck_traces.inputs.result_keys import KeptResults
from profdeck_traces.inputs.sources import TraceSource
from profdeck_traces.trend.rank_numbers import RankNumbers, numbers_of

_AT_ONCE = 64
"""Summaries that are held at a time."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RankNumbers).decode


@attrs.frozen(kw_only=True)
class RankPoint:
    """One rank in one capture."""

    run: str
    capture: str
    role: str
    replica: int | None
    stage: str | None
    """The stage that the capture is of, if it is of one."""
    rank: int
    first_step: int
    started_ns: int
    stall_s: float | None
    numbers: RankNumbers


def read_points(
    sources: Sequence[TraceSource],
    *,
    processes: int = 1,
    cache: ResultCache | None = None,
    on_progress: Progress | None = None,
) -> tuple[list[RankPoint], int, list[TraceError]]:
    """Read the numbers of all ranks of all captures.

    Args:
        sources: As from `profdeck_traces.inputs.sources.recorded_sources`.
        processes: How many traces are read at once.
        cache: Where results are kept.
        on_progress: Called with the traces read so far and in all.

    Returns:
        What each rank of each capture says; how many traces are not whole or have no step; and why others could not be
        read.
    """
    classifier, step_names = Classifier(), StepNames.load()
    kept = KeptResults(cache, "trend", *cached_reading.question(classifier, step_names, devices_only=False))
    numbers: dict[int, RankNumbers | None] = {}
    for index, source in enumerate(sources):
        if (content := kept.get(source.path, *cached_reading.about(source))) is not None:
            numbers[index] = _decode(content) if content else None
    errors: list[TraceError] = []
    left = [index for index in range(len(sources)) if index not in numbers]
    for begin in range(0, len(left), _AT_ONCE):
        some = {str(sources[index].path): index for index in left[begin : begin + _AT_ONCE]}
        before = {path: kept.before(sources[index].path) for path, index in some.items()}
        summary, problems = summarise_run(
            [sources[index] for index in some.values()], classifier=classifier, processes=processes, cache=cache
        )
        errors += problems
        for rank in summary.ranks:
            index = some[rank.path]
            found = numbers_of(rank) if rank.whole else None
            numbers[index] = found
            content = b"" if found is None else _encode(found)
            kept.put(before[rank.path], sources[index].path, content, *cached_reading.about(sources[index]))
        if on_progress is not None:
            on_progress(min(begin + _AT_ONCE, len(left)), len(left))
    points = [_point(sources[index], found) for index, found in sorted(numbers.items()) if found and found.values]
    return points, len(numbers) - len(points), errors


def points_of(runs: Sequence[RunSummary], sources: Sequence[TraceSource]) -> list[RankPoint]:
    """Take the numbers of all ranks of all captures from summaries; the same as `read_points` reads.

    Args:
        runs: Of the sources.
        sources: As from `profdeck_traces.inputs.sources.find_sources`; those of no run are passed over.
    """
    numbers = {rank.path: numbers_of(rank) for run in runs for rank in run.ranks if rank.whole}
    return [
        _point(source, found)
        for source in sources
        if source.facts is not None and (found := numbers.get(str(source.path))) is not None and found.values
    ]


def _point(source: TraceSource, numbers: RankNumbers) -> RankPoint:
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
        numbers=numbers,
    )
