"""`profdeck finish`: runs finish tasks that were never started or were interrupted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from profdeck.base.json_files import JsonKind
from profdeck.config.model import FinishConfig
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode


@attrs.frozen(kw_only=True)
class _Config:
    finish: FinishConfig = attrs.field(factory=FinishConfig)
    listeners: tuple[str, ...] = ()
    listener_options: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class _RunFile:
    config: _Config = attrs.field(factory=_Config)


_RUN_FILE = JsonKind(_RunFile)


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", parser=terminal.run_path, help="A run; latest: the newest one.")
    ],
    *,
    again: Annotated[bool, typer.Option("--again", help="Also repeat finish tasks that are done or failed.")] = False,
) -> None:
    """Run finish tasks that have not run or were interrupted.

    Use this if the process of a finish task was killed. Exits with 1 if a finish task of the run is not done. The
    finish command is read from the run directory and runs on this host, so use it only for runs that you trust.
    """
    from profdeck.after_capture.finish import finish_run
    from profdeck.after_capture.finish_record import FinishState, new_record
    from profdeck.cli import ls
    from profdeck.lifecycle.listeners import is_notified_at_the_finish
    from profdeck.records.run_directory import RUN_FILE
    from profdeck.verification.run_report import read_run

    run = Path(run).absolute()
    report = read_run(run, contents=False)
    try:
        config = _RUN_FILE.read(run / RUN_FILE).config
    except (OSError, ValueError) as error:
        raise ProfdeckError(f"{run / RUN_FILE} cannot be read: {error}.") from None
    listeners = tuple(filter(is_notified_at_the_finish, config.listeners))
    template = None
    if config.finish.command is not None or listeners:
        template = new_record(0, "", config.finish, listeners, config.listener_options)
    states, run_count = Counter[FinishState](), 0
    for finish, was_run in finish_run(report, template, again=again):
        states[finish.state] += 1
        run_count += was_run
        if was_run or finish.state is not FinishState.DONE:
            terminal.print_line(ls.describe_finish(finish) or f"Finish task for {finish.capture}: done.")
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    typer.echo(f"{run_count} of {states.total()} run now; {counts}" if states else "This run has no finish task.")
    if states.total() > states[FinishState.DONE]:
        raise typer.Exit(ExitCode.INCOMPLETE)
