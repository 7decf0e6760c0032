"""`profdeck ls`: what a run directory holds and whether it is complete, established by reading every file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from rich.text import Text

from profdeck.capture import Status
from profdeck.cli import _output
from profdeck.cli._exit import ExitCode
from profdeck.errors import ProfdeckError
from profdeck.verify import CaptureReport, RankReport, RunReport, TargetReport, read_run

_STYLES = {
    Status.COMPLETE: "green",
    Status.RECORDING: "cyan",
    Status.PARTIAL: "yellow",
    Status.MISSING: "red",
    Status.FAILED: "red",
}


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    *,
    json: _output.Json = False,
) -> None:
    """List a run's captures; exit with 1 if one is incomplete."""
    report = read(run)
    if json:
        _output.print_json(plain(report))
    else:
        show(report)
    if report.status is not Status.COMPLETE or report.problems:
        raise typer.Exit(ExitCode.INCOMPLETE)


def read(run: Path) -> RunReport:
    """Read a run with progress.

    Raises:
        ProfdeckError: it cannot be read, or is not a run.
    """
    try:
        with _output.progress("Reading the traces") as on_progress:
            return read_run(run, on_progress=on_progress)
    except OSError as error:
        raise ProfdeckError(f"{error.filename or run} cannot be read: {error.strerror}.") from error


def _ranks(report: RunReport) -> Iterator[tuple[CaptureReport, RankReport]]:
    for capture in report.captures:
        for rank in capture.ranks:
            yield capture, rank


def _totals(report: RunReport) -> dict[str, Any]:
    ranks = [rank for _, rank in _ranks(report)]
    return {
        "captures": len(report.captures),
        "ranks_by_status": dict(Counter(str(rank.status) for rank in ranks)),
        "size_bytes": sum(rank.size_bytes for rank in ranks),
        "events": sum(rank.events for rank in ranks),
    }


def show(report: RunReport) -> None:
    """Print a report."""
    console = _output.stdout()
    table = _output.table("steps", "role", "stage", "rank", "status", "size", "events", numbers=("size", "events"))
    for capture, rank in _ranks(report):
        table.add_row(
            _steps(capture),
            _role(capture),
            _stage(capture),
            _rank(rank),
            Text(rank.status, style=_STYLES[rank.status]),
            _output.size(rank.size_bytes),
            f"{rank.events:,}",
        )
    if report.captures:
        console.print(table)
        console.print()
    for capture, rank in _ranks(report):
        for problem in rank.problems:
            stage = f", {_stage(capture)}" if capture.stage else ""
            console.print(f"Step {_steps(capture)}, {_role(capture)}{stage}, rank {rank.rank}: {problem}")
    for target in report.targets:
        for problem in target.problems:
            console.print(f"Step {target.first_step}, {_role(target)}, {target.target}: {problem}")
    for problem in report.problems:
        console.print(problem)
    totals = _totals(report)
    statuses = ", ".join(f"{count} {status}" for status, count in totals["ranks_by_status"].items())
    amount = f"{_output.size(totals['size_bytes'])}, {totals['events']:,} events"
    captures = f"{totals['captures']} capture{'' if totals['captures'] == 1 else 's'}"
    console.print(f"{_output.short(report.path)}: {captures}; ranks: {statuses or 'none'}; {amount}")


def _steps(capture: CaptureReport) -> str:
    """Write the steps, and what tells a repeated capture from the first one."""
    steps = str(capture.first_step)
    if capture.last_step > capture.first_step:
        steps += f"..{capture.last_step}"
    take = re.search(r"-(take\d+)(?:-|$)", capture.id)
    return f"{steps} {take[1]}" if take else steps


def _stage(capture: CaptureReport) -> str:
    """Write the stage, with its number in the step from the second one on."""
    if capture.stage is None:
        return ""
    number = re.search(rf"-{re.escape(capture.stage)}(-\d+)?(?:-take\d+)?$", capture.id)
    return capture.stage + ((number[1] or "") if number else "")


def _role(capture: CaptureReport | TargetReport) -> str:
    return capture.role if capture.replica is None else f"{capture.role}/{capture.replica}"


def _rank(rank: RankReport) -> str:
    coordinates = "-".join(f"{name}{index}" for name, index in rank.parallel.items())
    return f"{rank.rank} {coordinates}".rstrip()


def plain(report: RunReport) -> dict[str, Any]:
    """Turn a report into JSON data."""
    return {
        "path": str(report.path),
        "status": report.status,
        "problems": report.problems,
        "totals": _totals(report),
        "captures": [
            {
                **attrs.asdict(capture, value_serializer=_paths_as_text),
                "status": capture.status,
                "ranks": [
                    {
                        **attrs.asdict(rank, value_serializer=_paths_as_text),
                        "size_bytes": rank.size_bytes,
                        "events": rank.events,
                    }
                    for rank in capture.ranks
                ],
            }
            for capture in report.captures
        ],
        "targets": [attrs.asdict(target, value_serializer=_paths_as_text) for target in report.targets],
    }


def _paths_as_text(_: object, __: object, value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
