"""``profdeck npu``: what there is to do with captures of Ascend NPUs. So far: ``analyse``."""

from __future__ import annotations

import os
import socket
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
)
from profdeck_npu import analysis, cann
from profdeck_npu.artifact_kinds import AscendDirectoryKind
from profdeck_npu.options import Export
from profdeck_npu.traces.analysis_state import read_state

command = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


class AnalysisOutcome(StrEnum):
    """What came of one directory."""

    DONE = "done"
    """It was analysed."""
    KEPT = "kept"
    """It had been analysed before."""
    FAILED = "failed"
    BUSY = "busy"
    """Another process records into it or analyses it."""


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
    """Work with captures of Ascend NPUs."""


@command.command()
def analyse(  # noqa: PLR0913  # the options of a command line
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Runs, captures or *_ascend_pt directories.")],
    *,
    processes: Annotated[
        int, typer.Option(min=0, metavar="N", help="How many directories to analyse at once; 0: one for two cores.")
    ] = 0,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="How long one directory may take.")
    ] = analysis.TIMEOUT_S,
    export: Annotated[
        list[Export] | None,
        typer.Option(help="What to write, instead of what the capture was configured for; may be given again."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also what has been analysed: its results go.")] = False,
    json: JsonOption = False,
) -> None:
    """Make timelines and tables of what torch_npu recorded.

    Needs torch_npu and CANN, and no NPU. Raw data stay, so that it can be done again.
    """
    found = {directory: _look(directory, export or (), force=force) for directory in _directories(paths)}
    due = [directory for directory, result in found.items() if result is None]
    if due:
        cann.LIBRARY.require("npu")
    made = dict(zip(due, _analyse(due, processes or analysis.default_processes(), timeout, export or ()), strict=True))
    results = [result or made[directory] for directory, result in found.items()]
    if json:
        print_json({"directories": [_plain(result) for result in results]})
    else:
        _show(results)
    if any(result.outcome in {AnalysisOutcome.FAILED, AnalysisOutcome.BUSY} for result in results):
        raise typer.Exit(ExitCode.INCOMPLETE)


def _directories(paths: Sequence[Path]) -> Iterator[Path]:
    """Find the directories of torch_npu, without looking into them.

    Raises:
        TraceError: There is none below a path.
    """
    for path in paths:
        if AscendDirectoryKind().matches(path):
            yield path
            continue
        if not path.is_dir():
            what = "is no directory" if path.exists() else "does not exist"
            raise TraceError(f"{path} {what}. Name a run, a capture, or a directory that ends in _ascend_pt.")
        found = []
        for parent, names, _ in os.walk(path):
            mine = sorted(name for name in names if AscendDirectoryKind().matches(Path(parent, name)))
            found += [Path(parent, name) for name in mine]
            names[:] = sorted({*names}.difference(mine))
        if not found:
            raise TraceError(
                f"{path}: nothing below it ends in _ascend_pt, so there is nothing of torch_npu to analyse."
            )
        yield from found


def _look(directory: Path, export: Sequence[Export], *, force: bool) -> _Result | None:
    """Say why a directory is not to be analysed; None if it is."""
    if by := _recording(directory) or _analysing(directory, force=force):
        return _Result(directory, AnalysisOutcome.BUSY, (by,))
    if not force and analysis.is_analysed(directory, export):
        return _Result(directory, AnalysisOutcome.KEPT)
    return None


def _recording(directory: Path) -> str | None:
    for file in directory.absolute().parent.glob("*.json"):
        if is_manifest(file) and directory.name.startswith((f"{file.stem}_", f"{file.stem}.")):
            with suppress(ProfdeckError):
                manifest = read_manifest(file)
                if manifest.under_way:
                    return f"process {manifest.pid} is still recording: analyse it when that has ended the capture"
    return None


def _analysing(directory: Path, *, force: bool) -> str | None:
    try:
        state = read_state(directory)
    except ProfdeckError:  # the analysis replaces it
        return None
    if state is None or state.state not in {"pending", "running"}:
        return None
    if state.under_way:
        return analysis.under_way(state)
    if state.host != socket.gethostname() and not force:
        return (
            f"process {state.pid} on {state.host} is to analyse it, and whether that still runs cannot be told from "
            "here: if it does not, give --force"
        )
    return None


def _analyse(directories: Sequence[Path], processes: int, timeout_s: float, export: Sequence[Export]) -> list[_Result]:
    cancelled = threading.Event()
    with show_progress("Analysing") as on_progress, ThreadPoolExecutor(processes) as pool:
        work = partial(_analyse_one, export=export, timeout_s=timeout_s, cancelled=cancelled)
        futures = [pool.submit(work, directory) for directory in directories]
        try:
            for done, _ in enumerate(as_completed(futures), 1):
                on_progress(done, len(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            cancelled.set()
            raise
    return [future.result() for future in futures]


def _analyse_one(directory: Path, *, export: Sequence[Export], timeout_s: float, cancelled: threading.Event) -> _Result:
    started_s = time.monotonic()
    try:
        state = analysis.analyse(directory, export=export, timeout_s=timeout_s, cancelled=cancelled)
    except analysis.AnalysisUnderWayError as error:
        return _Result(directory, AnalysisOutcome.BUSY, (str(error),))
    outcome = AnalysisOutcome.DONE if state.state == "done" else AnalysisOutcome.FAILED
    return _Result(directory, outcome, state.problems, time.monotonic() - started_s)


def _plain(result: _Result) -> dict[str, Any]:
    return {
        "path": str(result.directory),
        "outcome": result.outcome,
        "duration_s": None if result.duration_s is None else round(result.duration_s, 3),
        "problems": list(result.problems),
        "remedy": None
        if result.outcome in {AnalysisOutcome.DONE, AnalysisOutcome.KEPT}
        else analysis.remedy(result.directory),
    }


def _show(results: Sequence[_Result]) -> None:
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
        console.print(f"The raw data are unchanged. The output of torch_npu is in {analysis.LOG} of each directory.")
