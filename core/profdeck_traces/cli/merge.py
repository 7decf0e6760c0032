"""`profdeck merge`: the traces of many ranks, roles and engines as one timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profdeck_traces.base.errors import ConfigError
from profdeck_traces.cli import arguments, merging, terminal, trace_range
from profdeck_traces.cli.terminal import ExitCode

_CHROME = (".json", ".json.gz")


def command(  # noqa: PLR0913  # the options of a command line
    paths: arguments.Paths,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="OUT", help="The new file: .json, or .pftrace for a slim one; .gz compresses."
        ),
    ],
    align: merging.Align = None,
    role: merging.Role = None,
    rank: merging.Rank = None,
    steps: trace_range.Steps = None,
    iterations: trace_range.Iterations = None,
    time: trace_range.Time = None,
    category: trace_range.Category = None,
    processes: arguments.Processes = 0,
    json: terminal.JsonOption = False,
) -> None:
    """Merge traces into one that Perfetto opens.

    Processes are named by role, replica and rank. A slim trace has the names and times of what ran on devices and of
    annotations, or of the events of each --category.
    """
    if not output.name.endswith((*_CHROME, *merging.PERFETTO)):
        raise ConfigError(f"--output {output}: the file name must end in {', '.join((*_CHROME, *merging.PERFETTO))}.")
    part = trace_range.TracePart.of(steps, iterations, time, category)
    destination = trace_range.new_file(output)
    wanted = merging.Merge(paths=paths, align=align, roles=role, ranks=rank, part=part, processes=processes)
    written = merging.write(wanted, destination)
    for problem in written.problems:
        terminal.warn(f"{problem} Only the readable part was merged.")
    _report(destination, written, json=json)
    if written.problems:
        raise typer.Exit(ExitCode.UNREADABLE)


def _report(destination: Path, written: merging.Merged, *, json: bool) -> None:
    sources = written.sources
    if json:
        terminal.print_json(
            {
                "path": str(destination),
                "traces": [str(source.path) for source in sources],
                "align": str(written.how),
                "unaligned": written.unaligned,
                "clock_error_us": None if written.clock_error_ns is None else written.clock_error_ns / 1e3,
                "events": written.events,
                "size_bytes": written.size_bytes,
                "problems": list(written.problems),
            }
        )
        return
    error = "" if written.clock_error_ns is None else f" within {written.clock_error_ns / 1e3:,.0f} us"
    but = f", but {written.unaligned} of them" if written.unaligned else ""
    about = f"{len(sources)} traces, {written.events:,} events, {terminal.size(written.size_bytes)}"
    terminal.stdout_console().print(
        f"{destination}: {about}; clocks aligned by: {written.how}{error}{but}", soft_wrap=True
    )
