"""What records in diffusion stages is there in released wheels, apart from what docs/how-to/omni.md says."""

from __future__ import annotations

import pytest

RELEASES = ["0.18.0", "0.20.0", "0.22.0", "0.24.0", "0.26.0", "0.28.0", "0.30.0"]
WITH_VLLM_PLUGINS = RELEASES[4:]
WITH_BATCHES = RELEASES[3:]
WITH_STAGE = RELEASES[1:]

pytestmark = pytest.mark.parametrize("version", RELEASES)


@pytest.fixture
def wheel(code, version: str):
    return lambda path: code("vllm-omni", version, path)


def test_processes_of_diffusion_stages_load_plugins(wheel, version: str) -> None:
    plugins = wheel("vllm_omni/plugins/__init__.py")
    assert "'vllm_omni.general_plugins'" in str(plugins)
    load = str(plugins.functions["load_omni_general_plugins"])
    assert ("load_general_plugins()" in load.replace("load_omni_general_plugins()", "")) == (
        version in WITH_VLLM_PLUGINS
    )
    worker = wheel("vllm_omni/diffusion/worker/diffusion_worker.py").classes["WorkerProc"].functions
    assert "load_omni_general_plugins()" in str(worker["worker_main"])


def test_workers_run_requests_batches_and_steps(wheel, version: str) -> None:
    module = wheel("vllm_omni/diffusion/worker/diffusion_worker.py").classes
    worker = module["DiffusionWorker"]
    assert worker.bases == []  # so vLLM's RPC method is not theirs
    assert {"execute_model", "execute_stepwise", "shutdown"} <= worker.functions.keys()
    assert ("execute_model_batch" in worker.functions) == (version in WITH_BATCHES)
    assert worker.functions["__init__"].parameters[:3] == ["local_rank", "rank", "od_config"]
    for attribute in ("rank", "local_rank", "od_config", "device", "model_runner"):
        assert f"self.{attribute}" in str(worker.functions["__init__"])
    # Wrappers on the instance are found, and any method can be called by its name.
    assert "func = getattr(self.worker, method)" in str(module["WorkerWrapperBase"].functions["execute_method"])


def test_the_place_of_a_worker_is_known(wheel, version: str) -> None:
    config = str(wheel("vllm_omni/diffusion/data.py").classes["OmniDiffusionConfig"])
    assert "num_gpus: int" in config
    assert ("stage_id: int" in config) == (version in WITH_STAGE)
    state = wheel("vllm_omni/diffusion/distributed/parallel_state.py").functions
    assert "get_world_group" in state
    for name in ("data_parallel", "classifier_free_guidance", "sequence_parallel", "pipeline_parallel"):
        assert {f"get_{name}_rank", f"get_{name}_world_size"} <= state.keys()


def test_a_pipeline_is_asked_by_stage(wheel, version: str) -> None:
    base = wheel("vllm_omni/entrypoints/omni_base.py").classes["OmniBase"].functions
    assert {"num_stages", "start_profile", "stop_profile"} <= base.keys()
    asynchronous = wheel("vllm_omni/entrypoints/async_omni.py").classes["AsyncOmni"].functions
    path, name = ("engine/omni_engine_base.py", "OmniEngineBase")
    if version in RELEASES[:6]:
        path, name = ("engine/async_omni_engine.py", "AsyncOmniEngine")
    engine = wheel(f"vllm_omni/{path}").classes[name].functions
    for function in (asynchronous["collective_rpc"], engine["collective_rpc"]):
        assert {"method", "args", "stage_ids"} <= set(function.parameters)


def test_its_own_profiler_names_stage_and_rank(wheel, version: str) -> None:
    text = str(wheel("vllm_omni/diffusion/stage_diffusion_client.py"))
    replica = "" if version == "0.18.0" else "_rep_{self.replica_id}"
    assert f"f'stage_{{self.stage_id}}{replica}_diffusion_{{int(time.time())}}'" in text
    assert "f'stage{stage_id}_rank{self.rank}_{int(time.time())}'" in str(wheel("vllm_omni/worker/base.py"))
    profiler = str(wheel("vllm_omni/profiler/omni_torch_profiler.py"))
    assert ("_rank{rank}.json" if version == "0.18.0" else "_rank{self._rank()}{suffix}") in profiler


def test_a_server_is_known_by_a_route(wheel, version: str) -> None:
    assert "router.get('/v1/videos'" in str(wheel("vllm_omni/entrypoints/openai/api_server.py"))
