"""`profdeck trim`: writes a part of a trace to a new trace file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profdeck_traces.base.errors import ConfigError, TraceError
from profdeck_traces.base.files import user_path
from profdeck_traces.cli import terminal, trace_range

if TYPE_CHECKING:
    from profdeck_traces.account.owned_path import OwnedPath
    from profdeck_traces.reading.integrity import TraceCheck
    from profdeck_traces.writing.selection import Selection

_SUFFIXES = re.compile(r"(?:\.trace)?(?:\.json)?(?:\.gz)?$")


def command(  # noqa: PLR0913  # the options of a command line
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", parser=user_path, help="A trace file, or a trace directory of torch_npu."),
    ],
    *,
    steps: trace_range.Steps = None,
    iterations: trace_range.Iterations = None,
    time: trace_range.Time = None,
    category: trace_range.Category = None,
    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="Add the critical path of the steps as a thread.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            parser=user_path,
            help="The new file, or its directory. With .gz, the file is compressed. Default: a name in the current "
            "directory with the name of FILE and the part.",
        ),
    ] = None,
    json: terminal.JsonOption = False,
) -> None:
    """Trim a trace to steps, iterations, a time range or categories.

    Events on the host and on devices that overlap the time range are kept completely.
    """
    part = trace_range.TracePart.from_options(steps, iterations, time, category)
    if part.is_all:
        raise ConfigError("No part is specified. Use --steps, --iterations, --time or --category.")
    _check_source(file)
    name = f"{_SUFFIXES.sub('', file.absolute().name)}.trim-{part.text}.trace.json.gz"
    destination = Path(name) if output is None else output / name if output.is_dir() else output
    trace_range.check_new_file(destination)
    with terminal.show_progress("Finding the events to keep") as on_progress:
        selection = part.selection(file, on_progress)
    path = _critical_path(file) if critical_path else None
    check = _trim(file, destination, selection, path)
    if check.problem:
        terminal.warn(f"{check.problem} Only the readable part was kept.")
    _report(file, destination, check, json=json)


def _check_source(file: Path) -> None:
    from profdeck_traces.inputs.artifact_kinds import kind_of

    if not file.is_dir() or kind_of(file) is not None:
        return
    from profdeck_traces.inputs.sources import find_sources

    example = find_sources([file])[0].path
    raise TraceError(f"{file} is a directory. Specify one trace, such as {example}.")


def _critical_path(file: Path) -> OwnedPath | None:
    """Return the critical path. If it is unavailable, print a warning with the reason and return ``None``."""
    from profdeck_traces.analysis.critical_path import critical_path
    from profdeck_traces.analysis.step_names import StepNames
    from profdeck_traces.reading.reader import read_trace

    with terminal.show_progress("Finding the critical path") as on_progress:
        trace = read_trace(file, is_step=StepNames.load().is_step, on_progress=on_progress)
    try:
        return critical_path(trace)
    except TraceError as error:
        terminal.warn(f"Could not add the critical path: {error}")
        return None


def _trim(file: Path, destination: Path, selection: Selection, path: OwnedPath | None) -> TraceCheck:
    from profdeck_traces.writing.trim import trim_trace

    with terminal.show_progress("Trimming the trace") as on_progress, trace_range.write_errors(destination):
        return trim_trace(file, destination, selection, path=path, on_progress=on_progress)


def _report(file: Path, destination: Path, check: TraceCheck, *, json: bool) -> None:
    from profdeck_traces.inputs.artifact_kinds import chrome_trace

    source_bytes = chrome_trace(file).stat().st_size
    if json:
        terminal.print_json(
            {
                "path": str(destination),
                "events": check.events,
                "size_bytes": check.size_bytes,
                "json_bytes": check.json_bytes,
                "source_bytes": source_bytes,
                "whole": check.whole,
                "problem": check.problem,
            }
        )
        return
    sizes = f"{terminal.size(check.size_bytes)} from {terminal.size(source_bytes)}"
    terminal.stdout_console().print(f"{destination}: {check.events:,} events kept, {sizes}", soft_wrap=True)
