"""The training processes: what slime calls through ``--custom-megatron-...-path``, and its own `TrainProfiler`.

Seams, as slime calls them (624b824a): ``init(args)`` on each rank before it builds a `TrainProfiler`;
``before_log_prob(args, model, store_prefix)``; ``before_train_step(args, rollout_id, step_id, model, optimizer,
scheduler)``; ``TrainProfiler.step(rollout_id)`` at the end of what is trained on a rollout, which is a global step.
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

_PROFILER = "TrainProfiler"
_PACKAGES = ("slime", "vime")


class Training:
    """The captures of this process."""

    of_process: ClassVar[Training | None] = None

    def __init__(self, args: Any) -> None:
        """Args:
        args: slime's.
        """
        self._next = int(getattr(args, "start_rollout_id", None) or 0)
        self._profiler: Profiler | None = None
        self._step: int | None = None
        self._stage = ExitStack()
        self._mini_batch: int | None = None

    def begin(self, step: int | None = None) -> Profiler:
        """Begin a global step, unless that has been done; which one comes next is known if it is not told."""
        # Built only now, when Megatron's groups are there.
        self._profiler = self._profiler or Profiler.from_config(role="trainer")
        if step is None:
            step = self._next if self._step is None else self._step
        if step != self._step:
            self._step = step
            self._profiler.start(step)
        return self._profiler

    def enter(self, stage: str) -> None:
        """Begin a stage, which ends the one before."""
        self._stage.close()
        self._stage.enter_context(self.begin().stage(stage))

    def train(self, step: int, mini_batch: int) -> None:
        """Begin a mini-batch, which ends the one before."""
        profiler = self.begin(step)
        if self._mini_batch is None:
            self.enter("train")
        else:
            profiler.step(self._mini_batch, "mini_batch")
        self._mini_batch = mini_batch

    def end(self, step: int) -> None:
        """End a global step."""
        if self._profiler is None or self._step != step:  # else it would be an empty one
            raise ConfigError(
                f"rollout {step} ends, and no hook has said that it begins: give --custom-megatron-before-train-step-"
                "hook-path profdeck_slime.training.before_train_step"
            )
        if self._mini_batch is not None:
            self._profiler.step(self._mini_batch, "mini_batch")
        self._mini_batch = None
        self._stage.close()
        self._profiler.stop()
        self._next, self._step = step + 1, None


def init(args: Any) -> None:
    """Prepare this process, for ``--custom-megatron-init-path``.

    Raises:
        ConfigError: profdeck's config is wrong, slime's own profiler is on as well, or this is no process of slime.
    """
    load_config()  # raise config errors before the training starts
    if getattr(args, "use_pytorch_profiler", False):
        raise ConfigError(
            "--use-pytorch-profiler: profdeck is to record in the same process, and torch records once. Leave it out: "
            "steps and options are in PROFDECK_CONFIG."
        )
    Training.of_process = Training(args)
    cls = _train_profiler()
    if not hasattr(cls.step, "__wrapped__"):
        cls.step = _ending(cls.step)


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:  # noqa: ARG001  # as slime calls it
    """Begin a stage, for ``--custom-megatron-before-log-prob-hook-path``."""
    _guarded("enter", re.sub(r"[^A-Za-z0-9]", "_", f"{store_prefix}log_probs").lstrip("_0123456789"))


def before_train_step(  # noqa: PLR0913, PLR0917  # as slime calls it
    args: Any,  # noqa: ARG001  # as above
    rollout_id: int,
    step_id: int,
    model: Any,  # noqa: ARG001  # as above
    optimizer: Any,  # noqa: ARG001  # as above
    scheduler: Any,  # noqa: ARG001  # as above
) -> None:
    """Begin a mini-batch, for ``--custom-megatron-before-train-step-hook-path``."""
    _guarded("train", int(rollout_id), int(step_id))


def _ending(step: Any) -> Any:
    @functools.wraps(step)
    def ended(self: Any, rollout_id: int, *arguments: Any, **keywords: Any) -> Any:
        result = step(self, rollout_id, *arguments, **keywords)
        _guarded("end", int(rollout_id))
        return result

    return ended


def _guarded(call: str, *arguments: Any) -> None:
    """Report to this process's captures; what fails there costs no training step."""
    if Training.of_process is None:
        return
    try:
        getattr(Training.of_process, call)(*arguments)
    except Exception as error:  # noqa: BLE001  # see above
        logger.warning("profdeck: this process stops recording: %s", describe_error(error))
        Training.of_process = None


def _train_profiler() -> Any:
    """Return the host's class, which the module of its actor has imported."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES and (cls := vars(module).get(_PROFILER)) is not None:
            return cls
    raise ConfigError(
        f"No module of {' or '.join(_PACKAGES)} in this process has a {_PROFILER}. profdeck_slime.training.init is for "
        "--custom-megatron-init-path."
    )
