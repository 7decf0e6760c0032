"""`profdeck trend`: performance changes across the captures in one or more runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profdeck_traces.base.files import user_path
from profdeck_traces.cli import arguments, json_limit, terminal, text_layout
from profdeck_traces.cli.regression_limit import percent
from profdeck_traces.cli.terminal import ExitCode

_IMPORTANT = ("headlines", "series", "series[].changes", "series[].changes[].parts", "series[].points")
"""Lists in the JSON document, most important first."""


def command(  # noqa: PLR0913 - the options of the command line
    paths: arguments.Paths,
    *,
    least: Annotated[
        float | None,
        typer.Option("--least", metavar="PERCENT", parser=percent, help="Ignore smaller changes. Default: 2%."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", parser=user_path, help="Also write an HTML page with plots."),
    ] = None,
    processes: arguments.Processes = 0,
    cache: arguments.Cache = True,
    json: terminal.JsonOption = False,
    max_bytes: json_limit.MaxBytes = None,
) -> None:
    """Find when a run, or a series of runs, became slower, and what changed.

    The command compares the captures of each role. It compares the median step or iteration, tokens per second, device
    busy time, exposed communication and stalls. It also compares each stage and each owner on the critical path, over
    all ranks and on each rank. If nothing has changed, at most 1 in 100 calls reports a change. The exit code is 6 if
    the result is inconclusive, for example with fewer than 10 captures.
    """
    from profdeck_traces.base.result_cache import ResultCache
    from profdeck_traces.inputs.outputs import HTML, check_output
    from profdeck_traces.inputs.sources import recorded_sources
    from profdeck_traces.trend.change_points import MIN_CHANGE
    from profdeck_traces.trend.points import read_points
    from profdeck_traces.trend.trend import trend_of
    from profdeck_traces.trend.trend_text import document_of, inconclusive_reason

    json_limit.check_option(max_bytes, as_json=json)
    if output is not None:
        check_output(output, HTML)
    with terminal.show_progress("Reading the traces") as on_progress:
        points, left_out, errors = read_points(
            recorded_sources(paths, on_left_out=arguments.warn_skipped),
            processes=arguments.process_count(processes),
            cache=ResultCache.of_user() if cache else None,
            on_progress=on_progress,
        )
    smallest = MIN_CHANGE if least is None else least
    trend = trend_of(points, left_out=left_out, min_change=smallest)
    if json:
        json_limit.print_limited(document_of(trend), max_bytes, _IMPORTANT)
    elif trend.series:
        from profdeck_traces.cli.trend_screen import page

        console = terminal.stdout_console()
        text_layout.show(console, page(trend, text_layout.width_of(console, full_names=False), smallest))
    elif not errors:
        terminal.print_stderr("No capture has steps, iterations or stalls to compare.")
    if output is not None:
        from profdeck_traces.report.trend_page import write_trend_page

        terminal.write_file(
            output, write_trend_page(trend, [terminal.short_path(path) for path in paths]).encode("utf-8", "replace")
        )
        terminal.print_stderr(f"{terminal.short_path(output)}: {terminal.size(output.stat().st_size)}")
    for error in errors:
        terminal.print_stderr(f"error: {error}")
    if errors:
        raise typer.Exit(ExitCode.UNREADABLE)
    if inconclusive_reason(trend):
        raise typer.Exit(ExitCode.INCONCLUSIVE)
