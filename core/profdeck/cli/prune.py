"""`profdeck prune`: deletes a run's oldest captures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
        float | None, typer.Option(min=0, metavar="GB", help="Keep the newest steps with this total size.")
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Keep steps captured in the last DAYS days.")
    ] = None,
    uploaded: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Delete only steps that 'profdeck upload' has completely copied to this URL."),
    ] = None,
    role: Annotated[str | None, typer.Option("--role", hidden=True)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Delete nothing; print the number of steps and their size.")
    ] = False,
    json: terminal.JsonOption = False,
) -> None:
    """Delete old captures of a run.

    All captures of a step are deleted together. The newest step is never deleted. A step is also kept while it is being
    recorded or analysed, while its finish task runs, or if its directory contains a file named 'pinned'.
    """
    from profdeck.after_capture.prune import StepOnDisk, prune

    if role is not None:
        raise ConfigError("--role was removed. The captures of all roles in a step are deleted together.")
    if steps is None and gigabytes is None and days is None:
        raise ConfigError("Specify what to keep: --steps N, --gigabytes GB or --days DAYS.")
    size_bytes = None if gigabytes is None else gigabytes * _BYTES_PER_GB
    check: dict[str, Any] = {}
    if uploaded is not None:
        from profdeck.remote.upload import directory_url, upload_check

        check["reason_to_keep"] = upload_check(Path(run), directory_url(uploaded))
    all_steps = prune(Path(run), steps=steps, size_bytes=size_bytes, age_days=days, dry_run=dry_run, **check)
    deleted = [step for step in all_steps if step.is_deleted]
    kept = [step for step in all_steps if not step.is_deleted]
    if json:
        terminal.print_json(
            {
                "deleted": [attrs.asdict(step.pruned) for step in deleted],
                "kept": [attrs.asdict(step.pruned) | {"stays_because": step.stays_because} for step in kept],
                "dry_run": dry_run,
            }
        )
        return
    for step in kept:
        if step.exceeds:
            terminal.warn(f"Step {step.pruned.first_step} is kept: {step.stays_because}.")

    def describe(steps: list[StepOnDisk]) -> str:
        size = terminal.size(sum(step.pruned.size_bytes for step in steps))
        return f"{plural(len(steps), 'step')} ({size})"

    verb = "Would delete" if dry_run else "Deleted"
    terminal.stdout_console().print(f"{verb} {describe(deleted)}; {describe(kept)} kept.", soft_wrap=True)
