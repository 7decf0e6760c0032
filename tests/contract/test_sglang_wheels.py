"""Tests of the SGLang interfaces that the plugin patches, reads and calls."""

from __future__ import annotations

import pytest
from packaging.version import Version

# The first entry is the oldest supported release. requirements/sglang.txt pins the last entry.
RELEASES = ["0.5.10", "0.5.11", "0.5.12", "0.5.13", "0.5.15", "0.5.20", "0.5.22", "0.5.23"]

# First release with each feature that the plugin detects.
PLUGINS = "0.5.11"
STEP_SPANS = "0.5.11"
PROFILER_MANAGER = "0.5.13"
STRUCTS = "0.5.15"
DETAILED_ANNOTATIONS = "0.5.19"
SPANS_OF_DRAFTS = "0.5.20"
GLOBAL_RANKS = "0.5.21"
PLUGINS_IN_EVERY_PROCESS = "0.5.22"

PROFILE_FIELDS = [
    "output_dir", "start_step", "num_steps", "activities", "profile_by_stage", "with_stack", "record_shapes",
    "profile_id", "merge_profiles", "profile_prefix", "profile_stages",
]  # fmt: skip

pytestmark = pytest.mark.parametrize("version", RELEASES)


@pytest.fixture
def since(version: str):
    return lambda first: Version(version) >= Version(first)


@pytest.fixture
def wheel(code, version: str):
    return lambda path: code("sglang", version, f"sglang/srt/{path}")


@pytest.fixture
def scheduler(wheel):
    return wheel("managers/scheduler.py")["Scheduler"]


@pytest.fixture
def control(wheel, since):
    """Return the mixin class that implements the commands of TokenizerManager."""
    if since(PLUGINS):
        return wheel("managers/tokenizer_control_mixin.py")["TokenizerControlMixin"]
    return wheel("managers/tokenizer_communicator_mixin.py")["TokenizerCommunicatorMixin"]


def test_plugins_can_wrap_methods_and_verify_the_patch(wheel, since) -> None:
    if not since(PLUGINS):
        with pytest.raises(KeyError):
            wheel("plugins/__init__.py")
        return
    assert wheel("plugins/__init__.py").constant("GENERAL_PLUGINS_GROUP") == "'sglang.srt.plugins'"
    module = wheel("plugins/hook_registry.py")
    assert module["HookType"].constant("AROUND")
    assert module["HookType"].constant("AFTER")
    registry = module["HookRegistry"]
    assert registry["register"].parameters == ["target", "hook", "hook_type", "*", "source"]
    assert "classmethod" in registry["register"].decorators
    assert registry.annotation("_patched") == "set[str]"
    assert registry["apply_hooks"].call("cls._patched.add") is not None


def test_processes_load_plugins_before_they_create_the_patched_objects(wheel, since) -> None:
    scheduler = wheel("managers/scheduler.py")["run_scheduler_process"]
    engine = wheel("entrypoints/engine.py")["Engine.__init__"]
    for process in (scheduler, engine):
        assert (process.call("load_plugins") is not None) == since(PLUGINS)
    if since(PLUGINS):
        assert scheduler.call("load_plugins") < scheduler.call("Scheduler")
    # Without plugins, a detokenizer crashes if it receives an object of a plugin class.
    detokenizer = wheel("managers/detokenizer_manager.py")["run_detokenizer_process"]
    controller = wheel("managers/data_parallel_controller.py")["run_data_parallel_controller_process"]
    for process in (detokenizer, controller):
        assert (process.call("load_plugins") is not None) == since(PLUGINS_IN_EVERY_PROCESS)


def test_one_scheduler_method_handles_profile_commands(wheel, scheduler, since) -> None:
    if since(PROFILER_MANAGER):
        profiler = wheel("managers/scheduler_components/profiler_manager.py")["SchedulerProfilerManager"]
        name, prefix = "_profile", "self.profiler_manager."
        # The scheduler looks up `_profile` for each command, so the plugin can patch the class at any time.
        assert scheduler.call("self.profiler_manager._profile") is not None
        assert scheduler.values("self.profiler_manager") == ["SchedulerProfilerManager(...)"]
    else:
        profiler = wheel("managers/scheduler_profiler_mixin.py")["SchedulerProfilerMixin"]
        name, prefix = "profile", "self."
        assert scheduler.uses("self.profile")
        assert "SchedulerProfilerMixin" in scheduler.bases
    assert scheduler.uses("ProfileReq")
    assert profiler[name].parameters == ["recv_req"]
    assert profiler["_profile_batch_predicate"].parameters == ["batch"]
    assert scheduler["run_batch"].call(f"{prefix}_profile_batch_predicate") is not None


