"""`profdeck ls`: what a run directory holds and whether it is complete, established by reading every file."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from rich.console import Console
from rich.text import Text

from profdeck.after_capture.finish_record import FinishState
from profdeck.after_capture.work_in_progress import FinishReport, read_finishes
from profdeck.records.manifest import Manifest
from profdeck.records.run_directory import RUN_FILE, created_ns, runs_below
from profdeck.records.status import Status
from profdeck.verification import report_model as reports
from profdeck.verification.report_model import CaptureReport, RankReport, RunReport, TargetReport
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.base.text import plural
from profdeck_traces.cli import arguments, terminal
from profdeck_traces.cli.terminal import ExitCode

_STYLES = {
    Status.COMPLETE: "green",
    Status.RECORDING: "cyan",
    Status.PARTIAL: "yellow",
    Status.MISSING: "red",
    Status.FAILED: "red",
}


def command(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            parser=terminal.source_path,
            help="A run, or latest for the newest; else a directory of runs.",
        ),
    ] = terminal.RUNS,
    *,
    processes: arguments.Processes = 0,
    cache: arguments.Cache = True,
    json: terminal.JsonOption = False,
) -> None:
    """List a run's captures, or the runs; exit with 1 if incomplete."""
    if not (run / RUN_FILE).exists() and (runs := runs_below(run)):
        _list(runs, as_json=json)
        return
    if run == terminal.RUNS and not run.exists():
        raise ProfdeckError(f"There is no directory {run} here, so no run. Name a run, or a directory of runs.")
    report = read(run, cache=ResultCache.of_user() if cache else None, processes=processes)
    if json:
        terminal.print_json(plain(report))
    else:
        show(report)
    if report.status is not Status.COMPLETE or report.problems:
        raise typer.Exit(ExitCode.INCOMPLETE)


def read(
    run: Path,
    *,
    only: Callable[[Manifest], bool] | None = None,
    cache: ResultCache | None = None,
    processes: int = 0,
) -> RunReport:
    """Read a run with progress; the arguments are those of `read_run`, 0 processes being one for each core.

    Raises:
        ProfdeckError: it cannot be read, or is not a run.
    """
    try:
        with terminal.show_progress("Reading the traces") as on_progress:
            cores = arguments.cores(processes)
            return read_run(run, only=only, cache=cache, processes=cores, on_progress=on_progress)
    except OSError as error:
        raise ProfdeckError(f"{error.filename or run} cannot be read: {error.strerror}.") from error


def _list(runs: list[Path], *, as_json: bool) -> None:
    """Print runs, the newest first, without reading their files to their ends."""
    found = []
    for run in runs:
        try:
            report = read_run(run, contents=False)
            counted = reports.totals(report)
            status = Status.PARTIAL if report.problems and report.status is Status.COMPLETE else report.status
            about = {"status": status, "captures": counted["captures"], "size_bytes": counted["size_bytes"]}
        except ProfdeckError as error:
            about = {"status": Status.FAILED, "captures": 0, "size_bytes": 0, "problem": str(error)}
        found.append({"path": str(run), "created_ns": created_ns(run), **about})
    if as_json:
        terminal.print_json({"runs": found})
        return
    table = terminal.make_table("begun", "run", "captures", "size", "status", numbers=("captures", "size"))
    for one in found:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["created_ns"] / 1e9))
        state = Text(one["status"], style=_STYLES[one["status"]])
        table.add_row(
            begun, terminal.short_path(Path(one["path"])), str(one["captures"]), terminal.size(one["size_bytes"]), state
        )
    console = terminal.stdout_console()
    console.print(table)
    console.print()
    newest = terminal.short_path(runs[0])
    console.print(f"Only sizes were compared; to read the files: profdeck ls {newest}")


def _ranks(report: RunReport) -> Iterator[tuple[CaptureReport, RankReport]]:
    for capture in report.captures:
        for rank in capture.ranks:
            yield capture, rank


def show(report: RunReport) -> None:
    """Print a report."""
    console = terminal.stdout_console()
    _show_ranks(report, console)
    for capture, rank in _ranks(report):
        notes = [f"{artifact.path.name}: {note}" for artifact in rank.artifacts for note in artifact.notes]
        for text in (*rank.problems, *notes):
            stage = f", {_stage(capture)}" if capture.stage else ""
            console.print(f"Step {_steps(capture)}, {_role(capture)}{stage}, rank {rank.rank}: {text}")
    for line in _of_targets(report):
        console.print(line)
    for problem in report.problems:
        console.print(problem)
    finishes = list(read_finishes(report))
    for line in filter(None, map(describe_finish, finishes)):
        console.print(line)
    if any(finish.state in {FinishState.INTERRUPTED, FinishState.NOT_RUN} for finish in finishes):
        console.print(f"To run what was not finished: profdeck finish {terminal.short_path(report.path)}")
    for role, pruned in itertools.groupby(sorted(report.pruned, key=lambda one: one.role or ""), lambda one: one.role):
        steps = list(pruned)
        size_bytes = sum(step.size_bytes for step in steps)
        which = f"{plural(len(steps), 'older step')}{f' of {role}' if role else ''}"
        console.print(f"{which} {'was' if len(steps) == 1 else 'were'} pruned: {terminal.size(size_bytes)}")
    counted = reports.totals(report)
    statuses = ", ".join(f"{count} {status}" for status, count in counted["ranks_by_status"].items())
    amount = f"{terminal.size(counted['size_bytes'])}, {counted['events']:,} events"
    captures = plural(counted["captures"], "capture")
    console.print(f"{terminal.short_path(report.path)}: {captures}; ranks: {statuses or 'none'}; {amount}")
    if unread := counted["not_read_again"]:
        files = "file was" if unread == 1 else "files were"
        console.print(f"{unread} {files} proved before and did not change since; to read them again: --no-cache")


