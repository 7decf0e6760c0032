"""Everything that there is to say of some traces: the one document behind the terminal, reports, tables and diffs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.pictures import buckets_of
from profdeck_traces.analysis.run_summary import summarise_run
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.findings.finding import findings_of
from profdeck_traces.inputs.facts import run_records
from profdeck_traces.inputs.file_formats import is_merged
from profdeck_traces.inputs.sources import find_sources


def summarise(  # noqa: PLR0913 - what to read, and where
    paths: Sequence[Path],
    *,
    devices_only: bool = False,
    classifier: Classifier | None = None,
    buckets: int = 0,
    processes: int = 1,
    cache: ResultCache | None = None,
    on_progress: Progress | None = None,
    on_left_out: Callable[[Path, str], None] | None = None,
) -> tuple[RunSummary, list[TraceError]]:
    """Summarise all traces below some paths: what `summarise_run` says, the captures, and what stands out.

    Args:
        paths: Runs, captures, directories or trace files.
        devices_only: See `profdeck_traces.analysis.run_summary.summarise_run`, as for what follows.
        classifier: As there.
        buckets: As there.
        processes: As there.
        cache: As there.
        on_progress: As there.
        on_left_out: See `profdeck_traces.inputs.sources.find_sources`.

    Returns:
        The summary of those that could be read, and why the others could not be read.

    Raises:
        TraceError: There is no trace below a directory, or one holds several ranks.
    """
    sources = find_sources(paths, on_left_out=on_left_out)
    for source in sources:
        if is_merged(source.path):
            raise TraceError(
                f"{source.path} holds the traces of several ranks in one. Give those, or the run that they are in: "
                "here their steps and devices would be added up."
            )
    run, errors = summarise_run(
        sources,
        devices_only=devices_only,
        classifier=classifier,
        buckets=buckets,
        kept_buckets=buckets_of(len(sources)),
        processes=processes,
        cache=cache,
        on_progress=on_progress,
    )
    state = run_records().state(paths, {rank.path: rank.problem for rank in run.ranks if rank.problem})
    run = attrs.evolve(run, captures=state.captures, recordings=state.recordings, silent_roles=state.silent_roles)
    return attrs.evolve(run, findings=findings_of(run)), errors
