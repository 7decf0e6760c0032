"""Conversion of verl's profiling options, and their precedence relative to profdeck's config."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from profdeck.config.model import Mode
from profdeck_traces.base.errors import ConfigError
from profdeck_verl.settings import merge_configs

TORCH = {"contents": [], "discrete": False}


def job(
    *, tool: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **profiler: Any
) -> dict[str, Any]:
    """Return a verl config with verl's default keys."""
    own = {"enable": True, "all_ranks": False, "ranks": [], "tool_config": {"torch": TORCH | (tool or {})}}
    off = {"enable": False, "all_ranks": False, "ranks": [], "tool_config": {}}
    general = {
        "steps": None,
        "profile_continuous_steps": False,
        "save_path": "outputs/profile",
        "finish_hook_cmd": None,
    }
    return {
        "global_profiler": general | profiler,
        "actor_rollout_ref": {
            "actor": {"profiler": own},
            "ref": {"profiler": off},
            "rollout": {"name": "vllm", "profiler": off | (rollout or {})},
        },
        "critic": {"profiler": off},
        "trainer": {"device": "cuda"},
    }


def test_job_that_sets_only_the_tool() -> None:
    config, notes = merge_configs(
        job(
            steps=[2, 3, 7],
            save_path="/data/the traces",
            finish_hook_cmd='upload "$VERL_PROFILE_SAVE_PATH"',
            tool={"contents": ["cpu", "shapes", "stack", "memory"], "schedule": {"active": 2, "wait": 1, "repeat": 0}},
            rollout={
                "enable": True,
                "all_ranks": True,
                "tool_config": {"torch": {"contents": ["shapes"], "profile_token_start": 4, "profile_token_end": 10}},
            },
        )
    )
    assert notes == []
    assert (str(config.output), config.steps.to_list(), config.join_steps) == ("/data/the traces", [2, 3, 7], False)
    assert config.finish.command is not None
    assert "VERL_PROFILE_SAVE_PATH='/data/the traces'" in config.finish.command
    trainer, rollout = config.roles["trainer"], config.roles["rollout"]
    assert (trainer.backend, trainer.ranks) == ("torch", (0,))
    assert trainer.options == {
        "record_shapes": True, "with_stack": True, "profile_memory": True, "activities": ["cpu"],
    }  # fmt: skip
    assert trainer.window is not None
    assert (trainer.window.active, trainer.window.wait, trainer.window.repeat) == (2, 1, 1)
    assert (rollout.backend, rollout.ranks, rollout.options) == ("vllm", "all", {"record_shapes": True})
    assert rollout.iterations is not None
    assert (rollout.iterations.skip, rollout.iterations.count) == (4, 6)


def test_keys_of_newer_verl_versions() -> None:
    keys = {"step_start": 5, "step_end": 8, "profile_by_stage": True, "merge_profiles": False, "with_stack": True}
    config, _ = merge_configs(job(rollout={"enable": True, "ranks": [8]}, **keys))
    assert config.steps.to_list() == ["5..8"]
    assert config.roles["rollout"].ranks == (8,)
    assert config.roles["rollout"].options == {"profile_by_stage": True, "merge_profiles": False, "with_stack": True}


def test_discrete_mode_on_ascend() -> None:
    config = job(steps=[1])
    config["trainer"]["device"] = "npu"
    npu = {"contents": ["npu", "cpu"], "level": "level1", "analysis": False, "discrete": True}
    config["actor_rollout_ref"]["actor"]["profiler"]["tool_config"] = {"npu": npu}
    found, _ = merge_configs(config)
    assert found.mode is Mode.DISCRETE
    assert (found.roles["trainer"].backend, found.roles["trainer"].options) == (
        "npu", {"level": "level1", "analyse": False},
    )  # fmt: skip


def test_profdeck_config_takes_precedence_with_notes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text(
        "steps: [9]\nroles: {trainer: {backend: torch, ranks: all}, rollout: {iterations: {count: 3}}}\n"
    )
    monkeypatch.setenv("PROFDECK_CONFIG", str(tmp_path / "c.yaml"))
    config, notes = merge_configs(job(steps=[2]))
    assert config.steps.to_list() == [9]
    assert config.roles["trainer"].ranks == "all"
    assert config.roles["rollout"].backend == "vllm"  # not set by profdeck's config
    assert str(config.output) == str(Path("outputs/profile").absolute())
    assert notes == [
        "global_profiler.steps=[2] has no effect: profdeck's steps is [9].",
        "actor_rollout_ref.actor.profiler.ranks=[0] has no effect: profdeck's trainer.ranks is 'all'.",
    ]


def test_finish_hook_receives_the_output_directory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFDECK__OUTPUT", str(tmp_path / "o'clock"))
    config, _ = merge_configs(
        job(steps=[2], save_path="/data/traces", finish_hook_cmd='echo "$VERL_PROFILE_SAVE_PATH"')
    )
    assert config.finish.command is not None
    said = subprocess.run(["/bin/sh", "-c", config.finish.command], check=True, capture_output=True, text=True).stdout
    assert said == f"{tmp_path}/o'clock\n"


@pytest.mark.parametrize(("discrete", "repeat"), [(True, 0), (False, 1)])
def test_unlimited_schedule_repeats_like_verl(discrete: bool, repeat: int) -> None:
    config, _ = merge_configs(
        job(steps=[2], tool={"discrete": discrete, "schedule": {"active": 2, "wait": 1, "repeat": 0}})
    )
    window = config.roles["trainer"].window
    assert window is not None
    assert (window.active, window.wait, window.repeat) == (2, 1, repeat)


def test_disabled_worker_records_nothing() -> None:
    config = job(steps=[2])
    config["actor_rollout_ref"]["actor"]["profiler"]["enable"] = False
    found, notes = merge_configs(config)
    assert found.roles == {}
    assert notes[0].startswith(
        "nothing is recorded: profdeck's config has no roles, and no profiler in verl's config is"
    )


def test_a_wrong_value_is_named() -> None:
    with pytest.raises(ConfigError, match="steps"):
        merge_configs(job(steps=[-3]))
