"""Summarises traces for terminal output, reports, tables and diffs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.run_summary import summarise_run
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import sha256_of
from profdeck_traces.base.progress import Progress
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.findings.finding import with_findings
from profdeck_traces.findings.overview import headlines_of, teams_of, verdict_of
from profdeck_traces.inputs.artifact_kinds import FileCheck, kind_of
from profdeck_traces.inputs.facts import run_records
from profdeck_traces.inputs.file_checks import KeptChecks
from profdeck_traces.inputs.file_formats import is_merged
from profdeck_traces.inputs.sources import TraceSource, find_sources


def summarise(  # noqa: PLR0913 - what to read, and where
    paths: Sequence[Path],
    *,
    classifier: Classifier | None = None,
    graph_captures: Path | None = None,
    buckets: int = 0,
    processes: int = 1,
    cache: ResultCache | None = None,
    on_progress: Progress | None = None,
    on_left_out: Callable[[Path, str], None] | None = None,
) -> tuple[RunSummary, list[TraceError]]:
    """Summarise all traces in the given paths, including their captures and findings.

    For the arguments that aren't listed here, see `profdeck_traces.analysis.run_summary.summarise_run`.

    Args:
        paths: Runs, captures, directories or trace files.
        graph_captures: A trace of graph captures, or a directory of such traces; see
            `profdeck_traces.inputs.sources.TraceSource`. Default: the directory ``capture_traces`` next to a trace.
        on_left_out: See `profdeck_traces.inputs.sources.find_sources`.

    Returns:
        The summary of the readable traces, and the errors of the other traces.

    Raises:
        TraceError: A directory contains no trace, a file is a merged trace, or there are no graph captures.
    """
    sources = find_sources(paths, on_left_out=on_left_out)
    if graph_captures is not None:
        if not graph_captures.exists():
            raise TraceError(
                f"The graph captures {graph_captures} do not exist. Pass a trace that was recorded while the engine "
                "captured its graphs, or a directory of such traces."
            )
        find_sources([graph_captures])  # raises an error for a directory without traces
        sources = [attrs.evolve(source, captures=graph_captures) for source in sources]
    for source in sources:
        if is_merged(source.path):
            raise TraceError(
                f"{source.path} was written by profdeck merge, but statistics need the original traces. "
                "Pass the individual traces or their run instead."
            )
    run, errors = summarise_run(
        sources,
        classifier=classifier,
        buckets=buckets,
        processes=processes,
        cache=cache,
        on_progress=on_progress,
    )
    state = run_records().state(paths, _checks(run, sources, errors, cache))
    readable = {rank.path for rank in run.ranks}
    run = attrs.evolve(
        run,
        captures=state.captures,
        recordings=state.recordings,
        silent_roles=state.silent_roles,
        unread=(*(path for source in sources if (path := str(source.path)) not in readable), *state.unreadable),
    )
    run = with_findings(run)
    teams = teams_of(run)
    return attrs.evolve(run, verdict=verdict_of(run, teams), headlines=tuple(headlines_of(teams))), errors


def _checks(
    run: RunSummary, sources: Sequence[TraceSource], errors: Sequence[TraceError], cache: ResultCache | None
) -> dict[str, FileCheck]:
    """Return the check results for traces that belong to a run, keyed by path.

    Args:
        run: Summary of the readable traces.
        sources: All traces.
        errors: Errors of the other traces, in the order of `sources`.
        cache: Cache of check results.
    """
    kept = KeptChecks(cache)
    facts = {str(source.path): source.facts for source in sources if source.facts is not None}
    readable = {rank.path for rank in run.ranks}
    unreadable = [str(source.path) for source in sources if str(source.path) not in readable]
    checks = {
        path: FileCheck(whole=False, problem=f"cannot be read: {error}", events=None)
        for path, error in zip(unreadable, errors, strict=True)
    }
    for rank in run.ranks:
        if rank.path not in facts:
            continue
        path, sha256 = Path(rank.path), None
        if rank.problem is None and facts[rank.path].has_digest:
            check = kept.get(path, with_sum=True)
            sha256 = sha256_of(path) if check is None else check.sha256
        events = rank.events if kind_of(path) is None else None  # kinds of plugins count events in their own way
        checks[rank.path] = FileCheck(whole=rank.problem is None, problem=rank.problem, events=events, sha256=sha256)
    return checks
