"""Test of the example `examples/continuous_integration`. It runs the steps of the workflow."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

from processes import command_path

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long]

EXAMPLE = Path(__file__).parents[2] / "examples" / "continuous_integration"


def test_workflow_fails_if_a_step_becomes_slower(tmp_path: Path) -> None:
    job = shutil.copytree(EXAMPLE, tmp_path / "job")
    (workflow,) = yaml.safe_load((job / "profile.yml").read_text())["jobs"].values()
    steps: list[dict[str, Any]] = [
        step for step in workflow["steps"] if "pip install" not in step.get("run", "pip install")
    ]
    (scripts := tmp_path / "bin").mkdir()
    environment = os.environ | {
        "PATH": command_path(scripts),
        "GITHUB_ACTIONS": "true",
        "PROFDECK_CACHE": str(tmp_path / "cache"),
    }

    def run(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        shell = ["/bin/bash", "-e", "-c", command]
        return subprocess.run(shell, cwd=job, env=environment | variables, capture_output=True, text=True, check=False)

    def run_all(**variables: str) -> list[tuple[int, str]]:
        shutil.rmtree(job / "profiles", ignore_errors=True)
        results = []
        for step in steps:
            failed = any(code for code, _ in results)
            if not failed or step.get("if") == "always()":
                result = run(step["run"], **variables)
                results.append((result.returncode, result.stdout + result.stderr))
        return results

    assert run("python train.py").returncode == 0
    assert run("profdeck baseline save main profiles/change").returncode == 0
    slower = run_all(SIZE="3072")
    assert [code for code, _ in slower] == [0, 5, 0], slower
    assert "::error title=profdeck main::trainer is slower: the median global step " in slower[1][1]
    (suite,) = ET.parse(job / "profile.xml").iter("testsuite")  # noqa: S314 - a trusted file
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert (job / "profile.html").stat().st_size > 10_000
    faster = run_all(SIZE="64")
    assert [code for code, _ in faster] == [0, 0, 0], faster
