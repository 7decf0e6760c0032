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


def build_verl_config(
    *, tool: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **profiler: Any
) -> dict[str, Any]:
    """Return a verl config with verl's default keys."""
    enabled = {"enable": True, "all_ranks": False, "ranks": [], "tool_config": {"torch": TORCH | (tool or {})}}
    disabled = {"enable": False, "all_ranks": False, "ranks": [], "tool_config": {}}
    global_options = {
        "steps": None,
        "profile_continuous_steps": False,
        "save_path": "outputs/profile",
        "finish_hook_cmd": None,
    }
    return {
        "global_profiler": global_options | profiler,
        "actor_rollout_ref": {
            "actor": {"profiler": enabled},
            "ref": {"profiler": disabled},
            "rollout": {"name": "vllm", "profiler": disabled | (rollout or {})},
        },
        "critic": {"profiler": disabled},
        "trainer": {"device": "cuda"},
    }


def test_verl_options_are_converted() -> None:
    config, notes = merge_configs(
        build_verl_config(
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


def test_keys_of_newer_verl_versions_are_converted() -> None:
    keys = {"step_start": 5, "step_end": 8, "profile_by_stage": True, "merge_profiles": False, "with_stack": True}
    config, _ = merge_configs(build_verl_config(rollout={"enable": True, "ranks": [8]}, **keys))
    assert config.steps.to_list() == ["5..8"]
    assert config.roles["rollout"].ranks == (8,)
    assert config.roles["rollout"].options == {"profile_by_stage": True, "merge_profiles": False, "with_stack": True}


def test_discrete_mode_and_npu_options_are_converted() -> None:
    config = build_verl_config(steps=[1])
    config["trainer"]["device"] = "npu"
    npu = {"contents": ["npu", "cpu"], "level": "level1", "analysis": False, "discrete": True}
    config["actor_rollout_ref"]["actor"]["profiler"]["tool_config"] = {"npu": npu}
    merged, _ = merge_configs(config)
    assert merged.mode is Mode.DISCRETE
    assert (merged.roles["trainer"].backend, merged.roles["trainer"].options) == (
        "npu", {"level": "level1", "analyse": False},
    )  # fmt: skip


def test_profdeck_config_takes_precedence_with_notes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text(
        "steps: [9]\nroles: {trainer: {backend: torch, ranks: all}, rollout: {iterations: {count: 3}}}\n"
    )
    monkeypatch.setenv("PROFDECK_CONFIG", str(tmp_path / "c.yaml"))
    config, notes = merge_configs(build_verl_config(steps=[2]))
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
        build_verl_config(steps=[2], save_path="/data/traces", finish_hook_cmd='echo "$VERL_PROFILE_SAVE_PATH"')
    )
    assert config.finish.command is not None
    output = subprocess.run(["/bin/sh", "-c", config.finish.command], check=True, capture_output=True, text=True).stdout
    assert output == f"{tmp_path}/o'clock\n"


@pytest.mark.parametrize(("discrete", "repeat"), [(True, 0), (False, 1)])
def test_unlimited_schedule_repeats_like_verl(discrete: bool, repeat: int) -> None:
    config, _ = merge_configs(
        build_verl_config(steps=[2], tool={"discrete": discrete, "schedule": {"active": 2, "wait": 1, "repeat": 0}})
    )
    window = config.roles["trainer"].window
    assert window is not None
    assert (window.active, window.wait, window.repeat) == (2, 1, repeat)


def test_disabled_worker_records_nothing() -> None:
    config = build_verl_config(steps=[2])
    config["actor_rollout_ref"]["actor"]["profiler"]["enable"] = False
    merged, notes = merge_configs(config)
    assert merged.roles == {}
    assert notes[0].startswith(
        "nothing is recorded: profdeck's config has no roles, and no profiler in verl's config is"
    )


def test_invalid_value_is_named() -> None:
    with pytest.raises(ConfigError, match="steps"):
        merge_configs(build_verl_config(steps=[-3]))
