"""A callback for the Trainer of Hugging Face, and for what is built on it, such as TRL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from profdeck import Profiler


class ProfdeckCallback(TrainerCallback):
    """Captures the optimizer steps that profdeck's config selects, numbered as the Trainer logs them, from 1.

    With gradient accumulation a step is one of the optimizer, and each micro-batch is reported as a mini-batch. A
    Trainer that resumes goes on with its own numbers. The last step ends with it: nothing is recorded in between.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        engine: object = None,
    ) -> None:
        """Args:
        config: as in `Profiler.from_config`.
        settings: as there.
        engine: the target of the role ``rollout``, if the trainer generates with an engine in its own process, such
            as that of TRL: ``trainer.vllm_generation.llm``. Rank 0 captures it.
        """
        self._given: dict[str, Any] = {"config": config, "settings": settings}
        self._engine = engine
        self._profiler: Profiler | None = None
        self._rollouts: Profiler | None = None
        self._micro_batch = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # as called
        """Build the profiler, once the process group is there."""
        self._profiler = self._profiler or Profiler.from_config(**self._given, shared=True)
        if self._engine is not None and self._rollouts is None and state.is_world_process_zero:
            # Generating is one stage, also where each stage of the training is a capture.
            settings = {**(self._given["settings"] or {}), "mode": "continuous"}
            self._rollouts = Profiler.from_config(
                self._given["config"], settings=settings, role="rollout", target=self._engine
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # as called
        """Begin the step that comes."""
        self._micro_batch = 0
        for profiler in (self._rollouts, self._profiler):  # the trainer second: it trains when they have generated
            if profiler is not None:
                profiler.start(state.global_step + 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # as called
        """Report a micro-batch, after which the optimizer does not step."""
        if self._profiler is not None:
            self._profiler.step(self._micro_batch, "mini_batch")
        self._micro_batch += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the last micro-batch, and end the step."""
        self.on_substep_end(args, state, control)
        for profiler in (self._rollouts, self._profiler):
            if profiler is not None:
                profiler.stop()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # as called
        """End a capture that waits for a step that does not come."""
        last = f"the training ended after step {state.global_step}; if that was its last one, set final_step"
        ended, self._rollouts, self._profiler = (self._rollouts, self._profiler), None, None
        for profiler in ended:  # another training of this process may have another config
            if profiler is not None:
                profiler.close(last)
