"""`profdeck trend`: how the numbers of captures change over a run, and over runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profdeck.cli import _page, _trace_options, kit
from profdeck.cli._judged import percent
from profdeck.cli.kit import ExitCode


def command(  # noqa: PLR0913 - the options of the command line
    paths: _trace_options.Paths,
    *,
    least: Annotated[
        float | None,
        typer.Option("--least", metavar="PERCENT", parser=percent, help="Smaller changes are none. Default: 2%."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a page with plots, too.")
    ] = None,
    processes: _trace_options.Processes = 0,
    cache: _trace_options.Cache = True,
    json: kit.JsonOption = False,
) -> None:
    """Say since when a run, or its runs, got slower, and what changed.

    Each number of a role is followed over its captures: the median step or iteration, tokens per second, device busy,
    exposed communication, stalls. A change of level is told if chance gives one less often than in 1 of 100 calls.
    """
    from profdeck.base.result_cache import ResultCache
    from profdeck.traces.sources import recorded_sources
    from profdeck.traces.trend.change_points import LEAST
    from profdeck.traces.trend.points import read_points
    from profdeck.traces.trend.trend import trend_of

    with kit.show_progress("Reading the traces") as on_progress:
        points, left_out, errors = read_points(
            recorded_sources(paths),
            processes=_trace_options.cores(processes),
            cache=ResultCache.of_user() if cache else None,
            on_progress=on_progress,
        )
    smallest = LEAST if least is None else least
    trend = trend_of(points, left_out=left_out, least=smallest)
    if json:
        kit.print_json(trend.to_dict())
    elif trend.series:
        from profdeck.cli._trend_page import page

        console = kit.stdout_console()
        _page.show(console, page(trend, _page.width_of(console, full_names=False), smallest))
    else:
        kit.print_stderr("No capture has steps, iterations or stalls to compare.")
    if output is not None:
        from profdeck.traces.report.trend_page import write_trend_page

        kit.write_file(
            output, write_trend_page(trend, [kit.short_path(path) for path in paths]).encode("utf-8", "replace")
        )
        kit.print_stderr(f"{kit.short_path(output)}: {kit.size(output.stat().st_size)}")
    for error in errors:
        kit.print_stderr(f"error: {error}")
    if errors:
        raise typer.Exit(ExitCode.UNREADABLE)
