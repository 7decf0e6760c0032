"""What many traces say: each of them, and how the ranks stood to each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs

from profdeck.base.errors import TraceError
from profdeck.base.progress import Progress
from profdeck.traces.analysis.classes import Classifier
from profdeck.traces.analysis.model import RankSummary, RunSummary
from profdeck.traces.analysis.skew import skew_of
from profdeck.traces.analysis.step_names import StepNames
from profdeck.traces.analysis.summary import Reading, read_summary
from profdeck.traces.analysis.typical import candidates, typical_steps
from profdeck.traces.parallel import map_traces
from profdeck.traces.ray_tasks import map_on_ray
from profdeck.traces.sources import TraceSource


def summarise_run(  # noqa: PLR0913 - what to read, and where
    sources: Sequence[TraceSource],
    *,
    devices_only: bool = False,
    classifier: Classifier | None = None,
    buckets: int = 0,
    processes: int = 1,
    ray: str | None = None,
    on_progress: Progress | None = None,
) -> tuple[RunSummary, list[TraceError]]:
    """Summarise traces of any mixture of ranks, roles and engines; the answer does not depend on where it is made.

    Args:
        sources: The traces; :func:`profdeck.traces.sources.find_sources` finds them.
        devices_only: See :func:`profdeck.traces.analysis.summary.summarise_trace`.
        classifier: As there.
        buckets: As there.
        processes: How many traces are read at once, each in a process of its own if it is more than one.
        ray: The address of a Ray cluster on whose nodes the traces are read instead; they must see the files.
        on_progress: Called with the bytes read so far and in all.

    Returns:
        The summary of those that could be read, in the order of the sources, and why the others could not be read.
    """
    function = functools.partial(
        _read,
        devices_only=devices_only,
        classifier=classifier or Classifier(),
        step_names=StepNames.load(),
        buckets=buckets,
    )
    sizes = [source.size_bytes for source in sources]
    if ray is None:
        found = map_traces(function, sources, sizes, processes=processes, on_progress=on_progress)
    else:
        found = map_on_ray(function, sources, sizes, address=ray, on_progress=on_progress)
    readings = [reading for reading in found if not isinstance(reading, TraceError)]
    summary = RunSummary(
        ranks=_with_typical([reading.summary for reading in readings]),
        skew=skew_of([reading.collectives for reading in readings]),
    )
    return summary, [error for error in found if isinstance(error, TraceError)]


def _with_typical(ranks: Sequence[RankSummary]) -> tuple[RankSummary, ...]:
    """Return the traces with the pictures of all that was recorded and of the typical step alone."""
    typical = typical_steps(ranks)
    found = []
    for rank in ranks:
        whole, *of_steps = rank.timelines or (None,)
        kept = [of_steps[candidates(rank).index(typical[rank.path])]] if of_steps else []
        found.append(attrs.evolve(rank, timelines=(whole, *kept)) if whole else rank)
    return tuple(found)


def _read(  # noqa: PLR0913 - what is the same for all traces
    source: TraceSource,
    on_progress: Progress | None,
    *,
    devices_only: bool,
    classifier: Classifier,
    step_names: StepNames,
    buckets: int,
) -> Reading:
    reading = read_summary(
        source,
        devices_only=devices_only,
        classifier=classifier,
        step_names=step_names,
        buckets=buckets,
        on_progress=on_progress,
    )
    found = reading.summary
    if found.problem and not (found.events or found.kernels or found.device_steps or found.communication):
        raise TraceError(f"{source.path}: {found.problem}")
    return reading
