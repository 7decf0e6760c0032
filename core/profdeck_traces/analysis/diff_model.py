"""What changed between two runs, as data: the documented, stable JSON of ``profdeck diff --json``."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import attrs

from profdeck_traces.account.model import OwnerIdentity
from profdeck_traces.analysis.rank_sum_test import LEVEL

Verdict = Literal["slower", "faster", "same", "appeared", "vanished"]
FEWEST_MEASUREMENTS = 3
"""Minimum number of measurements per side for their spread to be an estimate of the noise."""
Basis = Literal["global_step", "iteration", "total"]


class Judge(StrEnum):
    """What may decide whether a role got slower."""

    STEPS = "steps"
    DEVICE = "device"
    STAGES = "stages"


_JUDGED = {
    Judge.STEPS: "steps, kernels or operators",
    Judge.DEVICE: "devices",
    Judge.STAGES: "stages or other annotations",
}


@attrs.frozen(kw_only=True)
class Bursts:
    """Number of steps on each side that take more than 1.25 times that side's median step."""

    before: int
    steps_before: int
    after: int
    steps_after: int
    p_value: float
    """Probability that a difference at least this large occurs by chance (Fisher's exact test)."""

    def __str__(self) -> str:
        return (
            f"{self.after} of {self.steps_after} steps take over 1.25 times the median, before {self.before} of "
            f"{self.steps_before}"
        )

    @property
    def increase(self) -> float:
        """Increase in the fraction of steps that are bursts."""
        return self.after / self.steps_after - self.before / self.steps_before


def has_more_bursts(bursts: Bursts | None) -> bool:
    """Return whether the share of bursts increased significantly."""
    return bursts is not None and bursts.increase > 0 and bursts.p_value < LEVEL


@attrs.frozen(kw_only=True)
class Contribution:
    """One part of the mean step on the host, before and after. Parts do not overlap."""

    name: str
    """Name of the stage, or of the host state outside stages, as in `HostTimes`."""
    kind: str
    """``stage`` or ``outside stages``."""
    before_us: float
    after_us: float
    delta_us: float


@attrs.frozen(kw_only=True)
class Change:
    """One time, before and after; the mean of the ranks."""

    name: str
    category: str | None
    """The class of a kernel, or the kind of a step."""
    per: str
    """What the times are of: ``total``, or a step such as ``global step``, ``decode iteration`` or ``iteration``."""
    before_us: float
    after_us: float
    delta_us: float
    ratio: float | None
    """``delta_us / before_us``: 0.05 is 5 % slower; ``None`` if there was no time before."""
    impact_us: float
    """``delta_us`` times the share that these steps have of all: how much it changes the mean step."""
    noise_us: float | None
    """Changes up to this may be chance; ``None`` where there are too few measurements to know."""
    p_value: float | None = None
    """Of steps: how often chance alone gives such a difference of their ranks (Mann and Whitney, exact); ``None`` with
    fewer than five a side, and for everything else."""
    shift_us: float | None = None
    """Of steps: by how much they are longer (Hodges and Lehmann)."""
    shift_from_us: float | None = None
    """Of steps: the interval of the shift, which holds it in 99 % of comparisons."""
    shift_to_us: float | None = None
    verdict: Verdict
    calls_before: float | None
    """How often it ran, per step of the basis or in total; of steps, how many there are. ``None`` for sums."""
    calls_after: float | None
    mean_before_us: float | None = None
    """For steps, the mean, which includes bursts that the median hides. ``None`` for everything else."""
    mean_after_us: float | None = None
    bursts: Bursts | None = None
    """For steps, the number of bursts on each side. ``None`` if neither side has any."""

    @property
    def mean_ratio(self) -> float | None:
        """Change in the mean as a fraction of the earlier mean, or ``None`` if unknown."""
        if not self.mean_before_us or self.mean_after_us is None:
            return None
        return self.mean_after_us / self.mean_before_us - 1

    @property
    def is_significant(self) -> bool:
        """True if the difference exceeds the known noise, or if the test over the steps is significant."""
        return self.verdict in {"slower", "faster"} and (self.p_value is not None or self.noise_us is not None)

    def is_regression(self, fail_over: float) -> bool:
        """Return True if the slowdown is significant and exceeds the given fraction of the earlier time."""
        if self.is_significant and self.delta_us > fail_over * self.before_us:
            return True
        bursts, ratio = self.bursts, self.mean_ratio
        return self.is_significant and has_more_bursts(bursts) and ratio is not None and ratio > fail_over

    def undecided(self, fail_over: float) -> str | None:
        """Return why the change is neither above nor within a limit, or ``None`` if it is one of the two."""
        if self.verdict in {"appeared", "vanished"}:
            return f"{self.name} {self.verdict}"
        if self.p_value is None and self.noise_us is None:
            return f"a side has fewer than {FEWEST_MEASUREMENTS} measurements of its {self.name}; record more steps"
        bursts, ratio = self.bursts, self.mean_ratio
        if not self.is_significant and bursts is not None and bursts.increase > 0 and (ratio or 0.0) > fail_over:
            return f"the mean {self.name} is {ratio:+.1%}, but {bursts}, which may be chance; record more steps"
        if self.is_significant or abs(self.delta_us) <= fail_over * self.before_us:
            return None
        return f"the {self.name} may have changed by more than {fail_over * 100:g}%; record more steps"


