"""Hooks for slime's training processes, set with ``--custom-megatron-...-path``.

slime (624b824a) makes the following calls:

- ``init(args)`` on each rank, before it creates a `TrainProfiler`
- ``before_log_prob(args, model, store_prefix)``
- ``before_train_step(args, rollout_id, step_id, model, optimizer, scheduler)``
- ``TrainProfiler.step(rollout_id)`` after the training on a rollout, which is a global step
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from contextlib import ExitStack
from typing import Any, ClassVar

from profdeck import Profiler
from profdeck.plugin import ConfigError, describe_error, load_config

logger = logging.getLogger("profdeck")

_PROFILER_CLASS = "TrainProfiler"
_PACKAGES = ("slime", "vime")


class Training:
    """Profiling of this process: converts slime's calls to global steps, stages and mini-batches."""

    current: ClassVar[Training | None] = None
    """Instance of this process; ``None`` before `init` and after an error."""

    def __init__(self, args: Any) -> None:
        """Args:
        args: slime's command-line arguments.
        """
        self._next_step = int(getattr(args, "start_rollout_id", None) or 0)
        self._profiler: Profiler | None = None
        self._step: int | None = None
        self._stage = ExitStack()
        self._mini_batch: int | None = None

    def start_step(self, step: int | None = None) -> Profiler:
        """Start a global step, unless it is already running.

        Args:
            step: number of the step. Default: the current step, or else the next step.
        """
        # Create the profiler on first use, because Megatron's process groups do not exist earlier.
        self._profiler = self._profiler or Profiler.from_config(role="trainer")
        if step is None:
            step = self._next_step if self._step is None else self._step
        if step != self._step:
            self._step = step
            self._profiler.start(step)
        return self._profiler

    def start_stage(self, stage: str) -> None:
        """End the current stage and start another stage."""
        self._stage.close()
        self._stage.enter_context(self.start_step().stage(stage))

    def start_mini_batch(self, step: int, mini_batch: int) -> None:
        """End the current mini-batch and start another mini-batch of a global step."""
        profiler = self.start_step(step)
        if self._mini_batch is None:
            self.start_stage("train")
        else:
            profiler.step(self._mini_batch, "mini_batch")
        self._mini_batch = mini_batch

    def end_step(self, step: int) -> None:
        """End a global step.

        Raises:
            ConfigError: no hook has started the step.
        """
        if self._profiler is None or self._step != step:  # starting the step now would record an empty step
            raise ConfigError(
                f"no hook has reported the start of rollout {step}. Set --custom-megatron-before-train-step-hook-path "
                "to profdeck_slime.training.before_train_step"
            )
        if self._mini_batch is not None:
            self._profiler.step(self._mini_batch, "mini_batch")
        self._mini_batch = None
        self._stage.close()
        self._profiler.stop()
        self._next_step, self._step = step + 1, None


def init(args: Any) -> None:
    """Enable profiling in this process. Set with ``--custom-megatron-init-path``.

    Raises:
        ConfigError: profdeck's config is invalid, slime's own profiler is enabled, or slime is not loaded.
    """
    load_config()  # raise config errors before the training starts
    if getattr(args, "use_pytorch_profiler", False):
        raise ConfigError(
            "--use-pytorch-profiler: torch supports only one recording per process, so slime's profiler cannot be "
            "combined with profdeck. Remove it, and set steps and options in PROFDECK_CONFIG."
        )
    Training.current = Training(args)
    cls = _find_profiler_class()
    if not hasattr(cls.step, "__wrapped__"):
        cls.step = _wrap_step(cls.step)


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:  # noqa: ARG001  # as slime calls it
    """Start a stage. Set with ``--custom-megatron-before-log-prob-hook-path``."""
    _call_training("start_stage", re.sub(r"[^A-Za-z0-9]", "_", f"{store_prefix}log_probs").lstrip("_0123456789"))


def before_train_step(  # noqa: PLR0913, PLR0917  # as slime calls it
    args: Any,  # noqa: ARG001  # as above
    rollout_id: int,
    step_id: int,
    model: Any,  # noqa: ARG001  # as above
    optimizer: Any,  # noqa: ARG001  # as above
    scheduler: Any,  # noqa: ARG001  # as above
) -> None:
    """Start a mini-batch. Set with ``--custom-megatron-before-train-step-hook-path``."""
    _call_training("start_mini_batch", int(rollout_id), int(step_id))


def _wrap_step(step: Any) -> Any:
    @functools.wraps(step)
    def wrapped_step(self: Any, rollout_id: int, *arguments: Any, **keywords: Any) -> Any:
        result = step(self, rollout_id, *arguments, **keywords)
        _call_training("end_step", int(rollout_id))
        return result

    return wrapped_step


def _call_training(method: str, *arguments: Any) -> None:
    """Call a method of this process's `Training`. If it fails, log a warning and stop profiling."""
    if Training.current is None:
        return
    try:
        getattr(Training.current, method)(*arguments)
    except Exception as error:  # noqa: BLE001  # the training must continue
        logger.warning("profdeck: this process stops recording: %s", describe_error(error))
        Training.current = None


def _find_profiler_class() -> Any:
    """Return the host's `TrainProfiler`. The actor's module has already imported it.

    Raises:
        ConfigError: no module of a host has the class.
    """
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES and (cls := vars(module).get(_PROFILER_CLASS)) is not None:
            return cls
    raise ConfigError(
        f"No module of {' or '.join(_PACKAGES)} in this process has a {_PROFILER_CLASS}. Use "
        "profdeck_slime.training.init only with --custom-megatron-init-path."
    )
