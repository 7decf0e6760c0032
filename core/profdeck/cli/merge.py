"""`profdeck merge`: the traces of many ranks, roles and engines as one timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profdeck.base.errors import ConfigError
from profdeck.cli import _merged, _trace_options, _trace_part, kit
from profdeck.cli.kit import ExitCode

_CHROME = (".json", ".json.gz")


def command(  # noqa: PLR0913  # the options of a command line
    paths: _trace_options.Paths,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="OUT", help="The new file: .json, or .pftrace for a slim one; .gz compresses."
        ),
    ],
    align: _merged.Align = None,
    role: _merged.Role = None,
    rank: _merged.Rank = None,
    steps: _trace_part.Steps = None,
    iterations: _trace_part.Iterations = None,
    time: _trace_part.Time = None,
    category: _trace_part.Category = None,
    processes: _trace_options.Processes = 0,
    json: kit.JsonOption = False,
) -> None:
    """Merge traces into one that Perfetto opens.

    Processes are named by role, replica and rank. A slim trace has the names and times of what ran on devices and of
    annotations, or of the events of each --category.
    """
    if not output.name.endswith((*_CHROME, *_merged.PERFETTO)):
        raise ConfigError(f"--output {output}: its name must end in {', '.join((*_CHROME, *_merged.PERFETTO))}.")
    part = _trace_part.TracePart.of(steps, iterations, time, category)
    destination = _trace_part.new_file(output)
    wanted = _merged.Merge(paths=paths, align=align, roles=role, ranks=rank, part=part, processes=processes)
    written = _merged.write(wanted, destination)
    for problem in written.problems:
        kit.warn(f"{problem} What is readable was merged.")
    _report(destination, written, json=json)
    if written.problems:
        raise typer.Exit(ExitCode.UNREADABLE)


def _report(destination: Path, written: _merged.Merged, *, json: bool) -> None:
    sources = written.sources
    if json:
        kit.print_json(
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
    about = f"{len(sources)} traces, {written.events:,} events, {kit.size(written.size_bytes)}"
    kit.stdout_console().print(f"{destination}: {about}; clocks aligned by: {written.how}{error}{but}", soft_wrap=True)
