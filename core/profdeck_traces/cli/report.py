"""`profdeck report`: a run, or two, as one page to look at, to send and to keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profdeck_traces.base.errors import TraceError
from profdeck_traces.cli import arguments, terminal
from profdeck_traces.cli.terminal import ExitCode

if TYPE_CHECKING:
    from profdeck_traces.analysis.model import RunSummary
    from profdeck_traces.trend.model import Trend


def command(  # noqa: PLR0913 - the options of a command line
    run: arguments.Run,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN2", parser=terminal.source_path, help="What to compare with it: what changed from RUN to RUN2."
        ),
    ] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; RUN.html here, if not given.")
    ] = None,
    devices_only: arguments.DevicesOnly = False,
    rules: arguments.Rules = None,
    processes: arguments.Processes = 0,
    cache: arguments.Cache = True,
) -> None:
    """Write a page with findings, timelines and tables.

    It is one file that loads nothing else, and opens in any browser.
    """
    from profdeck_traces.inputs.sources import find_sources
    from profdeck_traces.trend.points import points_of
    from profdeck_traces.trend.trend import trend_of

    file = output or Path(f"{run.resolve().name.partition('.')[0]}.html")
    paths = [run, *([other] if other else [])]
    sources = [source for path in paths for source in find_sources([path])]
    runs, problems = [], []
    for path in paths:
        found, of_path = arguments.summarise_paths(
            [path], devices_only=devices_only, rules=rules, traces=len(sources), processes=processes, cache=cache
        )
        if not found.ranks:
            raise TraceError(" ".join(of_path))
        runs.append(found)
        problems += of_path
    write(runs, [terminal.short_path(path) for path in paths], file, trend_of(points_of(runs, sources)))
    typer.echo(f"{terminal.short_path(file)}: {terminal.size(file.stat().st_size)}")
    for problem in problems:
        terminal.print_stderr(f"error: {problem}")
    if problems:
        raise typer.Exit(ExitCode.UNREADABLE)


def write(runs: Sequence[RunSummary], labels: Sequence[str], file: Path, trend: Trend | None = None) -> None:
    """Write the page of one run, or of two, with the directory that it goes to.

    Args:
        runs: Summaries with pictures.
        labels: What to call each.
        file: Where to.
        trend: How their numbers change over their captures.

    Raises:
        ProfdeckError: The file cannot be written.
    """
    from profdeck_traces.report.page import write_page

    terminal.write_file(file, write_page(runs, labels, trend).encode("utf-8", "replace"))
