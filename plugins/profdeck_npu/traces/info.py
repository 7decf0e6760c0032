"""What torch_npu says of a recording at its end, in ``profiler_info*.json``: what was to be recorded.

Format: ``_ProfInterface._dump_profiler_info`` in ``torch_npu/profiler/profiler_interface.py``.
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
    """What was to be recorded, as far as torch_npu wrote it down."""

    activities: frozenset[str] | None = None
    """`CPU`, `NPU` or both; None where nothing tells."""
    level: str | None = None
    exports: tuple[str, ...] = ()
    """What the analysis is to write, ``text`` or ``db``; empty where nothing tells."""

    @property
    def may_have_kernels(self) -> bool:
        """Whether the device writes kernels at this level."""
        return self.level != _NO_KERNELS


def read_info(file: Path | None) -> Info:
    """Read such a file; nothing is known where there is none, as the recording did not get so far.

    Raises:
        TraceError: It cannot be read.
    """
    if file is None:
        return Info()
    try:
        config = _INFO.decode(file.read_bytes()).config
    except (OSError, ValueError) as error:
        raise TraceError(f"{file.name} cannot be read: {error}.") from error
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
