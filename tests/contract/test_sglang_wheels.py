"""What the SGLang plugin hooks, reads and calls is there in the oldest supported release and in later ones."""

from __future__ import annotations

import pytest
from packaging.version import Version

# The oldest that is supported, and then releases of each kind; the last is the one that requirements/sglang.txt pins.
RELEASES = ["0.5.10", "0.5.11", "0.5.12", "0.5.13", "0.5.15", "0.5.20", "0.5.22", "0.5.23"]

# The releases that begin what the plugin has to tell apart.
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
    return wheel("managers/scheduler.py").classes["Scheduler"]


@pytest.fixture
def control(wheel, since):
    """What gives TokenizerManager its commands."""
    if since(PLUGINS):
        return wheel("managers/tokenizer_control_mixin.py").classes["TokenizerControlMixin"]
    return wheel("managers/tokenizer_communicator_mixin.py").classes["TokenizerCommunicatorMixin"]


def test_a_plugin_can_wrap_methods_and_see_that_it_did(wheel, since) -> None:
    if not since(PLUGINS):
        with pytest.raises(KeyError):
            wheel("plugins/__init__.py")
        return
    assert wheel("plugins/__init__.py").constants["GENERAL_PLUGINS_GROUP"] == "'sglang.srt.plugins'"
    found = wheel("plugins/hook_registry.py").classes
    assert {"AROUND", "AFTER"} <= found["HookType"].constants.keys()
    registry = found["HookRegistry"]
    assert registry.functions["register"].parameters == ["target", "hook", "hook_type", "source"]
    assert [argument.arg for argument in registry.functions["register"].node.args.kwonlyargs] == ["source"]
    assert "classmethod" in registry.functions["register"].decorators
    assert registry.fields["_patched"] == "set[str]"
    assert "cls._patched.add" in registry.functions["apply_hooks"].calls


def test_the_processes_load_plugins_before_they_make_what_is_wrapped(wheel, since) -> None:
    lines = wheel("managers/scheduler.py").functions["run_scheduler_process"].calls
    assert ("load_plugins" in lines) == since(PLUGINS)
    assert lines.get("load_plugins", 0) < lines["Scheduler"]
    lines = wheel("entrypoints/engine.py").classes["Engine"].functions["__init__"].calls
    assert ("load_plugins" in lines) == since(PLUGINS)
    # Until then an object that only a plugin can take must not be sent to the detokenizer: it ends at one.
    lines = wheel("managers/detokenizer_manager.py").functions["run_detokenizer_process"].calls
    assert ("load_plugins" in lines) == since(PLUGINS_IN_EVERY_PROCESS)
    lines = wheel("managers/data_parallel_controller.py").functions["run_data_parallel_controller_process"].calls
    assert ("load_plugins" in lines) == since(PLUGINS_IN_EVERY_PROCESS)


def test_the_profile_command_of_a_scheduler_is_one_method(wheel, scheduler, since) -> None:
    if since(PROFILER_MANAGER):
        found = wheel("managers/scheduler_components/profiler_manager.py").classes["SchedulerProfilerManager"]
        name, prefix = "_profile", "self.profiler_manager."
        # Looked up with each command, so that it does not matter when the class was patched.
        assert "(ProfileReq, lambda req: self.profiler_manager._profile(req))" in str(scheduler)
        assert "SchedulerProfilerManager" in scheduler.assigned["self.profiler_manager"]
    else:
        found = wheel("managers/scheduler_profiler_mixin.py").classes["SchedulerProfilerMixin"]
        name, prefix = "profile", "self."
        assert "(ProfileReq, self.profile)" in str(scheduler)
        assert "SchedulerProfilerMixin" in scheduler.bases
    assert found.functions[name].parameters == ["recv_req"]
    assert found.functions["_profile_batch_predicate"].parameters == ["batch"]
    assert f"{prefix}_profile_batch_predicate" in scheduler.functions["run_batch"].calls


def test_a_step_is_one_call_that_a_scheduler_counts(scheduler) -> None:
    assert scheduler.functions["__init__"].parameters[:2] == ["server_args", "port_args"]
    assert scheduler.functions["run_batch"].parameters == ["batch", "pp_proxy_tensors"]
    assert "self.forward_ct += 1" in str(scheduler.functions["run_batch"])
    assert scheduler.assigned["self.forward_ct"] == "0"


