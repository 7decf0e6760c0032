"""`profdeck ls`: lists runs, or the captures of a run, and verifies the files of a run by reading them."""

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
from profdeck_traces.cli import arguments, json_limit, terminal
from profdeck_traces.cli.terminal import ExitCode

_IMPORTANT = ("problems", "captures", "captures[].ranks", "targets", "finishes")
"""Lists in the JSON document, most important first."""
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
            help="A run, or a directory of runs; latest: the newest run.",
        ),
    ] = terminal.RUNS,
    *,
    processes: arguments.Processes = 0,
    cache: arguments.Cache = True,
    json: terminal.JsonOption = False,
    max_bytes: json_limit.MaxBytes = None,
) -> None:
    """List a run's captures, or the runs; exit with 1 if incomplete."""
    json_limit.check_option(max_bytes, as_json=json)
    if not (run / RUN_FILE).exists() and (runs := runs_below(run)):
        _list(runs, as_json=json, max_bytes=max_bytes)
        return
    if run == terminal.RUNS and not run.exists():
        raise ProfdeckError(f"The default directory {run} does not exist. Specify a run, or a directory of runs.")
    report = read(run, cache=ResultCache.of_user() if cache else None, processes=processes)
    if json:
        document = plain(report)
        if max_bytes is not None:  # put incomplete items first, because the end of a list may be cut off
            document["captures"].sort(key=_is_complete)
            for capture in document["captures"]:
                capture["ranks"].sort(key=_is_complete)
        json_limit.print_limited(document, max_bytes, _IMPORTANT)
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
    """Read a run with a progress bar. The arguments are those of `read_run`, but `processes` can be 0: one per core.

    Raises:
        ProfdeckError: The run cannot be read, or the path is not a run.
    """
    try:
        with terminal.show_progress("Reading the traces") as on_progress:
            count = arguments.process_count(processes)
            return read_run(run, only=only, cache=cache, processes=count, on_progress=on_progress)
    except OSError as error:
        raise ProfdeckError(f"{error.filename or run} cannot be read: {error.strerror}.") from error


def _is_complete(item: dict[str, Any]) -> bool:
    """Return whether a capture or rank of the JSON document is complete."""
    return bool(item["status"] == Status.COMPLETE)


def _list(runs: list[Path], *, as_json: bool, max_bytes: int | None) -> None:
    """Print a table of runs, newest first. For speed, file contents are not read."""
    rows = []
    for run in runs:
        try:
            report = read_run(run, contents=False)
            totals = reports.totals(report)
            status = Status.PARTIAL if report.problems and report.status is Status.COMPLETE else report.status
            fields = {"status": status, "captures": totals["captures"], "size_bytes": totals["size_bytes"]}
        except ProfdeckError as error:
            fields = {"status": Status.FAILED, "captures": 0, "size_bytes": 0, "problem": str(error)}
        rows.append({"path": str(run), "created_ns": created_ns(run), **fields})
    if as_json:
        json_limit.print_limited({"runs": rows}, max_bytes, ())
        return
    table = terminal.make_table("started", "run", "captures", "size", "status", numbers=("captures", "size"))
    for row in rows:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created_ns"] / 1e9))
        status_text = Text(row["status"], style=_STYLES[row["status"]])
        path, size = terminal.short_path(Path(row["path"])), terminal.size(row["size_bytes"])
        table.add_row(started, path, str(row["captures"]), size, status_text)
    console = terminal.stdout_console()
    console.print(table)
    console.print()
    newest = terminal.shell_path(runs[0])
    console.print(f"Only file sizes were checked. To read the files: profdeck ls {newest}", soft_wrap=True)


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
    for line in _target_problems(report):
        console.print(line)
    for problem in report.problems:
        console.print(problem)
    finishes = list(read_finishes(report))
    for line in filter(None, map(describe_finish, finishes)):
        console.print(line)
    if any(finish.state in {FinishState.INTERRUPTED, FinishState.NOT_RUN} for finish in finishes):
        console.print(
            f"To run unfinished finish tasks: profdeck finish {terminal.shell_path(report.path)}", soft_wrap=True
        )
    by_role = sorted(report.pruned, key=lambda step: step.role or "")
    for role, group in itertools.groupby(by_role, key=lambda step: step.role):
        steps = list(group)
        size_bytes = sum(step.size_bytes for step in steps)
        subject = f"{plural(len(steps), 'older step')}{f' of {role}' if role else ''}"
        console.print(f"{subject} {'was' if len(steps) == 1 else 'were'} pruned: {terminal.size(size_bytes)}")
    totals = reports.totals(report)
    statuses = ", ".join(f"{count} {status}" for status, count in totals["ranks_by_status"].items())
    contents = f"{terminal.size(totals['size_bytes'])}, {totals['events']:,} events"
    captures = plural(totals["captures"], "capture")
    console.print(f"{terminal.short_path(report.path)}: {captures}; ranks: {statuses or 'none'}; {contents}")
    if unread := totals["not_read_again"]:
        verb = "was" if unread == 1 else "were"
        console.print(f"{plural(unread, 'unchanged file')} {verb} not read again. To read all files: --no-cache")


