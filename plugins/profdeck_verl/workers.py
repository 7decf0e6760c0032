"""Implementation of verl's `DistProfiler` for the tool profdeck, in each training process."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from profdeck import ProfdeckError, Profiler
from profdeck.plugin import Config, describe_error, structure
from profdeck_verl import sft, steps
from profdeck_verl.constants import CONFIG, ROLE, TOOL
from profdeck_verl.plain_data import to_plain

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("profdeck")


def patch_profiler(module: ModuleType) -> None:
    """Patch `DistProfiler` to use `WorkerProfiler` for the tool profdeck."""
    cls: Any = module.DistProfiler
    original_init = cls.__init__

    @functools.wraps(original_init)
    def init(self: Any, rank: int, config: Any = None, *arguments: Any, **keywords: Any) -> None:
        original_init(self, rank, config, *arguments, **keywords)
        if getattr(config, "tool", None) == TOOL:
            # SFT trainers do not prepare the config, so find the trainer in the call stack.
            settings = _read_settings(config) or sft.prepare_trainer(config, sys._getframe(1))  # noqa: SLF001
            self._impl = WorkerProfiler(settings)
            self._enable = self._this_rank = True  # profdeck's config selects ranks.
            self._run_finish_hook = lambda **_: None  # profdeck runs the finish command after all files are complete.

    cls.__init__ = init


def _read_settings(config: Any) -> Mapping[str, Any] | None:
    tools: Any = getattr(config, "tool_config", None)
    settings = tools.get(TOOL) if tools is not None and hasattr(tools, "get") else None
    return settings if isinstance(settings, Mapping) else None


class WorkerProfiler:
    """Profiler of one worker. Actor, reference and critic of a process share the underlying profiler."""

    def __init__(self, settings: Mapping[str, Any] | None) -> None:
        """Args:
        settings: ``tool_config.profdeck``; None if no trainer has prepared the worker's config.
        """
        self._profiler = _create_profiler(settings)
        self._mini_batch = 0

    def start(self, *, profile_step: int | None = None, **_: Any) -> None:
        """Start a global step."""
        self._mini_batch = 0
        step = steps.current_step() if profile_step is None else int(profile_step)
        if self._profiler is not None and step is not None:
            self._profiler.start(step)

    def stop(self) -> None:
        """End the global step."""
        if self._profiler is not None:
            self._profiler.stop()

    def step(self) -> None:
        """Report the end of a mini-batch."""
        index, self._mini_batch = self._mini_batch, self._mini_batch + 1
        if self._profiler is not None:
            self._profiler.step(index, "mini_batch")

    def annotate(self, *, role: str | None = None, message: str | None = None, **_: Any) -> Callable[[F], F]:
        """Return a decorator that makes a method a stage."""
        name = role or message
        if self._profiler is None or name is None:
            return lambda function: function
        return self._profiler.stage(name)


def _create_profiler(settings: Mapping[str, Any] | None) -> Profiler | None:
    """Return the shared profiler of this process. On an error, log a warning and return None."""
    if settings is None:
        logger.warning(
            "profdeck: this worker records nothing, because no supported trainer has prepared its config although "
            "global_profiler.tool is profdeck. Run 'profdeck check --host verl'."
        )
        return None
    try:
        config = structure(to_plain(settings[CONFIG]), Config, where="tool_config.profdeck.config")
        return Profiler.of(config, role=str(settings[ROLE]), shared=True)
    except ProfdeckError as error:
        logger.warning("profdeck: this worker records nothing: %s", describe_error(error))
        return None