@attrs.frozen(kw_only=True)
class OwnerChange(OwnerIdentity):
    """Time per step that one owner spends on the critical path, before and after."""

    before_ns: int
    after_ns: int
    delta_ns: int


@attrs.frozen(kw_only=True)
class AccountDiff:
    """Difference between the accounts of two runs, per step.

    The owners' times before, times after and differences each add up exactly to the step's.
    """

    borders_before: tuple[str, ...]
    """Border rules of the earlier steps, as in `profdeck_traces.account.model.Account`."""
    borders_after: tuple[str, ...]
    step_before_ns: int
    """Mean time of a step, or the time of the recording if it has no steps."""
    step_after_ns: int
    step_delta_ns: int
    owners: tuple[OwnerChange, ...]
    """Owners from either side, sorted by absolute difference, largest first."""


@attrs.frozen(kw_only=True)
class RankDiff:
    """One rank of both runs. Several traces of it are repeated measurements."""

    replica: int | None
    rank: int | None
    before: tuple[str, ...]
    """The paths of its traces."""
    after: tuple[str, ...]
    overall: tuple[Change, ...]
    iterations: tuple[Change, ...]
    categories: tuple[Change, ...]

    @property
    def label(self) -> str:
        """Name to display for the rank within its role, such as ``replica 2 rank 0``."""
        numbers = {"replica": self.replica, "rank": self.rank}
        return " ".join(f"{name} {number}" for name, number in numbers.items() if number is not None) or self.after[0]


