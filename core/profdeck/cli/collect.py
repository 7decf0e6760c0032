"""`profdeck collect`: fetches missing files of a run from servers and actors."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profdeck.cli._cluster_options import ClusterOptions
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode

if TYPE_CHECKING:
    from profdeck.replicas.late_collection import Collected


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", parser=terminal.run_path, help="A run; latest: the newest one.")
    ],
    *,
    of_clusters: ClusterOptions,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Time limit in seconds.")
    ] = 1800.0,
) -> None:
    """Fetch missing files from other hosts; exit with 1 if incomplete.

    Files are fetched from servers. To include actors, use their cluster's option. Existing files are not fetched again.
    PROFDECK_TOKEN is sent to the servers that the run names. Files of training processes are not fetched.
    """
    import asyncio

    from profdeck.on_demand.stores import ADDRESS_FILE
    from profdeck.replicas.late_collection import collect_run
    from profdeck.verification.run_report import read_about

    read_about(run)
    with contextlib.ExitStack() as until_done:
        find_actors = of_clusters.selected()
        actors = find_actors and find_actors(until_done)
        on_progress = until_done.enter_context(terminal.show_progress("Fetching files"))
        engines = asyncio.run(collect_run(run, limit_s=timeout_s, actors=actors, on_progress=on_progress))
    for engine in engines:
        terminal.print_line(f"{engine.role_and_replica} {engine.capture}: {_outcome(engine)}")
        for problem in engine.problems:
            terminal.print_stderr(f"error: {problem}")
    incomplete = sum(bool(engine.problems) for engine in engines)
    if engines:
        terminal.print_line(
            f"{len(engines) - incomplete} of {len(engines)} engine captures are complete. "
            f"Next: profdeck ls {terminal.shell_path(run)}"
        )
    else:
        typer.echo("No file is missing that a server could send.")
    if (run / ADDRESS_FILE).exists():
        terminal.print_stderr(
            "Files that processes of the job wrote on other hosts are not fetched. Copy their step_* directories into "
            f"{terminal.short_path(run)}, or set output to a directory that all hosts share."
        )
    if incomplete:
        raise typer.Exit(ExitCode.INCOMPLETE)


def _outcome(engine: Collected) -> str:
    return " ".join(engine.notes) or ("Nothing was fetched." if engine.problems else "All files are here.")
