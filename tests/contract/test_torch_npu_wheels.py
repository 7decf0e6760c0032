"""What the Ascend plugin calls and reads of torch_npu is there in the oldest supported release and in later ones.

Versions do not tell what is there: the last post-releases of an old line have the Python of the newest line, while its
first release has that of years ago. So the plugin asks signatures and never compares versions, and what differs is
written down here by release.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from profdeck.base.errors import ConfigError
from profdeck.base.structuring import structure
from profdeck_npu import NpuBackend, NpuOptions, experimental
from profdeck_npu.options import AicMetrics, Export, HostSystem, Level

ROOT = Path(__file__).parents[2]

# The oldest that is supported, the first of later lines, a post-release of an old line, the one that
# requirements/npu.txt pins, and the newest.
RELEASES = ["2.6.0", "2.7.1", "2.9.0", "2.10.0", "2.10.0.post7", "2.13.0", "2.14.0"]

# What the plugin has to tell apart, each time by asking for it.
WITHOUT_MSTX = {"2.6.0"}  # as an option; its older name is there
WITH_NAMES_IN_UTC = {"2.6.0"}
WITH_METRICS_FORCED_ON = {"2.6.0", "2.7.1", "2.9.0"}
WITH_LEVEL_NONE_OF_NOTHING = {"2.6.0", "2.7.1"}
WITH_BLOCK_DIM = {"2.6.0", "2.7.1", "2.9.0"}
WITHOUT_A_MARK_OF_THE_END = {"2.6.0", "2.7.1", "2.9.0"}
WITH_OLD_PYTHON = {"2.6.0", "2.7.1", "2.9.0", "2.10.0"}

CONFIG = [
    "profiler_level", "aic_metrics", "l2_cache", "msprof_tx", "mstx", "data_simplification", "record_op_args",
    "op_attr", "gc_detect_threshold", "export_type", "host_sys", "mstx_domain_include", "mstx_domain_exclude", "sys_io",
    "sys_interconnection",
]  # fmt: skip

pytestmark = pytest.mark.parametrize("version", RELEASES)


@pytest.fixture
def wheel(code, version: str):
    return lambda path: code("torch-npu", version, f"torch_npu/{path}")


@pytest.fixture
def profile(wheel):
    return wheel("profiler/profiler.py").classes["profile"]


@pytest.fixture
def interface(wheel):
    return wheel("profiler/profiler_interface.py").classes["_ProfInterface"]


@pytest.fixture
def config(wheel):
    return wheel("profiler/experimental_config.py").classes


@pytest.fixture
def constants(wheel):
    """The constants of the profiler, as Python values where they are any."""

    def value(text: str):
        try:
            return ast.literal_eval(text)
        except ValueError:
            return text

    found = wheel("profiler/analysis/prof_common_func/_constant.py").classes
    return {name: value(text) for part in ("Constant", "DbConstant") for name, text in found[part].constants.items()}


def defaults(function) -> dict[str, str]:
    """The default of each parameter that has one."""
    arguments = function.node.args
    given = [*zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)]
    given += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {argument.arg: ast.unparse(default) for argument, default in given if default is not None}


def raises(function) -> int:
    return len(function.of(ast.Raise))


# The object that records.


def test_the_profiler_takes_our_arguments(profile) -> None:
    made = profile.functions["__init__"]
    assert [argument.arg for argument in made.node.args.args] == ["self"]
    assert {
        "activities", "schedule", "on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops",
        "with_modules", "experimental_config",
    } <= set(made.parameters)  # fmt: skip
    # All of them can be left out, and none is on by itself.
    assert set(defaults(made).values()) == {"None", "False"}
    assert defaults(made).keys() == set(made.parameters)


def test_the_names_are_exported(wheel) -> None:
    module = wheel("profiler/__init__.py")
    assert set(ast.literal_eval(module.constants["__all__"])) >= {
        "profile", "ProfilerAction", "ProfilerActivity", "_ExperimentalConfig", "ProfilerLevel", "AiCMetrics",
        "ExportType", "HostSystem", "tensorboard_trace_handler",
    }  # fmt: skip
    assert "analyse" in ast.literal_eval(wheel("profiler/profiler.py").constants["__all__"])


def test_the_profiler_hides_what_goes_wrong(profile, wheel) -> None:
    # So the files are checked, and never what these return.
    for name in ("start", "step", "stop", "__del__"):
        assert "no_exception_func()" in profile.functions[name].decorators
    for name in ("tensorboard_trace_handler", "analyse"):
        assert "no_exception_func()" in wheel("profiler/profiler.py").functions[name].decorators
    hides = str(wheel("profiler/analysis/prof_common_func/_utils.py").functions["no_exception_func"])
    assert "except Exception as ex" in hides
    assert "print_error_msg(" in hides
    assert "[ERROR]" in str(wheel("profiler/analysis/prof_common_func/_constant.py").functions["print_error_msg"])


def test_the_profiler_can_be_called_without_what_hides_it(wheel) -> None:
    hides = wheel("profiler/analysis/prof_common_func/_utils.py").functions["no_exception_func"]
    assert "functools.wraps(func)" in hides.functions["wrapper"].decorators


def test_the_profiler_takes_what_it_is_told_about_a_capture(wheel) -> None:
    told = wheel("profiler/profiler.py").classes["_KinetoProfile"]
    assert told.functions["add_metadata_json"].parameters == ["key", "value"]
    assert "self.metadata[key] = json.loads(value)" in str(told.functions["add_metadata_json"])
    dumped = str(wheel("profiler/profiler_interface.py").classes["_ProfInterface"].functions["_dump_metadata"])
    assert "FileManager.create_json_file_by_path(metadata_path, self.metadata)" in dumped


def test_a_profile_that_records_can_be_seen(wheel, interface) -> None:
    creator = wheel("profiler/_profiler_path_creator.py").classes["ProfPathCreator"].functions
    assert creator["create_prof_dir"].assigned["self.is_prof_inited"] == "True"
    assert interface.functions["finalize_trace"].assigned["ProfPathCreator().is_prof_inited"] == "False"


def test_a_step_asks_the_schedule_for_its_number_and_goes_there(profile) -> None:
    assert profile.assigned["self.step_num"] == "0"
    assert profile.assigned["self.current_action"].startswith("self.schedule(self.step_num)")
    step = str(profile.functions["step"])
    order = [
        "prev_action = self.current_action",
        "self.step_num += 1",
        "self.current_action = self.schedule(self.step_num)",
        "self.action_controller.transit_action(prev_action, self.current_action)",
        "'ProfilerStep#' + str(self.step_num + self._step_num_offset)",
    ]
    places = [step.index(text) for text in order]
    assert places == sorted(places)
    start = str(profile.functions["start"])
    assert "transit_action(ProfilerAction.NONE, self.current_action)" in start
    assert "'ProfilerStep#' + str(self.step_num + self._step_num_offset)" in start


def test_an_end_by_a_step_leaves_nothing_to_stop(profile) -> None:
    assert profile.assigned["self.stopped"] == "True"  # at its stop; False before
    stop = profile.functions["stop"]
    assert "self.action_controller.transit_action(self.current_action, None)" in str(stop)
    # An object that was dropped stops by itself, unless it counts as stopped.
    assert re.search(
        r"if (not self\.stopped|self\.stopped == False):\s+self\.stop\(\)", str(profile.functions["__del__"])
    )


def test_the_schedule_is_any_callable(profile, wheel) -> None:
    assert "if schedule and isinstance(schedule, Callable):" in str(profile.functions["__init__"])
    actions = wheel("profiler/scheduler.py").classes["ProfilerAction"].constants
    assert list(actions) == ["NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE"]
    # Its attributes become JSON.
    interface = wheel("profiler/profiler_interface.py").classes["_ProfInterface"]
    assert "'schedule': _trans_obj2cfg(self.schedule)" in str(interface.functions["_dump_profiler_info"])


def test_the_transitions_do_what_we_count_on(wheel) -> None:
    controller = wheel("profiler/_profiler_action_controller.py").classes["ProfActionController"]
    (table,) = controller.functions["_init_action_map"].of(ast.Dict)
    prefix = "ProfilerAction."
    found = {
        ast.unparse(key).replace(prefix, ""): [ast.unparse(call).removeprefix("self.prof_inst.") for call in calls.elts]
        for key, calls in zip(table.keys, table.values, strict=True)
    }
    says = {pair: [call for call in calls if call.startswith("partial(")] for pair, calls in found.items()}
    does = {pair: [call for call in calls if not call.startswith("partial(")] for pair, calls in found.items()}
    assert does["(NONE, WARMUP)"] == ["init_trace", "warmup_trace"]
    assert does["(NONE, RECORD)"] == ["init_trace", "start_trace"]
    assert does["(WARMUP, RECORD)"] == ["start_trace"]
    assert does["(WARMUP, WARMUP)"] == does["(RECORD, RECORD)"] == does["(NONE, NONE)"] == []
    # The end of a window, in a step, and without a word.
    assert does["(RECORD_AND_SAVE, NONE)"] == ["stop_trace", "finalize_trace", "self._trace_ready"]
    assert says["(RECORD_AND_SAVE, NONE)"] == []
    # The end of a warm-up is whole in a step, and leaks what the driver was given in a stop.
    assert does["(WARMUP, NONE)"] == ["start_trace", "stop_trace", "finalize_trace"]
    assert does["(WARMUP, None)"] == ["finalize_trace", "delete_prof_dir"]
    # After a window a stop does nothing.
    assert "(NONE, None)" not in found


# Where it writes.


def test_the_directory_of_a_capture_is_known_after_its_start(interface) -> None:
    assert interface.assigned["self.prof_path"] == "ProfPathCreator().get_prof_dir()"
    lines = interface.functions["init_trace"].calls
    assert (
        lines["ProfPathCreator().create_prof_dir"] < lines["ProfPathCreator().get_prof_dir"] < lines["_init_profiler"]
    )


def test_the_handler_names_the_directory(wheel, constants, version: str) -> None:
    handler = wheel("profiler/profiler.py").functions["tensorboard_trace_handler"]
    assert handler.parameters == ["dir_name", "worker_name", "analyse_flag", "async_mode"]
    assert defaults(handler) == {
        "dir_name": "None",
        "worker_name": "None",
        "analyse_flag": "True",
        "async_mode": "False",
    }
    # One for the process, and no longer than this; a longer name is passed over.
    assert "ProfPathCreator().init(worker_name=worker_name, dir_name=dir_name)" in str(handler)
    creator = wheel("profiler/_profiler_path_creator.py").classes["ProfPathCreator"]
    assert creator.decorators == ["Singleton"]
    assert "len(worker_name) < Constant.MAX_WORKER_NAME_LENGTH" in str(creator.functions["init"])
    assert constants["MAX_WORKER_NAME_LENGTH"] == 226
    made = str(creator.functions["create_prof_dir"])
    assert "'{}_{}'.format(self._worker_name or socket.gethostname(), str(os.getpid()))" in made
    assert "'{}_{}_ascend_pt'.format(worker_name" in made
    assert "'%Y%m%d%H%M%S%f')[:-3]" in made
    assert ("utcnow" in made) == (version in WITH_NAMES_IN_UTC)


def test_paths_have_few_characters(wheel, version: str) -> None:
    paths = wheel("utils/_path_manager.py").classes["PathManager"]
    check = paths.functions["_input_path_common_check"]
    pattern = ast.literal_eval(check.assigned["pattern"])
    assert "re.fullmatch(pattern, path)" in str(check)
    assert re.fullmatch(pattern, "/profiles/run-1/step_000010/rank_0000.step10_4711_20260101000000000_ascend_pt")
    assert not re.fullmatch(pattern, "/profiles/run=1")
    # The old ones refuse, so there is no handler; the others only warn.
    assert bool(raises(check)) == (version in WITH_OLD_PYTHON)
    assert paths.constants["MAX_FILE_NAME_LENGTH"] == "255"


def test_the_raw_files_have_names_that_we_look_for(wheel, interface, constants) -> None:
    dumped = str(interface.functions["_dump_profiler_info"])
    assert "'profiler_info.json'" in dumped
    assert "f'profiler_info_{rank_id}.json'" in dumped
    assert "os.environ.get('RANK')" in dumped
    assert constants["PROFILER_META_DATA"] == "profiler_metadata.json"
    assert constants["FRAMEWORK_DIR"] == "FRAMEWORK"
    assert r"^torch\.op_range" in str(wheel("profiler/analysis/prof_config/_fwk_file_parser_config.py")).replace(
        "\\\\", "\\"
    )
    paths = wheel("profiler/analysis/prof_common_func/_path_manager.py").classes["ProfilerPathManager"].functions
    assert "'^PROF_\\\\d+_\\\\d+_[0-9a-zA-Z]+'" in str(paths["get_cann_path"])
    assert "'^device_\\\\d'" in str(paths["get_device_path"])


def test_the_analysis_can_be_told_what_was_recorded(constants, interface) -> None:
    dumped = str(interface.functions["_dump_profiler_info"])
    assert "Constant.COMMON_CONFIG: common_config" in dumped
    assert "Constant.EXPERIMENTAL_CONFIG: experimental_config" in dumped
    assert "'activities': list(map(str, list(self.activities)))" in dumped
    names = ("CONFIG", "COMMON_CONFIG", "EXPERIMENTAL_CONFIG", "PROFILER_LEVEL", "EXPORT_TYPE")
    assert [constants[name] for name in names] == [
        "config", "common_config", "experimental_config", "_profiler_level", "_export_type",
    ]  # fmt: skip


def test_the_device_is_waited_for_by_torch_npu_or_by_us(interface, version: str) -> None:
    waits = "torch.npu.synchronize" in interface.functions["stop_trace"].calls
    assert waits == (version not in WITH_OLD_PYTHON)


# What is asked for.


def test_the_config_takes_our_options(config, version: str) -> None:
    made = config["_ExperimentalConfig"].functions["__init__"]
    assert made.parameters == [name for name in CONFIG if name != "mstx" or version not in WITHOUT_MSTX]
    given = defaults(made)
    assert given["profiler_level"] == "Constant.LEVEL0"
    # The plugin gives all of them, since these differ.
    metrics = "Constant.AicMetricsNone" if version in WITH_METRICS_FORCED_ON else "Constant.AicPipeUtilization"
    assert given["aic_metrics"] == metrics
    assert given["export_type"] == ("None" if version in WITH_METRICS_FORCED_ON else "ExportType.Text")
    assert given["data_simplification"] == "True"
    assert {given[name] for name in ("l2_cache", "op_attr", "record_op_args", "sys_io", "sys_interconnection")} == {
        "False"
    }


def test_the_config_keeps_what_it_was_given_under_one_name(config) -> None:
    """So that the plugin can see what torch_npu has reset."""
    kept = config["_ExperimentalConfig"].functions["__init__"]
    names = {name for name in kept.assigned if name.startswith("self.")}
    expected = {f"self.{name}" if name == "record_op_args" else f"self._{name}" for name in kept.parameters}
    assert names == expected


def test_the_config_resets_what_it_does_not_like(config, version: str) -> None:
    own = config["_ExperimentalConfig"].functions
    reset = str(own["_check_params"])
    assert "self._aic_metrics = Constant.AicMetricsNone" in reset
    assert "self._op_attr = False" in reset
    assert ("self._mstx = True" in reset) == (version not in WITH_LEVEL_NONE_OF_NOTHING)
    # No metrics at a level that has them is not possible in the old ones.
    forced = "self._aic_metrics == Constant.AicMetricsNone" in str(own["__init__"])
    assert forced == (version in WITH_METRICS_FORCED_ON)
    assert not raises(config["_ExperimentalConfig"])


def test_the_constants_are_there(config, constants, interface, version: str) -> None:
    def values(name: str) -> dict[str, str]:
        found = config[name].constants.items()
        return {member: constants[value.removeprefix("Constant.")] for member, value in found}

    assert values("ProfilerLevel") == {
        "Level0": "Level0", "Level1": "Level1", "Level2": "Level2", "Level_none": "Level_none",
    }  # fmt: skip
    assert values("AiCMetrics").keys() == {
        "PipeUtilization", "ArithmeticUtilization", "Memory", "MemoryL0", "MemoryUB", "ResourceConflictRatio",
        "L2Cache", "MemoryAccess", "AiCoreNone",
    }  # fmt: skip
    assert values("ExportType") == {"Db": "db", "Text": "text"}
    host = {"CPU": "cpu", "MEM": "mem", "DISK": "disk", "NETWORK": "network", "OSRT": "osrt"}
    assert values("HostSystem") == host | ({} if version in WITH_OLD_PYTHON else {"NUMA": "numa"})
    # The activities are C++; what its own Python asks of them is there.
    assert {"ProfilerActivity.CPU", "ProfilerActivity.NPU"} <= set(re.findall(r"ProfilerActivity\.\w+", str(interface)))


@pytest.fixture
def experimental_config(source, version: str) -> SimpleNamespace:
    """The module of this name, which runs with nothing around it but constants; `warned` is what it printed."""
    warned: list[str] = []
    around = {
        "CannPackageManager": SimpleNamespace(is_support_default_export_db=lambda: False),
        "print_info_msg": warned.append,
        "print_warn_msg": warned.append,
        "os": os,
        "warnings": warnings,
    }
    for path in ("analysis/prof_common_func/_constant.py", "experimental_config.py"):
        tree = source("torch-npu", version, f"torch_npu/profiler/{path}")
        classes = ast.Module([node for node in tree.body if isinstance(node, ast.ClassDef)], [])
        code = compile(classes, path, "exec", flags=annotations.compiler_flag)
        exec(code, around)  # noqa: S102  # what is tested
    return SimpleNamespace(**around, warned=warned)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"level": "level0"},
        {"level": "level_none", "mstx": True, "mstx_domain_exclude": ["communication", "other"]},
        {"level": "level2", "aic_metrics": "MemoryUB", "l2_cache": True, "op_attr": True, "export": ["db", "text"]},
        {"mstx": True, "mstx_domain_include": ["b", "a"], "record_op_args": True, "data_simplification": False},
        {"sys_io": True, "sys_interconnection": True, "host_sys": ["osrt", "cpu"], "gc_detect_threshold_ms": 2.5},
    ],
    ids=str,
)
def test_it_takes_our_options_as_they_are(experimental_config, version: str, given: dict[str, Any]) -> None:
    options = structure(given, NpuOptions, where="options")
    config = experimental.experimental_config(options, experimental_config, version)
    assert experimental_config.warned == []
    assert config._profiler_level == {"level_none": "Level_none"}.get(options.level, str(options.level).capitalize())
    assert config._aic_metrics == getattr(experimental_config.AiCMetrics, str(options.aic_metrics))
    assert config._l2_cache == options.l2_cache
    assert config._op_attr == options.op_attr
    assert config.record_op_args == options.record_op_args
    assert config._data_simplification == options.data_simplification
    assert (config._msprof_tx if version in WITHOUT_MSTX else config._mstx) == options.mstx
    assert sorted(config._mstx_domain_include) == sorted(options.mstx_domain_include)
    assert sorted(config._mstx_domain_exclude) == sorted(options.mstx_domain_exclude)
    assert (config._sys_io, config._sys_interconnection) == (options.sys_io, options.sys_interconnection)
    assert sorted(config._host_sys) == sorted(options.host_sys)
    assert config._gc_detect_threshold == options.gc_detect_threshold_ms
    assert sorted(config._export_type) == sorted(options.export)


@pytest.mark.parametrize(
    ("given", "unable", "text"),
    [
        ({"host_sys": ["numa"]}, WITH_OLD_PYTHON, "options.host_sys: NUMA: torch_npu {} does not have it"),
        ({"aic_metrics": "AiCoreNone"}, WITH_METRICS_FORCED_ON, "options.aic_metrics: torch_npu {} takes "),
    ],
    ids=["host_sys", "aic_metrics"],
)
def test_what_it_cannot_do_is_refused(
    experimental_config, version: str, given: dict[str, Any], unable: set[str], text: str
) -> None:
    options = structure(given, NpuOptions, where="options")
    if version in unable:
        with pytest.raises(ConfigError, match=re.escape(text.format(version))):
            experimental.experimental_config(options, experimental_config, version)
    else:
        experimental.experimental_config(options, experimental_config, version)
        assert experimental_config.warned == []


def test_our_words_stand_for_its_constants(config, version: str) -> None:
    assert {str(metric) for metric in AicMetrics} == set(config["AiCMetrics"].constants)
    assert {kind.capitalize() for kind in Export} == set(config["ExportType"].constants)
    assert len(Level) == len(config["ProfilerLevel"].constants)
    numa = {"NUMA"} if version in WITH_OLD_PYTHON else set()
    assert {part.upper() for part in HostSystem} - numa == set(config["HostSystem"].constants)


def test_our_limit_of_names_is_its_own(constants) -> None:
    text = (ROOT / "plugins" / "profdeck_npu" / "recorder.py").read_text()  # which imports torch_npu
    ours = dict(re.findall(r"^(_\w+_LIMIT) = (\d+)$", text, re.MULTILINE))
    assert int(ours["_WORKER_LIMIT"]) < constants["MAX_WORKER_NAME_LENGTH"]
    assert int(ours["_NAME_LIMIT"]) == constants["MAX_FILE_NAME_LENGTH"]


def test_the_variables_that_turn_it_off_are_those_we_look_for(wheel, interface, constants, version: str) -> None:
    checks = "self._is_env_valid" in interface.assigned
    assert checks == (version not in WITH_OLD_PYTHON)
    if checks:
        assert (constants["MSPROF_STATIC_ENV"], constants["MSPROF_DYNAMIC_ENV"]) == (
            "PROFILER_SAMPLECONFIG",
            "PROFILING_MODE",
        )
        assert "if not self._is_env_valid:\n        return" in str(interface.functions["start_trace"])
    hooked = str(wheel("profiler/_non_intrusive_profile.py").classes["_NonIntrusiveProfile"].functions["init"])
    for name in ("PROF_CONFIG_PATH", "MSMONITOR_USE_DAEMON", "KINETO_USE_DAEMON"):
        assert f"os.getenv('{name}'" in hooked
    assert "dyno_enable_flag != 1" in hooked


def test_ranges_of_mstx_take_a_stream(wheel) -> None:
    ranges = wheel("npu/mstx.py").classes["mstx"].functions
    assert ranges["range_start"].parameters == ["message", "stream", "domain"]
    assert defaults(ranges["range_start"]) == {"stream": "None", "domain": "'default'"}
    assert ranges["range_end"].parameters == ["range_id", "domain"]
    assert defaults(ranges["range_end"]) == {"domain": "'default'"}
    assert "staticmethod" in ranges["range_start"].decorators


# Analysis.


def test_the_analysis_takes_our_arguments(wheel) -> None:
    analyse = wheel("profiler/profiler.py").functions["analyse"]
    assert analyse.parameters == ["profiler_path", "max_process_number", "export_type"]
    assert defaults(analyse) == {"max_process_number": "Constant.DEFAULT_PROCESS_NUMBER", "export_type": "None"}


def test_the_analysis_forks_and_does_nothing_in_a_daemon(wheel, constants) -> None:
    run = str(wheel("profiler/analysis/_npu_profiler.py").classes["NpuProfiler"].functions["analyse"])
    assert "if multiprocessing.current_process().daemon:" in run
    assert "multiprocessing.set_start_method('fork', force=True)" in run
    # None on a machine of one core.
    assert constants["DEFAULT_PROCESS_NUMBER"] == "os.cpu_count() // 2"


def test_the_analysis_says_that_it_is_done_whatever_happened(wheel, version: str) -> None:
    parser = wheel("profiler/analysis/_profiling_parser.py").classes["ProfilingParser"]
    assert re.search(
        r"try:\n\s+self\.run_parser\(\)\n\s+except Exception", str(parser.functions["analyse_profiling_data"])
    )
    says = "generate_parser_done_file" in parser.functions
    assert says == (version not in WITHOUT_A_MARK_OF_THE_END)


def test_the_results_have_names_that_we_read(wheel, constants) -> None:
    assert constants["OUTPUT_DIR"] == "ASCEND_PROFILER_OUTPUT"
    assert constants["DB_ASCEND_PYTORCH_PROFILER"] == "ascend_pytorch_profiler.db"
    views = {
        "_trace_view_parser.py": ("TraceViewParser", "TRACE_VIEW", "trace_view.json"),
        "_kernel_view_parser.py": ("KernelViewParser", "KERNEL_VIEW", "kernel_details.csv"),
        "_trace_step_time_parser.py": ("TraceStepTimeParser", "STEP_TRACE", "step_trace_time.csv"),
        "_communication_parser.py": ("CommunicationParser", "COMMUNICATION", "communication.json"),
    }
    for path, (parser, name, file) in views.items():
        found = wheel(f"profiler/analysis/prof_view/{path}").classes[parser].constants
        assert ast.literal_eval(found[name]) == file
    assert "f'ascend_pytorch_profiler_{ProfilerConfig().rank_id}.db'" in str(
        wheel("profiler/analysis/prof_view/prof_db_parse/_db_parser.py")
    )


def test_the_tables_have_columns_that_we_read(wheel, version: str) -> None:
    headers = wheel("profiler/analysis/prof_common_func/_csv_headers.py").classes["CsvHeaders"].constants
    blocks = "Block Dim" if version in WITH_BLOCK_DIM else "Block Num"
    assert ast.literal_eval(headers["OP_SUMMARY_KERNEL_BASE_HEADERS"]) == [
        "Device_id", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)", "Wait Time(us)", blocks,
    ]  # fmt: skip
    kernels = wheel("profiler/analysis/prof_view/_kernel_view_parser.py").classes["KernelViewParser"]
    assert "['Step Id'] + output_headers if self.step_range else output_headers" in str(kernels)
    steps = wheel("profiler/analysis/prof_view/_trace_step_time_parser.py").classes["TraceStepTimeParser"].constants
    assert ast.literal_eval(steps["title"]) == [
        "Device_id", "Step", "Computing", "Communication(Not Overlapped)", "Overlapped", "Communication", "Free",
        "Stage", "Bubble", "Communication(Not Overlapped and Exclude Receive)", "Preparing",
    ]  # fmt: skip
    groups = wheel("profiler/analysis/prof_view/_communication_parser.py").classes["CommunicationParser"].constants
    assert {name: ast.literal_eval(groups[name]) for name in ("P2P", "COLLECTIVE", "COMMUNICATION_TIME_INFO")} == {
        "P2P": "p2p", "COLLECTIVE": "collective", "COMMUNICATION_TIME_INFO": "Communication Time Info",
    }  # fmt: skip


# What is installed.


def test_torch_loads_it_whether_it_is_used_or_not(wheel) -> None:
    """Without CANN that fails, and `import torch` with it; after that the switch of torch is off in the environment."""
    module = wheel("__init__.py")
    assert "_autoload" in module.functions
    assert "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = ORG_AUTOLOAD" in str(module.functions["_autoload"])
    assert module.constants["ORG_AUTOLOAD"] == "os.getenv('TORCH_DEVICE_BACKEND_AUTOLOAD', '1')"
    assert module.constants["os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD']"] == "'0'"


def test_the_release_is_in_the_range_that_the_backend_declares(version: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = project["project"]["optional-dependencies"]["npu"]
    assert version in SpecifierSet(NpuBackend.libraries[0].versions)
    assert version in SpecifierSet(requirement.removeprefix("torch-npu"))
