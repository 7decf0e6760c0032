"""Selection of cold steps, in which a recorder started. Statistics exclude them if a trace has other steps."""

from __future__ import annotations

from collections.abc import Sequence

from profdeck_traces.analysis.model import RankSummary, StepSummary


def warm_steps(steps: Sequence[StepSummary]) -> list[StepSummary]:
    """Return all steps except cold ones, or all steps if every step is cold."""
    return [step for step in steps if not step.cold] or [*steps]


def excluded_steps(steps: Sequence[StepSummary]) -> list[StepSummary]:
    """Return the cold steps of each kind that also has warm steps."""
    kinds = {step.kind for step in steps if not step.cold}
    return [step for step in steps if step.cold and step.kind in kinds]


def is_cold(rank: RankSummary) -> bool:
    """Return whether a trace has only cold steps."""
    return bool(rank.steps) and all(step.cold for step in rank.steps)
