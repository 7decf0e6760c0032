"""The workers: what verl's `DistProfiler` calls in each training process when the tool is profdeck."""

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
from profdeck_verl.words import CONFIG, ROLE, TOOL, plain

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("profdeck")


def put_in_place(module: ModuleType) -> None:
    """Give `DistProfiler` an implementation for the tool."""
    cls: Any = module.DistProfiler
    initialise = cls.__init__

    @functools.wraps(initialise)
    def init(self: Any, rank: int, config: Any = None, *arguments: Any, **keywords: Any) -> None:
        initialise(self, rank, config, *arguments, **keywords)
        if getattr(config, "tool", None) == TOOL:
            own = _own(config) or sft.prepared(config, sys._getframe(1))  # noqa: SLF001  # its trainer is __main__'s
            self._impl = WorkerProfiler(own)
            self._enable = self._this_rank = True  # profdeck's config selects ranks
            self._run_finish_hook = lambda **_: None  # profdeck's runs when all files are whole

    cls.__init__ = init


def _own(config: Any) -> Mapping[str, Any] | None:
    tools: Any = getattr(config, "tool_config", None)
    found = tools.get(TOOL) if tools is not None and hasattr(tools, "get") else None
    return found if isinstance(found, Mapping) else None


class WorkerProfiler:
    """One wrapper's part in the profiler of a worker's process: actor, reference and critic share it."""

    def __init__(self, own: Mapping[str, Any] | None) -> None:
        """Args:
        own: ``tool_config.profdeck``; None if no trainer has prepared it.
        """
        self._profiler = _joined(own)
        self._mini_batch = 0

    def start(self, *, profile_step: int | None = None, **_: Any) -> None:
        """Begin a global step."""
        self._mini_batch = 0
        step = steps.current() if profile_step is None else int(profile_step)
        if step is not None:
            self._call("start", step)

    def stop(self) -> None:
        """End it."""
        self._call("stop")

    def step(self) -> None:
        """Report the end of a mini-batch of an update."""
        index, self._mini_batch = self._mini_batch, self._mini_batch + 1
        self._call("step", index, "mini_batch")

    def annotate(self, *, role: str | None = None, message: str | None = None, **_: Any) -> Callable[[F], F]:
        """Return what makes a method a stage."""
        name = role or message
        if self._profiler is None or name is None:
            return lambda function: function
        return self._profiler.stage(name)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._profiler is not None:
            getattr(self._profiler, name)(*arguments)


def _joined(own: Mapping[str, Any] | None) -> Profiler | None:
    """Take part in this process's profiler; None, with a warning that says why, if there can be none."""
    if own is None:
        logger.warning(
            "profdeck: global_profiler.tool=profdeck, and no trainer that profdeck knows has prepared this worker: it "
            "records nothing. Run 'profdeck check --host verl'."
        )
        return None
    try:
        config = structure(plain(own[CONFIG]), Config, where="tool_config.profdeck.config")
        return Profiler.of(config, role=str(own[ROLE]), shared=True)
    except ProfdeckError as error:
        logger.warning("profdeck: this worker records nothing: %s", describe_error(error))
        return None
