"""What standing captures will cost a job, in words, by what an earlier run of it left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profdeck.backends.building import build_backend
from profdeck.base.structuring import unstructure
from profdeck.base.words import plural
from profdeck.cli import kit
from profdeck.config.model import Config
from profdeck.config.schedule import StepSpan, TimedSteps
from profdeck.verification.cost import CaptureCost, cost_below


def is_standing(config: Config) -> bool:
    """Tell whether a config captures again and again."""
    return bool(_standing(config))


def words(config: Config, role: str) -> str:
    """Say which share of the job the captures of a role take.

    Args:
        config: of the job.
        role: whose captures.
    """
    cost = cost_below(config.output.absolute(), role)
    if cost is None:
        return f"not known before a run in {kit.short_path(config.output)} has two captures of whole steps"
    shares = "; ".join(f"{one.spec}: {_share(cost, one)}" for one in _standing(config))
    many = f"{plural(cost.captures, 'capture')} of {plural(cost.steps, 'step')}"
    spread = f"{_time(cost.least_s)} to {_time(cost.most_s)}"
    step = "" if cost.step_s is None else f"; a step takes {_time(cost.step_s)}"
    others = _differing(cost.options, unstructure(build_backend(config, role).options))
    with_others = f" Other options then: {', '.join(others)}." if others else ""
    each = f"Each of {many} in {kit.short_path(cost.run)} cost {_time(cost.capture_s)} ({spread}){step}."
    return f"{shares}. {each}{with_others}"


def _standing(config: Config) -> list[StepSpan | TimedSteps]:
    return [*(span for span in config.steps.spans if span.every > 1), *config.steps.timed]


def _share(cost: CaptureCost, steps: StepSpan | TimedSteps) -> str:
    if isinstance(steps, TimedSteps):
        between_s = steps.every_s
    elif cost.step_s is None:
        return f"{_time(cost.capture_s)} in {steps.every:,} steps"
    else:
        between_s = steps.every * cost.step_s
    return f"{cost.capture_s / (between_s + cost.capture_s):.2%} of the job"


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name, value in now.items() if name in before and before[name] != value]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
