"""`profdeck summary`: prints the time breakdown and the findings of a run."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profdeck_traces.base.text import printable
from profdeck_traces.cli import arguments, json_limit, terminal
from profdeck_traces.cli.terminal import ExitCode
from profdeck_traces.tables.of_run import NAMES, table_of

if TYPE_CHECKING:
    from profdeck_traces.analysis.model import RunSummary

    class Rows(StrEnum):
        """Tables that ``--csv`` can print. At runtime, there is a member for each table."""

        KERNELS = "kernels"

else:
    Rows = StrEnum("Rows", {name.upper(): name.replace("_", "-") for name in NAMES})


_IMPORTANT = (
    "findings",
    "unread",
    "ranks",
    "captures",
    "ranks[].account.owners",
    "ranks[].host_times.stages",
    "ranks[].host_times.states",
    "ranks[].iterations",
    "ranks[].devices",
    "ranks[].categories",
    "ranks[].kernels",
    "ranks[].operators",
    "ranks[].steps",
    "skew",
)
"""Lists in the JSON document, most important first."""
_OWNERS = 20
"""Default number of rows for ``--by``."""


class TimeOwner(StrEnum):
    """Kinds of owners for ``--by``."""

    OPERATOR = "operator"
    SHAPE = "shape"
    MODULE = "module"
    STAGE = "stage"
    LINE = "line"


def command(  # noqa: PLR0913  # the options of a command line
    paths: arguments.Paths,
    *,
    top: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Number of kernels and operators; 0 for all. Default: as many as fit."),
    ] = None,
    by: Annotated[
        TimeOwner | None,
        typer.Option(
            "--by",
            metavar="OWNER",
            help=f"Divide the device time, or without a device the self CPU time of operators: {', '.join(TimeOwner)}.",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Also print all tables of each trace.")] = False,
    full_names: Annotated[bool, typer.Option("--full-names", help="Do not shorten names.")] = False,
    rules: arguments.Rules = None,
    graph_captures: arguments.GraphCaptures = None,
    processes: arguments.Processes = 0,
    cache: arguments.Cache = True,
    json: terminal.JsonOption = False,
    max_bytes: json_limit.MaxBytes = None,
    as_csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="Print a table as CSV: --by or --rows. Default: --rows kernels, or operators without kernels."
        ),
    ] = False,
    rows: Annotated[
        Rows | None,
        typer.Option("--rows", metavar="TABLE", help=f"Table for --csv: {', '.join(Rows)}."),
    ] = None,
) -> None:
    """Show where the time was spent, and what stands out."""
    if json and as_csv:
        raise typer.BadParameter("--json and --csv cannot be combined. Use only one of them.")
    if by and (json or rows or full):
        option = "--json" if json else "--rows" if rows else "--full"
        raise typer.BadParameter(f"--by and {option} cannot be combined. Use only one of them.")
    if rows and not as_csv:
        raise typer.BadParameter("--rows requires --csv. Specify --csv as well.")
    json_limit.check_option(max_bytes, as_json=json)
    run, problems = arguments.summarise_paths(
        paths,
        rules=rules,
        graph_captures=graph_captures,
        processes=processes,
        cache=cache,
    )
    if json:
        json_limit.print_limited(run.to_dict(), max_bytes, _IMPORTANT)
    elif as_csv:
        _print_csv(run, Rows[f"TIME_BY_{by.upper()}"] if by else rows or _default_rows(run))
    elif by:
        from profdeck_traces.cli import text_layout
        from profdeck_traces.cli.time_by_owner import tables

        console = terminal.stdout_console()
        width = text_layout.width_of(console, full_names=full_names)
        text_layout.show(console, tables(run, by, width, _OWNERS if top is None else top or None))
    else:
        show(run, paths, top=top, full=full, full_names=full_names)
    report_problems(run, problems)


def _default_rows(run: RunSummary) -> Rows:
    """Return the kernel table, or the operator table if no trace has kernels."""
    return Rows.KERNELS if any(rank.kernels for rank in run.ranks) else Rows["OPERATORS"]


def _print_csv(run: RunSummary, name: Rows) -> None:
    """Print a table as CSV, with control characters and line breaks in names escaped."""
    table = table_of(run, name.replace("-", "_"))
    rows = [[printable(value) if isinstance(value, str) else value for value in row] for row in table.rows()]
    writer = csv.writer(sys.stdout)
    try:
        writer.writerow(table.columns)
        writer.writerows(rows)
        sys.stdout.flush()
    except BrokenPipeError:
        terminal.exit_quietly()
    if run.ranks and not rows:
        terminal.warn(f"The table {name} is empty.")


def show(
    run: RunSummary, paths: Sequence[Path], *, top: int | None, full: bool = False, full_names: bool = False
) -> None:
    """Print a summary as text, unless no trace could be read.

    Args:
        run: The summary.
        paths: The paths from the command line.
        top: Maximum number of kernels and operators; 0 for all. Default: as many as fit on the screen.
        full: If True, print all findings, and all tables of each trace.
        full_names: If True, do not shorten names.
    """
    if not run.ranks and run.unread:
        return
    # Imported here because these modules take 0.1 s to import, and --json and --csv do not need them.
    from profdeck_traces.cli import text_layout
    from profdeck_traces.cli.summary_screen import MAX_FINDINGS, Screen, page

    console = terminal.stdout_console()
    width = text_layout.width_of(console, full_names=full_names)
    height = console.height if sys.stdout.isatty() and not full else None
    screen = Screen(width=width, height=height, top=top, findings=None if full else MAX_FINDINGS)
    text_layout.show(console, page(run, paths, screen))
    if full:
        from rich.text import Text

        from profdeck_traces.cli.summary_tables import tables

        text_layout.show(console, [Text(), *tables(run, width, 15 if top is None else top or None)])


def report_problems(run: RunSummary, problems: Sequence[str]) -> None:
    """Print errors and warnings about traces that could not be read completely.

    Args:
        run: The summary.
        problems: Error messages for traces that cannot be read.

    Raises:
        typer.Exit: `problems` is not empty.
    """
    for problem in problems:
        terminal.print_stderr(f"error: {problem}")
    for rank in run.ranks:
        if rank.problem:
            terminal.warn(
                f"{terminal.short_path(Path(rank.path))}: {rank.problem} The summary covers only the readable part."
            )
    if problems:
        raise typer.Exit(ExitCode.UNREADABLE)
