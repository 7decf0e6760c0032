"""Tests of the NPU backend without torch_npu: environment checks and support for several releases.

`Release` and its subclasses imitate torch_npu's `_ExperimentalConfig`. tests/contract checks the real classes.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributions import install
from profdeck_npu import NpuBackend, NpuOptions, cann, identity
from profdeck_npu.experimental import experimental_config
from profdeck_npu.options import AicMetrics, Export, HostSystem, Level
from profdeck_traces.base.errors import ConfigError, MissingLibraryError

# Environment checks.


def test_environment_without_other_profilers_is_accepted() -> None:
    cann.check_environment({"PATH": "/bin", "MSMONITOR_USE_DAEMON": "0", "KINETO_USE_DAEMON": "", "PROFILING_MODE": ""})
    cann.check_environment({"MSMONITOR_USE_DAEMON": "yes"})  # torch_npu interprets this value as 0


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("PROFILING_MODE", "dynamic", "msprof profiles this process, so torch_npu's profiler would record nothing"),
        ("PROFILER_SAMPLECONFIG", "{}", "Start the job without msprof and unset PROFILER_SAMPLECONFIG"),
        ("PROF_CONFIG_PATH", "/x", "torch_npu's dynamic profiling, which starts its own captures"),
        ("MSMONITOR_USE_DAEMON", "1", "lets the msMonitor daemon start captures in this process"),
        ("MSMONITOR_USE_DAEMON", " 01", "Unset MSMONITOR_USE_DAEMON"),
        ("KINETO_USE_DAEMON", "1", "Unset KINETO_USE_DAEMON"),
    ],
)
def test_environment_with_another_profiler_is_rejected(name: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cann.check_environment({name: value})
    assert str(caught.value).startswith(f"{name}={value} ")
    assert text in str(caught.value)


def test_environment_is_checked_before_torch_npu_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFILING_MODE", "dynamic")
    with pytest.raises(ConfigError, match="PROFILING_MODE=dynamic"):
        NpuBackend(NpuOptions()).preflight()


def test_missing_msprof_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"msprof, which is not on the PATH\. Either source CANN's set_env\.sh"
    ) as caught:
        cann.check_msprof()
    assert "set options.analyse to false and run `profdeck npu analyse` on a host with msprof" in str(caught.value)
    program = tmp_path / "msprof"
    program.touch(0o755)
    cann.check_msprof()


# Import errors.


def missing_cann_error() -> ImportError:
    return ImportError("libhccl.so: cannot open shared object file: No such file or directory")


def autoload_error() -> RuntimeError:
    error = RuntimeError("Failed to load the backend extension: torch_npu. You can disable extension auto-loading ...")
    error.__cause__ = missing_cann_error()
    return error


@pytest.fixture
def torch_npu_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Install an empty torch_npu distribution."""
    install(tmp_path, "torch-npu", version="2.13.0")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("torch_npu_distribution")
def test_missing_cann_is_diagnosed() -> None:
    diagnosis = NpuBackend.diagnose(autoload_error())
    assert diagnosis is not None
    assert diagnosis.startswith(
        "torch_npu 2.13.0 is installed, but its dependency libhccl.so of CANN cannot be loaded."
    )
    assert "source CANN's set_env.sh (often /usr/local/Ascend/ascend-toolkit/set_env.sh)" in diagnosis
    assert "set TORCH_DEVICE_BACKEND_AUTOLOAD=0 or uninstall torch_npu" in diagnosis


@pytest.mark.usefixtures("torch_npu_distribution")
@pytest.mark.parametrize(
    "error",
    [
        missing_cann_error(),  # does not mention torch_npu
        ImportError("No module named 'torch_npu._C'"),
        RuntimeError("Failed to load the backend extension: torch_npu."),
    ],
)
def test_other_import_errors_are_not_diagnosed(error: Exception) -> None:
    assert NpuBackend.diagnose(error) is None


