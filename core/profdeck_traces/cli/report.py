"""`profdeck report`: writes an HTML page about one run, or a comparison of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import user_path
from profdeck_traces.cli import arguments, terminal
from profdeck_traces.cli.terminal import ExitCode


def command(  # noqa: PLR0913 - the options of a command line
    run: arguments.Run,
    other: Annotated[
        Path | None,
        typer.Argument(metavar="RUN2", parser=terminal.source_path, help="A run to compare with RUN."),
    ] = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            parser=user_path,
            help="The new file. Default: RUN.html in the current directory.",
        ),
    ] = None,
    rules: arguments.Rules = None,
    processes: arguments.Processes = 0,
    cache: arguments.Cache = True,
) -> None:
    """Write an HTML page with findings, timelines and tables.

    The page is a single file without external resources. It opens in any browser.
    """
    from profdeck_traces.inputs.outputs import HTML, check_output
    from profdeck_traces.inputs.sources import find_sources
    from profdeck_traces.trend.points import points_of
    from profdeck_traces.trend.trend import trend_of

    file = output or Path(f"{run.resolve().name.partition('.')[0]}.html")
    check_output(file, HTML)
    paths = [run, *([other] if other else [])]
    sources = [source for path in paths for source in find_sources([path])]
    runs, problems = [], []
    for path in paths:
        summary, path_problems = arguments.summarise_paths(
            [path], rules=rules, traces=len(sources), processes=processes, cache=cache
        )
        if not summary.ranks:
            raise TraceError(" ".join(path_problems))
        runs.append(summary)
        problems += path_problems
    from profdeck_traces.report.page import write_page  # needs jinja2; the trace reader reports its libraries first

    page = write_page(runs, [terminal.short_path(path) for path in paths], trend_of(points_of(runs, sources)))
    terminal.write_file(file, page.encode("utf-8", "replace"))
    terminal.print_line(f"{terminal.short_path(file)}: {terminal.size(file.stat().st_size)}")
    for problem in problems:
        terminal.print_stderr(f"error: {problem}")
    if problems:
        raise typer.Exit(ExitCode.UNREADABLE)
