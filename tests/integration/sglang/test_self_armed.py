"""A config that arms a capture by itself, and configs that are wrong: the engine serves in any case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_traces import spans, steps

from profdeck.records.status import Status
from profdeck.verification.reading import read_run


def test_the_iterations_of_the_config_are_recorded_without_a_call(run_job: Callable[..., Any], tmp_path: Path) -> None:
    config, profiles = tmp_path / "profdeck.yaml", tmp_path / "profiles"
    config.write_text(
        f"output: {profiles}\n"
        "roles:\n  rollout: {backend: sglang, ranks: all, iterations: {first: 7, count: 3}}\n"
        "  trainer: {backend: torch}\n"
    )
    job = run_job("self_armed", "2", str(profiles), PROFDECK_CONFIG=str(config), PROFDECK_REPLICA="2")
    assert job.results["tokens"] == [6, 6, 6, 6]
    (run,) = profiles.iterdir()  # both ranks agree on its name
    report = read_run(run)
    assert report.status is Status.COMPLETE
    (capture,) = report.captures
    assert (capture.id, capture.role, capture.replica) == ("iteration7", "rollout", 2)
    assert [rank.rank for rank in capture.ranks] == [0, 1]
    for rank in capture.ranks:
        # Each of the job's generations is a prefill and five decodes.
        assert steps(rank.artifacts[0].path) == [7, 8, 9]
        assert spans(rank.artifacts[0].path) == ["DECODE"] * 3


def test_a_wrong_config_costs_no_engine(run_job: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "profdeck.yaml"
    config.write_text("outptu: here\n")
    job = run_job("self_armed", "1", str(tmp_path / "profiles"), PROFDECK_CONFIG=str(config))
    assert job.results["tokens"] == [6, 6, 6, 6]
    assert "unknown key 'outptu'" in job.log
    assert not (tmp_path / "profiles").exists()
