"""`profdeck collect`: fetches into a run what the servers that recorded it still have."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from profdeck.cli import kit
from profdeck.cli.kit import ExitCode
from profdeck.verification.reading import read_about


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", parser=kit.run_path, help="A run; latest: the newest one.")],
    *,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="How long that may take.")
    ] = 1800.0,
) -> None:
    """Fetch what servers still have; exit with 1 if incomplete.

    What is here is not fetched again. PROFDECK_TOKEN goes to the servers that the run names.
    """
    from profdeck.replicas.late_collection import collect_run

    read_about(run)
    found = asyncio.run(collect_run(run, limit_s=timeout_s))
    if not found:
        typer.echo("Nothing is missing that a server could send.")
        return
    left = 0
    for one in found:
        left += bool(one.problems)
        about = " ".join(one.notes) or ("Nothing was fetched." if one.problems else "All is here now.")
        typer.echo(f"{one.role_and_replica} {one.capture}: {about}")
        for problem in one.problems:
            kit.say(f"error: {problem}")
    typer.echo(f"{len(found) - left} of {len(found)} complete. Next: profdeck ls {kit.short(run)}")
    if left:
        raise typer.Exit(ExitCode.INCOMPLETE)
