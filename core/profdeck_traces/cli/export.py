"""`profdeck export`: writes the tables of a run in formats of other tools."""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profdeck_traces.base.errors import ConfigError, TraceError
from profdeck_traces.base.files import user_path
from profdeck_traces.base.version import __version__
from profdeck_traces.cli import arguments, terminal
from profdeck_traces.cli.terminal import ExitCode
from profdeck_traces.inputs.outputs import check_output

if TYPE_CHECKING:
    from profdeck_traces.analysis.model import RunSummary

_PARQUET = re.compile(rb"PAR1")
_SPEEDSCOPE = re.compile(rb'{"\$schema":"https://www\.speedscope\.app/[^"]*","exporter":"profdeck"')


_ORIGIN = b"profdeck"
"""Metadata key that marks Parquet files as written by `profdeck export`."""


def command(  # noqa: PLR0913 - the options of a command line
    run: arguments.Run,
    *,
    parquet: Annotated[
        Path | None,
        typer.Option(
            "--parquet",
            metavar="DIR",
            parser=user_path,
            help="Write each table that has rows as a Parquet file to this directory.",
        ),
    ] = None,
    speedscope: Annotated[
        Path | None,
        typer.Option(
            "--speedscope", metavar="FILE", parser=user_path, help="Write recorded stacks for speedscope.app."
        ),
    ] = None,
    rules: arguments.Rules = None,
    processes: arguments.Processes = 0,
    cache: arguments.Cache = True,
) -> None:
    """Export the tables of a run for other tools."""
    if parquet is None and speedscope is None:
        raise typer.BadParameter("No output is specified. Use --parquet DIR, --speedscope FILE, or both.")
    if parquet is not None:
        _check_tables(parquet)
    if speedscope is not None:
        check_output(speedscope, _SPEEDSCOPE)
    summary, problems = arguments.summarise_paths([run], rules=rules, processes=processes, cache=cache)
    if problems and not summary.ranks:
        raise TraceError(*problems)
    try:
        if parquet is not None:
            _write_parquet(summary, parquet)
        if speedscope is not None:
            _write_speedscope(summary, speedscope)
    except OSError as error:
        raise ConfigError(f"{error.filename or run} cannot be written: {error.strerror or error}.") from error
    for problem in problems:
        terminal.print_stderr(f"error: {problem}")
    if problems:
        raise typer.Exit(ExitCode.UNREADABLE)


def _write_parquet(run: RunSummary, directory: Path) -> None:
    import pyarrow.parquet as pq

    from profdeck_traces.base.files import replace_file
    from profdeck_traces.tables.of_run import NAMES, table_of

    directory.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        file = directory / f"{name}.parquet"
        table = table_of(run, name).to_arrow()
        if table.num_rows:
            content = io.BytesIO()
            pq.write_table(table.replace_schema_metadata({_ORIGIN: __version__}), content)
            replace_file(file, content.getbuffer(), durable=False)
            terminal.print_line(f"{terminal.short_path(file)}: {table.num_rows:,} rows")
        else:
            file.unlink(missing_ok=True)  # from an earlier export


def _check_tables(directory: Path) -> None:
    """Check that the tables can be written to a directory.

    Raises:
        ConfigError: A file that would be replaced was not written by an export.
        ProfdeckError: pyarrow is not installed.
    """
    from profdeck_traces.tables.table import arrow

    arrow()  # if pyarrow is missing, fail before any trace is read
    from profdeck_traces.tables.of_run import NAMES

    for name in NAMES:
        file = directory / f"{name}.parquet"
        check_output(file, _PARQUET)
        _check_own_parquet(file)


def _check_own_parquet(file: Path) -> None:
    """Check that a file can be replaced: it does not exist, or an earlier export wrote it.

    Raises:
        ConfigError: The file was not written by an export, or it is a symbolic link.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not os.path.lexists(file):
        return
    with suppress(pa.ArrowException):
        if not file.is_symlink() and file.is_file() and _ORIGIN in (pq.read_schema(file).metadata or {}):
            return
    raise ConfigError(f"{file} already exists and is not an output of this command. Choose another path.")


def _write_speedscope(run: RunSummary, file: Path) -> None:
    """Write the stacks of a run as a speedscope document.

    Raises:
        TraceError: The run has no stacks.
    """
    from profdeck_traces.tables.speedscope import speedscope

    document = speedscope(run)
    if document is None:
        raise TraceError("No trace has stacks. To record them, set the backend option with_stack.")
    terminal.write_file(file, json.dumps(document, separators=(",", ":")).encode())
    terminal.print_line(
        f"{terminal.short_path(file)}: {len(document['profiles'])} profiles, {terminal.size(file.stat().st_size)}"
    )
