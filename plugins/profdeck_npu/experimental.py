"""Options in torch_npu's words: its ``_ExperimentalConfig``, with nothing reset on the way.

torch_npu replaces what it does not like or know by defaults and prints a warning at best; which values these are
differs between releases. So the object that it made is compared with what was asked for.
"""

from __future__ import annotations

import inspect
from typing import Any

from profdeck.plugin import ConfigError
from profdeck_npu.options import AicMetrics, Level, NpuOptions

_LEVELS = {Level.NONE: "Level_none", Level.LEVEL0: "Level0", Level.LEVEL1: "Level1", Level.LEVEL2: "Level2"}

# Arguments that are called otherwise than the options.
_OPTIONS = {
    "profiler_level": "level",
    "msprof_tx": "mstx",
    "gc_detect_threshold": "gc_detect_threshold_ms",
    "export_type": "export",
}


def experimental_config(options: NpuOptions, experimental: Any, version: str) -> Any:
    """Build torch_npu's config object.

    Args:
        options: what to record.
        experimental: the module ``torch_npu.profiler.experimental_config``.
        version: torch_npu's, for messages.

    Raises:
        ConfigError: this release of torch_npu does not know an option or a value, or has reset it.
    """
    wanted = _wanted(options, experimental, version)
    known = inspect.signature(experimental._ExperimentalConfig).parameters  # noqa: SLF001  # documented, though private
    if "mstx" not in known:  # its name up to 2.6
        wanted["msprof_tx"] = wanted.pop("mstx")
    for name in [name for name in wanted if name not in known]:
        if wanted.pop(name) not in (False, None, []):
            raise ConfigError(_unknown(_option(name), version))
    config = experimental._ExperimentalConfig(**wanted)  # noqa: SLF001  # as above
    for name, value in wanted.items():
        held = getattr(config, f"_{name}" if hasattr(config, f"_{name}") else name)
        if _plain(held) != _plain(value):
            raise ConfigError(
                f"options.{_option(name)}: torch_npu {version} takes {held!r} instead of {value!r}. Choose another "
                "value, or another release of torch_npu."
            )
    return config


def _wanted(options: NpuOptions, experimental: Any, version: str) -> dict[str, Any]:
    def constant(of: str, name: str, option: str) -> Any:
        try:
            return getattr(getattr(experimental, of), name)
        except AttributeError:
            raise ConfigError(_unknown(f"{option}: {name}", version)) from None

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


def _option(argument: str) -> str:
    return _OPTIONS.get(argument, argument)


def _unknown(what: str, version: str) -> str:
    return f"options.{what}: torch_npu {version} does not have it. Remove it, or install a release that does."


def _plain(value: Any) -> Any:
    return sorted(set(value)) if isinstance(value, list) else value  # it loses the order