def test_the_scheduler_counts_one_call_per_step(scheduler) -> None:
    assert scheduler["__init__"].parameters[:2] == ["server_args", "port_args"]
    assert scheduler["run_batch"].parameters == ["batch", "pp_proxy_tensors"]
    assert scheduler["run_batch"].values("self.forward_ct") == ["+= 1"]
    assert "0" in scheduler.values("self.forward_ct")


def test_the_scheduler_knows_its_ranks(wheel, scheduler, since) -> None:
    names = ["tp_rank", "pp_rank", "dp_rank", "moe_ep_rank"]
    if not since(PROFILER_MANAGER):
        assert all(scheduler.values(f"self.{name}") for name in names)
    elif not since(GLOBAL_RANKS):
        assert scheduler.values("self.ps") == ["ParallelState(...)"]
        state = wheel("distributed/parallel_state_wrapper.py")["ParallelState"]
        assert all(state.annotation(name) for name in names)
    else:
        assert scheduler.values("self.ps") == []
        assert scheduler.uses("get_parallel().tp_rank")
        assert "get_parallel" in wheel("runtime_context.py")


def test_forward_modes_have_the_members_we_use(wheel) -> None:
    mode = wheel("model_executor/forward_batch_info.py")["ForwardMode"]
    for name in ("EXTEND", "DECODE", "MIXED", "IDLE", "TARGET_VERIFY", "PREBUILT"):
        assert mode.constant(name) is not None
    for kind in ("extend", "prefill", "decode", "mixed", "idle", "target_verify", "prebuilt"):
        method = mode[f"is_{kind}"]
        assert set(method.parameters) == method.defaults.keys()  # all parameters are optional


def test_profile_requests_and_replies_have_the_fields_we_use(wheel, since) -> None:
    module = wheel("managers/io_struct.py")
    request, reply = module["ProfileReq"], module["ProfileReqOutput"]
    first = "req_type" if since(STRUCTS) else "type"
    more = ["detailed_annotations"] * since(DETAILED_ANNOTATIONS)
    assert request.field_names == [first, *PROFILE_FIELDS, *more]
    assert reply.field_names == ["success", "message"]
    assert (reply.annotation("success"), reply.annotation("message")) == ("bool", "str")
    assert request.bases == reply.bases == ["BaseReq"]
    assert module["BaseReq"].bases == (["msgspec.Struct"] if since(STRUCTS) else ["ABC"])
    assert request.decorators == ([] if since(STRUCTS) else ["dataclass"])
    for name in ("START_PROFILE", "STOP_PROFILE"):
        assert module["ProfileReqType"].constant(name) is not None


def test_the_front_end_sends_profile_commands_to_all_replicas(wheel, control, since) -> None:
    manager = wheel("managers/tokenizer_manager.py")["TokenizerManager"]
    assert manager.bases[0] == control.symbol
    assert manager["__init__"].parameters[:2] == ["server_args", "port_args"]
    assert manager["auto_create_handle_loop"].parameters == []
    assert manager["sigterm_watchdog"].is_async
    assert control["_execute_profile"].call("self.profile_communicator") is not None
    init = control["init_communicators"]
    if not since(PLUGINS):
        assert init.values("self.profile_communicator") == ["_Communicator(...)"]
        assert init.uses("server_args.dp_size")
        return
    assert init.has_literal("{name}_communicator")
    assert any(
        init.uses(size) for size in ("server_args.dp_size", "get_parallel().dp_size", "get_parallel().num_dp_ranks")
    )
    communicator = wheel("managers/communicator.py")["FanOutCommunicator"]
    assert communicator["__call__"].is_async
    assert "fan_out" in communicator.values("self._fan_out")


@pytest.mark.wheels
def test_the_first_replica_decides_the_result_of_a_profile_command(wheel, control, since) -> None:
    assert "(await self.profile_communicator(req))[0]" in control["_execute_profile"].text
    if since(PLUGINS):
        assert "('profile', ProfileReqOutput)" in wheel("managers/tokenizer_control_mixin.py").text


