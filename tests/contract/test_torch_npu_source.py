"""Tests of torch_npu behavior that the Ascend plugin requires. The tests read or run code from released wheels."""

from __future__ import annotations

import ast
import os
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from profdeck.config.structuring import structure
from profdeck_npu import NpuOptions, experimental
from profdeck_traces.base.errors import ConfigError

# Same releases as in test_torch_npu_wheels.py.
RELEASES = ["2.6.0", "2.10.0", "2.14.0"]
WITH_OLD_CONFIG = {"2.6.0"}
WITH_OLD_PATHS = {"2.6.0", "2.10.0"}

pytestmark = [pytest.mark.wheels, pytest.mark.parametrize("version", RELEASES)]


@pytest.fixture
def wheel(code, version: str):
    return lambda path: code("torch-npu", version, f"torch_npu/profiler/{path}")


@pytest.fixture
def profile(wheel):
    return wheel("profiler.py")["profile"]


def test_the_decorator_prints_hidden_errors(wheel) -> None:
    assert "except Exception as ex" in wheel("analysis/prof_common_func/_utils.py")["no_exception_func"].text
    assert "[ERROR]" in wheel("analysis/prof_common_func/_constant.py")["print_error_msg"].text


def test_step_applies_the_action_for_the_new_step_number(profile) -> None:
    statements = [
        "prev_action = self.current_action",
        "self.step_num += 1",
        "self.current_action = self.schedule(self.step_num)",
        "self.action_controller.transit_action(prev_action, self.current_action)",
        "'ProfilerStep#' + str(self.step_num + self._step_num_offset)",
    ]
    positions = [profile["step"].text.index(statement) for statement in statements]
    assert positions == sorted(positions)


def test_any_callable_is_a_schedule(profile) -> None:
    assert "if schedule and isinstance(schedule, Callable):" in profile["__init__"].text


def test_action_transitions_call_these_methods(wheel) -> None:
    controller = wheel("_profiler_action_controller.py")["ProfActionController"]
    (table,) = [node for node in ast.walk(controller["_init_action_map"].node) if isinstance(node, ast.Dict)]
    methods, messages = {}, {}
    for key, values in zip(table.keys, table.values, strict=True):
        calls = [ast.unparse(value).removeprefix("self.prof_inst.") for value in values.elts]
        transition = ast.unparse(key).replace("ProfilerAction.", "")
        methods[transition] = [call for call in calls if not call.startswith("partial(")]
        messages[transition] = [call for call in calls if call.startswith("partial(")]
    assert methods["(NONE, WARMUP)"] == ["init_trace", "warmup_trace"]
    assert methods["(NONE, RECORD)"] == ["init_trace", "start_trace"]
    assert methods["(WARMUP, RECORD)"] == ["start_trace"]
    assert methods["(WARMUP, WARMUP)"] == methods["(RECORD, RECORD)"] == methods["(NONE, NONE)"] == []
    # At the end of the window, `step` prints no message.
    assert methods["(RECORD_AND_SAVE, NONE)"] == ["stop_trace", "finalize_trace", "self._trace_ready"]
    assert messages["(RECORD_AND_SAVE, NONE)"] == []
    # During warm-up, `step` releases driver resources, but `stop` leaks them.
    assert methods["(WARMUP, NONE)"] == ["start_trace", "stop_trace", "finalize_trace"]
    assert methods["(WARMUP, None)"] == ["finalize_trace", "delete_prof_dir"]
    # After the window, `stop` does nothing.
    assert "(NONE, None)" not in methods


@pytest.fixture
def experimental_config(wheel) -> SimpleNamespace:
    """Execute the module `experimental_config` with stubs for its imports. `warned` contains logged messages."""
    warned: list[str] = []
    namespace = {
        "CannPackageManager": SimpleNamespace(is_support_default_export_db=lambda: False),
        "print_info_msg": warned.append,
        "print_warn_msg": warned.append,
        "os": os,
        "warnings": warnings,
    }
    for path in ("analysis/prof_common_func/_constant.py", "experimental_config.py"):
        body = wheel(path).node.body
        classes = ast.Module([node for node in body if isinstance(node, ast.ClassDef)], [])
        exec(compile(classes, path, "exec", flags=annotations.compiler_flag), namespace)  # noqa: S102  # code under test
    return SimpleNamespace(**namespace, warned=warned)


@pytest.mark.parametrize(
    "values",
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
def test_the_config_stores_our_options_unchanged(experimental_config, version: str, values: dict[str, Any]) -> None:
    options = structure(values, NpuOptions, where="options")
    config = experimental.experimental_config(options, experimental_config, version)
    assert experimental_config.warned == []
    assert config._profiler_level == {"level_none": "Level_none"}.get(options.level, str(options.level).capitalize())
    assert config._aic_metrics == getattr(experimental_config.AiCMetrics, str(options.aic_metrics))
    assert config._l2_cache == options.l2_cache
    assert config._op_attr == options.op_attr
    assert config.record_op_args == options.record_op_args
    assert config._data_simplification == options.data_simplification
    assert (config._msprof_tx if version in WITH_OLD_CONFIG else config._mstx) == options.mstx
    assert sorted(config._mstx_domain_include) == sorted(options.mstx_domain_include)
    assert sorted(config._mstx_domain_exclude) == sorted(options.mstx_domain_exclude)
    assert (config._sys_io, config._sys_interconnection) == (options.sys_io, options.sys_interconnection)
    assert sorted(config._host_sys) == sorted(options.host_sys)
    assert config._gc_detect_threshold == options.gc_detect_threshold_ms
    assert sorted(config._export_type) == sorted(options.export)


@pytest.mark.parametrize(
    ("values", "releases", "message"),
    [
        ({"host_sys": ["numa"]}, WITH_OLD_PATHS, "options.host_sys: NUMA: not supported by torch_npu {}"),
        ({"aic_metrics": "AiCoreNone"}, WITH_OLD_CONFIG, "options.aic_metrics: torch_npu {} uses "),
    ],
    ids=["host_sys", "aic_metrics"],
)
def test_an_unsupported_option_raises_an_error(
    experimental_config, version: str, values: dict[str, Any], releases: set[str], message: str
) -> None:
    options = structure(values, NpuOptions, where="options")
    if version in releases:
        with pytest.raises(ConfigError, match=re.escape(message.format(version))):
            experimental.experimental_config(options, experimental_config, version)
    else:
        experimental.experimental_config(options, experimental_config, version)
        assert experimental_config.warned == []


def test_the_default_process_number_is_zero_on_one_core(wheel) -> None:
    text = wheel("analysis/prof_common_func/_constant.py").text
    assert "DEFAULT_PROCESS_NUMBER = os.cpu_count() // 2" in text


def test_the_analysis_continues_after_an_error(wheel) -> None:
    parser = wheel("analysis/_profiling_parser.py")["ProfilingParser.analyse_profiling_data"]
    assert re.search(r"try:\n\s+self\.run_parser\(\)\n\s+except Exception", parser.text)
