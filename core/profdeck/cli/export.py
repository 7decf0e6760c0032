"""`profdeck export`: the tables of a run as files that other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from profdeck.cli import _trace_options, kit
from profdeck.cli.kit import ExitCode


def command(
    run: _trace_options.Run,
    *,
    parquet: Annotated[
        Path, typer.Option("--parquet", metavar="DIR", help="Write each table that has rows as a Parquet file in it.")
    ],
    devices_only: _trace_options.DevicesOnly = False,
    rules: _trace_options.Rules = None,
    processes: _trace_options.Processes = 0,
) -> None:
    """Write the tables of a run for other tools."""
    from profdeck.traces.tables.of_run import NAMES, table_of
    from profdeck.traces.tables.table import arrow

    arrow()  # before anything is read
    import pyarrow.parquet as pq

    summary, problems = _trace_options.summarise_paths(
        [run], devices_only=devices_only, rules=rules, processes=processes
    )
    parquet.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        table = table_of(summary, name).to_arrow()
        file = parquet / f"{name}.parquet"
        if table.num_rows:
            pq.write_table(table, file)
            typer.echo(f"{kit.short(file)}: {table.num_rows:,} rows")
        else:
            file.unlink(missing_ok=True)  # of an earlier export
    for problem in problems:
        kit.say(f"error: {problem}")
    if problems:
        raise typer.Exit(ExitCode.UNREADABLE)
