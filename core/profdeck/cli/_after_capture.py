"""What a capture shows when it is over, beside its files: where the time went, and its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from profdeck.verification.report_model import RunReport
from profdeck_traces.cli import arguments, report, summary, terminal

if TYPE_CHECKING:
    from profdeck_traces import RunSummary

Page = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Also write what `profdeck report` says of it.")
]


def show(found: RunReport, paths: Sequence[Path], page: Path | None, *, quiet: bool) -> None:
    """Print the summary of what was captured, and write its page if that is wanted.

    Args:
        found: What was captured.
        paths: The directories of its captures.
        page: Where the page goes.
        quiet: Whether to print nothing.
    """
    if not any(rank.events for capture in found.captures for rank in capture.ranks):
        if page is not None:
            terminal.warn(f"{terminal.short_path(page)} was not written: the capture has no events.")
        return
    if quiet and page is None:
        return
    traces = sum(len(capture.ranks) for capture in found.captures) if page is not None else 0
    run, problems = arguments.summarise_paths(paths, traces=traces)
    run = _without_unreported(run, found)
    if not quiet:
        terminal.stdout_console().print()
        summary.show(run, paths, top=8)
    if page is not None:
        report.write([run], [", ".join(map(terminal.short_path, paths))], page)
        terminal.print_stderr(f"{terminal.short_path(page)}: {terminal.size(page.stat().st_size)}")
    summary.tell(run, problems)


def _without_unreported(run: RunSummary, found: RunReport) -> RunSummary:
    """Remove captures of ranks that have no files on this host and are missing from the report."""
    from profdeck_traces import findings_of

    reported = {(one.role, one.replica, one.id, rank.rank) for one in found.captures for rank in one.ranks}
    captures = tuple(
        state
        for state in run.captures
        if state.host is not None or (state.role, state.replica, state.capture, state.rank) in reported
    )
    if len(captures) == len(run.captures):
        return run
    run = attrs.evolve(run, captures=captures)
    return attrs.evolve(run, findings=findings_of(run))
