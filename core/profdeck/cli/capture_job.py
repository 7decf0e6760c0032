"""`profdeck capture job`: captures a running job.

The request is sent through the job's run directory or store.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from profdeck.after_capture.work_in_progress import await_finishes
from profdeck.base.text import sentence
from profdeck.cli import capture_report, ls
from profdeck.cli.terminal_observer import TerminalObserver
from profdeck.on_demand.client import TIMEOUT_S, JobCapture, JobRequest, ProcessCapture, capture_job
from profdeck.on_demand.requests import MOST_STEPS
from profdeck.records.status import Status
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode

_SERVERS = "A job records what its config specifies. To capture servers without a job: profdeck capture servers"
REMOVED = {
    "--report": "After the capture, use 'profdeck report latest'.",
    "--run": "The run directory is an argument: profdeck capture job RUN.",
    **dict.fromkeys(("--batch-kind", "--iterations", "--output", "--ranks", "--router", "--skip", "--url"), _SERVERS),
}
"""Removed options, each with a message that names the replacement."""


def command(  # noqa: PLR0913  # the options of a command line
    run: Annotated[
        Path, typer.Argument(metavar="RUN", parser=terminal.run_path, help="Run directory of the job, or latest.")
    ],
    *,
    steps: Annotated[int, typer.Option(min=1, max=MOST_STEPS, metavar="N", help="Global steps to record.")] = 1,
    in_steps: Annotated[
        int | None,
        typer.Option(
            "--in",
            min=1,
            max=MOST_STEPS,
            metavar="N",
            help="Begin after N global steps. Default: 2, plus the steps of the warm-up.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:ADDRESS",
            help="Store of a job whose hosts share no directory, such as tcpstore:10.0.0.1:29500. Default: the store "
            "specified in RUN.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Withdraw the request if the job has not begun the capture by then."
        ),
    ] = TIMEOUT_S,
    json: terminal.JsonOption = False,
) -> None:
    """Capture a running job; exit with 1 if the capture of a process is missing or incomplete."""
    request = JobRequest(run=run, steps=steps, in_steps=in_steps, store=store, timeout_s=timeout)
    with _sigterm_as_interrupt():
        captured = capture_job(request, TerminalObserver(), ls.read)
    report = captured.report
    if report is not None and captured.is_over:
        with terminal.show_progress("Waiting for the finish task"):
            await_finishes(report)
    problems = any(process.problem for process in captured.processes)
    files_elsewhere = any(process.files_here is False for process in captured.processes)
    complete = not problems and (files_elsewhere if report is None else report.status is Status.COMPLETE)
    if json:
        terminal.print_json(
            {
                "run": str(run),
                "complete": complete,
                "first_step": captured.first_step,
                "last_step": captured.last_step,
                "processes": list(map(_plain, captured.processes)),
                "ls": report and ls.plain(report),
            }
        )
    else:
        if report is not None:
            ls.show(report)
        _show_processes(captured)
        if report is not None:
            capture_report.show_summary(report, captured.directories)
    if not complete:
        raise typer.Exit(ExitCode.INCOMPLETE)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside the block, so that a pending request is withdrawn."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _show_processes(captured: JobCapture) -> None:
    """Print the problems that are not in the report, and the locations of files on other hosts."""
    console = terminal.stdout_console()
    for capture in captured.processes:
        process = capture.process
        if capture.problem and not capture.files_here:
            console.print(f"{process.name}, {process.at}: {sentence(capture.problem)}")
        if capture.files_here is False:
            text = f"{process.name}: its files are on {process.at.host}, in {capture.directory}"
            console.print(text, soft_wrap=True)  # do not wrap the path
    if any(capture.files_here is False for capture in captured.processes):
        console.print(
            "To read all ranks together, copy the step_* directories from there into "
            f"{terminal.short_path(captured.run)}, or set output to a directory that all hosts share."
        )


def _plain(capture: ProcessCapture) -> dict[str, Any]:
    process = capture.process
    return {
        "role": process.role,
        "replica": process.replica,
        "rank": process.rank,
        "target": process.target,
        "host": process.at.host,
        "pid": process.at.pid,
        "captures": capture.captures,
        "directory": str(capture.directory),
        "files_here": capture.files_here,
        "problem": capture.problem,
    }
