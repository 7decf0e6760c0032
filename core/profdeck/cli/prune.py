"""`profdeck prune`: keeps a run small."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
import typer

from profdeck_traces.base.errors import ConfigError
from profdeck_traces.base.text import plural
from profdeck_traces.cli import terminal

_BYTES_PER_GB = 1e9


def command(  # noqa: PLR0913  # the options of a command line
    run: Annotated[
        Path, typer.Argument(metavar="RUN", parser=terminal.run_path, help="A run; latest: the newest one.")
    ],
    *,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Keep the newest N captured steps.")] = None,
    gigabytes: Annotated[
        float | None, typer.Option(min=0, metavar="GB", help="Keep the newest steps that have so much together.")
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Keep what was captured in the last so many days.")
    ] = None,
    role: Annotated[
        str | None, typer.Option(metavar="NAME", help="Delete captures of this role only; others stay.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; show what would be deleted.")] = False,
    json: terminal.JsonOption = False,
) -> None:
    """Delete old captures of a run, whole steps at a time.

    The newest step stays, and so does one that is being recorded, finished or analysed, or that has a file 'pinned'.
    """
    from profdeck.after_run.pruning import Limits, StepOnDisk, prune

    if steps is None and gigabytes is None and days is None:
        raise ConfigError("Say what is kept: --steps N, --gigabytes GB or --days DAYS.")
    size_bytes = None if gigabytes is None else gigabytes * _BYTES_PER_GB
    found = prune(Path(run), Limits(steps=steps, size_bytes=size_bytes, age_days=days), role=role, is_trial=dry_run)
    if json:
        terminal.print_json(
            {
                "deleted": [attrs.asdict(step.pruned) for step in found.deleted],
                "kept": [attrs.asdict(step.pruned) | {"stays_because": step.stays_because} for step in found.kept],
                "dry_run": dry_run,
            }
        )
        return
    for step in found.over:
        terminal.warn(f"Step {step.pruned.first_step} stays: {step.stays_because}.")

    def amount(of: tuple[StepOnDisk, ...]) -> str:
        size = terminal.size(sum(step.pruned.size_bytes for step in of))
        return f"{plural(len(of), 'step')} ({size})"

    done = "Would delete" if dry_run else "Deleted"
    terminal.stdout_console().print(f"{done} {amount(found.deleted)}; {amount(found.kept)} kept.", soft_wrap=True)
