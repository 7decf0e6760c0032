"""Tests of the torchtitan profiler in a loop like that of torchtitan's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torchtitan


@pytest.fixture
def profiler() -> Any:
    from profdeck_trainers.torchtitan import ProfdeckProfiler  # lazy: other nox sessions also collect this module

    return ProfdeckProfiler


def test_steps_have_torchtitans_numbers(profiler: Any, tmp_path: Path) -> None:
    import torch

    config = tmp_path / "c.yaml"
    config.write_text(
        f"output: {tmp_path}\nrun: tt\nsteps: ['102..103', 105]\nroles: {{trainer: {{backend: torch}}}}\n"
    )
    with profiler.Config(profdeck_config=str(config)).build(global_step=100, base_folder=str(tmp_path)) as running:
        for _ in range(5):  # like Trainer.train of a resumed job
            torch.ones(8, 8) @ torch.ones(8, 8)
            running.step()
    report = read_run(tmp_path / "tt")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(capture.first_step, capture.last_step) for capture in report.captures] == [(102, 103), (105, 105)]


def test_torchtitans_own_profiling_is_rejected(profiler: Any) -> None:
    with pytest.raises(ConfigError, match="enable_profiling: torch supports only one recording per process"):
        profiler.Config(enable_profiling=True).build(global_step=0)
