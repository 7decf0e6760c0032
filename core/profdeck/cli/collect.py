"""`profdeck collect`: fetches missing files of a run from servers, actors and job processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import attrs
import typer

from profdeck.base.errors import describe_error
from profdeck.base.words import plural, sentence
from profdeck.cli import kit
from profdeck.cli._cluster_options import ClusterOptions
from profdeck.cli.kit import ExitCode
from profdeck.on_demand.gathering import Gathered, gather
from profdeck.on_demand.requests import read_processes
from profdeck.on_demand.stores import open_store
from profdeck.records.status import Status
from profdeck.replicas.late_collection import Collected, collect_run
from profdeck.verification.reading import read_about, read_run


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", parser=kit.run_path, help="A run; latest: the newest one.")],
    *,
    of_clusters: ClusterOptions,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Time limit in seconds.")
    ] = 1800.0,
) -> None:
    """Fetch missing files from other hosts; exit with 1 if incomplete.

    Files are fetched from servers, and from a running job through its store. To include actors, use their cluster's
    option. Existing files are not fetched again. PROFDECK_TOKEN is sent to the servers that the run names.
    """
    read_about(run)
    of_job, no_job = _of_job(run, timeout_s)
    with contextlib.ExitStack() as until_done:
        find_actors = of_clusters.selected()
        actors = find_actors and find_actors(until_done)
        on_progress = until_done.enter_context(kit.show_progress("Asking engines"))
        of_engines = asyncio.run(collect_run(run, limit_s=timeout_s, actors=actors, on_progress=on_progress))
    if no_job and read_run(run, contents=False).status is Status.COMPLETE:
        no_job = None  # whoever took part is here
    found = [*map(_of_process, of_job), *map(_of_engine, of_engines)]
    for one in found:
        typer.echo(f"{one.who}: {one.came}")
        for problem in one.problems:
            kit.print_stderr(f"error: {problem}")
    left = sum(bool(one.problems) for one in found)
    if found:
        typer.echo(f"{len(found) - left} of {len(found)} complete. Next: profdeck ls {kit.short_path(run)}")
    elif not no_job:
        typer.echo("Nothing is missing that a server could send.")
    if no_job:
        kit.print_stderr(f"error: {no_job}")
    if left or no_job:
        raise typer.Exit(ExitCode.INCOMPLETE)


@attrs.frozen
class _Found:
    """What came of who was asked."""

    who: str
    came: str
    problems: Sequence[str]


def _of_process(process: Gathered) -> _Found:
    problems = [sentence(process.problem)] if process.problem else []
    return _Found(process.name, f"{plural(process.fetched, 'artifact')} fetched.", problems)


def _of_engine(engine: Collected) -> _Found:
    came = " ".join(engine.notes) or ("Nothing was fetched." if engine.problems else "All is here now.")
    return _Found(f"{engine.role_and_replica} {engine.capture}", came, engine.problems)


def _of_job(run: Path, limit_s: float) -> tuple[list[Gathered], str | None]:
    """Bring what processes of a job have that runs and has a store; returns why they could not be asked, too."""
    with contextlib.closing(open_store(run, None)) as store:
        if not store.remote:
            return [], None
        try:
            there = [process for process in read_processes(store) if not process.gone]
        except OSError as error:
            return [], sentence(f"The job of this run cannot be asked, and may have ended: {describe_error(error)}")
        with kit.show_progress("Asking the job"):
            return asyncio.run(gather(store, run, there, limit_s=limit_s, everything=True)), None
