"""Whether a comparison is over a limit: the options, the judgement, and its exit codes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from profdeck_traces.analysis.diff_model import Judge
from profdeck_traces.analysis.diff_text import label_of_role
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from profdeck_traces.analysis.diff_model import Change, RoleDiff, RunDiff

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)(\s*%)?")
_JUDGED = {"steps": "steps, kernels or operators", "device": "devices", "stages": "stages or other marks"}


def percent(text: str) -> float:
    """Turn ``5%`` or ``5`` into 0.05.

    Raises:
        typer.BadParameter: It is no percentage, or it may be meant as a fraction.
    """
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"'{text}' is no percentage. Write 5% or 2.5%.")
    value = float(match[1])
    if not match[2] and 0 < value < 1:
        raise typer.BadParameter(f"'{text}' may be a fraction or a percentage. Write {value:.0%} or {value:g}%.")
    return value / 100


FailOver = Annotated[
    float | None,
    typer.Option(
        metavar="PERCENT",
        parser=percent,
        help="Exit with 5 if a role got slower by more than this and by more than its noise: in the median of its "
        "global steps or of its iterations of any stage; without steps, in the sum of its kernels; without "
        "kernels, in the self time of its operators. Where the noise is not known, this percentage alone decides.",
    ),
]
FailOn = Annotated[
    list[Judge] | None,
    typer.Option(
        help="What --fail-over judges: steps, as above; device, its busy time; stages, whatever the job marks. May "
        "be repeated; steps alone, if not given.",
    ),
]


@attrs.frozen
class Judgement:
    """What came of it."""

    judged: list[tuple[RoleDiff, Change]]
    """What was looked at."""
    regressions: list[tuple[RoleDiff, Change]]
    """What of it is over the limit."""
    undecided: list[str]
    """What could not be judged, and why."""

    def end(self, problems: Sequence[str]) -> None:
        """Say what could not be judged, and end with the exit code.

        Args:
            problems: Why traces could not be read.
        """
        for lack in self.undecided:
            terminal.print_stderr(f"error: {lack}")
        if problems or self.undecided:
            raise typer.Exit(ExitCode.UNREADABLE)
        if self.regressions:
            raise typer.Exit(ExitCode.REGRESSION)


def judge(diff: RunDiff, fail_over: float | None, fail_on: Sequence[Judge] | None) -> Judgement:
    """Judge a comparison; nothing is judged without a limit."""
    judges = [] if fail_over is None else fail_on or [Judge.STEPS]
    pairs = [(role, by) for role in diff.roles for by in judges]
    return Judgement(
        [(role, change) for role, by in pairs for change in role.judged(by)],
        [(role, change) for role, by in pairs for change in role.regressions(fail_over or 0.0, by)],
        [
            f"{label_of_role(role)}: there are no {_JUDGED[by]} on both sides to judge by."
            for role, by in pairs
            if not role.judged(by)
        ],
    )
