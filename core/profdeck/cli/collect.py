"""`profdeck collect`: fetches into a run what the servers that recorded it still have."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer

from profdeck.base.errors import describe
from profdeck.base.words import plural, sentence
from profdeck.cli import kit
from profdeck.cli.kit import ExitCode
from profdeck.on_demand.gathering import Gathered, gather
from profdeck.on_demand.requests import read_processes
from profdeck.on_demand.stores import open_store
from profdeck.verification.reading import read_about


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", parser=kit.run_path, help="A run; latest: the newest one.")],
    *,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="How long that may take.")
    ] = 1800.0,
) -> None:
    """Fetch what other hosts still have; exit with 1 if incomplete.

    Servers are asked, and through its store a job that runs. What is here is not fetched again. PROFDECK_TOKEN goes to
    the servers that the run names.
    """
    from profdeck.replicas.late_collection import collect_run

    read_about(run)
    of_job, problem = _of_job(run, timeout_s)
    with kit.progress("Asking servers") as on_progress:
        found = asyncio.run(collect_run(run, limit_s=timeout_s, on_progress=on_progress))
    left = len([one for one in of_job if one.problem])
    for process in of_job:
        came = plural(process.fetched, "artifact")
        typer.echo(f"{process.name}: {came} fetched.")
        if process.problem:
            kit.say(f"error: {sentence(process.problem)}")
    if not found and not of_job and not problem:
        typer.echo("Nothing is missing that a server could send.")
    for one in found:
        left += bool(one.problems)
        about = " ".join(one.notes) or ("Nothing was fetched." if one.problems else "All is here now.")
        typer.echo(f"{one.role_and_replica} {one.capture}: {about}")
        for problem in one.problems:
            kit.say(f"error: {problem}")
    if found or of_job:
        asked = len(found) + len(of_job)
        typer.echo(f"{asked - left} of {asked} complete. Next: profdeck ls {kit.short(run)}")
    if problem:
        kit.say(f"error: {problem}")
    if left or problem:
        raise typer.Exit(ExitCode.INCOMPLETE)


def _of_job(run: Path, limit_s: float) -> tuple[list[Gathered], str | None]:
    """Bring what processes of a job have that runs and has a store; returns why they could not be asked, too."""
    with contextlib.closing(open_store(run, None)) as store:
        if not store.remote:
            return [], None
        try:
            there = [process for process in read_processes(store) if not process.gone]
        except OSError as error:
            return [], sentence(f"The job of this run cannot be asked, and may have ended: {describe(error)}")
        with kit.progress("Asking the job"):
            return asyncio.run(gather(store, run, there, limit_s=limit_s, everything=True)), None