def _show_ranks(report: RunReport, console: Console) -> None:
    """Print a table of the ranks. If the terminal is too narrow for a file column, list the files below the table."""
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
    widths = (max(len(str(row[index])) for row in (columns, *rows)) + 2 for index in range(len(columns)))
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


def _target_problems(report: RunReport) -> Iterator[str]:
    """Yield a line for each problem of a target. Targets of a fleet are described only by their record in the fleet."""
    failed = {
        (fleet.first_step, fleet.role, record.replica, record.capture)
        for fleet in report.targets
        for record in fleet.targets
        if not (record.outcome and record.outcome.ends_well)
    }
    for target in report.targets:
        if (target.first_step, target.role, target.replica, target.id) in failed:
            continue
        for problem in target.problems:
            yield f"Step {target.first_step}, {_role(target)}, {target.target}: {problem}"
        for record in target.targets:
            if (target.first_step, target.role, record.replica, record.capture) in failed:
                reason = " ".join(filter(None, [record.reason, record.fix]))
                name = f"{target.role}/{record.replica}, {record.name}"
                yield f"Step {target.first_step}, {name}: {record.outcome or 'not contacted'}: {reason}"


def describe_finish(finish: FinishReport) -> str | None:
    """Describe a finish task in one line. Return None if it is done and every participant ended the capture."""
    missing = ", ".join(finish.waits_for)
    match finish.state:
        case FinishState.DONE:
            state = f"done, without {missing}" if missing else None
        case FinishState.WAITING:
            state = f"waiting for {missing}" if missing else "starting"
        case FinishState.RUNNING:
            state = "running" + (f", without {missing}" if missing else "")
        case FinishState.NOT_RUN:
            state = "not run: no process of the job ended the capture"
        case _:
            state = f"{finish.state}: {finish.problem or 'its process was terminated'}"
            state += f"; without {missing}" if missing else ""
    if state is None:
        return None
    process = f" ({finish.by})" if finish.by and finish.state in {FinishState.WAITING, FinishState.RUNNING} else ""
    record = f" See {terminal.short_path(finish.record)}" if finish.record else ""
    return f"Finish task for {finish.capture}{process}: {state}.{record}"


def _steps(capture: CaptureReport) -> str:
    """Format the steps. For a repeated capture, add its number, such as ``take2``."""
    steps = str(capture.first_step)
    if capture.last_step > capture.first_step:
        steps += f"..{capture.last_step}"
    take = re.search(r"-(take\d+)(?:-|$)", capture.id)
    return f"{steps} {take[1]}" if take else steps


def _stage(capture: CaptureReport) -> str:
    """Format the stage. From its second occurrence in the step, add its number."""
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
    """Format the path of the rank's first file, relative to the run, and the number of other files."""
    paths = [str(artifact.path.relative_to(run)) for artifact in rank.artifacts]
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "") if paths else ""


def _events(rank: RankReport) -> str:
    """Format the number of events, or return an empty string if it is unknown because a file is not analysed yet."""
    unknown = rank.artifacts and all(artifact.whole and artifact.events is None for artifact in rank.artifacts)
    return "" if unknown else f"{rank.events:,}"


def plain(report: RunReport) -> dict[str, Any]:
    """Convert a report, including its finish tasks, to JSON-compatible data."""
    finishes = [attrs.asdict(finish) for finish in read_finishes(report)]
    for finish in finishes:
        finish["record"] = finish["record"] and str(finish["record"])
    return {**reports.plain(report), "finishes": finishes}
