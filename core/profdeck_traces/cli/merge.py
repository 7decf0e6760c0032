"""`profdeck merge`: merges the traces of several ranks, roles and engines into one trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profdeck_traces.base.errors import ConfigError
from profdeck_traces.base.files import user_path
from profdeck_traces.base.text import plural
from profdeck_traces.cli import arguments, merging, terminal, trace_range
from profdeck_traces.cli.terminal import ExitCode

_CHROME = (".json", ".json.gz")


def command(  # noqa: PLR0913  # the options of a command line
    paths: arguments.Paths,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            parser=user_path,
            help="The new file: .json, or .pftrace for a slim trace. With .gz, it is compressed.",
        ),
    ],
    align: merging.Align = None,
    role: merging.Role = None,
    rank: merging.Rank = None,
    steps: trace_range.Steps = None,
    iterations: trace_range.Iterations = None,
    time: trace_range.Time = None,
    category: trace_range.Category = None,
    critical_path: merging.CriticalPath = None,
    processes: arguments.Processes = 0,
    json: terminal.JsonOption = False,
) -> None:
    """Merge traces into one trace for Perfetto.

    Processes are named by role, replica and rank. A slim trace contains only the names and times of device activity and
    annotations, or of the events of each --category, and the critical path.
    """
    if not output.name.endswith((*_CHROME, *merging.PERFETTO)):
        raise ConfigError(f"--output {output}: the file name must end in {', '.join((*_CHROME, *merging.PERFETTO))}.")
    part = trace_range.TracePart.from_options(steps, iterations, time, category)
    trace_range.check_new_file(output)
    is_slim = output.name.endswith(merging.PERFETTO)
    merge = merging.Merge(
        paths=paths,
        align=align,
        roles=role,
        ranks=rank,
        part=part,
        processes=processes,
        with_path=is_slim and not category if critical_path is None else critical_path,
    )
    merged = merging.write_merged(merge, output)
    for problem in merged.written.problems:
        terminal.warn(f"{problem} Only the readable part was merged.")
    _report(output, merged, json=json)
    if merged.written.problems:
        raise typer.Exit(ExitCode.UNREADABLE)


def _report(destination: Path, merged: merging.Merged, *, json: bool) -> None:
    if json:
        terminal.print_json(
            {
                "path": str(destination),
                "traces": [str(source.path) for source in merged.sources],
                "align": str(merged.alignment),
                "unaligned": merged.unaligned,
                "clock_error_us": None if merged.clock_error_ns is None else merged.clock_error_ns / 1e3,
                "events": merged.written.events,
                "size_bytes": merged.written.size_bytes,
                "problems": list(merged.written.problems),
                "unread": merged.written.unread,
            }
        )
        return
    error = "" if merged.clock_error_ns is None else f" within {merged.clock_error_ns / 1e3:,.0f} us"
    exception = f", except {plural(merged.unaligned, 'trace')}" if merged.unaligned else ""
    terminal.stdout_console().print(
        f"{destination}: {merged.contents}; clocks aligned by: {merged.alignment}{error}{exception}", soft_wrap=True
    )
