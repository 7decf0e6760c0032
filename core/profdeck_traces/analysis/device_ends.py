"""Step durations measured to the end of device work, for jobs whose host runs ahead of the device."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from profdeck_traces.account.borders import DEVICE
from profdeck_traces.account.model import Account
from profdeck_traces.analysis.model import StepSummary


def ends_on_device(account: Account | None) -> bool:
    """Return whether the account measures steps to the end of their device work."""
    return account is not None and account.border == DEVICE


def until_device_ends(steps: Sequence[StepSummary], account: Account | None) -> list[StepSummary]:
    """If the account measures steps to the end of their device work, return the steps with these durations.

    Otherwise, return them unchanged.

    Args:
        steps: The warm steps of the account's kind.
        account: The rank's account.
    """
    if account is None or not ends_on_device(account) or len(account.step_us) != len(steps):
        return [*steps]
    return [attrs.evolve(step, duration_us=time) for step, time in zip(steps, account.step_us, strict=True)]