def _show_ranks(report: RunReport, console: Console) -> None:
    """Print a row for each rank, with its file, or below them where a row has no room for that."""
    ranks = list(_ranks(report))
    if not ranks:
        return
    staged = any(capture.stage for capture, _ in ranks)
    columns = ("steps", "role", *(("stage",) if staged else ()), "rank", "status", "size", "events")
    rows = [
        (
            _steps(capture),
            _role(capture),
            *((_stage(capture),) if staged else ()),
            _rank(rank),
            Text(rank.status, style=_STYLES[rank.status]),
            terminal.size(rank.size_bytes),
            _events(rank),
        )
        for capture, rank in ranks
    ]
    files = [_files(rank, report.path) for _, rank in ranks]
    widths = (max(len(str(row[place])) for row in (columns, *rows)) + 2 for place in range(len(columns)))
    fits = sum(widths) + max(map(len, files)) <= console.width
    table = terminal.make_table(*columns, *(("file",) if fits else ()), numbers=("size", "events"))
    for row, file in zip(rows, files, strict=True):
        table.add_row(*row, *((file,) if fits else ()))
    console.print(table)
    console.print()
    if not fits:
        for file in filter(None, files):
            console.print(terminal.short_path(report.path / file))
        console.print()


def _of_targets(report: RunReport) -> Iterator[str]:
    """Say what is wrong with each target; of those in a fleet, that is said with the fleet."""
    poor = {
        (fleet.first_step, fleet.role, record.replica, record.capture): record
        for fleet in report.targets
        for record in fleet.targets
        if not (record.outcome and record.outcome.ends_well)
    }
    for target in report.targets:
        if (target.first_step, target.role, target.replica, target.id) in poor:
            continue
        for problem in target.problems:
            yield f"Step {target.first_step}, {_role(target)}, {target.target}: {problem}"
        for record in target.targets:
            if (target.first_step, target.role, record.replica, record.capture) in poor:
                what = " ".join(filter(None, [record.reason, record.fix]))
                who = f"{target.role}/{record.replica}, {record.name}"
                yield f"Step {target.first_step}, {who}: {record.outcome or 'not asked'}: {what}"


def describe_finish(finish: FinishReport) -> str | None:
    """Describe a finish task in one line. Return None if it is done and every participant ended the capture."""
    others = ", ".join(finish.waits_for)
    match finish.state:
        case FinishState.DONE:
            what = f"done, without {others}" if others else None
        case FinishState.WAITING:
            what = f"waiting for {others}" if others else "begins"
        case FinishState.RUNNING:
            what = "running" + (f", without {others}" if others else "")
        case FinishState.NOT_RUN:
            what = "not run: no process of the job ended the capture"
        case state:
            what = f"{state}: {finish.problem or 'its process was terminated'}" + (
                f"; without {others}" if others else ""
            )
    if what is None:
        return None
    by = f" ({finish.by})" if finish.by and finish.state in {FinishState.WAITING, FinishState.RUNNING} else ""
    see = f" See {terminal.short_path(finish.record)}" if finish.record else ""
    return f"Finish task for {finish.capture}{by}: {what}.{see}"


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


def _files(rank: RankReport, run: Path) -> str:
    """Write where it is in the run, and how many more files there are."""
    paths = [str(artifact.path.relative_to(run)) for artifact in rank.artifacts]
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "") if paths else ""


def _events(rank: RankReport) -> str:
    """Write how many there are; nothing where nobody knows, as of what is still to be analysed."""
    unknown = rank.artifacts and all(artifact.whole and artifact.events is None for artifact in rank.artifacts)
    return "" if unknown else f"{rank.events:,}"


def plain(report: RunReport) -> dict[str, Any]:
    """Turn a report into JSON data, with the finishes of its captures."""
    finishes = [attrs.asdict(finish) for finish in read_finishes(report)]
    for finish in finishes:
        finish["record"] = finish["record"] and str(finish["record"])
    return {**reports.plain(report), "finishes": finishes}
