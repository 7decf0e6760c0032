"""Profiler for torchtitan 0.3 and later: ``Trainer.Config(profiler=ProfdeckProfiler.Config(...))``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torchtitan.tools.profiler import Profiler as TorchtitanProfiler

from profdeck import Profiler
from profdeck.plugin import ConfigError


class ProfdeckProfiler(TorchtitanProfiler):
    """Captures the training steps that profdeck's config selects.

    Steps have the numbers that torchtitan logs. The first step is 1, and a resumed job continues its numbering.
    torchtitan's memory snapshots remain available.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TorchtitanProfiler.Config):
        """torchtitan's profiler config with an option for profdeck."""

        profdeck_config: str | None = None
        """Path of a profdeck config. Default: ``PROFDECK_CONFIG``."""

    def __init__(self, config: Config, **runtime: Any) -> None:
        """Args:
        config: config of this profiler.
        runtime: arguments for torchtitan's profiler.

        Raises:
            ConfigError: torchtitan's own profiling is enabled, or profdeck's config is invalid.
        """
        super().__init__(config, **runtime)
        if config.enable_profiling:
            raise ConfigError(
                "enable_profiling: torch supports only one recording per process, so torchtitan's profiling cannot be "
                "combined with profdeck. Remove it, and set steps and options in profdeck's config."
            )
        self._profdeck = Profiler.from_config(config.profdeck_config)
        self._step = 0

    def __enter__(self) -> Self:
        super().__enter__()
        self._step = self._global_step + 1
        self._profdeck.start(self._step)
        return self

    def __exit__(self, *exception: object) -> bool:
        if exception[1] is not None:
            self._profdeck.close(f"the training failed with {type(exception[1]).__name__}")
        else:
            self._profdeck.close(f"the training ended before the end of step {self._step}; set final_step")
        return bool(super().__exit__(*exception))

    def step(self) -> None:
        """End the current step and start the next one."""
        super().step()
        self._profdeck.stop()
        self._step += 1
        self._profdeck.start(self._step)
