"""Supervised fine-tuning: each rank has a trainer of its own, which is ``__main__``'s and never says its step."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

from profdeck.plugin import unstructure
from profdeck_verl.settings import resolved
from profdeck_verl.steps import AnyStep
from profdeck_verl.words import CONFIG, ROLE, TRAINER

_MOST_FRAMES = 20


def prepared(config: Any, frame: FrameType | None) -> Mapping[str, Any] | None:
    """Prepare a trainer that builds its worker, and return what the worker is to find in its config.

    Args:
        config: verl's `ProfilerConfig` of the worker.
        frame: of what builds the worker's profiler.

    Returns:
        As ``tool_config.profdeck``; None if no such trainer is building it.

    Raises:
        ConfigError: the config is wrong.
    """
    trainer = None
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        trainer = frame.f_locals.get("self")
        if hasattr(trainer, "start_profile_step") and hasattr(trainer, "end_profile_step"):
            break
        frame = frame.f_back
    else:
        return None
    assert trainer is not None  # noqa: S101  # it has those attributes
    found = resolved({**_of(trainer), "profiler": vars(config)})
    trainer.start_profile_step = trainer.end_profile_step = AnyStep()
    return {CONFIG: unstructure(found), ROLE: TRAINER}


def _of(trainer: Any) -> dict[str, Any]:
    first, last = trainer.start_profile_step, trainer.end_profile_step
    steps = list(range(first, last + 1)) if isinstance(first, int) and first >= 0 else None
    own = {"steps": steps, "save_path": trainer.config.profiler.get("save_path"), "profile_continuous_steps": True}
    return {"trainer": {"device": trainer.config.trainer.get("device")}, "global_profiler": own}
