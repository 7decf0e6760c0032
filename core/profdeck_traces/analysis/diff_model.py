"""What changed between two runs, as data: the documented, stable JSON of ``profdeck diff --json``."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import attrs

from profdeck_traces.account.model import OwnerIdentity, OwnerRowKey
from profdeck_traces.analysis.formatting import ms, relative
from profdeck_traces.analysis.rank_sum_test import LEVEL

Verdict = Literal["slower", "faster", "same", "inconclusive", "appeared", "vanished"]
FEWEST_MEASUREMENTS = 3
"""Minimum number of measurements per side for their spread to be an estimate of the noise."""
CALLED_SAME = 0.05
"""Insignificant changes up to this fraction of the smaller time have the verdict ``same``."""
_LARGEST_BY_SPEED = 0.5
"""Larger changes are never attributed to the speed of the machine."""
_MOST = 0.5
_MUCH_MORE = 0.25
"""Minimum difference between an owner's share of a change and its share of the step, for an owner that is the cause."""
RoleVerdict = Literal["slower", "faster", "faster and slower", "same", "inconclusive"]
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
    """Probability that a difference at least this large occurs by chance, by Fisher's exact test and the cause."""

    def __str__(self) -> str:
        return (
            f"{self.after} of {self.steps_after} steps take over 1.25 times the median, before {self.before} of "
            f"{self.steps_before}"
        )

    @property
    def increase(self) -> float:
        """Increase in the fraction of steps that are bursts."""
        return self.after / self.steps_after - self.before / self.steps_before


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
    drift_us: float | None = None
    """For steps, the mean drift within the two sides if it may explain the change, otherwise 0. ``None`` with fewer
    than five steps per side."""
    gap_us: float | None = None
    """For steps, the gap between the durations on the two sides, negative if the later steps are shorter. ``None`` if
    the durations overlap, and for everything else."""
    verdict: Verdict
    """Only steps can be ``inconclusive``, with fewer than three per side or if chance or drift may explain a change of
    more than 5 %."""
    calls_before: float | None
    """How often it ran, per step of the basis or in total; of steps, how many there are. ``None`` for sums."""
    calls_after: float | None
    mean_before_us: float | None = None
    """Mean per step. It includes bursts, which the median hides. ``None`` for sums."""
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
    def mean_impact_us(self) -> float:
        """Change in mean step time, or ``impact_us`` if the means are unknown."""
        if self.mean_before_us is None or self.mean_after_us is None:
            return self.impact_us
        return self.mean_after_us - self.mean_before_us

    @property
    def is_significant(self) -> bool:
        """True if the difference exceeds the known noise, or if the test over the steps is significant."""
        return self.verdict in {"slower", "faster"} and (self.p_value is not None or self.noise_us is not None)

    def exceeds(self, fail_over: float) -> bool:
        """Return True if the change is significant and exceeds a fraction of the smaller time.

        The change in the median must exceed the limit, or the change in the mean if it is due to bursts. For a
        slowdown, the smaller time is the earlier one.
        """
        if not self.is_significant:
            return False
        if (self.delta_us > 0) == (self.verdict == "slower") and _exceeds(self.before_us, self.after_us, fail_over):
            return True
        bursts = self.bursts
        is_bursty = (
            bursts is not None and bursts.p_value < LEVEL and (bursts.increase > 0) == (self.verdict == "slower")
        )
        return is_bursty and _exceeds(self.mean_before_us, self.mean_after_us, fail_over)

    def undecided(self, fail_over: float) -> str | None:
        """Return why the change is neither above nor within a limit, or ``None`` if it is one of the two.

        An insignificant change is within the limit if it is small, or if the measurements rule out a change above the
        limit.
        """
        if self.verdict in {"appeared", "vanished"}:
            return f"{self.name} {self.verdict}"
        if self.p_value is None and self.noise_us is None:
            few = f"a side has fewer than {FEWEST_MEASUREMENTS} measurements of its {self.name}"
            return f"{few}{self._describe_gap()}; record more steps"
        if self.is_significant:
            return None
        return self._describe_bursts(fail_over) or self._describe_uncertainty(fail_over)

    def _describe_bursts(self, fail_over: float) -> str | None:
        bursts, ratio = self.bursts, self.mean_ratio or 0.0
        is_bursty = bursts is not None and bursts.increase * ratio > 0
        # If every step in one run is longer than every step in the other, bursts do not explain the uncertainty.
        if self.gap_us is not None or not is_bursty or not _exceeds(self.mean_before_us, self.mean_after_us, fail_over):
            return None
        return f"the mean {self.name} is {relative(ratio)}, but {bursts}, which may be chance; record more steps"

    def _describe_uncertainty(self, fail_over: float) -> str | None:
        if not _exceeds(self.before_us, self.after_us, min(fail_over, CALLED_SAME)):
            return None
        if self.drift_us:
            return (
                f"the {self.name} drifts by {ms(self.drift_us)} ms within a run, so the change of "
                f"{ms(abs(self.delta_us))} ms may be drift; record later or more steps"
            )
        if self._most_us <= fail_over * min(self.before_us, self.after_us):
            return None
        return (
            f"the {self.name} may have changed by more than {fail_over * 100:g}%{self._describe_gap()}; record more "
            "steps"
        )

    @property
    def _most_us(self) -> float:
        """Largest change in either direction that is consistent with the measurements."""
        if self.shift_from_us is not None and self.shift_to_us is not None:
            return max(abs(self.shift_from_us), abs(self.shift_to_us))
        return abs(self.delta_us) + (self.noise_us or 0.0)

    def _describe_gap(self) -> str:
        if self.gap_us is None or self.calls_before == self.calls_after == 1:
            return ""
        longer = "longer" if self.gap_us > 0 else "shorter"
        return f", although every step after is {longer} than every step before, by at least {ms(abs(self.gap_us))} ms"


