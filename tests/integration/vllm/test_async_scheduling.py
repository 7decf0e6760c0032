"""Tests of captures of a vLLM engine with async scheduling."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def job(run_job: Callable[..., Any]) -> Any:
    return run_job("async_scheduling", VLLM_PLUGINS="profdeck", VLLM_ENABLE_V1_MULTIPROCESSING="0")


def annotations(job: Any, step: int, pattern: str) -> list[str]:
    (path,) = (job.output / "run" / f"step_{step:06d}" / "rollout").glob("rank_*.trace.json.gz")
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("ph") == "X" and re.match(pattern, event["name"])]


def test_engine_schedules_two_batches(job: Any) -> None:
    assert job.results["batches_at_once"] == 2


@pytest.mark.parametrize("capture", ["all", "window", "decode"])
def test_capture_is_complete_and_does_not_change_tokens(job: Any, capture: str) -> None:
    assert job.results[capture] == {
        "status": "complete", "problems": [], "notes": [], "expected": [0], "same_tokens": True,
    }  # fmt: skip


def test_window_contains_the_selected_iterations(job: Any) -> None:
    assert annotations(job, 1, "ProfilerStep") == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    assert len(annotations(job, 1, "execute_")) == 3


def test_batch_kind_selects_batches(job: Any) -> None:
    names = [name.partition("_waiting_")[0] for name in annotations(job, 2, "execute_")]
    assert names == ["execute_context_0(0)_generation_2(2)"] * 5
