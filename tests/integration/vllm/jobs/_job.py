"""Helpers of the jobs: arguments, engine arguments, and results."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

MODEL, OUTPUT, RESULTS = map(Path, sys.argv[1:4])
ENGINE: dict[str, Any] = {
    "model": str(MODEL),
    "load_format": "dummy",
    "enforce_eager": True,
    "max_model_len": 256,
    "dtype": "float32",
}
PROMPTS = ["hello", "world, how are you"]

logging.getLogger("profdeck").addHandler(logging.StreamHandler())


def settings(step: int, **role: Any) -> dict[str, Any]:
    """Return config values for one capture of the role `rollout`. ``__`` in keyword arguments represents a dot."""
    role_settings = {f"rollout.{key.replace('__', '.')}": value for key, value in role.items()}
    return {"output": str(OUTPUT), "run": "run", "steps": [step], "rollout.backend": "vllm", **role_settings}


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


def finish(results: dict[str, Any]) -> None:
    """Write the results."""
    RESULTS.write_text(json.dumps(results))
