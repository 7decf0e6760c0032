"""Tests of `profdeck npu analyse` with the real torch_npu and the stub driver."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.cli.terminal import ExitCode

JOB = """
import sys
import torch, torch_npu
from profdeck import Identity, Profiler

x = torch.ones(4).to("npu")
settings = {
    "output": "profiles", "run": "job", "steps": [1], "on_error": "raise", "trainer.backend": "npu",
    "trainer.ranks": "all", "trainer.options.analyse": False,
}
for rank in range(2):
    with Profiler.from_config(identity=Identity(rank=rank, world_size=2), settings=settings) as profiler:
        for step in range(3):
            with profiler.capture(step):
                x + 1
                torch.npu.synchronize()
"""

Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(driver, msprof_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks without analysis."""
    home = tmp_path_factory.mktemp("run")
    with driver.jobs(home, PATH=msprof_path, PROFDECK_LEASE_DIR=str(home / "leases")) as jobs:
        jobs(JOB)
    return home / "profiles" / "job"


@pytest.fixture
def profdeck(driver, msprof_path: str, tmp_path: Path) -> Program:
    """Return a function that runs a profdeck command."""

    def program(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "profdeck", *map(str, arguments)]
        environ = driver.environ | {"PATH": msprof_path} | environ
        return subprocess.run(command, cwd=tmp_path, env=environ, check=False, capture_output=True, text=True)

    return program


def document(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


def test_run_is_analysed_listed_and_summarised(run: Path, profdeck: Program) -> None:
    before = document(profdeck("ls", "--json", run))
    assert before["status"] == "complete"  # only the existence of raw data can be checked
    result = profdeck("npu", "analyse", "--processes", "2", run, STUB_MSPROF="fail")
    assert result.returncode == ExitCode.INCOMPLETE, result.stdout + result.stderr
    assert "2 directories: 2 failed" in result.stdout
    assert "kernel_details.csv is missing" in result.stdout
    assert profdeck("ls", run).returncode == ExitCode.INCOMPLETE

    result = profdeck("npu", "analyse", "--json", run)
    assert result.returncode == ExitCode.OK, result.stdout + result.stderr
    entries = document(result)["directories"]
    assert [entry["outcome"] for entry in entries] == ["done", "done"]
    assert all(entry["problems"] == [] for entry in entries)
    listed = profdeck("ls", "--json", run)
    assert listed.returncode == ExitCode.OK, listed.stdout
    assert document(listed)["totals"]["events"] > 0
    summary = document(profdeck("summary", "--json", run))
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert all(rank["kernels"] for rank in summary["ranks"])

    again = document(profdeck("npu", "analyse", "--json", run))["directories"]
    assert [entry["outcome"] for entry in again] == ["kept", "kept"]


def test_missing_cann_is_reported_with_instructions(run: Path, profdeck: Program) -> None:
    result = profdeck("npu", "analyse", "--force", run, LD_LIBRARY_PATH="")
    assert result.returncode == ExitCode.INCOMPLETE
    assert "set_env.sh" in result.stdout
