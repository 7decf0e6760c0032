"""Tests of the torch_npu interfaces that the Ascend plugin calls and reads.

The version does not determine the interface, because post-releases of old versions contain new Python code. The plugin
therefore inspects signatures instead of versions.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from profdeck_npu import NpuBackend
from profdeck_npu.options import AicMetrics, Export, HostSystem, Level

ROOT = Path(__file__).parents[2]

# The oldest supported release, a release with the new config and the old path checks, and the newest release. Other
# releases are redundant: 2.13.0 has the facts of 2.14.0, and 2.7.1, 2.9.0 and 2.10.0.post7 mix facts of these three.
RELEASES = ["2.6.0", "2.10.0", "2.14.0"]
WITH_OLD_CONFIG = {"2.6.0"}
WITH_OLD_PATHS = {"2.6.0", "2.10.0"}

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
    return wheel("profiler/profiler.py")["profile"]


@pytest.fixture
def interface(wheel):
    return wheel("profiler/profiler_interface.py")["_ProfInterface"]


@pytest.fixture
def config(wheel):
    return wheel("profiler/experimental_config.py")


@pytest.fixture
def constant(wheel):
    """Return a function that reads a profiler constant as a Python value."""
    module = wheel("profiler/analysis/prof_common_func/_constant.py")
    return lambda name, owner="Constant": ast.literal_eval(module[owner].constant(name))


# The profiler object.


def test_the_profiler_accepts_our_arguments(profile) -> None:
    init = profile["__init__"]
    keyword_only, *names = init.parameters
    assert keyword_only == "*"
    assert {
        "activities", "schedule", "on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops",
        "with_modules", "experimental_config",
    } <= set(names)  # fmt: skip
    # All arguments are optional and off by default.
    assert init.defaults.keys() == set(names)
    assert set(init.defaults.values()) == {"None", "False"}


def test_the_package_exports_the_names_we_use(wheel) -> None:
    assert set(ast.literal_eval(wheel("profiler/__init__.py").constant("__all__"))) >= {
        "profile", "ProfilerAction", "ProfilerActivity", "_ExperimentalConfig", "ProfilerLevel", "AiCMetrics",
        "ExportType", "HostSystem", "tensorboard_trace_handler",
    }  # fmt: skip
    assert "analyse" in ast.literal_eval(wheel("profiler/profiler.py").constant("__all__"))


def test_a_decorator_hides_errors_of_the_profiler(profile, wheel) -> None:
    """The plugin cannot catch these errors, so it checks the output files."""
    module = wheel("profiler/profiler.py")
    functions = [profile[name] for name in ("start", "step", "stop", "__del__")]
    for function in (*functions, module["tensorboard_trace_handler"], module["analyse"]):
        assert "no_exception_func()" in function.decorators
    decorator = wheel("profiler/analysis/prof_common_func/_utils.py")["no_exception_func"]
    assert decorator.call("print_error_msg") is not None
    # The plugin calls the wrapped function directly.
    assert "functools.wraps(func)" in decorator["wrapper"].decorators


def test_the_profiler_writes_our_metadata(wheel, interface) -> None:
    add = wheel("profiler/profiler.py")["_KinetoProfile.add_metadata_json"]
    assert add.parameters == ["key", "value"]
    assert add.values("self.metadata[key]") == ["json.loads(...)"]
    assert interface["_dump_metadata"].call("FileManager.create_json_file_by_path") is not None
    assert interface["_dump_metadata"].uses("self.metadata")


def test_a_recording_profile_can_be_detected(wheel, interface) -> None:
    create = wheel("profiler/_profiler_path_creator.py")["ProfPathCreator.create_prof_dir"]
    assert create.values("self.is_prof_inited") == ["True"]
    assert interface["finalize_trace"].values("ProfPathCreator().is_prof_inited") == ["False"]


def test_the_profiler_counts_steps_from_zero(profile) -> None:
    assert "0" in profile.values("self.step_num")
    assert "self.schedule(...)" in profile["__init__"].values("self.current_action")
    assert profile["start"].call("self.action_controller.transit_action") is not None
    assert profile["start"].has_literal("ProfilerStep#")


def test_a_stopped_profiler_is_not_stopped_again(profile) -> None:
    assert "True" in profile["stop"].values("self.stopped")
    assert profile["stop"].call("self.action_controller.transit_action") is not None
    # The destructor stops the profiler unless it is already stopped.
    assert profile["__del__"].uses("self.stopped")
    assert profile["__del__"].call("self.stop") is not None


def test_a_schedule_can_return_these_actions(wheel, interface) -> None:
    actions = wheel("profiler/scheduler.py")["ProfilerAction"]
    assert actions.constant_names == ["NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE"]
    # torch_npu converts the attributes of the schedule to JSON.
    assert interface["_dump_profiler_info"].call("_trans_obj2cfg") is not None
    assert interface["_dump_profiler_info"].uses("self.schedule")


# Output files.


def test_the_output_directory_is_known_after_start(interface) -> None:
    assert "ProfPathCreator().get_prof_dir()" in interface.values("self.prof_path")
    init = interface["init_trace"]
    creator = "ProfPathCreator()"
    assert init.call(f"{creator}.create_prof_dir") < init.call(f"{creator}.get_prof_dir") < init.call("_init_profiler")


def test_the_handler_sets_the_directory_name(wheel, constant, version: str) -> None:
    handler = wheel("profiler/profiler.py")["tensorboard_trace_handler"]
    assert handler.parameters == ["dir_name", "worker_name", "analyse_flag", "async_mode"]
    assert handler.defaults == {
        "dir_name": "None",
        "worker_name": "None",
        "analyse_flag": "True",
        "async_mode": "False",
    }
    # The worker name is global to the process. torch_npu ignores a name that exceeds the limit.
    assert handler.call("ProfPathCreator().init") is not None
    creator = wheel("profiler/_profiler_path_creator.py")["ProfPathCreator"]
    assert creator.decorators == ["Singleton"]
    assert creator["init"].uses("Constant.MAX_WORKER_NAME_LENGTH")
    assert constant("MAX_WORKER_NAME_LENGTH") == 226
    create = creator["create_prof_dir"]
    for literal in ("{}_{}", "{}_{}_ascend_pt", "%Y%m%d%H%M%S%f"):
        assert create.has_literal(literal)
    assert create.uses("datetime.utcnow") == (version in WITH_OLD_CONFIG)


def test_the_path_check_accepts_our_paths(wheel, version: str) -> None:
    paths = wheel("utils/_path_manager.py")["PathManager"]
    check = paths["_input_path_common_check"]
    assert check.call("re.fullmatch") is not None
    pattern = ast.literal_eval(*check.values("pattern"))
    assert re.fullmatch(pattern, "/profiles/run-1/step_000010/rank_0000.step10_4711_20260101000000000_ascend_pt")
    assert not re.fullmatch(pattern, "/profiles/run=1")
    # For other paths, old releases raise an error. New releases log a warning.
    assert check.raises == (version in WITH_OLD_PATHS)
    assert paths.constant("MAX_FILE_NAME_LENGTH") == "255"


def test_raw_files_have_the_names_we_read(wheel, interface, constant) -> None:
    for literal in ("profiler_info.json", "profiler_info_{rank_id}.json", "RANK"):
        assert interface["_dump_profiler_info"].has_literal(literal)
    assert constant("PROFILER_META_DATA") == "profiler_metadata.json"
    assert constant("FRAMEWORK_DIR") == "FRAMEWORK"
    assert wheel("profiler/analysis/prof_config/_fwk_file_parser_config.py").has_literal(r"^torch\.op_range")
    paths = wheel("profiler/analysis/prof_common_func/_path_manager.py")["ProfilerPathManager"]
    assert paths["get_cann_path"].has_literal(r"^PROF_\d+_\d+_[0-9a-zA-Z]+")
    assert paths["get_device_path"].has_literal(r"^device_\d")


def test_the_profiler_info_contains_the_recorded_configuration(constant, interface) -> None:
    dump = interface["_dump_profiler_info"]
    for name in ("Constant.COMMON_CONFIG", "Constant.EXPERIMENTAL_CONFIG", "self.activities"):
        assert dump.uses(name)
    assert dump.has_literal("activities")
    names = ("CONFIG", "COMMON_CONFIG", "EXPERIMENTAL_CONFIG", "PROFILER_LEVEL", "EXPORT_TYPE")
    assert [constant(name) for name in names] == [
        "config", "common_config", "experimental_config", "_profiler_level", "_export_type",
    ]  # fmt: skip


def test_old_releases_do_not_wait_for_the_device(interface, version: str) -> None:
    waits = interface["stop_trace"].call("torch.npu.synchronize") is not None
    assert waits == (version not in WITH_OLD_PATHS)


# Options.


def test_the_config_has_our_options(config, version: str) -> None:
    init = config["_ExperimentalConfig.__init__"]
    assert init.parameters == [name for name in CONFIG if name != "mstx" or version not in WITH_OLD_CONFIG]
    defaults = init.defaults
    assert defaults["profiler_level"] == "Constant.LEVEL0"
    # These defaults differ between releases, so the plugin sets every option.
    old = version in WITH_OLD_CONFIG
    assert defaults["aic_metrics"] == ("Constant.AicMetricsNone" if old else "Constant.AicPipeUtilization")
    assert defaults["export_type"] == ("None" if old else "ExportType.Text")
    assert defaults["data_simplification"] == "True"
    for name in ("l2_cache", "op_attr", "record_op_args", "sys_io", "sys_interconnection"):
        assert defaults[name] == "False"


def test_the_config_has_one_attribute_per_option(config) -> None:
    """The plugin reads the attributes to detect options that torch_npu has reset."""
    init = config["_ExperimentalConfig.__init__"]
    expected = {f"self.{name}" if name == "record_op_args" else f"self._{name}" for name in init.parameters}
    assert set(init.attributes_set) == expected


def test_the_config_resets_options_without_an_error(config, version: str) -> None:
    check = config["_ExperimentalConfig._check_params"]
    assert "Constant.AicMetricsNone" in check.values("self._aic_metrics")
    assert "False" in check.values("self._op_attr")
    assert ("True" in check.values("self._mstx")) == (version not in WITH_OLD_CONFIG)
    assert not config["_ExperimentalConfig"].raises


def test_the_option_values_exist(config, constant, interface, version: str) -> None:
    def values(name: str) -> dict[str, str]:
        members = config[name]
        return {
            member: constant(members.constant(member).removeprefix("Constant.")) for member in members.constant_names
        }

    assert values("ProfilerLevel") == {
        "Level0": "Level0", "Level1": "Level1", "Level2": "Level2", "Level_none": "Level_none",
    }  # fmt: skip
    assert values("ExportType") == {"Db": "db", "Text": "text"}
    host = {"CPU": "cpu", "MEM": "mem", "DISK": "disk", "NETWORK": "network", "OSRT": "osrt"}
    assert values("HostSystem") == host | ({} if version in WITH_OLD_PATHS else {"NUMA": "numa"})
    # C++ code defines the activities, so the wheel contains only their uses.
    assert interface.uses("ProfilerActivity.CPU")
    assert interface.uses("ProfilerActivity.NPU")


def test_our_option_values_match_torch_npu(config, version: str) -> None:
    assert {str(metric) for metric in AicMetrics} == set(config["AiCMetrics"].constant_names)
    assert {kind.capitalize() for kind in Export} == set(config["ExportType"].constant_names)
    assert len(Level) == len(config["ProfilerLevel"].constant_names)
    numa = {"NUMA"} if version in WITH_OLD_PATHS else set()
    assert {part.upper() for part in HostSystem} - numa == set(config["HostSystem"].constant_names)


def test_our_name_limits_match_torch_npu(constant) -> None:
    text = (ROOT / "plugins" / "profdeck_npu" / "recorder.py").read_text()  # importing this module requires torch_npu
    limits = dict(re.findall(r"^(_MAX_\w+) = (\d+)$", text, re.MULTILINE))
    assert int(limits["_MAX_WORKER_LENGTH"]) < constant("MAX_WORKER_NAME_LENGTH")
    assert int(limits["_MAX_NAME_LENGTH"]) == constant("MAX_FILE_NAME_LENGTH")


def test_these_environment_variables_disable_the_profiler(wheel, interface, constant, version: str) -> None:
    checks = bool(interface.values("self._is_env_valid"))
    assert checks == (version not in WITH_OLD_PATHS)
    if checks:
        assert constant("MSPROF_STATIC_ENV") == "PROFILER_SAMPLECONFIG"
        assert constant("MSPROF_DYNAMIC_ENV") == "PROFILING_MODE"
        assert interface["start_trace"].uses("self._is_env_valid")
    init = wheel("profiler/_non_intrusive_profile.py")["_NonIntrusiveProfile.init"]
    for name in ("PROF_CONFIG_PATH", "MSMONITOR_USE_DAEMON", "KINETO_USE_DAEMON"):
        assert init.has_literal(name)


def test_mstx_ranges_accept_a_stream(wheel) -> None:
    mstx = wheel("npu/mstx.py")["mstx"]
    start, end = mstx["range_start"], mstx["range_end"]
    assert start.parameters == ["message", "stream", "domain"]
    assert start.defaults == {"stream": "None", "domain": "'default'"}
    assert end.parameters == ["range_id", "domain"]
    assert end.defaults == {"domain": "'default'"}
    assert "staticmethod" in start.decorators


# Analysis.


def test_the_analysis_accepts_our_arguments(wheel) -> None:
    analyse = wheel("profiler/profiler.py")["analyse"]
    assert analyse.parameters == ["profiler_path", "max_process_number", "export_type"]
    assert analyse.defaults == {"max_process_number": "Constant.DEFAULT_PROCESS_NUMBER", "export_type": "None"}


def test_the_analysis_forks_and_checks_for_a_daemon_process(wheel) -> None:
    analyse = wheel("profiler/analysis/_npu_profiler.py")["NpuProfiler.analyse"]
    assert analyse.uses("multiprocessing.current_process().daemon")
    assert analyse.call("multiprocessing.set_start_method") is not None
    assert analyse.has_literal("fork")
    assert analyse.keyword("force") == ["True"]


def test_the_analysis_writes_a_done_file(wheel, version: str) -> None:
    parser = wheel("profiler/analysis/_profiling_parser.py")["ProfilingParser"]
    assert ("generate_parser_done_file" in parser) == (version not in WITH_OLD_CONFIG)


def test_the_results_have_the_names_we_read(wheel, constant) -> None:
    assert constant("OUTPUT_DIR") == "ASCEND_PROFILER_OUTPUT"
    assert constant("DB_ASCEND_PYTORCH_PROFILER", "DbConstant") == "ascend_pytorch_profiler.db"
    views = {
        "_trace_view_parser.py": ("TraceViewParser", "TRACE_VIEW", "trace_view.json"),
        "_kernel_view_parser.py": ("KernelViewParser", "KERNEL_VIEW", "kernel_details.csv"),
        "_trace_step_time_parser.py": ("TraceStepTimeParser", "STEP_TRACE", "step_trace_time.csv"),
        "_communication_parser.py": ("CommunicationParser", "COMMUNICATION", "communication.json"),
    }
    for path, (parser, name, file) in views.items():
        assert wheel(f"profiler/analysis/prof_view/{path}")[parser].constant(name) == repr(file)
    parser = wheel("profiler/analysis/prof_view/prof_db_parse/_db_parser.py")
    assert parser.has_literal("ascend_pytorch_profiler_{}.db")


def test_the_tables_have_the_columns_we_read(wheel, version: str) -> None:
    headers = wheel("profiler/analysis/prof_common_func/_csv_headers.py")["CsvHeaders"]
    blocks = "Block Dim" if version in WITH_OLD_CONFIG else "Block Num"
    assert ast.literal_eval(headers.constant("OP_SUMMARY_KERNEL_BASE_HEADERS")) == [
        "Device_id", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)", "Wait Time(us)", blocks,
    ]  # fmt: skip
    kernels = wheel("profiler/analysis/prof_view/_kernel_view_parser.py")["KernelViewParser"]
    assert kernels.has_literal("Step Id")
    steps = wheel("profiler/analysis/prof_view/_trace_step_time_parser.py")["TraceStepTimeParser"]
    assert ast.literal_eval(steps.constant("title")) == [
        "Device_id", "Step", "Computing", "Communication(Not Overlapped)", "Overlapped", "Communication", "Free",
        "Stage", "Bubble", "Communication(Not Overlapped and Exclude Receive)", "Preparing",
    ]  # fmt: skip
    groups = wheel("profiler/analysis/prof_view/_communication_parser.py")["CommunicationParser"]
    assert groups.constant("P2P") == "'p2p'"
    assert groups.constant("COLLECTIVE") == "'collective'"
    assert groups.constant("COMMUNICATION_TIME_INFO") == "'Communication Time Info'"


# Installation.


def test_torch_imports_torch_npu_automatically(wheel) -> None:
    """If CANN is missing, `import torch` fails, and the environment variable is not restored."""
    module = wheel("__init__.py")
    switch = "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD']"
    assert module.constant(switch) == "'0'"
    assert module.constant("ORG_AUTOLOAD") == "os.getenv(...)"
    assert module["_autoload"].values(switch) == ["ORG_AUTOLOAD"]


def test_the_backend_declares_support_for_the_release(version: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = project["project"]["optional-dependencies"]["npu"]
    assert version in SpecifierSet(NpuBackend.libraries[0].versions)
    assert version in SpecifierSet(requirement.removeprefix("torch-npu"))
