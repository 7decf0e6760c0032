"""The command ``profdeck npu``, which analyses captures of Ascend NPUs."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from rich.text import Text

from profdeck import ProfdeckError
from profdeck.plugin import (
    ExitCode,
    JsonOption,
    TraceError,
    is_manifest,
    make_table,
    print_json,
    read_manifest,
    short_path,
    show_progress,
    stdout_console,
    user_path,
)
from profdeck_npu import analysis, cann
from profdeck_npu.artifact_kinds import AscendDirectoryKind
from profdeck_npu.options import Export
from profdeck_npu.traces.analysis_state import read_state

command = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


class AnalysisOutcome(StrEnum):
    """Outcome of the analysis of one directory."""

    DONE = "done"
    KEPT = "kept"
    """Skipped: an earlier analysis is complete."""
    FAILED = "failed"
    BUSY = "busy"
    """Skipped: another process is recording into the directory or analysing it."""


_STYLES = {
    AnalysisOutcome.DONE: "green",
    AnalysisOutcome.KEPT: "green",
    AnalysisOutcome.FAILED: "red",
    AnalysisOutcome.BUSY: "yellow",
}


@attrs.frozen
class _Result:
    directory: Path
    outcome: AnalysisOutcome
    problems: tuple[str, ...] = ()
    duration_s: float | None = None


@command.callback()
def _npu() -> None:
    """Inspect Ascend NPU captures."""


@command.command()
def analyse(  # noqa: PLR0913  # the options of a command line
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", parser=user_path, help="Runs, captures or *_ascend_pt directories."),
    ],
    *,
    processes: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Maximum number of parallel analyses. 0: half of the CPU cores, at least 1."
        ),
    ] = 0,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Time limit for each directory.")
    ] = analysis.TIMEOUT_S,
    export: Annotated[
        list[Export] | None,
        typer.Option(help="Format to write. Default: the formats configured for the capture. Repeatable."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also analyse directories that have results, and replace the results.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Generate timelines and tables from the raw data of torch_npu.

    Requires torch_npu and CANN, but no NPU. The raw data is kept, so an analysis can be repeated.
    """
    skipped = {
        directory: _skipped_result(directory, export or (), force=force) for directory in _find_directories(paths)
    }
    to_analyse = [directory for directory, result in skipped.items() if result is None]
    if to_analyse:
        cann.LIBRARY.require("npu")
    analysed = _analyse_all(to_analyse, processes or analysis.default_processes(), timeout, export or ())
    analysed_by_path = dict(zip(to_analyse, analysed, strict=True))
    results = [result or analysed_by_path[directory] for directory, result in skipped.items()]
    if json:
        print_json({"directories": [_to_json(result) for result in results]})
    else:
        _print_results(results)
    if any(result.outcome in {AnalysisOutcome.FAILED, AnalysisOutcome.BUSY} for result in results):
        raise typer.Exit(ExitCode.INCOMPLETE)


