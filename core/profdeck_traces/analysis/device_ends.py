"""Durations of steps that end on the device, because the host runs ahead of it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from profdeck_traces.account.borders import DEVICE
from profdeck_traces.account.model import Account
from profdeck_traces.analysis.model import StepSummary


def ends_on_device(account: Account | None) -> bool:
    """Return whether the account's steps end when their device work ends."""
    return account is not None and account.border == DEVICE


def until_device_ends(steps: Sequence[StepSummary], account: Account | None) -> list[StepSummary]:
    """Return the steps with the account's durations if they end on the device. Otherwise, return them unchanged.

    Args:
        steps: The warm steps of the account's kind.
        account: The account of the same rank.
    """
    if account is None or not ends_on_device(account) or len(account.step_us) != len(steps):
        return [*steps]
    return [attrs.evolve(step, duration_us=time) for step, time in zip(steps, account.step_us, strict=True)]
