"""Step durations that include device work, for jobs whose host runs ahead of the device."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from profdeck_traces.account.borders import DEVICE
from profdeck_traces.account.model import Account
from profdeck_traces.analysis.cold_steps import warm_steps
from profdeck_traces.analysis.model import RankSummary, StepSummary
from profdeck_traces.analysis.step_names import GLOBAL_STEP

_MIN_STEPS = 3
"""With fewer steps, the border rule depends on a single step."""


def ends_on_device(account: Account | None) -> bool:
    """Return whether the steps in an account last until their device work is done."""
    return account is not None and account.border == DEVICE


def global_steps_end_on_device(rank: RankSummary) -> bool:
    """Return whether all global steps have a known duration that lasts until their device work is done."""
    account = rank.account
    if account is None or account.basis != GLOBAL_STEP or not ends_on_device(account):
        return False
    steps = warm_steps([step for step in rank.steps if step.kind == GLOBAL_STEP])
    return len(account.step_us) == len(steps) >= _MIN_STEPS


def until_device_ends(steps: Sequence[StepSummary], account: Account | None) -> list[StepSummary]:
    """Set the duration of each step to the time until its device work is done.

    If steps in the account end on the host, return them unchanged.

    Args:
        steps: The warm steps of the account's kind.
        account: The rank's account.
    """
    if account is None or not ends_on_device(account) or len(account.step_us) != len(steps):
        return [*steps]
    return [attrs.evolve(step, duration_us=time) for step, time in zip(steps, account.step_us, strict=True)]