@pytest.mark.parametrize("name", ["torch_npu", "torch"])
def test_import_error_names_its_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, torch_npu_distribution: None
) -> None:
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    lines = [
        "import os",
        "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'",  # as torch_npu does
        "raise ImportError('libhccl.so: cannot open shared object file') from None",
    ]
    for module in ("torch", "torch_npu"):
        package = tmp_path / module
        package.mkdir()
        (package / "__init__.py").write_text("\n".join(lines) if module == name else "")
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingLibraryError, match="The backend 'npu' cannot be used in this process: ") as caught:
        NpuBackend(NpuOptions()).preflight()
    assert isinstance(caught.value.__cause__, ImportError)
    assert "libhccl.so" in str(caught.value)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_backend_is_described_and_created_without_torch() -> None:
    backend = NpuBackend(NpuOptions(activities=("cpu",)))
    assert backend.devices() == ()
    assert (NpuBackend.name, NpuBackend.device_types, NpuBackend.thread_bound) == ("npu", ("npu",), True)
    (library,) = NpuBackend.libraries
    assert library.names == ("torch-npu",)
    assert callable(identity)
    assert NpuBackend(NpuOptions()).profile_stop(None) == ()


@pytest.mark.parametrize(
    ("visible", "index", "number"),
    [
        (None, 3, 3),
        ("", 1, 1),
        ("4,5,6", 0, 4),
        ("4,5,6", 2, 6),
        ("4,5,6", 3, 3),
        ("7", 0, 7),
        ("1,0", 0, 1),
        ("2,3;4", 1, 3),
        ("2,3;4", 2, 2),
        (" 5", 0, 0),
    ],
)
def test_device_index_is_converted_to_the_physical_device(visible: str | None, index: int, number: int) -> None:
    environ = {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    assert cann.physical_device(index, environ) == number


# Releases of torch_npu.


class Release:
    """Stub of torch_npu 2.13's config class."""

    def __init__(
        self,
        *,
        profiler_level: str = "Level0",
        aic_metrics: str = "ACL_AICORE_PIPE_UTILIZATION",
        l2_cache: bool = False,
        msprof_tx: bool = False,
        mstx: bool = False,
        data_simplification: bool = True,
        record_op_args: bool = False,
        op_attr: bool = False,
        gc_detect_threshold: float | None = None,
        export_type: str | list[str] = "text",
        host_sys: list[str] | None = None,
        mstx_domain_include: list[str] | None = None,
        mstx_domain_exclude: list[str] | None = None,
        sys_io: bool = False,
        sys_interconnection: bool = False,
    ) -> None:
        self._profiler_level = profiler_level
        self._aic_metrics = aic_metrics
        self._l2_cache = l2_cache
        self._msprof_tx = msprof_tx
        self._mstx = mstx
        self._data_simplification = data_simplification
        self.record_op_args = record_op_args
        self._op_attr = op_attr
        self._gc_detect_threshold = gc_detect_threshold
        self._export_type = list(set(export_type))
        self._host_sys = list(set(host_sys or []))
        self._mstx_domain_include = list(set(mstx_domain_include or []))
        self._mstx_domain_exclude = list(set(mstx_domain_exclude or []))
        self._sys_io = sys_io
        self._sys_interconnection = sys_interconnection


class Release26:
    """Stub of torch_npu 2.6's config class, which has fewer arguments and replaces some metrics."""

    def __init__(
        self,
        *,
        profiler_level: str = "Level0",
        aic_metrics: str = "ACL_AICORE_NONE",
        l2_cache: bool = False,
        msprof_tx: bool = False,
        data_simplification: bool = True,
        record_op_args: bool = False,
        op_attr: bool = False,
        gc_detect_threshold: float | None = None,
        export_type: str | list[str] | None = None,
    ) -> None:
        self._profiler_level = profiler_level
        has_no_metrics = aic_metrics == "ACL_AICORE_NONE"
        self._aic_metrics = (
            "ACL_AICORE_PIPE_UTILIZATION" if has_no_metrics and profiler_level != "Level0" else aic_metrics
        )
        self._l2_cache = l2_cache
        self._msprof_tx = msprof_tx
        self._data_simplification = data_simplification
        self.record_op_args = record_op_args
        self._op_attr = op_attr
        self._gc_detect_threshold = gc_detect_threshold
        self._export_type = list(export_type or [])


def build_config_module(config: type, *, hosts: str = "CPU MEM DISK NETWORK OSRT NUMA") -> Any:
    """Return a stub of the module `torch_npu.profiler.experimental_config`."""
    return SimpleNamespace(
        _ExperimentalConfig=config,
        ProfilerLevel=SimpleNamespace(Level_none="Level_none", Level0="Level0", Level1="Level1", Level2="Level2"),
        AiCMetrics=SimpleNamespace(
            PipeUtilization="ACL_AICORE_PIPE_UTILIZATION", AiCoreNone="ACL_AICORE_NONE", MemoryUB="ACL_AICORE_MEMORY_UB"
        ),
        ExportType=SimpleNamespace(Db="db", Text="text"),
        HostSystem=SimpleNamespace(**{name: name.lower() for name in hosts.split()}),
    )


def test_options_are_converted_to_torch_npus_config() -> None:
    options = NpuOptions(
        level=Level.LEVEL2,
        aic_metrics=AicMetrics.MEMORY_UB,
        mstx=True,
        mstx_domain_include=("b", "a"),
        host_sys=(HostSystem.MEM, HostSystem.CPU),
        export=(Export.TEXT, Export.DB),
        gc_detect_threshold_ms=1.5,
        op_attr=True,
        record_op_args=True,
    )
    with warnings.catch_warnings(action="error"):
        config = experimental_config(options, build_config_module(Release), "2.13.0")
    assert (config._profiler_level, config._aic_metrics) == ("Level2", "ACL_AICORE_MEMORY_UB")
    assert (config._mstx, config._msprof_tx, sorted(config._mstx_domain_include)) == (True, False, ["a", "b"])
    assert (sorted(config._host_sys), sorted(config._export_type)) == (["cpu", "mem"], ["db", "text"])
    assert (config._gc_detect_threshold, config._op_attr, config.record_op_args) == (1.5, True, True)


def test_options_are_renamed_for_older_releases() -> None:
    config = experimental_config(NpuOptions(mstx=True), build_config_module(Release26), "2.6.0")
    assert (config._msprof_tx, config._profiler_level, config._export_type) == (True, "Level1", ["text"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            NpuOptions(sys_io=True),
            "options.sys_io: not supported by torch_npu 2.6.0. Remove it, or install a release that supports it.",
        ),
        (
            NpuOptions(mstx=True, mstx_domain_include=("a",)),
            "options.mstx_domain_include: not supported by torch_npu 2.6.0.",
        ),
        (NpuOptions(host_sys=(HostSystem.NUMA,)), "options.host_sys: NUMA: not supported by torch_npu 2.6.0."),
        (NpuOptions(host_sys=(HostSystem.CPU,)), "options.host_sys: not supported by torch_npu 2.6.0."),
        (
            NpuOptions(aic_metrics=AicMetrics.L2_CACHE),
            "options.aic_metrics: L2Cache: not supported by torch_npu 2.6.0.",
        ),
        (
            NpuOptions(aic_metrics=AicMetrics.NONE),
            "options.aic_metrics: torch_npu 2.6.0 uses 'ACL_AICORE_PIPE_UTILIZATION' instead of 'ACL_AICORE_NONE'. ",
        ),
    ],
)
def test_unsupported_or_replaced_option_is_rejected(options: NpuOptions, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        experimental_config(options, build_config_module(Release26, hosts="CPU MEM DISK NETWORK OSRT"), "2.6.0")
    assert str(caught.value).startswith(message)


class ForcesMstx(Release):
    """Stub of a config class that always enables mstx."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._mstx = True

    __signature__ = inspect.signature(Release)


def test_option_that_torch_npu_overrides_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"options\.mstx: torch_npu 2\.13\.0 uses True instead of False"):
        experimental_config(NpuOptions(), build_config_module(ForcesMstx), "2.13.0")
