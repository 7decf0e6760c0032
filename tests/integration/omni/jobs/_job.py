"""Helpers of the jobs: arguments, sampling parameters, and results."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from vllm_omni.inputs.data import OmniDiffusionSamplingParams

MODEL, OUTPUT, RESULTS = map(Path, sys.argv[1:4])
ENGINE: dict[str, Any] = {"model": str(MODEL), "diffusion_load_format": "diffusers", "dtype": "float32"}
DENOISING_STEPS = 3

logging.getLogger("profdeck").addHandler(logging.StreamHandler())


def picture() -> OmniDiffusionSamplingParams:
    """Return the sampling parameters of a small image, for one stage."""
    return OmniDiffusionSamplingParams(
        height=32, width=32, num_inference_steps=DENOISING_STEPS, guidance_scale=1.0, output_type="np"
    )


def settings(*steps: int, **role: Any) -> dict[str, Any]:
    """Return config values of the role `rollout`. ``__`` in keyword arguments represents a dot."""
    role_settings = {f"rollout.{key.replace('__', '.')}": value for key, value in role.items()}
    return {"output": str(OUTPUT), "run": "run", "steps": [*steps], "rollout.backend": "vllm", **role_settings}


def about(capture: Any) -> dict[str, Any]:
    """Return the fields of a capture that the tests check."""
    if capture is None:
        return {"status": None}
    return {"status": str(capture.status), "problems": capture.problems, "expected": capture.expected_ranks}


def finish(results: dict[str, Any]) -> None:
    """Write the results."""
    RESULTS.write_text(json.dumps(results))
