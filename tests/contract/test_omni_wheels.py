"""Tests for the vLLM-Omni interfaces that profdeck's plugin uses, run against each release.

docs/how-to/vllm.md lists the limitations of older releases.
"""

from __future__ import annotations

import pytest

RELEASES = ["0.18.0", "0.20.0", "0.22.0", "0.24.0", "0.26.0", "0.28.0", "0.30.0"]
WITH_STAGE = RELEASES[1:]
WITH_BATCHES = RELEASES[3:]
WITH_VLLM_PLUGINS = RELEASES[4:]
WITH_ENGINE_BASE = RELEASES[6:]

pytestmark = pytest.mark.parametrize("version", RELEASES)


@pytest.fixture
def wheel(code, version: str):
    return lambda path: code("vllm-omni", version, f"vllm_omni/{path}")


def test_diffusion_processes_load_plugins(wheel, version: str) -> None:
    plugins = wheel("plugins/__init__.py")
    assert plugins.has_literal("vllm_omni.general_plugins")
    loads_vllm_plugins = plugins["load_omni_general_plugins"].call("load_general_plugins") is not None
    assert loads_vllm_plugins == (version in WITH_VLLM_PLUGINS)
    worker_main = wheel("diffusion/worker/diffusion_worker.py")["WorkerProc.worker_main"]
    assert worker_main.call("load_omni_general_plugins") is not None


def test_workers_execute_requests_batches_and_steps(wheel, version: str) -> None:
    module = wheel("diffusion/worker/diffusion_worker.py")
    worker = module["DiffusionWorker"]
    assert worker.bases == []  # our vLLM plugin patches only subclasses of WorkerBase
    assert all(name in worker for name in ("execute_model", "execute_stepwise", "shutdown"))
    assert ("execute_model_batch" in worker) == (version in WITH_BATCHES)
    assert worker["__init__"].parameters[:3] == ["local_rank", "rank", "od_config"]
    for attribute in ("rank", "local_rank", "od_config", "device", "model_runner"):
        assert worker["__init__"].uses(f"self.{attribute}")
    # `getattr` finds a wrapper that the plugin sets on the instance.
    method = module["WorkerWrapperBase.execute_method"]
    assert method.values("func") == ["getattr(...)"]
    assert method.uses("self.worker")


def test_the_config_and_the_parallel_state_define_worker_ranks(wheel, version: str) -> None:
    config = wheel("diffusion/data.py")["OmniDiffusionConfig"]
    assert config.annotation("num_gpus") == "int | None"
    assert config.annotation("stage_id") == ("int" if version in WITH_STAGE else None)
    state = wheel("diffusion/distributed/parallel_state.py")
    assert "get_world_group" in state
    for name in ("data_parallel", "classifier_free_guidance", "sequence_parallel", "pipeline_parallel"):
        assert f"get_{name}_rank" in state
        assert f"get_{name}_world_size" in state


def test_workers_of_a_stage_can_be_called_through_the_engine(wheel, version: str) -> None:
    base = wheel("entrypoints/omni_base.py")["OmniBase"]
    assert all(name in base for name in ("num_stages", "start_profile", "stop_profile"))
    engine = (
        wheel("engine/omni_engine_base.py")["OmniEngineBase"]
        if version in WITH_ENGINE_BASE
        else wheel("engine/async_omni_engine.py")["AsyncOmniEngine"]
    )
    for owner in (wheel("entrypoints/async_omni.py")["AsyncOmni"], engine):
        assert {"method", "args", "stage_ids"} <= set(owner["collective_rpc"].parameters)


def test_profiler_file_names_contain_the_stage_and_the_rank(wheel, version: str) -> None:
    replica = "" if version == "0.18.0" else "_rep_{self.replica_id}"
    client = wheel("diffusion/stage_diffusion_client.py")
    assert client.has_literal(f"stage_{{self.stage_id}}{replica}_diffusion_{{}}")
    assert wheel("worker/base.py").has_literal("stage{stage_id}_rank{self.rank}_{}")
    file_name = "{filename}_rank{rank}.json" if version == "0.18.0" else "{stem}_rank{}{suffix}"
    assert wheel("profiler/omni_torch_profiler.py").has_literal(file_name)


def test_a_route_identifies_the_server(wheel, version: str) -> None:
    assert wheel("entrypoints/openai/api_server.py").decorated("router.get('/v1/videos')")
