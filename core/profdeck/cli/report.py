"""`profdeck report`: a run, or two, as one page to look at, to send and to keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profdeck.cli import _trace_options, kit
from profdeck.cli.kit import ExitCode


def command(  # noqa: PLR0913 - the options of a command line
    run: _trace_options.Run,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN2]", parser=kit.run_path, help="What to compare with it: what changed from RUN to RUN2."
        ),
    ] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; RUN.html here, if not given.")
    ] = None,
    devices_only: _trace_options.DevicesOnly = False,
    rules: _trace_options.Rules = None,
    processes: _trace_options.Processes = 0,
) -> None:
    """Write a page with findings, timelines and tables.

    It is one file that loads nothing else, and opens in any browser.
    """
    file = output or Path(f"{run.resolve().name.partition('.')[0]}.html")
    problems = write([run, *([other] if other else [])], file, devices_only, rules, processes)
    typer.echo(f"{kit.short(file)}: {kit.size(file.stat().st_size)}")
    for problem in problems:
        kit.say(f"error: {problem}")
    if problems:
        raise typer.Exit(ExitCode.UNREADABLE)


def write(
    paths: list[Path],
    file: Path,
    devices_only: bool = False,  # noqa: FBT001, FBT002 - an option
    rules: Path | None = None,
    processes: int = 0,
) -> list[str]:
    """Write the page of one run, or of two; return why some traces could not be read.

    Raises:
        TraceError: there is no trace.
        OSError: the file cannot be written.
    """
    from profdeck.base.files import replace
    from profdeck.traces.report.page import buckets_of, write_page
    from profdeck.traces.sources import find_sources

    count = sum(len(find_sources([path])) for path in paths)
    runs, problems = [], []
    for path in paths:
        found, of_path = _trace_options.summarise_paths(
            [path], devices_only=devices_only, rules=rules, buckets=buckets_of(count), processes=processes
        )
        runs.append(found)
        problems += of_path
    page = write_page(runs, [kit.short(path) for path in paths])
    replace(file, page.encode("utf-8", "replace"), durable=False)
    return problems
