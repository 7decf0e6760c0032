"""What commands that read traces share: their arguments, and reading with progress."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    int, typer.Option(min=0, metavar="N", help="How many traces to read at once; 0: one for each core.")
]
DevicesOnly = Annotated[
    bool,
    typer.Option("--devices-only", help="Read devices and annotations only: three times as fast, no operators."),
]
Cache = Annotated[
    bool, typer.Option("--cache/--no-cache", help="Keep what is read, and read again only what changed since.")
]
Rules = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Classes of kernels of your own, in YAML or TOML."),
]


def cores(processes: int) -> int:
    """Return how many processes are meant by 0, or the number itself."""
    return processes or len(os.sched_getaffinity(0))


def left_out(path: Path, why: str) -> None:
    """Warn that a file is skipped, and why."""
    terminal.warn(f"{terminal.short_path(path)} {why}.")


def summarise_paths(  # noqa: PLR0913 - the options of commands
    paths: Sequence[Path],
    *,
    devices_only: bool = False,
    rules: Path | None = None,
    traces: int = 0,
    processes: int = 0,
    cache: bool = True,
) -> tuple[RunSummary, list[str]]:
    """Summarise all traces below some paths, with progress on stderr; also return why some could not be read.

    Args:
        paths: Runs, captures, directories or trace files.
        devices_only: See `profdeck_traces.loading.summarise`.
        rules: A file with classes of kernels.
        traces: How many traces are to be on one page, for its pictures; 0 for none.
        processes: How many traces to read at once; 0: one for each core.
        cache: Whether to keep what is read, and to use what was read before.

    Raises:
        TraceError: There is no trace below a directory.
        ConfigError: The rules are wrong.
    """
    from profdeck_traces.analysis.class_rules import load_rules
    from profdeck_traces.analysis.classes import Classifier
    from profdeck_traces.analysis.pictures import buckets_of
    from profdeck_traces.base.result_cache import ResultCache
    from profdeck_traces.loading import summarise

    with terminal.show_progress("Reading the traces") as on_progress:
        summary, errors = summarise(
            paths,
            devices_only=devices_only,
            classifier=Classifier(load_rules(rules)) if rules else None,
            buckets=buckets_of(traces) if traces else 0,
            processes=cores(processes),
            cache=ResultCache.of_user() if cache else None,
            on_progress=on_progress,
            on_left_out=left_out,
        )
    return summary, [str(error) for error in errors]
