"""`profdeck trend` on a real training job with two ranks. A stage of one rank becomes slower during the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = Path(__file__).with_name("trend_job.py")


def train(directory: Path, run: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(JOB), str(directory), run], env=environment, check=True, timeout=500)


def trend(*arguments: object) -> str:
    command = [sys.executable, "-m", "profdeck", "trend", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout


def test_slow_stage_of_a_rank_is_found(tmp_path: Path) -> None:
    train(tmp_path, "slow")
    result: dict[str, Any] = json.loads(trend(tmp_path / "slow", "--json"))
    (series,) = [series for series in result["series"] if series["what"] == "global step"]
    assert [point["first_step"] for point in series["points"]] == list(range(25, 1000, 25))
    (change,) = [change for change in series["changes"] if change["is_worse"]]
    assert abs(series["points"][change["index"]]["first_step"] - 600) <= 25
    (stage,) = [cause for cause in change["parts"] if cause["kind"] == "stage"]
    assert (stage["name"], stage["rank"]) == ("score", 1)
    assert stage["delta_us"] == pytest.approx(40_000, rel=0.3)
    text = " ".join(trend(tmp_path / "slow").split())
    assert "trainer is slower since step" in text
    assert "With it: stage score of rank 1 +" in text
