"""Arguments and options shared by commands that read traces, and reading traces with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profdeck_traces.base.files import user_path
from profdeck_traces.cli import terminal

if TYPE_CHECKING:
    from profdeck_traces.analysis.model import RunSummary

_RUN_HELP = "A run, a capture, a directory of traces, or a trace; latest: the newest run."
Run = Annotated[Path, typer.Argument(metavar="RUN", parser=terminal.source_path, help=_RUN_HELP)]
Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH",
        parser=terminal.source_path,
        help="Runs, captures, directories or trace files; latest: the newest run.",
    ),
]
Processes = Annotated[
    int, typer.Option(min=0, metavar="N", help="Number of traces to read in parallel; 0: one per core.")
]
Cache = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        is_eager=True,  # parsed before the paths
        callback=terminal.set_copies_cached,
        help="Cache results, and read only traces that have changed since.",
    ),
]
Rules = Annotated[
    Path | None,
    typer.Option(metavar="FILE", parser=user_path, help="YAML or TOML file with custom kernel classes."),
]
GraphCaptures = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        parser=user_path,
        help="Trace of graph captures, or a directory of them, for the operators inside graphs. Default: the directory "
        "capture_traces next to a trace.",
    ),
]


def process_count(processes: int) -> int:
    """Return the number of processes: `processes`, or the number of available cores if it is 0."""
    return processes or len(os.sched_getaffinity(0))


def warn_skipped(path: Path, reason: str) -> None:
    """Print a warning that a file is skipped.

    Args:
        path: Path of the file.
        reason: Predicate of the message, such as ``is not a trace``.
    """
    terminal.warn(f"{terminal.short_path(path)} {reason}.")


def summarise_paths(  # noqa: PLR0913 - one parameter per option
    paths: Sequence[Path],
    *,
    rules: Path | None = None,
    graph_captures: Path | None = None,
    traces: int = 0,
    processes: int = 0,
    cache: bool = True,
) -> tuple[RunSummary, list[str]]:
    """Summarise all traces in the given paths, with a progress bar on stderr.

    Args:
        paths: Runs, captures, directories or trace files.
        rules: File with custom kernel classes.
        graph_captures: Value of ``--graph-captures``.
        traces: Number of traces on the report page, which sets the resolution of its timelines; 0 for no timelines.
        processes: Number of traces to read in parallel; 0: one per core.
        cache: If True, use the user's result cache.

    Returns:
        The summary, and an error message for each trace that cannot be read.

    Raises:
        TraceError: A directory contains no trace.
        ConfigError: The file with kernel classes is invalid.
    """
    from profdeck_traces.analysis.class_rules import load_rules
    from profdeck_traces.analysis.classes import Classifier
    from profdeck_traces.analysis.pictures import buckets_of
    from profdeck_traces.base.result_cache import ResultCache
    from profdeck_traces.loading import summarise

    with terminal.show_progress("Reading the traces") as on_progress:
        summary, errors = summarise(
            paths,
            classifier=Classifier(load_rules(rules)) if rules else None,
            graph_captures=graph_captures,
            buckets=buckets_of(traces) if traces else 0,
            processes=process_count(processes),
            cache=ResultCache.of_user() if cache else None,
            on_progress=on_progress,
            on_left_out=warn_skipped,
        )
    return summary, [str(error) for error in errors]