def _exceeds(before_us: float | None, after_us: float | None, fraction: float) -> bool:
    """Return whether two times differ by more than a fraction of the smaller time."""
    before_us, after_us = before_us or 0.0, after_us or 0.0
    return abs(after_us - before_us) > fraction * min(before_us, after_us)


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

    @property
    def rows(self) -> dict[OwnerRowKey, tuple[int, int]]:
        """Time of each table row before and after, in nanoseconds per step."""
        times: dict[OwnerRowKey, tuple[int, int]] = {}
        for owner in self.owners:
            before_ns, after_ns = times.get(owner.row, (0, 0))
            times[owner.row] = before_ns + owner.before_ns, after_ns + owner.after_ns
        return times


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
    account: AccountDiff | None = None
    """As in `RoleDiff`, but with at most 20 named owners. Also ``None`` if this is the only rank of the role."""
    contributions: tuple[Contribution, ...] = ()
    """As in `RoleDiff`. Also empty if this is the only rank of the role."""

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
    recorded_differently: tuple[str, ...] = ()
    """Differences between the recordings that change the times on the host. They rule out a verdict on these times."""
    account: AccountDiff | None = None
    """Change in step time by owner. ``None`` if a trace has no account, the kinds of steps differ, or the recordings
    differ."""

    contributions: tuple[Contribution, ...] = ()
    """Parts of the mean step on the host. Their changes add up to the change in mean step time. Empty if unknown, or
    if steps are measured to the end of their device work."""
    busy: tuple[str | None, str | None] = (None, None)
    """Why the machine was busy during the earlier and later captures. ``None`` if not busy, or if unknown."""
    lost_fractions: tuple[float, float] = (0.0, 0.0)
    """Largest fraction of a recording that was lost to contention, earlier and later. 0 if not busy, or if unknown."""

    machine_ratio: float | None = None
    """Time spent in operators that only create views, relative to the earlier run. ``None`` if unknown, or if a side
    has several captures."""

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
        """Return the slowdowns among the results of `changes_over`."""
        return tuple(change for change in self.changes_over(fail_over, by) if change.verdict == "slower")

    def changes_over(self, fail_over: float, by: Judge = Judge.STEPS) -> tuple[Change, ...]:
        """Return the significant changes in `judged` that exceed a limit, given as a fraction of the smaller time.

        If the mean over all ranks shows no slowdown, or no speedup, each rank is tested for one. The result is empty
        for corrupt traces. Changes in host time that a busy machine explains are omitted.
        """
        if self.corrupt or (self.recorded_differently and by is not Judge.DEVICE):
            return ()
        changes = self._significant(fail_over, by)
        return changes if by is Judge.DEVICE else tuple(one for one in changes if not self._is_due_to_machine(one))

    def _significant(self, fail_over: float, by: Judge) -> tuple[Change, ...]:
        changes = [change for change in self.judged(by) if change.exceeds(fail_over)]
        if by is not Judge.STEPS or len(self.ranks) == 1:
            return tuple(changes)
        verdicts = {change.verdict for change in changes}
        # Bonferroni correction: each tested rank is another chance of a false alarm.
        changes += [
            attrs.evolve(change, name=f"{change.name} of {rank.label}")
            for rank in self.ranks
            for change in rank.iterations
            if change.verdict not in verdicts
            and change.exceeds(fail_over)
            and (change.p_value or 0) * len(self.ranks) < LEVEL
        ]
        return tuple(changes)

    def _is_due_to_machine(self, change: Change) -> bool:
        """Return whether machine speed or load can explain a change."""
        return change.is_significant and (self._is_due_to_contention(change) or self._is_due_to_speed(change))

    def _is_due_to_speed(self, change: Change) -> bool:
        """Return whether a change could be due to a difference in machine speed.

        The change must be at most 50 %. The same calls of operators must explain at least half of it, without an owner
        that changed far more than the others. The time spent in operators that only create views must have changed by
        at least half as much.
        """
        ratio = change.mean_ratio
        if self.machine_ratio is None or not ratio or abs(ratio) > _LARGEST_BY_SPEED:
            return False
        if change.bursts is not None and change.bursts.p_value < LEVEL:
            return False
        change_us = change.mean_impact_us
        same = [of for of in self.operators if of.calls_before == of.calls_after]
        if sum(of.mean_impact_us for of in same) / change_us < _MOST:
            return False
        if self.account is not None:
            times_us = [(owner.before_ns / 1000, owner.delta_ns / 1000) for owner in self.account.owners]
        else:
            times_us = [(of.mean_before_us or 0.0, of.mean_impact_us) for of in self.operators]
        step_us = change.mean_before_us or change.before_us
        has_cause = any(
            delta_us / change_us >= _MOST and delta_us / change_us - before_us / step_us >= _MUCH_MORE
            for before_us, delta_us in times_us
        )
        return not has_cause and (self.machine_ratio - 1) / ratio >= _MOST

    def _is_due_to_contention(self, change: Change) -> bool:
        """Return whether contention in the slower run can explain a change.

        A run that lost a fraction of its time could have been shorter by that fraction. Contention in the faster run
        only hides a part of the change.
        """
        lost = self.lost_fractions[change.verdict == "slower"]
        times = [(change.before_us, change.after_us), (change.mean_before_us or 0.0, change.mean_after_us or 0.0)]
        return lost > 0 and all(abs(new - old) <= lost * max(old, new) for old, new in times)

    def is_inconclusive(self, limit: float = CALLED_SAME) -> bool:
        """Return whether no change exceeds a limit, but a change of that size cannot be ruled out.

        A speedup is inconclusive if the comparison is incomplete, because work may be missing from the later run.
        """
        verdicts = {change.verdict for change in self.changes_over(limit)}
        if "slower" in verdicts:
            return False
        return bool(self.incomplete if verdicts else self.undecided(limit))

    def verdict(self, limit: float = CALLED_SAME) -> RoleVerdict:
        """Return the verdict on the role.

        Args:
            limit: Insignificant changes are "same" up to this fraction and "inconclusive" above it.
        """
        if self.is_inconclusive(limit) or not self.decisive:
            return "inconclusive"
        decisive = [change for change in self.decisive if not self._is_due_to_machine(change)]
        verdicts = {change.verdict for change in (*decisive, *self.changes_over(limit))}
        if {"slower", "faster"} <= verdicts:
            return "faster and slower"
        return "slower" if "slower" in verdicts else "faster" if "faster" in verdicts else "same"

    def undecided(self, fail_over: float, by: Judge = Judge.STEPS) -> tuple[str, ...]:
        """Return why `judged` is neither above nor within a limit. The result is empty if it is one of the two."""
        if self.corrupt:
            more = f" and {len(self.corrupt) - 1} more" if len(self.corrupt) > 1 else ""
            return (f"{self.corrupt[0]}{more} is corrupt and was read only in part",)
        judged = self.judged(by)
        if self.recorded_differently and by is not Judge.DEVICE:
            return self.recorded_differently
        reasons = [reason for change in judged if (reason := change.undecided(fail_over))]
        if by is Judge.STEPS:
            reasons += [f"only one side has a {one.name}" for one in self.iterations if one.verdict == "vanished"]
        changes = [change for change in (*judged, *self._significant(fail_over, by)) if change.is_significant]
        if by is not Judge.DEVICE and any(map(self._is_due_to_speed, changes)):
            reasons.append(
                f"operators that only create views also take {self.machine_ratio:.2f} times as long, so the speed of "
                "the machine may have changed; record several captures of each run"
            )
        if by is not Judge.DEVICE and (text := self.describe_busy()):
            is_cause = any(map(self._is_due_to_contention, changes))
            explains = ", which can explain the change" if is_cause else ""
            reasons += [f"{text}{explains}; record again on an idle machine"] if reasons or is_cause else []
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
