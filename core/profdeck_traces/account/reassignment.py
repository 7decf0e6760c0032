"""Reassigns time between an account's owners."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from profdeck_traces.account.model import Account, OwnerKey, key_of_small_owners
from profdeck_traces.account.table import largest_owners

_NS_PER_US = 1000
_EXPOSED = 0.99


def reassigned(
    account: Account,
    moved_ns: Mapping[OwnerKey, int],
    added: Mapping[OwnerKey, tuple[int, int]],
    gains_ns: Mapping[OwnerKey, int],
) -> Account | None:
    """Return an account with time reassigned between owners, or ``None`` if an owner has too little time.

    Args:
        account: The account.
        moved_ns: Time to take from each owner.
        added: Time in nanoseconds and number of intervals to add to each owner. The sums of times are equal.
        gains_ns: Gains of the added owners that are known.
    """
    times = {owner.key: (round(owner.time_us * _NS_PER_US), owner.count) for owner in account.owners}
    gains = {owner.key: (owner.gain_us, owner.next_limit) for owner in account.owners}
    for moved_key, time_ns in moved_ns.items():
        key = moved_key if moved_key in times else key_of_small_owners(moved_key)
        before_ns, count = times.pop(key, (0, 0))
        if before_ns < time_ns:
            return None
        if before_ns > time_ns:
            times[key] = before_ns - time_ns, count
        # If an owner's gain equals its time, the gain of any part equals that part's time. Otherwise, it is unknown.
        gain_us = gains.get(key, (None, None))[0]
        is_exposed = gain_us is not None and gain_us * _NS_PER_US >= _EXPOSED * before_ns
        gains[key] = ((before_ns - time_ns) / _NS_PER_US if is_exposed else None, None)
    for key, (time_ns, count) in added.items():
        before_ns, before = times.get(key, (0, 0))
        times[key] = before_ns + time_ns, before + count
        if key in gains_ns:
            gains[key] = min(gains_ns[key], time_ns) / _NS_PER_US, None
    owners = largest_owners(times, round(account.time_us * _NS_PER_US))
    moved_kinds = {kind for kind, *_ in moved_ns}
    steps_us = {(owner.key, owner.time_us): owner.steps_us for owner in account.owners}
    return attrs.evolve(
        account,
        owners=tuple(
            attrs.evolve(
                owner, gain_us=gain_us, next_limit=limit, steps_us=steps_us.get((owner.key, owner.time_us), ())
            )
            for owner in owners
            for gain_us, limit in [gains.get(owner.key, (None, None))]
        ),
        joined_gains=tuple(gain for gain in account.joined_gains if gain.kind not in moved_kinds),
    )
