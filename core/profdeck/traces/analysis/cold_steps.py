"""The recorder's cold first step: statistics exclude it if the trace has other steps."""

from __future__ import annotations

from collections.abc import Sequence

from profdeck.traces.analysis.model import RankSummary, StepSummary


def warm_steps(steps: Sequence[StepSummary]) -> list[StepSummary]:
    """Return the steps that are not cold, or all steps if all are cold."""
    return [step for step in steps if not step.cold] or [*steps]


def excluded_steps(steps: Sequence[StepSummary]) -> list[StepSummary]:
    """Return the cold steps of each kind that has other steps."""
    kinds = {step.kind for step in steps if not step.cold}
    return [step for step in steps if step.cold and step.kind in kinds]


def is_cold(rank: RankSummary) -> bool:
    """Return whether a trace has steps and all of them are cold."""
    return bool(rank.steps) and all(step.cold for step in rank.steps)
