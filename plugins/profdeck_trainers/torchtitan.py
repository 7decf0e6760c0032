"""A profiler for torchtitan, since 0.3: ``Trainer.Config(profiler=ProfdeckProfiler.Config(...))``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torchtitan.tools.profiler import Profiler as TorchtitanProfiler

from profdeck import Profiler
from profdeck.plugin import ConfigError


class ProfdeckProfiler(TorchtitanProfiler):
    """Captures the steps that profdeck's config selects, numbered as torchtitan logs them, from 1.

    A job that resumes goes on with its own numbers. torchtitan's memory snapshots work as before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TorchtitanProfiler.Config):
        """torchtitan's own, and what profdeck takes."""

        profdeck_config: str | None = None
        """A config of profdeck. Default: the one that ``PROFDECK_CONFIG`` names."""

    def __init__(self, config: Config, **runtime: Any) -> None:
        """Args:
        config: of this class.
        runtime: as torchtitan gives it.

        Raises:
            ConfigError: torchtitan is to profile as well, or profdeck's config is wrong.
        """
        super().__init__(config, **runtime)
        if config.enable_profiling:
            raise ConfigError(
                "enable_profiling: profdeck is to record in the same process, and torch records once. Leave it out: "
                "steps and options are in profdeck's config."
            )
        self._profdeck = Profiler.from_config(config.profdeck_config)
        self._step = 0

    def __enter__(self) -> Self:
        super().__enter__()
        self._step = self._global_step + 1
        self._profdeck.start(self._step)
        return self

    def __exit__(self, *raised: object) -> bool:
        if raised[1] is not None:
            self._profdeck.close(f"the training failed with {type(raised[1]).__name__}")
        else:
            self._profdeck.close(f"the training ended before step {self._step} did; set final_step")
        return bool(super().__exit__(*raised))

    def step(self) -> None:
        """End a step, and begin the next."""
        super().step()
        self._profdeck.stop()
        self._step += 1
        self._profdeck.start(self._step)