def test_the_front_end_profiler_accepts_our_arguments(control, since) -> None:
    start, stop = control["start_profile"], control["stop_profile"]
    assert start.is_async
    assert stop.is_async
    assert stop.parameters == []
    if since(STRUCTS):
        assert start.parameters == ["req"]
        assert start.uses("req.profile_id")
    else:
        # Callers cannot set the profile ID.
        assert set(start.parameters) == set(PROFILE_FIELDS) - {"profile_id"}


def test_the_engine_has_the_methods_we_call(wheel) -> None:
    engine = wheel("entrypoints/engine.py")["Engine"]
    assert engine["start_profile"].parameters == ["**kwargs"]
    assert engine["stop_profile"].parameters == engine["shutdown"].parameters == []
    assert engine.values("self.loop")
    assert engine.values("self.tokenizer_manager")
    assert engine["start_profile"].call("self.loop.run_until_complete") is not None


def test_the_detokenizer_dispatches_by_type(wheel, code, version: str) -> None:
    manager = wheel("managers/detokenizer_manager.py")["DetokenizerManager"]
    assert manager["__init__"].parameters == ["server_args", "port_args"]
    assert manager.values("self._request_dispatcher") == ["TypeBasedDispatcher(...)"]
    dispatcher = code("sglang", version, "sglang/utils.py")["TypeBasedDispatcher"]
    assert "OrderedDict(...)" in dispatcher.values("self._mapping")


@pytest.mark.wheels
def test_the_detokenizer_sends_no_reply_for_none(wheel) -> None:
    assert "if output is not None" in wheel("managers/detokenizer_manager.py")["DetokenizerManager.event_loop"].text


def test_the_scheduler_can_send_to_the_detokenizer(wheel, scheduler, since) -> None:
    if since(PROFILER_MANAGER):
        assert scheduler.call("self.ipc_channels.send_to_detokenizer.send_output") is not None
        channels = wheel("managers/scheduler_components/ipc_channels.py")["SchedulerIpcChannels"]
        assert channels.annotation("send_to_detokenizer") == "SenderWrapper"
    else:
        assert scheduler.call("self.send_to_detokenizer.send_output") is not None


@pytest.fixture
def send_output(wheel, since):
    module = "managers/scheduler_components/output_sender.py" if since(PROFILER_MANAGER) else "managers/scheduler.py"
    return wheel(module)["SenderWrapper.send_output"]


def test_the_sender_accepts_our_arguments(send_output) -> None:
    assert send_output.parameters == ["output", "recv_obj"]


@pytest.mark.wheels
def test_a_sender_without_a_socket_sends_nothing(send_output) -> None:
    assert "if self.socket is None:\n        return" in send_output.text


def test_step_spans_have_the_names_we_parse(wheel, since) -> None:
    runner = wheel("model_executor/model_runner.py")
    name = "build_step_span_name" if since(SPANS_OF_DRAFTS) else "_build_step_span_name"
    assert (runner.call(name) is not None) == since(STEP_SPANS)
    if not since(STEP_SPANS):
        return
    assert runner.call("profile_range") is not None or runner.call("torch.profiler.record_function") is not None
    if since(SPANS_OF_DRAFTS):
        build = wheel("utils/profile_utils.py")[name]
        literals = ("DRAFT", "VERIFY", "step[{stage} bs={bs} toks={ext_toks}", "step[{stage} bs={bs}")
    else:
        build = runner[name]
        literals = ("step[EXTEND bs={bs} toks={ext_toks}]", "step[{mode.name} bs={bs}]")
    assert build.parameters[0] == "forward_batch"
    assert all(build.has_literal(literal) for literal in literals)


def test_the_server_has_the_routes_we_request(wheel, since) -> None:
    server = wheel("entrypoints/http_server.py")
    assert server.constant("app") == "FastAPI(...)"
    info = server[server.decorated("app.get('/server_info')")]
    assert info.has_literal("internal_states")
    assert info.has_literal("version")
    assert server[server.decorated("app.get('/get_server_info')")].call("server_info") is not None
    start, stop = (server[server.decorated(f"app.api_route('/{name}_profile')")] for name in ("start", "stop"))
    assert "app.api_route('/start_profile', methods=['GET', 'POST'])" in start.decorators
    assert "app.api_route('/stop_profile', methods=['GET', 'POST'])" in stop.decorators
    body = "ProfileReq" if since(STRUCTS) else "ProfileReqInput"
    assert f"Optional[{body}]" in start.annotation("obj")
    fields = set(wheel("managers/io_struct.py")[body].field_names)
    assert set(PROFILE_FIELDS) - {"profile_id"} <= fields
    assert ("profile_id" in fields) == since(STRUCTS)
