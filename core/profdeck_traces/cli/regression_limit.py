"""Options and exit codes for a limit on regressions, shared by `profdeck diff` and `profdeck baseline check`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from profdeck_traces.analysis.diff_model import CALLED_SAME, Judge
from profdeck_traces.analysis.diff_text import label_of_role, verdict_of
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from profdeck_traces.analysis.diff_model import Change, RoleDiff, RunDiff

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)(\s*%)?")


def percent(text: str) -> float:
    """Parse a percentage, such as ``5%`` or ``5``, and return it as a fraction (0.05).

    Raises:
        typer.BadParameter: The text is not a percentage, or it could be a fraction (``0.05``).
    """
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"'{text}' is not a percentage, such as 5% or 2.5%.")
    value = float(match[1])
    if not match[2] and 0 < value < 1:
        raise typer.BadParameter(f"'{text}' is ambiguous. Write {value:.0%} or {value:g}%.")
    return value / 100


FailOver = Annotated[
    float | None,
    typer.Option(
        metavar="PERCENT",
        parser=percent,
        help="Exit with 5 if a role became slower by more than this percentage and by more than its noise. The "
        "comparison uses the median time of its global steps, or of its iterations of each stage. Without them, it "
        "uses the total kernel time, or else the self time of operators.",
    ),
]
FailOn = Annotated[
    list[Judge] | None,
    typer.Option(
        help="Times that --fail-over applies to: steps, as above; device, the busy time of devices; stages, all "
        "annotations of the job. Repeatable. Default: steps.",
    ),
]


@attrs.frozen
class Judgement:
    """Result of applying a limit to a comparison."""

    limit: float
    """The limit as a fraction, for example 0.05 for 5 %."""
    judged: list[tuple[RoleDiff, Change]]
    """All changes to which the limit applies."""
    regressions: list[tuple[RoleDiff, Change]]
    """Changes that exceed the limit."""
    undecided_roles: list[tuple[RoleDiff, str]]
    """Why the limit could not be applied to a role, for each such role. The text does not name the role."""
    lost_roles: list[str]
    """Why a role was not compared at all, for each such role."""

    @property
    def undecided(self) -> list[str]:
        """Why the limit could not be applied, for all roles."""
        return [*(f"{label_of_role(role)}: {reason}." for role, reason in self.undecided_roles), *self.lost_roles]

    def is_undecided(self, role: RoleDiff) -> bool:
        """Return whether the limit could not be applied to a role."""
        return any(undecided is role for undecided, _ in self.undecided_roles)

    def sentence_of(self, role: RoleDiff, problems: Sequence[str] = ()) -> str:
        """Return the verdict for a role and whether it is within the limit.

        The text appears in the terminal, JSON output, JUnit files and GitHub annotations. Example: ``trainer is slower:
        ... Over the limit of 5%.``

        Args:
            role: A role in the comparison.
            problems: Error messages for traces that cannot be read.
        """
        is_over = any(slower is role for slower, _ in self.regressions)
        result = "Over" if is_over else "Inconclusive for" if problems or self.is_undecided(role) else "Within"
        return f"{verdict_of(role, self.limit)} {result} the limit of {self.limit * 100:g}%."

    def reasons_not_in(self, texts: Sequence[str]) -> list[str]:
        """Return the reasons in `undecided` that do not appear in any of the texts."""
        reasons = [reason for _, reason in self.undecided_roles] + self.lost_roles
        pairs = zip(self.undecided, reasons, strict=True)
        return [full for full, reason in pairs if not any(reason in text for text in texts)]

    def end(self, problems: Sequence[str], *, verdicts: Sequence[str] = ()) -> None:
        """Print the reasons in `undecided`, and exit if there is a problem or a regression.

        Args:
            problems: Error messages for traces that cannot be read.
            verdicts: Verdicts that have already been printed. Reasons that appear in them are not repeated.

        Raises:
            typer.Exit: There is a problem or a regression.
        """
        for reason in self.reasons_not_in(verdicts):
            terminal.print_stderr(f"inconclusive: {reason}")
        if problems:
            raise typer.Exit(ExitCode.UNREADABLE)
        if self.regressions:
            raise typer.Exit(ExitCode.REGRESSION)
        if self.undecided:
            raise typer.Exit(ExitCode.INCONCLUSIVE)


def judge(diff: RunDiff, fail_over: float | None, fail_on: Sequence[Judge] | None) -> Judgement:
    """Apply a limit to a comparison.

    Args:
        diff: The comparison.
        fail_over: The limit as a fraction. If it is ``None``, no change counts as a regression, and a role is undecided
            if its verdict is inconclusive.
        fail_on: The times to which the limit applies. Default: steps.
    """
    limit = CALLED_SAME if fail_over is None else fail_over
    pairs = [(role, basis) for role in diff.roles for basis in fail_on or [Judge.STEPS]]
    judged = [] if fail_over is None else [(role, change) for role, basis in pairs for change in role.judged(basis)]
    regressions = [
        (role, change) for role, basis in pairs if fail_over is not None for change in role.regressions(limit, basis)
    ]
    undecided = [
        (role, reason)
        for role, basis in pairs
        if fail_over is not None or role.is_inconclusive()
        for reason in role.undecided(limit, basis)
    ]
    return Judgement(
        limit,
        judged + [pair for pair in regressions if pair not in judged],
        regressions,
        undecided,
        [f"{role}: the second run has no trace of this role." for role in diff.lost_roles],
    )
