"""Prints the summary of a capture after it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from profdeck.verification.report_model import RunReport
from profdeck_traces.base.errors import MissingLibraryError
from profdeck_traces.cli import arguments, summary, terminal

if TYPE_CHECKING:
    from profdeck_traces import RunSummary

_MAX_KERNELS = 8


def show_summary(report: RunReport, paths: Sequence[Path]) -> None:
    """Print the summary of a capture, unless it has no events.

    Args:
        report: Report on the capture.
        paths: Directories of the capture.
    """
    if not any(rank.events for capture in report.captures for rank in capture.ranks):
        return
    try:
        run, problems = arguments.summarise_paths(paths)
    except MissingLibraryError as error:  # a missing library does not affect the capture
        terminal.warn(str(error))
        return
    run = _without_remote_ranks(run, report)
    terminal.stdout_console().print()
    summary.show(run, paths, top=_MAX_KERNELS)
    summary.report_problems(run, problems)


def _without_remote_ranks(run: RunSummary, report: RunReport) -> RunSummary:
    """Remove ranks that the report excludes because their files are on other hosts.

    Without this, the summary would list these ranks as missing.
    """
    from profdeck_traces import with_findings

    reported = {
        (capture.role, capture.replica, capture.id, rank.rank) for capture in report.captures for rank in capture.ranks
    }
    captures = tuple(
        state
        for state in run.captures
        if state.host is not None or (state.role, state.replica, state.capture, state.rank) in reported
    )
    if len(captures) == len(run.captures):
        return run
    return with_findings(attrs.evolve(run, captures=captures))
