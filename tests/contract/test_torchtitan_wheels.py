"""Tests of the torchtitan code that builds and steps the configured profiler."""

from __future__ import annotations

import pytest


@pytest.fixture
def trainer(code):
    return code("torchtitan", "0.3.0", "torchtitan/trainer.py")["Trainer"]


def test_the_trainer_builds_the_configured_profiler(trainer) -> None:
    assert trainer["Config"].annotation("profiler") == "Profiler.Config"
    train = trainer["train"]
    assert train.keyword("global_step") == ["self.step"]
    assert train.keyword("base_folder") == ["config.dump_folder"]
    assert train.call("config.profiler.build") < train.call("self.train_step") < train.call("profiler.step")


@pytest.mark.wheels
def test_the_step_number_increases_before_the_step_runs(trainer) -> None:
    text = trainer["train"].text
    assert text.index("self.step += 1") < text.index("self.train_step(") < text.index("profiler.step()")
