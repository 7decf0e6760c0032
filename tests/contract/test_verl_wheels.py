"""Tests for the verl interfaces that profdeck's adapter wraps or reads, run against each release.

docs/how-to/frameworks.md lists the limitations of older releases.
"""

from __future__ import annotations

import pytest

RELEASES = ["0.6.1", "0.7.1", "0.8.0", "0.9.0", "0.9.1"]
WITH_ROLLOUTS = RELEASES[1:]
WITH_SFT = RELEASES[1:]
WITH_PLUGINS = RELEASES[3:]
WITH_V1 = RELEASES[3:]
WITH_MINI_BATCHES = RELEASES[3:]
WITH_RUNTIME_ENV_CONFIG = RELEASES[3:]
WITH_TOOL_IN_RUNTIME_ENV = RELEASES[4:]


def releases(versions: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("version", versions)


@pytest.fixture
def wheel(code, version: str):
    return lambda path: code("verl", version, f"verl/{path}")


@releases(RELEASES)
def test_every_process_loads_plugins(wheel, version: str) -> None:
    package = wheel("__init__.py")
    assert package.has_literal("VERL_USE_EXTERNAL_MODULES")
    assert package.has_literal("verl.plugins") == (version in WITH_PLUGINS)
    # verl only logs a plugin that fails to load, so `profdeck check` must report it.
    assert package.has_literal("Failed to load plugin '%s': %s") == (version in WITH_PLUGINS)


@releases(RELEASES)
def test_an_unknown_tool_uses_the_no_op_profiler(wheel, version: str) -> None:
    module = wheel("utils/profiler/profile.py")
    profiler = module["DistProfiler"]
    assert profiler["__init__"].parameters[:3] == ["rank", "config", "tool_config"]
    assert "_NoOpProfiler()" in profiler["__init__"].values("self._impl")
    assert profiler["__init__"].values("self._this_rank")
    # In 0.6.1, trainers set the flag in the config.
    assert profiler["__init__"].values("self._enable") == ([] if version == "0.6.1" else ["config.enable"])
    assert profiler["start"].uses("self._impl")
    assert profiler["stop"].uses("self._impl")
    assert profiler["annotate"].uses("impl.annotate")
    assert ("step" in profiler) == (version in WITH_MINI_BATCHES)
    extension = module["DistProfilerExtension"]
    assert extension["start_profile"].call("self.profiler.start") is not None
    assert "stop_profile" in extension


@releases(RELEASES)
def test_the_trainer_stores_its_config_and_passes_its_step(wheel) -> None:
    trainer = wheel("trainer/ppo/ray_trainer.py")["RayPPOTrainer"]
    assert trainer["__init__"].parameters[0] == "config"
    assert trainer["_start_profiling"].parameters == ["do_profile"]
    assert trainer["_start_profiling"].keyword("profile_step") == ["self.global_steps"]
    assert trainer["_stop_profiling"].parameters[0] == "do_profile"
    assert trainer["fit"].uses("self.global_steps")
    assert trainer["fit"].uses("self.config.global_profiler.steps")


@releases(WITH_V1)
def test_the_v1_trainer_stores_its_config_and_passes_its_step(wheel) -> None:
    trainer = wheel("trainer/ppo/v1/trainer_base.py")["PPOTrainer"]
    assert trainer["__init__"].parameters == ["config"]
    assert trainer["_start_profiling"].parameters == trainer["_stop_profiling"].parameters == []
    assert trainer["_start_profiling"].keyword("profile_step") == ["self.global_steps"]
    assert trainer["fit"].uses("self.global_steps")
    assert trainer["fit"].uses("self.config.global_profiler.steps")


@releases(WITH_ROLLOUTS)
def test_rollout_servers_have_a_manager(wheel, version: str) -> None:
    manager = (
        wheel("experimental/agent_loop/agent_loop.py")["AgentLoopManager"]
        if version == "0.7.1"
        else wheel("workers/rollout/llm_server.py")["LLMServerManager"]
    )
    for method in ("start_profile", "stop_profile"):
        assert manager[method].uses("self.rollout_replicas")
    assert "config" in manager["__init__"].values("self.config")
    replica = wheel("workers/rollout/replica.py")["RolloutReplica.__init__"]
    for attribute in ("replica_rank", "world_size", "servers", "is_reward_model"):
        assert replica.uses(f"self.{attribute}")


@releases(WITH_ROLLOUTS)
def test_server_actors_hold_the_engine(wheel) -> None:
    assert "engine_client" in wheel("workers/rollout/vllm_rollout/vllm_async_server.py").values("self.engine")
    assert wheel("workers/rollout/sglang_rollout/async_sglang_server.py").uses("self.tokenizer_manager")


@releases(WITH_SFT)
def test_the_sft_trainer_compares_its_step_with_the_profiled_steps(wheel) -> None:
    fit = wheel("trainer/sft_trainer.py")["SFTTrainer.fit"]
    for name in ("global_step", "self.start_profile_step", "self.end_profile_step"):
        assert fit.uses(name)


@releases(RELEASES)
def test_the_driver_sets_the_environment_of_its_actors(wheel, version: str) -> None:
    module = wheel("trainer/constants_ppo.py")
    parameters = ["config"] if version in WITH_RUNTIME_ENV_CONFIG else []
    assert module["get_ppo_ray_runtime_env"].parameters == parameters
    assert wheel("trainer/main_ppo.py").call("get_ppo_ray_runtime_env") is not None
    assert module.has_literal("global_profiler.tool") == (version in WITH_TOOL_IN_RUNTIME_ENV)
