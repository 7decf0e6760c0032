"""What the jobs share: arguments, the engine's arguments, captures one after the other, results."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from profdeck import Profiler

MODEL, OUTPUT, RESULTS = map(Path, sys.argv[1:4])
ENGINE: dict[str, Any] = {
    "model_path": str(MODEL),
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "grammar_backend": "none",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "context_length": 256,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "sleep_on_idle": True,
    # A prompt that comes again is read again: outputs with and without a capture are compared.
    "disable_radix_cache": True,
}
PROMPTS = ["hello", "world, how are you"]

# An Engine lets only errors through, unless it is told otherwise.
logging.getLogger("profdeck").addHandler(logging.StreamHandler())
logging.getLogger("profdeck").setLevel(logging.INFO)


def sampling(tokens: int) -> dict[str, Any]:
    """Sampling parameters that give so many tokens, the same ones each time."""
    return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}


def settings(*steps: int | str, **role: Any) -> dict[str, Any]:
    """Config values for captures of the role `rollout`; dots in keys are written ``__``."""
    own = {f"rollout.{key.replace('__', '.')}": value for key, value in role.items()}
    return {"output": str(OUTPUT), "run": "run", "steps": [*steps], "rollout.backend": "sglang", **own}


def about(capture: Any) -> dict[str, Any]:
    """Return what a test wants to know of a capture."""
    if capture is None:
        return {"status": None}
    return {
        "status": str(capture.status),
        "problems": capture.problems,
        "notes": capture.notes,
        "expected": capture.expected_ranks,
    }


class Host:
    """Whoever holds an `Engine` and uses it without an event loop: generates, and captures what it generates."""

    def __init__(self, engine: Any, tokens: int = 10) -> None:
        self.engine = engine
        self.results: dict[str, Any] = {}
        self._tokens = tokens
        self.expected = self.generate()

    def generate(self, *prompts: str) -> list[list[int]]:
        """Return the tokens that follow each prompt."""
        asked = [*prompts] or PROMPTS[:1]
        return [done["output_ids"] for done in self.engine.generate(asked, sampling(self._tokens))]

    def profiler(self, step: int, target: Any = None, **role: Any) -> Profiler:
        """Return the profiler of a role that captures one step, of the engine or of what is a part of it."""
        return Profiler.from_config(settings=settings(step, **role), role="rollout", target=target or self.engine)

    def capture(self, name: str, step: int, target: Any = None, **role: Any) -> None:
        """Capture one generation."""
        profiler = self.profiler(step, target, **role)
        running = profiler.start(step)
        tokens = self.generate()
        profiler.stop()
        self.results[name] = {**about(running), "same_tokens": tokens == self.expected}


def finish(results: dict[str, Any]) -> None:
    """Write the results."""
    RESULTS.write_text(json.dumps(results))
