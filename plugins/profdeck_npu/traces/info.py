"""Reader for ``profiler_info*.json``, which torch_npu writes at the end of a recording.

The file contains the configuration of the recording. Format: ``_ProfInterface._dump_profiler_info`` in
``torch_npu/profiler/profiler_interface.py``.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import msgspec

from profdeck.plugin import JsonKind, TraceError

CPU, NPU = "ProfilerActivity.CPU", "ProfilerActivity.NPU"
_NO_KERNELS = "Level_none"


@attrs.frozen
class Info:
    """Configuration of a recording. Values missing from the file are ``None`` or empty."""

    activities: frozenset[str] | None = None
    """`CPU`, `NPU` or both."""
    level: str | None = None
    exports: tuple[str, ...] = ()
    """Output formats of the analysis: ``text``, ``db`` or both."""

    @property
    def may_have_kernels(self) -> bool:
        """False if the level records no kernels."""
        return self.level != _NO_KERNELS


def read_info(file: Path | None) -> Info:
    """Read a ``profiler_info*.json``. Without a file, return an empty `Info`: the recording did not finish.

    Raises:
        TraceError: The file cannot be read.
    """
    if file is None:
        return Info()
    try:
        config = _INFO.decode(file.read_bytes()).config
    except (OSError, ValueError) as error:
        raise TraceError(f"Cannot read {file.name}: {error}.") from error
    activities, experimental = config.common_config.activities, config.experimental_config or _ExperimentalConfig()
    exports = experimental.exports
    return Info(
        None if activities is None else frozenset(activities),
        experimental.level,
        tuple(filter(None, [exports] if isinstance(exports, str) else exports)),
    )


class _CommonConfig(msgspec.Struct):
    activities: list[str] | None = None


class _ExperimentalConfig(msgspec.Struct):
    level: str | None = msgspec.field(default=None, name="_profiler_level")
    exports: list[str] | str = msgspec.field(default_factory=list, name="_export_type")


class _Config(msgspec.Struct):
    common_config: _CommonConfig = msgspec.field(default_factory=_CommonConfig)
    experimental_config: _ExperimentalConfig | None = None


class _File(msgspec.Struct):
    config: _Config = msgspec.field(default_factory=_Config)


_INFO = JsonKind(_File)