def test_a_scheduler_knows_its_ranks(wheel, scheduler, since) -> None:
    names = ["tp_rank", "pp_rank", "dp_rank", "moe_ep_rank"]
    if not since(PROFILER_MANAGER):
        assert {f"self.{name}" for name in names} <= scheduler.assigned.keys()
    elif not since(GLOBAL_RANKS):
        assert scheduler.assigned["self.ps"].startswith("ParallelState(")
        state = wheel("distributed/parallel_state_wrapper.py").classes["ParallelState"]
        assert set(names) <= state.fields.keys()
    else:
        assert "self.ps" not in scheduler.assigned
        assert "get_parallel().tp_rank" in str(scheduler)
        assert "get_parallel" in wheel("runtime_context.py").functions


def test_the_modes_of_a_batch_can_be_told_apart(wheel) -> None:
    mode = wheel("model_executor/forward_batch_info.py").classes["ForwardMode"]
    assert {"EXTEND", "DECODE", "MIXED", "IDLE", "TARGET_VERIFY", "PREBUILT"} <= mode.constants.keys()
    kinds = ["extend", "prefill", "decode", "mixed", "idle", "target_verify", "prebuilt"]
    # Some take arguments, which have defaults.
    needed = {kind: mode.functions[f"is_{kind}"].node.args for kind in kinds}
    assert all(len(found.args) - len(found.defaults) == 1 for found in needed.values())


def test_a_profile_command_and_its_answer_have_fields_that_we_know(wheel, since) -> None:
    found = wheel("managers/io_struct.py").classes
    first = "req_type" if since(STRUCTS) else "type"
    more = ["detailed_annotations"] * since(DETAILED_ANNOTATIONS)
    assert list(found["ProfileReq"].fields) == [first, *PROFILE_FIELDS, *more]
    assert found["ProfileReqOutput"].fields == {"success": "bool", "message": "str"}
    assert found["ProfileReq"].bases == found["ProfileReqOutput"].bases == ["BaseReq"]
    assert found["BaseReq"].bases == (["msgspec.Struct"] if since(STRUCTS) else ["ABC"])
    assert found["ProfileReq"].decorators == ([] if since(STRUCTS) else ["dataclass"])
    assert {"START_PROFILE", "STOP_PROFILE"} <= found["ProfileReqType"].constants.keys()


def test_the_front_end_sends_profile_commands_and_waits_for_all_replicas(wheel, control, since) -> None:
    manager = wheel("managers/tokenizer_manager.py").classes["TokenizerManager"]
    assert manager.bases[0] == control.node.name
    assert manager.functions["__init__"].parameters[:2] == ["server_args", "port_args"]
    assert manager.functions["auto_create_handle_loop"].parameters == []
    assert manager.functions["sigterm_watchdog"].is_async
    # The answer of the first replica alone decides.
    assert "(await self.profile_communicator(req))[0]" in str(control.functions["_execute_profile"])
    made = str(control.functions["init_communicators"])
    if not since(PLUGINS):
        assert "self.profile_communicator = _Communicator(self.send_to_scheduler, server_args.dp_size)" in made
        return
    assert "setattr(self, f'{name}_communicator', comm)" in made
    assert any(
        size in made for size in ("server_args.dp_size", "get_parallel().dp_size", "get_parallel().num_dp_ranks")
    )
    specifications = wheel("managers/tokenizer_control_mixin.py").constants["_COMMUNICATOR_SPECS"]
    assert "('profile', ProfileReqOutput)" in specifications
    communicator = wheel("managers/communicator.py").classes["FanOutCommunicator"]
    assert communicator.functions["__call__"].is_async
    assert communicator.assigned["self._fan_out"] == "fan_out"


def test_the_profiler_of_the_front_end_takes_what_we_give(wheel, control, since) -> None:
    start, stop = control.functions["start_profile"], control.functions["stop_profile"]
    assert start.is_async
    assert stop.is_async
    assert stop.parameters == []
    if since(STRUCTS):
        assert start.parameters == ["req"]
        assert "req.profile_id or" in str(start)
    else:
        # The name of a profile cannot be chosen.
        assert set(start.parameters) == set(PROFILE_FIELDS) - {"profile_id"}


