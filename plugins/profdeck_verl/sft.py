"""Supervised fine-tuning. Each rank has its own trainer, defined in ``__main__``, which does not report its step."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

from profdeck.plugin import unstructure
from profdeck_verl.constants import CONFIG, ROLE, TRAINER
from profdeck_verl.settings import load_config
from profdeck_verl.steps import AnyStep

_MAX_FRAMES = 20


def prepare_trainer(config: Any, frame: FrameType | None) -> Mapping[str, Any] | None:
    """Find the trainer that creates a worker, patch its step range, and return the worker's profdeck settings.

    Args:
        config: verl's `ProfilerConfig` of the worker.
        frame: the frame that creates the worker's profiler.

    Returns:
        The value of ``tool_config.profdeck``, or None if there is no such trainer on the stack.

    Raises:
        ConfigError: the config is invalid.
    """
    trainer = None
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        trainer = frame.f_locals.get("self")
        if hasattr(trainer, "start_profile_step") and hasattr(trainer, "end_profile_step"):
            break
        frame = frame.f_back
    else:
        return None
    assert trainer is not None  # noqa: S101  # the loop found a trainer
    profdeck_config = load_config({**_ppo_config(trainer), "profiler": vars(config)})
    trainer.start_profile_step = trainer.end_profile_step = AnyStep()
    return {CONFIG: unstructure(profdeck_config), ROLE: TRAINER}


def _ppo_config(trainer: Any) -> dict[str, Any]:
    """Return the trainer's profiling options in the layout of verl's PPO config."""
    first, last = trainer.start_profile_step, trainer.end_profile_step
    steps = list(range(first, last + 1)) if isinstance(first, int) and first >= 0 else None
    profiler = {"steps": steps, "save_path": trainer.config.profiler.get("save_path"), "profile_continuous_steps": True}
    return {"trainer": {"device": trainer.config.trainer.get("device")}, "global_profiler": profiler}
