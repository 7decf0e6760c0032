"""`profdeck report`: a run, or two, as one page to look at, to send and to keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profdeck.base.errors import TraceError
from profdeck.cli import _trace_options, kit
from profdeck.cli.kit import ExitCode

if TYPE_CHECKING:
    from profdeck.traces.analysis.model import RunSummary
    from profdeck.traces.trend.model import Trend


def command(  # noqa: PLR0913 - the options of a command line
    run: _trace_options.Run,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN2", parser=kit.source_path, help="What to compare with it: what changed from RUN to RUN2."
        ),
    ] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; RUN.html here, if not given.")
    ] = None,
    devices_only: _trace_options.DevicesOnly = False,
    rules: _trace_options.Rules = None,
    processes: _trace_options.Processes = 0,
    cache: _trace_options.Cache = True,
) -> None:
    """Write a page with findings, timelines and tables.

    It is one file that loads nothing else, and opens in any browser.
    """
    from profdeck.traces.sources import find_sources
    from profdeck.traces.trend.points import points_of
    from profdeck.traces.trend.trend import trend_of

    file = output or Path(f"{run.resolve().name.partition('.')[0]}.html")
    paths = [run, *([other] if other else [])]
    sources = [source for path in paths for source in find_sources([path])]
    runs, problems = [], []
    for path in paths:
        found, of_path = _trace_options.summarise_paths(
            [path], devices_only=devices_only, rules=rules, traces=len(sources), processes=processes, cache=cache
        )
        if not found.ranks:
            raise TraceError(" ".join(of_path))
        runs.append(found)
        problems += of_path
    write(runs, [kit.short_path(path) for path in paths], file, trend_of(points_of(runs, sources)))
    typer.echo(f"{kit.short_path(file)}: {kit.size(file.stat().st_size)}")
    for problem in problems:
        kit.print_stderr(f"error: {problem}")
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
    from profdeck.traces.report.page import write_page

    kit.write_file(file, write_page(runs, labels, trend).encode("utf-8", "replace"))
