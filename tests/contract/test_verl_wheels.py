"""What the adapter for verl wraps and reads is there in released wheels, apart from what docs/how-to/verl.md says."""

from __future__ import annotations

import pytest

RELEASES = ["0.6.1", "0.7.1", "0.8.0", "0.9.0", "0.9.1"]
WITH_PLUGINS = RELEASES[3:]
WITH_V1 = RELEASES[3:]
WITH_ROLLOUTS = RELEASES[1:]
WITH_MINI_BATCHES = RELEASES[3:]

pytestmark = pytest.mark.parametrize("version", RELEASES)


@pytest.fixture
def wheel(code, version: str):
    return lambda path: code("verl", version, path)


def test_plugins_are_loaded_by_every_process(wheel, version: str) -> None:
    text = str(wheel("verl/__init__.py"))
    assert "VERL_USE_EXTERNAL_MODULES" in text
    assert ("_entry_points(group='verl.plugins')" in text) == (version in WITH_PLUGINS)
    assert ("""debug("Failed to load plugin '%s': %s",""" in text) == (version in WITH_PLUGINS)  # so a check is needed


def test_an_unknown_tool_does_nothing_and_all_goes_through_the_implementation(wheel, version: str) -> None:
    found = wheel("verl/utils/profiler/profile.py").classes
    profiler = found["DistProfiler"].functions
    assert profiler["__init__"].parameters[:3] == ["rank", "config", "tool_config"]
    text = str(profiler["__init__"])
    assert "self._impl = _NoOpProfiler()" in text
    assert "self._this_rank = " in text
    assert ("self._enable = " in text) == (version != "0.6.1")  # which asks its config, as trainers prepare it
    assert "self._impl" in str(profiler["start"])
    assert "self._impl" in str(profiler["stop"])
    assert "impl.annotate" in str(profiler["annotate"])
    assert ("step" in profiler) == (version in WITH_MINI_BATCHES)
    extension = found["DistProfilerExtension"].functions
    assert {"start_profile", "stop_profile"} <= extension.keys()
    assert "self.profiler.start(**kwargs)" in str(extension["start_profile"])


def test_a_trainer_is_given_its_config_first_and_says_its_step(wheel, version: str) -> None:
    trainer = wheel("verl/trainer/ppo/ray_trainer.py").classes["RayPPOTrainer"].functions
    assert trainer["__init__"].parameters[0] == "config"
    assert trainer["_start_profiling"].parameters == ["do_profile"]
    assert "profile_step=self.global_steps" in str(trainer["_start_profiling"])
    assert trainer["_stop_profiling"].parameters[0] == "do_profile"
    assert "self.global_steps in self.config.global_profiler.steps" in str(trainer["fit"])


def test_the_trainers_of_v1(wheel, version: str) -> None:
    if version not in WITH_V1:
        pytest.skip(f"verl {version} has no V1 trainers")
    trainer = wheel("verl/trainer/ppo/v1/trainer_base.py").classes["PPOTrainer"].functions
    assert trainer["__init__"].parameters == ["config"]
    assert trainer["_start_profiling"].parameters == trainer["_stop_profiling"].parameters == []
    assert "profile_step=self.global_steps" in str(trainer["_start_profiling"])
    assert "self.global_steps in self.config.global_profiler.steps" in str(trainer["fit"])


def test_rollout_servers_have_a_manager(wheel, version: str) -> None:
    if version not in WITH_ROLLOUTS:
        pytest.skip(f"verl {version} profiles no rollouts")
    path, name = ("verl/workers/rollout/llm_server.py", "LLMServerManager")
    if version == "0.7.1":
        path, name = ("verl/experimental/agent_loop/agent_loop.py", "AgentLoopManager")
    manager = wheel(path).classes[name].functions
    for method in ("start_profile", "stop_profile"):
        assert "self.rollout_replicas" in str(manager[method])
    assert "self.config = config" in str(manager["__init__"])
    replica = wheel("verl/workers/rollout/replica.py").classes["RolloutReplica"].functions["__init__"]
    for attribute in ("replica_rank", "world_size", "servers", "is_reward_model"):
        assert f"self.{attribute}" in str(replica)


def test_the_actors_of_servers_hold_the_engine(wheel, version: str) -> None:
    if version not in WITH_ROLLOUTS:
        pytest.skip(f"verl {version} profiles no rollouts")
    assert "self.engine = engine_client" in str(wheel("verl/workers/rollout/vllm_rollout/vllm_async_server.py"))
    assert "self.tokenizer_manager" in str(wheel("verl/workers/rollout/sglang_rollout/async_sglang_server.py"))


def test_a_trainer_for_sft_compares_its_step(wheel, version: str) -> None:
    if version == "0.6.1":
        pytest.skip(f"verl {version} profiles no fine-tuning")
    trainer = wheel("verl/trainer/sft_trainer.py").classes["SFTTrainer"]
    assert "self.start_profile_step" in str(trainer)
    assert "global_step == self.start_profile_step" in str(trainer.functions["fit"])
    assert "global_step == self.end_profile_step" in str(trainer.functions["fit"])


def test_the_driver_gives_its_actors_an_environment(wheel, version: str) -> None:
    module = wheel("verl/trainer/constants_ppo.py")
    given = version in {"0.9.0", "0.9.1"}
    assert module.functions["get_ppo_ray_runtime_env"].parameters == (["config"] if given else [])
    called = "get_ppo_ray_runtime_env(config)" if given else "get_ppo_ray_runtime_env()"
    assert called in str(wheel("verl/trainer/main_ppo.py"))
    assert ("OmegaConf.select(config, 'global_profiler.tool', default=None) == 'torch'" in str(module)) == (
        version == "0.9.1"
    )