@attrs.frozen(kw_only=True)
class RoleDiff:
    """All ranks of one role that both runs have; changes are sorted by their impact, the greatest first."""

    role: str | None
    stage: str | None
    """The stage or kind of batch that its captures are of, where they are of one."""
    basis: Basis
    """What times are per, so that recordings of different lengths compare: ``global_step`` where all traces have
    some, else ``iteration`` where all have some, else ``total``."""
    steps_before: int | None
    """How many of these the traces have together; ``None`` for totals."""
    steps_after: int | None
    overall: tuple[Change, ...]
    """``kernels`` and ``operators`` (their sums) and, of the devices, ``busy``, ``idle``, ``communication`` and
    ``exposed communication``, as far as all traces have them."""
    iterations: tuple[Change, ...]
    """The median time of the global steps and of the engine iterations of each stage, in the order of their names."""
    kernels: tuple[Change, ...]
    operators: tuple[Change, ...]
    """By self time."""
    annotations: tuple[Change, ...]
    """What the job marks, such as stages, from start to end."""
    categories: tuple[Change, ...]
    ranks: tuple[RankDiff, ...]
    notes: tuple[str, ...]
    """What makes the comparison weaker than it looks."""
    corrupt: tuple[str, ...] = ()
    """Paths of traces that could be read only in part. They rule out a verdict."""
    incomplete: tuple[str, ...] = ()
    """Reasons why the comparison is inconclusive if it finds no regression, such as a rank that only one side has."""
    account: AccountDiff | None = None
    """Change in step time by owner. ``None`` if a trace has no account or the kinds of steps differ."""

    contributions: tuple[Contribution, ...] = ()
    """Parts of the mean step on the host. Their changes add up to the change in the mean step. Empty if unknown."""
    busy: tuple[str | None, str | None] = (None, None)
    """Why the machine was busy during the earlier and later captures. ``None`` if not busy, or if unknown."""

    @property
    def slowed_by_machine(self) -> bool:
        """True if the machine was busy only during the later run, which can explain slower host times."""
        before, after = self.busy
        return after is not None and before is None

    def describe_busy(self) -> str | None:
        """Return why the machine was busy, such as ``the machine was busy after (...)``, or ``None`` if it was not."""
        sides = [f"{name} ({reason})" for name, reason in zip(("before", "after"), self.busy, strict=True) if reason]
        return f"the machine was busy {' and '.join(sides)}" if sides else None

    @property
    def decisive(self) -> tuple[Change, ...]:
        """What decides whether it got slower.

        The median of the global steps and of the iterations of each stage that both sides have; without any, the sum
        of the kernels; without kernels, the self time of the operators.
        """
        steps = tuple(change for change in self.iterations if change.verdict not in {"appeared", "vanished"})
        return steps or self.overall[:1]

    def judged(self, by: Judge) -> tuple[Change, ...]:
        """Return what decides: ``steps`` is `decisive`; ``device`` its busy time; ``stages`` the annotations."""
        if by is Judge.STAGES:
            return self.annotations
        return self.decisive if by is Judge.STEPS else tuple(one for one in self.overall if one.name == "busy")

    def regressions(self, fail_over: float, by: Judge = Judge.STEPS) -> tuple[Change, ...]:
        """Return the significant slowdowns in `judged` that exceed the given fraction of the earlier time.

        If the mean over all ranks shows no such slowdown, single ranks are tested. Corrupt traces give no result.
        The result is empty for host times if the machine was busy only during the later run.
        """
        if self.corrupt or (self.slowed_by_machine and by is not Judge.DEVICE):
            return ()
        return self._slowdowns(fail_over, by)

    def _slowdowns(self, fail_over: float, by: Judge) -> tuple[Change, ...]:
        of_role = tuple(change for change in self.judged(by) if change.is_regression(fail_over))
        if of_role or by is not Judge.STEPS or len(self.ranks) == 1:
            return of_role
        # Bonferroni correction: each tested rank is another chance of a false alarm.
        return tuple(
            attrs.evolve(change, name=f"{change.name} of {rank.label}")
            for rank in self.ranks
            for change in rank.iterations
            if change.is_regression(fail_over) and (change.p_value or 0) * len(self.ranks) < LEVEL
        )

    def undecided(self, fail_over: float, by: Judge = Judge.STEPS) -> tuple[str, ...]:
        """Return why `judged` is neither above nor within a limit. The result is empty if it is one of the two."""
        if self.corrupt:
            more = f" and {len(self.corrupt) - 1} more" if len(self.corrupt) > 1 else ""
            return (f"{self.corrupt[0]}{more} is corrupt and was read only in part",)
        judged = self.judged(by)
        reasons = [reason for change in judged if (reason := change.undecided(fail_over))]
        if by is Judge.STEPS:
            reasons += [f"only one side has a {one.name}" for one in self.iterations if one.verdict == "vanished"]
        if by is not Judge.DEVICE and (text := self.describe_busy()):
            is_slower = self.slowed_by_machine and bool(self._slowdowns(fail_over, by))
            reasons += [f"{text}; record again on an idle machine"] if reasons or is_slower else []
        missing = () if judged else (f"one of the runs has no {_JUDGED[by]}",)
        return (*reasons, *self.incomplete, *missing)


@attrs.frozen(kw_only=True)
class RunDiff:
    """What changed from one run to another."""

    roles: tuple[RoleDiff, ...]
    only_before: tuple[str, ...]
    """The paths of traces that nothing was compared with."""
    only_after: tuple[str, ...]
    lost_roles: tuple[str, ...] = ()
    """Roles and their stages that are missing from the second run."""

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as dicts, tuples and scalars."""
        return attrs.asdict(self)
