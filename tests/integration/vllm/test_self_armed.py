"""A config that arms a capture by itself, and configs that are wrong: the engine serves in any case."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profdeck.records.status import Status
from profdeck.verification.reading import read_run

TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def test_the_iterations_of_the_config_are_recorded_without_a_call(run_job: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "profdeck.yaml"
    config.write_text(
        f"output: {tmp_path / 'profiles'}\n"
        "roles:\n  rollout: {backend: vllm, ranks: all, iterations: {first: 7, count: 3}}\n"
        "  trainer: {backend: torch}\n"
    )
    run_job("self_armed", PROFDECK_CONFIG=str(config), PROFDECK_REPLICA="2", **TWO_CORES)
    (run,) = (tmp_path / "profiles").iterdir()  # both ranks agree on its name
    report = read_run(run)
    assert report.status is Status.COMPLETE
    (capture,) = report.captures
    assert (capture.id, capture.role, capture.replica) == ("iteration7", "rollout", 2)
    assert [rank.rank for rank in capture.ranks] == [0, 1]
    for rank in capture.ranks:
        text = gzip.decompress(rank.artifacts[0].path.read_bytes()).decode()
        assert sorted({int(step) for step in re.findall(r"ProfilerStep#(\d+)", text)}) == [7, 8, 9]


def test_a_wrong_config_costs_no_engine(run_job: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "profdeck.yaml"
    config.write_text("outptu: here\n")
    done = run_job("self_armed", PROFDECK_CONFIG=str(config), **TWO_CORES)
    assert done.results["tokens"] == [2, 2, 2, 2]
    assert "unknown key 'outptu'" in done.log
