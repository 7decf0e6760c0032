"""Test of the rollout function for slime: engines of the manager's router are captured during generation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from engine_servers import Server
from servers import TOKEN

from processes import python_path
from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

# Rollout function of the host. It sends requests through the router.
HOST = """
import httpx

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/v1/completions"
    for prompt in data_source * 2:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        httpx.post(url, json=body, timeout=60, trust_env=False).raise_for_status()
    return [rollout_id, evaluation]
"""
MANAGER = """
import sys
from types import SimpleNamespace
import vime
from profdeck_slime.rollouts import generate_rollout

args = SimpleNamespace(vllm_router_ip=sys.argv[1], vllm_router_port=int(sys.argv[2]))
for rollout in range(3):
    assert generate_rollout(args, rollout, ["a", "b"]) == [rollout, False]
assert generate_rollout(args, 1, ["a"], evaluation=True) == [1, True]
"""


def test_rollouts_through_the_router_of_the_manager(
    workers: tuple[Server, Server], start_router: Callable[..., Server], root: Path, tmp_path: Path
) -> None:
    urls = [worker.url for worker in workers]
    router = urlsplit(start_router("vllm-router", "--policy", "round_robin", "--worker-urls", *urls).url)
    package = tmp_path / "vime" / "rollout"
    package.mkdir(parents=True)
    (package / "vllm_rollout.py").write_text(HOST)
    config = tmp_path / "profdeck.yaml"
    config.write_text(f"output: {root}\nrun: vime\nsteps: [1]\nroles: {{rollout: {{backend: vllm}}}}\n")
    environ = os.environ | TOKEN | {"PROFDECK_CONFIG": str(config), "PYTHONPATH": python_path(tmp_path)}
    environ |= {"PYTHONFAULTHANDLER": "1"}  # the process rarely exits with SIGSEGV and no message
    command = [sys.executable, "-c", MANAGER, router.hostname, str(router.port)]
    done = subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = read_run(root / "vime")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(one.first_step, one.role, one.replica) for one in report.captures] == [
        (1, "rollout", 0),
        (1, "rollout", 1),
    ]
    assert all(rank.events for one in report.captures for rank in one.ranks)