def _find_directories(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the torch_npu directories at or below the paths. The contents of these directories are not searched.

    Raises:
        TraceError: a path is not a directory, or contains no torch_npu directory.
    """
    for path in paths:
        if AscendDirectoryKind().matches(path):
            yield path
            continue
        if not path.is_dir():
            problem = "is not a directory" if path.exists() else "does not exist"
            raise TraceError(f"{path} {problem}. Specify a run, a capture, or a directory that ends in _ascend_pt.")
        directories = []
        for parent, names, _ in os.walk(path):
            matching = sorted(name for name in names if AscendDirectoryKind().matches(Path(parent, name)))
            directories += [Path(parent, name) for name in matching]
            names[:] = sorted({*names}.difference(matching))
        if not directories:
            raise TraceError(f"No torch_npu recording found in {path} (expected directories ending in _ascend_pt).")
        yield from directories


def _skipped_result(directory: Path, export: Sequence[Export], *, force: bool) -> _Result | None:
    """Return the result of a directory that is skipped, or ``None`` if the directory must be analysed."""
    if problem := _recording_problem(directory, force=force) or _analysis_problem(directory, force=force):
        return _Result(directory, AnalysisOutcome.BUSY, (problem,))
    if not force and analysis.is_analysed(directory, export):
        return _Result(directory, AnalysisOutcome.KEPT)
    return None


def _recording_problem(directory: Path, *, force: bool) -> str | None:
    """Return a message if a process is recording, or might still be recording, into the directory."""
    for file in directory.absolute().parent.glob("*.json"):
        if is_manifest(file) and directory.name.startswith((f"{file.stem}_", f"{file.stem}.")):
            with suppress(ProfdeckError):
                manifest = read_manifest(file)
                if manifest.under_way:
                    return f"process {manifest.pid} is still recording; analyse the directory after the capture"
                if manifest.under_way is None and not force:
                    return (
                        f"process {manifest.pid} on {manifest.host} has not ended the capture. If that process is no "
                        "longer running, pass --force"
                    )
    return None


def _analysis_problem(directory: Path, *, force: bool) -> str | None:
    """Return a message if another analysis of the directory is queued or running."""
    try:
        state = read_state(directory)
    except ProfdeckError:  # the analysis replaces a corrupt state file
        return None
    if state is None or state.state not in {"pending", "running"}:
        return None
    if state.is_active:
        return analysis.in_progress_message(state)
    if state.is_active is None and not force:
        return (
            f"process {state.pid} on {state.host} has not finished its analysis. If that process is no longer running, "
            "pass --force"
        )
    return None


def _analyse_all(
    directories: Sequence[Path], processes: int, timeout_s: float, export: Sequence[Export]
) -> list[_Result]:
    cancelled = threading.Event()
    with show_progress("Analysing") as on_progress, ThreadPoolExecutor(processes) as pool:
        analyse_directory = partial(_analyse_directory, export=export, timeout_s=timeout_s, cancelled=cancelled)
        futures = [pool.submit(analyse_directory, directory) for directory in directories]
        try:
            for done, _ in enumerate(as_completed(futures), 1):
                on_progress(done, len(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            cancelled.set()
            raise
    return [future.result() for future in futures]


def _analyse_directory(
    directory: Path, *, export: Sequence[Export], timeout_s: float, cancelled: threading.Event
) -> _Result:
    started_s = time.monotonic()
    try:
        state = analysis.analyse(directory, export=export, timeout_s=timeout_s, cancelled=cancelled)
    except analysis.AnalysisInProgressError as error:
        return _Result(directory, AnalysisOutcome.BUSY, (str(error),))
    outcome = AnalysisOutcome.DONE if state.state == "done" else AnalysisOutcome.FAILED
    return _Result(directory, outcome, state.problems, time.monotonic() - started_s)


def _to_json(result: _Result) -> dict[str, Any]:
    return {
        "path": str(result.directory),
        "outcome": result.outcome,
        "duration_s": None if result.duration_s is None else round(result.duration_s, 3),
        "problems": list(result.problems),
        "remedy": None
        if result.outcome in {AnalysisOutcome.DONE, AnalysisOutcome.KEPT}
        else analysis.remedy(result.directory),
    }


def _print_results(results: Sequence[_Result]) -> None:
    console = stdout_console()
    table = make_table("outcome", "seconds", "directory", numbers=("seconds",))
    for result in results:
        duration = "" if result.duration_s is None else f"{result.duration_s:,.1f}"
        table.add_row(Text(result.outcome, style=_STYLES[result.outcome]), duration, short_path(result.directory))
    console.print(table)
    console.print()
    for result in results:
        for problem in result.problems:
            console.print(f"{short_path(result.directory)}: {problem}", soft_wrap=True)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in Counter(result.outcome for result in results).items())
    console.print(f"{len(results)} director{'y' if len(results) == 1 else 'ies'}: {counts}")
    if any(result.outcome is AnalysisOutcome.FAILED for result in results):
        console.print(f"The raw data is unchanged. torch_npu's output is in {analysis.LOG} of each directory.")
