"""Tests of slime's hooks in a training process. ``PROFDECK_TEST_SLIME`` can select a checkout of slime."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import python_path
from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

pytestmark = pytest.mark.torch

JOB = Path(__file__).parent / "slime_job.py"
CHECKOUT = "PROFDECK_TEST_SLIME"
# Stub with the methods of slime's class (624b824a) that the tests call.
STUB = """
class TrainProfiler:
    def __init__(self, args): self.steps = []
    def on_init_end(self): pass
    def step(self, rollout_id): self.steps.append(rollout_id)
"""
CONFIG = """
output: {output}
run: rl
steps: [4, 5, 7]
join_steps: false
final_step: 7
roles: {{trainer: {{backend: torch}}}}
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["stand-in", "checkout"])
def slime(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Directory with the package `slime`."""
    if request.param == "checkout":
        if CHECKOUT not in os.environ:
            pytest.skip(f"{CHECKOUT} is not set to a checkout of slime")
        return Path(os.environ[CHECKOUT])
    package = tmp_path / "host" / "slime" / "utils"
    package.mkdir(parents=True)
    (package / "profile_utils.py").write_text(STUB)
    return tmp_path / "host"


@pytest.fixture
def run(slime: Path, tmp_path: Path) -> Run:
    """Return a function that runs the job with four rollouts, starting with number 4."""
    config = tmp_path / "profdeck.yaml"
    config.write_text(CONFIG.format(output=tmp_path / "profiles"))

    def start(**arguments: object) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROFDECK")}
        environ = inherited | {"PYTHONPATH": python_path(slime), "PROFDECK_CONFIG": str(config)}
        command = [sys.executable, JOB, "4", "4", json.dumps(arguments)]
        return subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=300)

    return start


def test_rollout_is_a_global_step_with_stages_and_mini_batches(run: Run, tmp_path: Path) -> None:
    result = run()
    assert result.returncode == 0, result.stderr
    report = read_run(tmp_path / "profiles" / "rl")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(capture.first_step, capture.last_step) for capture in report.captures] == [(4, 4), (5, 5), (7, 7)]
    for capture in report.captures:
        (artifact,) = capture.ranks[0].artifacts
        events = json.loads(gzip.decompress(artifact.path.read_bytes()))["traceEvents"]
        annotations = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
        assert {name: annotations[name] for name in ("ref_log_probs", "log_probs", "train")} == {
            "ref_log_probs": 1,
            "log_probs": 1,
            "train": 1,
        }
        operators = Counter(event["name"] for event in events if event.get("cat") == "cpu_op")
        assert operators["aten::softmax"] == 3


def test_step_number_is_the_hosts_rollout_number(run: Run, tmp_path: Path) -> None:
    result = run(start_rollout_id=None)
    assert result.returncode == 0, result.stderr
    report = read_run(tmp_path / "profiles" / "rl")
    assert report.status is Status.COMPLETE
    assert [(capture.first_step, capture.last_step) for capture in report.captures] == [(4, 4), (5, 5), (7, 7)]


def test_missing_hook_is_reported_without_stopping_the_job(run: Run, tmp_path: Path) -> None:
    result = run(hooks=False)
    assert result.returncode == 0, result.stderr
    assert "no hook has reported the start of rollout 4. Set --custom-megatron-before-train" in result.stderr
    assert not (tmp_path / "profiles").exists()


def test_slimes_own_profiler_is_rejected(run: Run) -> None:
    result = run(use_pytorch_profiler=True)
    assert result.returncode == 1
    assert "ConfigError: --use-pytorch-profiler: torch supports only one recording per process" in result.stderr
