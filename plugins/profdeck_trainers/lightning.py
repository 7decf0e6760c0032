"""A callback and a profiler for Lightning: steps, and the stages in them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler

import profdeck

_STAGES = {
    "data": r"\[_TrainingEpochLoop\]\.train_dataloader_next",
    "forward": r"\[(LightningModule|Strategy)\].*\.training_step",
    "backward": r"\[Strategy\].*\.backward",
    "validation": r"\[(LightningModule|Strategy)\].*\.validation_step",
}
"""Our stages, and the names of Lightning's actions in which they are (2.6)."""


class LightningCallback(Callback):
    """Captures the optimizer steps that profdeck's config selects, numbered as ``trainer.global_step``, from 1.

    With ``accumulate_grad_batches`` each batch is reported as a mini-batch of the step. A Trainer that resumes goes on
    with its own numbers. ``profiler`` is for the Trainer's argument of this name, and marks stages.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
        config: as in `profdeck.Profiler.from_config`.
        settings: as there.
        """
        self._given: dict[str, Any] = {"config": config, "settings": settings}
        self._shared: profdeck.Profiler | None = None
        self._step = 0
        self._mini_batch = 0
        self.profiler = StageProfiler(self)

    @property
    def shared(self) -> profdeck.Profiler | None:
        """What captures this process; None before the training begins."""
        return self._shared

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as called
        """Build the profiler, once the process group is there."""
        self._shared = self._shared or profdeck.Profiler.from_config(**self._given, shared=True)
        self._step = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002  # as called
        """Begin the step that comes, with its first batch."""
        if trainer.global_step + 1 != self._step and self._shared is not None:
            self._step, self._mini_batch = trainer.global_step + 1, 0
            self._shared.start(self._step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002  # as called
        """Report the batch, and end the step if the optimizer has stepped."""
        if self._shared is not None:
            self._shared.step(self._mini_batch, "mini_batch")
            self._mini_batch += 1
            if trainer.global_step >= self._step:
                self._shared.stop()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as called
        """End a capture that waits for a step that does not come."""
        self._close(f"the training ended after step {trainer.global_step}; if that was its last one, set final_step")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002  # as called
        """End the capture of a step that failed."""
        self._close(f"the training failed with {type(exception).__name__}")

    def _close(self, reason: str) -> None:
        shared, self._shared = self._shared, None  # another training of this process may have another config
        if shared is not None:
            shared.close(reason)


class StageProfiler(Profiler):
    """Marks stages of a captured step in the trace: data, forward, backward, validation. In discrete mode each is a
    capture.
    """

    def __init__(self, callback: LightningCallback) -> None:
        """Args:
        callback: what captures the steps.
        """
        super().__init__()
        self._callback = callback
        self._open: dict[str, AbstractContextManager[object]] = {}

    def start(self, action_name: str) -> None:
        """Begin an action of Lightning."""
        shared = self._callback.shared
        stage = next((stage for stage, pattern in _STAGES.items() if re.fullmatch(pattern, action_name)), None)
        if stage is None or shared is None or any(name in self._open for name in (stage, action_name)):
            return
        opened = shared.stage(stage)
        opened.__enter__()
        self._open[action_name] = self._open[stage] = opened

    def stop(self, action_name: str) -> None:
        """End it."""
        opened = self._open.pop(action_name, None)
        if opened is not None:
            self._open = {name: other for name, other in self._open.items() if other is not opened}
            opened.__exit__(None, None, None)
