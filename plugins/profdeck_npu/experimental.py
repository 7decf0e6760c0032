"""Converts the backend's options to torch_npu's ``_ExperimentalConfig``.

torch_npu replaces invalid or unknown values by defaults, sometimes without a warning. The affected values differ
between releases. The object that torch_npu creates is therefore compared with the requested values.
"""

from __future__ import annotations

import inspect
from typing import Any

from profdeck.plugin import ConfigError
from profdeck_npu.options import AicMetrics, Level, NpuOptions

_LEVELS = {Level.NONE: "Level_none", Level.LEVEL0: "Level0", Level.LEVEL1: "Level1", Level.LEVEL2: "Level2"}

# torch_npu's argument names that differ from the option names.
_OPTION_NAMES = {
    "profiler_level": "level",
    "msprof_tx": "mstx",
    "gc_detect_threshold": "gc_detect_threshold_ms",
    "export_type": "export",
}


def experimental_config(options: NpuOptions, experimental: Any, version: str) -> Any:
    """Create torch_npu's config object.

    Args:
        options: the backend's options.
        experimental: the module ``torch_npu.profiler.experimental_config``.
        version: the version of torch_npu, for error messages.

    Raises:
        ConfigError: this release of torch_npu does not support an option or a value, or replaced a value.
    """
    arguments = _arguments(options, experimental, version)
    parameters = inspect.signature(experimental._ExperimentalConfig).parameters  # noqa: SLF001  # private but documented
    if "mstx" not in parameters:  # named msprof_tx up to torch_npu 2.6
        arguments["msprof_tx"] = arguments.pop("mstx")
    for name in [name for name in arguments if name not in parameters]:
        if arguments.pop(name) not in (False, None, []):
            raise ConfigError(_unsupported(_option_name(name), version))
    config = experimental._ExperimentalConfig(**arguments)  # noqa: SLF001  # as above
    for name, requested in arguments.items():
        actual = getattr(config, f"_{name}" if hasattr(config, f"_{name}") else name)
        if _comparable(actual) != _comparable(requested):
            raise ConfigError(
                f"options.{_option_name(name)}: torch_npu {version} uses {actual!r} instead of {requested!r}. Choose "
                "another value, or install another release of torch_npu."
            )
    return config


def _arguments(options: NpuOptions, experimental: Any, version: str) -> dict[str, Any]:
    """Return the arguments of ``_ExperimentalConfig`` under their current names."""

    def constant(class_name: str, name: str, option: str) -> Any:
        try:
            return getattr(getattr(experimental, class_name), name)
        except AttributeError:
            raise ConfigError(_unsupported(f"{option}: {name}", version)) from None

    return {
        "profiler_level": constant("ProfilerLevel", _LEVELS[options.level], "level"),
        "aic_metrics": constant("AiCMetrics", options.aic_metrics or AicMetrics.NONE, "aic_metrics"),
        "l2_cache": options.l2_cache,
        "op_attr": options.op_attr,
        "record_op_args": options.record_op_args,
        "mstx": options.mstx,
        "mstx_domain_include": list(options.mstx_domain_include),
        "mstx_domain_exclude": list(options.mstx_domain_exclude),
        "sys_io": options.sys_io,
        "sys_interconnection": options.sys_interconnection,
        "host_sys": [constant("HostSystem", system.upper(), "host_sys") for system in options.host_sys],
        "gc_detect_threshold": options.gc_detect_threshold_ms,
        "data_simplification": options.data_simplification,
        "export_type": [constant("ExportType", kind.capitalize(), "export") for kind in options.export],
    }


def _option_name(argument: str) -> str:
    return _OPTION_NAMES.get(argument, argument)


def _unsupported(option: str, version: str) -> str:
    return f"options.{option}: not supported by torch_npu {version}. Remove it, or install a release that supports it."


def _comparable(value: Any) -> Any:
    return sorted(set(value)) if isinstance(value, list) else value  # torch_npu does not preserve the order
