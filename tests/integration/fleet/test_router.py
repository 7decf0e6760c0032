"""Tests of real routers: their workers are one capture while requests go through the router."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_servers import Server, SglangServer
from servers import TOKEN, busy, command_line_of_many, wait_for_command, wait_until_idle

from processes import until
from profdeck import Profiler
from profdeck.base.errors import CaptureError
from profdeck.base.outcome import Outcome
from profdeck.records.capture import CaptureRecord
from profdeck.records.status import Status
from profdeck.records.targets import TargetRecord
from profdeck.replicas.discovery import query_workers
from profdeck.verification.run_report import read_run

WINDOW_S = 120
StartRouter = Callable[..., Server]
Rollouts = Callable[[dict[str, Any]], Profiler]


@pytest.fixture
def router(workers: tuple[Server, Server], start_router: StartRouter) -> Server:
    """A vllm-router that alternates between the workers."""
    return start_router("vllm-router", "--policy", "round_robin", "--worker-urls", *(worker.url for worker in workers))


def settings(root: Path, run: str, **own: Any) -> dict[str, Any]:
    """Return the config of a job that captures steps 0 and 2. In keyword arguments, ``__`` replaces a dot."""
    common = {"output": str(root), "run": run, "steps": [0, 2], "on_error": "raise", "on_demand": False}
    rollout = {"rollout.backend": "vllm", "rollout.iterations": {"count": 5}, "rollout.batch_kinds": ["decode"]}
    return common | rollout | {key.replace("__", "."): value for key, value in own.items()}


def captured(profiler: Profiler, step: int = 0) -> tuple[TargetRecord, ...]:
    """Capture one step until all windows end. Return the record of each target."""

    async def capture() -> CaptureRecord:
        running = await profiler.astart(step)
        assert running is not None
        assert await profiler.await_window(WINDOW_S)
        await profiler.astop()
        return running

    done = asyncio.run(capture())
    assert done.status is Status.COMPLETE
    assert done.fleet is not None
    return done.fleet.targets


def test_both_workers_record_while_requests_go_through_the_router(
    workers: tuple[Server, Server], router: Server, root: Path, rollouts: Rollouts
) -> None:
    text = router.complete()
    targets = {"router": router.url, "policy": "all"}
    profiler = rollouts(settings(root, "router", rollout__targets=targets))
    with busy(router, clients=2):
        records = captured(profiler)
    assert {record.name: record.worker_type for record in records} == {worker.url: "regular" for worker in workers}
    assert {record.outcome for record in records} == {Outcome.ENDED_BY_ITSELF}
    assert router.complete() == text
    assert wait_until_idle(*workers)
    report = read_run(root / "router")
    assert report.status is Status.COMPLETE, report
    assert {(capture.replica, capture.stage) for capture in report.captures} == {(0, "decode"), (1, "decode")}
    for replica in (0, 1):  # each prefill iteration starts a new artifact
        ranks = [capture.ranks[0] for capture in report.captures if capture.replica == replica]
        recorded = [artifact.iterations for rank in ranks for artifact in rank.artifacts]
        assert sum(last - first + 1 for first, last in filter(None, recorded)) == 5
    (whole,) = (target for target in report.targets if target.policy)
    assert whole.start_skew_ms is not None
    assert 0 <= whole.start_skew_ms < 100


def test_sample_by_load_selects_a_busy_worker(
    workers: tuple[Server, Server], start_router: StartRouter, root: Path, rollouts: Rollouts
) -> None:
    """With the policy round_robin, the router reports no load."""
    urls = [worker.url for worker in workers]
    router = start_router("vllm-router", "--policy", "cache_aware", "--worker-urls", *urls)
    targets = {"router": router.url, "sample": 1, "sample_by": "load"}
    profiler = rollouts(settings(root, "busiest", rollout__targets=targets))
    with busy(router, clients=4):
        until(lambda: any(worker.load for worker in asyncio.run(query_workers(router.url, None))), timeout_s=30)
        (record,) = captured(profiler)
    assert record.name in urls
    (whole,) = (target for target in read_run(root / "busiest").targets if target.policy)
    assert whole.notes == ("Selected 1 of 2 targets, because sample is 1.",)


def test_router_with_an_api_key(
    reward: SglangServer, start_router: StartRouter, root: Path, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = start_router("sglang-router", "--api-key", "key of the router", "--worker-urls", reward.url)
    profiler = rollouts(settings(root, "key", rollout__targets={"router": router.url}, rollout__backend="sglang"))
    with pytest.raises(
        CaptureError, match=r"replied to /workers with 401. Set the environment variable in router_key_variable"
    ):
        profiler.start(0)
    monkeypatch.setenv("PROFDECK_ROUTER_KEY", "key of the router")
    with busy(reward):
        (record,) = captured(profiler, 2)
    assert record.name == reward.url
    assert wait_until_idle(reward)


JOB = """
import sys, urllib.request, json
import torch
from profdeck import Profiler

