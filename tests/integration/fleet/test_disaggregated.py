"""Tests of vLLM prefill and decode workers with a real router. The workers transfer KV caches through files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_servers import Server, Servers, wait_until_ready
from servers import busy, command_line_of_many, wait_for_command, wait_until_idle

from profdeck import Profiler
from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

pytestmark = pytest.mark.long

PROMPT = "hello world " * 12
"""Prompt of more than 128 tokens, which fill four blocks of the KV cache."""
StartRouter = Callable[..., Server]


@pytest.fixture(scope="module")
def pair(begin: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A prefill worker and a decode worker. They are stopped after the module."""
    shared = {"shared_storage_path": str(tmp_path_factory.mktemp("keys"))}
    with Servers(tmp_path_factory.mktemp) as servers:
        begin = attrs.evolve(begin, servers=servers)
        started = []
        for role in ("kv_producer", "kv_consumer"):
            about = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": shared}
            started.append(begin.vllm(arguments=["--block-size", "32", "--kv-transfer-config", json.dumps(about)]))
        prefill, decode = map(wait_until_ready, started)
        yield prefill, decode


@pytest.fixture
def router(pair: tuple[Server, Server], start_router: StartRouter) -> Server:
    prefill, decode = pair
    return start_router("vllm-router", "--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url)


def settings(root: Path, run: str) -> dict[str, Any]:
    """Return the config of a job that captures step 0."""
    return {"output": str(root), "run": run, "steps": [0], "on_error": "raise", "rollout.backend": "vllm"}


def test_workers_record_only_their_own_batch_kind(pair: tuple[Server, Server], router: Server, root: Path) -> None:
    """Otherwise, a prefill worker would wait forever for decode batches."""
    asked = ("--iterations", "3", "--batch-kind", "prefill", "--batch-kind", "decode")
    with busy(router):
        process = command_line_of_many("--router", router.url, *asked, "--set", "run=disaggregated", "--json")
        out, err = wait_for_command(process, pair[0])
    assert process.returncode == 0, err
    document = json.loads(out)
    types = [server["worker_type"] for server in document["servers"]]  # by replica
    assert {server["url"]: server["worker_type"] for server in document["servers"]} == {
        pair[0].url: "prefill", pair[1].url: "decode",
    }  # fmt: skip
    recorded = {(capture["replica"], capture["stage"]) for capture in document["ls"]["captures"]}
    assert recorded == {*enumerate(types)}
    assert document["complete"], document["problem"]
    assert wait_until_idle(*pair)


def test_merged_trace_shows_a_request_on_both_workers(
    pair: tuple[Server, Server],
    router: Server,
    root: Path,
    tmp_path: Path,
    rollouts: Callable[[dict[str, Any]], Profiler],
) -> None:
    """The prefill worker processes the entire prompt, then the decode worker the remainder after four blocks."""
    router.complete(PROMPT, tokens=2)
    profiler = rollouts(settings(root, "timeline") | {"rollout.targets": {"router": router.url}})
    with profiler.capture(0):
        router.complete(f"hello {PROMPT}", tokens=8)
    assert read_run(root / "timeline").status is Status.COMPLETE
    merged = tmp_path / "merged.json"
    subprocess.run(
        [sys.executable, "-m", "profdeck", "merge", root / "timeline", "-o", merged], check=True, timeout=120
    )
    events = [
        event
        for event in json.loads(merged.read_text())["traceEvents"]
        if event["name"].startswith("execute_context_") and event["ph"] == "X"
    ]
    first, second, *others = sorted(events, key=lambda event: event["ts"])
    assert [batch(event) for event in (first, second)] == [(tokens := batch(first)[0], 0), (tokens - 128, 0)]
    assert [batch(event) for event in others] == [(0, 1)] * 7
    assert {event["pid"] for event in others} == {second["pid"]} != {first["pid"]}
    assert first["ts"] + first["dur"] < second["ts"]


def batch(event: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of prompt tokens and generated tokens of an iteration."""
    found = re.fullmatch(r"execute_context_\d+\((\d+)\)_generation_\d+\((\d+)\)(?:_waiting_\d+_kv_\d+)?", event["name"])
    assert found is not None
    return int(found[1]), int(found[2])
