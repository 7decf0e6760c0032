"""Callback for the Hugging Face Trainer and its subclasses, such as the trainers of TRL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from profdeck import Profiler


class ProfdeckCallback(TrainerCallback):
    """Captures the optimizer steps that profdeck's config selects.

    Steps have the numbers that the Trainer logs. The first step is 1, and a resumed Trainer continues its numbering.
    With gradient accumulation, each micro-batch is reported as a mini-batch of its optimizer step. Work between two
    steps is not recorded.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        engine: object = None,
    ) -> None:
        """Args:
        config: see `Profiler.from_config`.
        settings: see `Profiler.from_config`.
        engine: an engine in the trainer's process that generates rollouts, such as ``trainer.vllm_generation.llm`` of
            TRL. Rank 0 captures it as the target of the role ``rollout``.
        """
        self._config = config
        self._settings = settings
        self._engine = engine
        self._profiler: Profiler | None = None
        self._rollouts: Profiler | None = None
        self._micro_batch = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # as called
        """Create the profilers. They read the rank from the process group, which now exists."""
        self._profiler = self._profiler or Profiler.from_config(self._config, settings=self._settings, shared=True)
        if self._engine is not None and self._rollouts is None and state.is_world_process_zero:
            # Generation is a single stage, so it is never captured in discrete mode.
            settings = {**(self._settings or {}), "mode": "continuous"}
            self._rollouts = Profiler.from_config(self._config, settings=settings, role="rollout", target=self._engine)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # as called
        """Start the next step."""
        self._micro_batch = 0
        for profiler in (self._rollouts, self._profiler):  # the trainer second, because training follows generation
            if profiler is not None:
                profiler.start(state.global_step + 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # as called
        """Report a micro-batch without an optimizer step."""
        if self._profiler is not None:
            self._profiler.step(self._micro_batch, "mini_batch")
        self._micro_batch += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last micro-batch and end the step."""
        self.on_substep_end(args, state, control)
        for profiler in (self._rollouts, self._profiler):
            if profiler is not None:
                profiler.stop()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # as called
        """Close the profilers. A capture that is waiting for another step ends."""
        reason = f"the training ended after step {state.global_step}; if this was the last step, set final_step"
        # The next training in this process may have another config, so it creates new profilers.
        profilers, self._rollouts, self._profiler = (self._rollouts, self._profiler), None, None
        for profiler in profilers:
            if profiler is not None:
                profiler.close(reason)
