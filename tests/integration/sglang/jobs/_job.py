"""Helpers of the jobs: arguments, engine arguments, sequential captures, and results."""

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
    # Compute repeated prompts again, because tests compare outputs with and without a capture.
    "disable_radix_cache": True,
}
PROMPTS = ["hello", "world, how are you"]

# By default, an Engine logs only errors.
logging.getLogger("profdeck").addHandler(logging.StreamHandler())
logging.getLogger("profdeck").setLevel(logging.INFO)


def sampling(tokens: int) -> dict[str, Any]:
    """Return deterministic sampling parameters with this number of tokens."""
    return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}


def settings(*steps: int | str, **role: Any) -> dict[str, Any]:
    """Return config values for captures of the role `rollout`. ``__`` in keyword arguments represents a dot."""
    role_settings = {f"rollout.{key.replace('__', '.')}": value for key, value in role.items()}
    return {"output": str(OUTPUT), "run": "run", "steps": [*steps], "rollout.backend": "sglang", **role_settings}


def about(capture: Any) -> dict[str, Any]:
    """Return the fields of a capture that the tests check."""
    if capture is None:
        return {"status": None}
    return {
        "status": str(capture.status),
        "problems": capture.problems,
        "notes": capture.notes,
        "expected": capture.expected_ranks,
    }


class Host:
    """Host that uses an `Engine` without an event loop. It generates tokens with and without captures."""

    def __init__(self, engine: Any, tokens: int = 10) -> None:
        self.engine = engine
        self.results: dict[str, Any] = {}
        self._tokens = tokens
        self.expected = self.generate()

    def generate(self, *prompts: str) -> list[list[int]]:
        """Return the generated tokens of each prompt."""
        outputs = self.engine.generate([*prompts] or PROMPTS[:1], sampling(self._tokens))
        return [output["output_ids"] for output in outputs]

    def profiler(self, step: int, target: Any = None, **role: Any) -> Profiler:
        """Return a profiler that captures one step of the engine, or of a component of the engine."""
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
