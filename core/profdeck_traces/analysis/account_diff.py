"""Difference between the accounts of two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import attrs

from profdeck_traces.account.model import Account, OwnerIdentity, OwnerKey, key_of_small_owners
from profdeck_traces.account.table import MAX_OWNERS
from profdeck_traces.analysis.capture_matching import RankPair, RankSummaries
from profdeck_traces.analysis.diff_model import AccountDiff, OwnerChange

_NS_PER_US = 1000


def account_diff(pairs: Sequence[RankPair], *, max_owners: int | None = None) -> AccountDiff | None:
    """Compute the per-step difference between the accounts of two runs.

    Times are averaged over the traces of each rank, then over the ranks. The means are rounded to nanoseconds by the
    largest remainder method, so the owners on each side add up to its step. The differences then add up as well.

    Args:
        pairs: The traces of each rank on both sides.
        max_owners: Maximum number of owners to list, starting with the largest changes. The others are summed by kind.

    Returns:
        The difference, or ``None`` if a trace has no account or the accounts use different kinds of steps.
    """
    accounts = [account for side in (0, 1) for account in _accounts(pairs, side)]
    if None in accounts or len({account.basis for account in accounts if account}) != 1:
        return None
    before, after = _without_small([account for account in accounts if account], *(_mean_ns(pairs, n) for n in (0, 1)))
    if max_owners is not None:
        listed = sorted(before | after, key=lambda key: -abs(after.get(key, 0) - before.get(key, 0)))[:max_owners]
        before, after = (_summed(times, lambda key: key not in listed) for times in (before, after))
    owners = [
        OwnerChange(
            **attrs.asdict(OwnerIdentity.from_key(key)),
            before_ns=before.get(key, 0),
            after_ns=after.get(key, 0),
            delta_ns=after.get(key, 0) - before.get(key, 0),
        )
        for key in before | after
    ]
    owners.sort(key=lambda owner: (-abs(owner.delta_ns), -owner.after_ns, [str(field or "") for field in owner.key]))
    return AccountDiff(
        borders_before=_borders(pairs, 0),
        borders_after=_borders(pairs, 1),
        step_before_ns=sum(before.values()),
        step_after_ns=sum(after.values()),
        step_delta_ns=sum(after.values()) - sum(before.values()),
        owners=tuple(owners),
    )


def _without_small(
    accounts: Sequence[Account], before: dict[OwnerKey, int], after: dict[OwnerKey, int]
) -> tuple[dict[OwnerKey, int], dict[OwnerKey, int]]:
    """Sum small owners by kind, because an account lists only its `MAX_OWNERS` largest owners.

    Otherwise, an owner that is listed in only one account would seem to appear or vanish.
    """
    limit_ns = max(
        (
            min(owner.time_us for owner in account.owners if owner.name) * _NS_PER_US / account.steps
            for account in accounts
            if len(account.owners) >= MAX_OWNERS
        ),
        default=0,
    )

    def is_small(key: OwnerKey) -> bool:
        return max(before.get(key, 0), after.get(key, 0)) <= limit_ns

    return _summed(before, is_small), _summed(after, is_small)


def _summed(times: dict[OwnerKey, int], is_small: Callable[[OwnerKey], bool]) -> dict[OwnerKey, int]:
    """Replace small owners with one sum per kind."""
    result: dict[OwnerKey, int] = {}
    for key, time_ns in times.items():
        sum_key = key_of_small_owners(key) if is_small(key) else key
        result[sum_key] = result.get(sum_key, 0) + time_ns
    return result


def _accounts(pairs: Sequence[RankPair], side: int) -> Iterator[Account | None]:
    return (trace.account for pair in pairs for trace in pair.sides[side])


def _borders(pairs: Sequence[RankPair], side: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(account.border for account in _accounts(pairs, side) if account))


def _mean_ns(pairs: Sequence[RankPair], side: int) -> dict[OwnerKey, int]:
    """Return the mean time per step of each owner."""
    means: dict[OwnerKey, Fraction] = {}
    for pair in pairs:
        traces: RankSummaries = pair.sides[side]
        for account in (trace.account for trace in traces if trace.account):
            for owner in account.owners:
                time_ns = Fraction(round(owner.time_us * _NS_PER_US), account.steps * len(traces) * len(pairs))
                means[owner.key] = means.get(owner.key, Fraction(0)) + time_ns
    return _rounded(means)


def _rounded(means: dict[OwnerKey, Fraction]) -> dict[OwnerKey, int]:
    """Round values to integers that add up to the rounded sum of the values."""
    rounded = {key: int(mean) for key, mean in means.items()}
    missing = round(sum(means.values())) - sum(rounded.values())
    by_remainder = sorted(means, key=lambda key: rounded[key] - means[key])
    for key in by_remainder[:missing]:
        rounded[key] += 1
    return rounded