config, router, reward = sys.argv[1:]
sampling = {"max_new_tokens": 20, "ignore_eos": True}

def post(url, **body):
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)

profiler = Profiler.from_config(config, role="trainer", targets={})
weights = torch.zeros(64, 64)
with profiler:
    for step in range(5):
        with profiler.capture(step):
            texts = [post(f"{router}/v1/completions", model="tiny", prompt=f"{step}", max_tokens=20, ignore_eos=True)
                     for _ in range(4)]
            for text in texts:
                post(f"{reward}/generate", text=text["choices"][0]["text"], sampling_params=sampling)
            weights += torch.ones(64, 64) @ torch.ones(64, 64)
            profiler.step(step)
"""


def test_run_of_trainer_rollouts_and_reward_is_complete(
    router: Server, reward: SglangServer, root: Path, tmp_path: Path
) -> None:
    config = tmp_path / "profdeck.yaml"
    roles = {
        "trainer": {"backend": "torch"},
        "rollout": {
            "backend": "vllm",
            "targets": {"router": router.url, "policy": "all"},
            "iterations": {"skip": 1, "count": 5},
            "options": {"profile_by_stage": True},
            "batch_kinds": ["decode"],
        },
        "reward": {"backend": "sglang", "targets": {"urls": [reward.url]}, "iterations": {"count": 3}},
    }
    config.write_text(json.dumps({"output": str(root), "run": "mixed", "steps": [2, 3], "roles": roles}))
    environ = {name: value for name, value in os.environ.items() if name != "PROFDECK_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", JOB, config, router.url, reward.url],
        check=False,
        capture_output=True,
        text=True,
        env=environ | TOKEN | {"KINETO_LOG_LEVEL": "6", "OMP_NUM_THREADS": "1"},
        timeout=WINDOW_S,
    )
    assert done.returncode == 0, done.stderr
    report = read_run(root / "mixed")
    assert (report.status, report.problems) == (Status.COMPLETE, ()), report
    # Consecutive steps are one capture.
    assert {capture.id.partition("-")[0] for capture in report.captures} == {"step2"}
    recorded = {(capture.role, capture.replica) for capture in report.captures}
    assert recorded == {("trainer", None), ("rollout", 0), ("rollout", 1), ("reward", 0)}
    assert {(one.first_step, one.last_step) for one in report.captures if one.role == "trainer"} == {(2, 3)}
    assert all(rank.events for capture in report.captures for rank in capture.ranks)
    fleets = [target for target in report.targets if target.policy]
    assert sorted(target.role for target in fleets) == ["reward", "rollout"]
    outcomes = {record.outcome for target in fleets for record in target.targets}
    assert outcomes == {Outcome.ENDED_BY_ITSELF}


# The command line.


def test_capture_command_with_a_router(workers: tuple[Server, Server], router: Server, root: Path) -> None:
    with busy(router, clients=4):
        process = command_line_of_many(
            *(
                "--router",
                router.url,
                "--iterations",
                "5",
                "--batch-kind",
                "decode",
                "--set",
                "server.targets.policy=all",
            ),
            *("--set", "run=by-router", "--json"),
        )
        out, err = wait_for_command(process, workers[0])
    assert process.returncode == 0, err
    document = json.loads(out)
    assert (document["complete"], document["problem"]) == (True, None)
    assert document["run"] == str(root / "by-router")
    assert {(server["url"], server["worker_type"], server["state"]) for server in document["servers"]} == {
        (worker.url, "regular", "ready") for worker in workers
    }
    recorded = {(capture["replica"], capture["stage"]) for capture in document["ls"]["captures"]}
    assert recorded == {(0, "decode"), (1, "decode")}
    assert wait_until_idle(*workers)