def test_an_engine_has_what_we_call(wheel) -> None:
    engine = wheel("entrypoints/engine.py").classes["Engine"]
    assert engine.functions["start_profile"].node.args.kwarg.arg == "kwargs"
    assert engine.functions["start_profile"].parameters == engine.functions["stop_profile"].parameters == []
    assert engine.functions["shutdown"].parameters == []
    assert {"self.loop", "self.tokenizer_manager"} <= engine.assigned.keys()
    assert "self.loop.run_until_complete" in engine.functions["start_profile"].calls


def test_the_detokenizer_looks_up_what_it_gets_by_type(wheel, code, version: str) -> None:
    manager = wheel("managers/detokenizer_manager.py").classes["DetokenizerManager"]
    assert manager.functions["__init__"].parameters == ["server_args", "port_args"]
    assert manager.assigned["self._request_dispatcher"].startswith("TypeBasedDispatcher(")
    dispatcher = code("sglang", version, "sglang/utils.py").classes["TypeBasedDispatcher"]
    assert dispatcher.assigned["self._mapping"] == "OrderedDict(mapping)"
    # It answers nobody who asked for nothing.
    assert "if output is not None" in str(manager.functions["event_loop"])


def test_a_scheduler_can_send_to_the_detokenizer(wheel, scheduler, since) -> None:
    if since(PROFILER_MANAGER):
        assert "self.ipc_channels.send_to_detokenizer.send_output(recv_req, recv_req)" in str(scheduler)
        channels = wheel("managers/scheduler_components/ipc_channels.py").classes["SchedulerIpcChannels"]
        assert channels.fields["send_to_detokenizer"] == "SenderWrapper"
        wrapper = wheel("managers/scheduler_components/output_sender.py").classes["SenderWrapper"]
    else:
        assert "self.send_to_detokenizer.send_output(recv_req, recv_req)" in str(scheduler)
        wrapper = wheel("managers/scheduler.py").classes["SenderWrapper"]
    assert wrapper.functions["send_output"].parameters == ["output", "recv_obj"]
    # Ranks without a socket have a sender too, which sends nothing.
    assert "if self.socket is None:\n        return" in str(wrapper.functions["send_output"])


def test_steps_have_spans_with_names_that_we_read(wheel, since) -> None:
    runner = wheel("model_executor/model_runner.py")
    if not since(STEP_SPANS):
        assert "step_span" not in str(runner)
        return
    (called,) = [name for name in runner.calls if name.endswith("build_step_span_name")]
    (built,) = [
        str(module.functions[called])
        for module in (runner, wheel("utils/profile_utils.py"))
        if called in module.functions
    ]
    assert f"({called}(forward_batch" in str(runner)
    assert {"profile_range", "torch.profiler.record_function"} & runner.calls.keys()
    mode = "stage" if since(SPANS_OF_DRAFTS) else "mode.name"
    assert f"step[{{{mode}}} bs={{bs}}" in built
    assert "toks={ext_toks}" in built
    assert ("'VERIFY'" in built) == ("'DRAFT'" in built) == since(SPANS_OF_DRAFTS)


def test_the_server_is_one_app_that_tells_about_itself(wheel, since) -> None:
    server = wheel("entrypoints/http_server.py")
    assert server.constants["app"].startswith("FastAPI(")
    routes = {decorator: function for function in server.functions.values() for decorator in function.decorators}
    about = str(routes["app.get('/server_info')"])
    assert "'internal_states'" in about
    assert "'version'" in about
    assert "server_info" in routes["app.get('/get_server_info')"].calls
    start = routes["app.api_route('/start_profile', methods=['GET', 'POST'])"]
    assert "app.api_route('/stop_profile', methods=['GET', 'POST'])" in routes
    body = "ProfileReq" if since(STRUCTS) else "ProfileReqInput"
    assert f"Optional[{body}]" in str(start)
    fields = wheel("managers/io_struct.py").classes[body].fields.keys()
    assert set(PROFILE_FIELDS) - {"profile_id"} <= fields
    assert ("profile_id" in fields) == since(STRUCTS)
