"""Callback and profiler for Lightning, which report steps and their stages."""

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
"""Patterns of Lightning's action names (2.6), keyed by stage."""


class LightningCallback(Callback):
    """Captures the optimizer steps that profdeck's config selects.

    Steps have the numbers of ``trainer.global_step``. The first step is 1, and a resumed Trainer continues its
    numbering. With ``accumulate_grad_batches``, each batch is reported as a mini-batch of the step. Pass the attribute
    ``profiler`` to the Trainer's argument of the same name to record stages.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
        config: see `profdeck.Profiler.from_config`.
        settings: see `profdeck.Profiler.from_config`.
        """
        self._config = config
        self._settings = settings
        self._shared: profdeck.Profiler | None = None
        self._step = 0
        self._mini_batch = 0
        self.profiler = StageProfiler(self)

    @property
    def shared(self) -> profdeck.Profiler | None:
        """Profiler of this process; ``None`` before the training starts and after it has ended."""
        return self._shared

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as called
        """Create the profiler. It reads the rank from the process group, which now exists."""
        self._shared = self._shared or profdeck.Profiler.from_config(self._config, settings=self._settings, shared=True)
        self._step = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002  # as called
        """Start the next step if this is its first batch."""
        if trainer.global_step + 1 != self._step and self._shared is not None:
            self._step, self._mini_batch = trainer.global_step + 1, 0
            self._shared.start(self._step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002  # as called
        """Report the batch. If the optimizer has stepped, end the step."""
        if self._shared is not None:
            self._shared.step(self._mini_batch, "mini_batch")
            self._mini_batch += 1
            if trainer.global_step >= self._step:
                self._shared.stop()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as called
        """Close the profiler. A capture that is waiting for another step ends."""
        self._close(f"the training ended after step {trainer.global_step}; if this was the last step, set final_step")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002  # as called
        """Close the profiler. A running capture ends."""
        self._close(f"the training failed with {type(exception).__name__}")

    def _close(self, reason: str) -> None:
        shared, self._shared = self._shared, None  # the next training in this process may have another config
        if shared is not None:
            shared.close(reason)


class StageProfiler(Profiler):
    """Reports the stages of a step: data, forward, backward and validation. In discrete mode, each is a capture."""

    def __init__(self, callback: LightningCallback) -> None:
        """Args:
        callback: callback that captures the steps.
        """
        super().__init__()
        self._callback = callback
        self._open_stages: dict[str, AbstractContextManager[object]] = {}
        """Open stages, keyed by stage and also by action."""

    def start(self, action_name: str) -> None:
        """Start the stage of a Lightning action, unless the action belongs to no stage or the stage is open."""
        shared = self._callback.shared
        stage = next((stage for stage, pattern in _STAGES.items() if re.fullmatch(pattern, action_name)), None)
        if stage is None or shared is None or any(name in self._open_stages for name in (stage, action_name)):
            return
        context = shared.stage(stage)
        context.__enter__()
        self._open_stages[action_name] = self._open_stages[stage] = context

    def stop(self, action_name: str) -> None:
        """End the stage that the action started, if any."""
        context = self._open_stages.pop(action_name, None)
        if context is not None:
            self._open_stages = {name: other for name, other in self._open_stages.items() if other is not context}
            context.__exit__(None, None, None)
