"""SGLang itself runs here: a server without profdeck generates, and its own profiler writes what we read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    # A list of plugins without profdeck: SGLang has no way to say that there shall be none.
    return start_server(SGLANG_PLUGINS="torchcpu")


def test_a_plain_server_generates(server: Any) -> None:
    text = server.complete("hello", tokens=20)
    assert text
    assert server.complete("hello", tokens=20) == text


def test_its_own_profiler_writes_as_many_steps_as_it_was_asked_for(server: Any, tmp_path: Path) -> None:
    body = {"output_dir": str(tmp_path / "own"), "profile_id": "plain", "activities": ["CPU"], "num_steps": 3}
    httpx.post(f"{server.url}/start_profile", json=body, timeout=60, trust_env=False).raise_for_status()
    server.complete(tokens=8)  # the export precedes the steps after the third
    with gzip.open(tmp_path / "own" / "plain-TP-0.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = [event["name"] for event in events if event["name"].startswith("step[")]
    assert [name.partition(" ")[0] for name in steps] == ["step[EXTEND", "step[DECODE", "step[DECODE"]
