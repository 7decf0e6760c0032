"""The options of the Ascend NPU backend, and which of them go together.

torch_npu resets values that it does not like and prints a warning; here they are refused. Names and meanings are those
of ``torch_npu.profiler._ExperimentalConfig``, read in the releases 2.6 to 2.14.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import attrs
from attrs import validators

from profdeck import Activity, CommonOptions
from profdeck.plugin import duration_validator

SUPPORTED = (Activity.CPU, Activity.NPU)


class Level(StrEnum):
    """How much the device records."""

    NONE = "level_none"
    LEVEL0 = "level0"
    LEVEL1 = "level1"
    LEVEL2 = "level2"


class AicMetrics(StrEnum):
    """Which counters of the AI cores are read, in torch_npu's words."""

    NONE = "AiCoreNone"
    PIPE_UTILIZATION = "PipeUtilization"
    ARITHMETIC_UTILIZATION = "ArithmeticUtilization"
    MEMORY = "Memory"
    MEMORY_L0 = "MemoryL0"
    MEMORY_UB = "MemoryUB"
    RESOURCE_CONFLICT_RATIO = "ResourceConflictRatio"
    L2_CACHE = "L2Cache"
    MEMORY_ACCESS = "MemoryAccess"


class HostSystem(StrEnum):
    """What CANN samples of the host."""

    CPU = "cpu"
    MEM = "mem"
    DISK = "disk"
    NETWORK = "network"
    OSRT = "osrt"
    NUMA = "numa"


class Export(StrEnum):
    """What the analysis writes."""

    TEXT = "text"
    DB = "db"


@attrs.frozen(kw_only=True)
class NpuOptions(CommonOptions):
    """Options of the backend `npu`."""

    activities: tuple[Activity, ...] = SUPPORTED
    """What to observe, of `cpu` and `npu`. Default: both. Without `npu` the driver's profiler is not used, and the
    device is not leased."""

    level: Level = Level.LEVEL1
    """How much the device records: `level0` kernels and communication, `level1` (default) with CANN's calls, counters
    of the AI cores and the parts of communication, `level2` with CANN's runtime and AI CPU tasks, `level_none` only
    ranges, which needs `mstx`. Each level costs more time and disk than the one below."""

    aic_metrics: AicMetrics | None = None
    """Which counters of the AI cores are read, as columns of kernel_details.csv: `PipeUtilization`,
    `ArithmeticUtilization`, `Memory`, `MemoryL0`, `MemoryUB`, `ResourceConflictRatio`, `L2Cache`, `MemoryAccess`, or
    none, `AiCoreNone`. Default: `PipeUtilization` from `level1` on, none below, where the device reads none."""

    l2_cache: bool = False
    """Record the hit rate of the L2 cache per kernel. Default: off. The analysis then writes l2_cache.csv."""

    op_attr: bool = False
    """Record the attributes of operators. Default: off. Needs `db` in `export`, the only place where they are
    written."""

    record_op_args: bool = False
    """Dump statistics of operators for CANN's tuning tool AOE, to a directory of their own beside the capture's.
    Default: off. Do not combine with a capture whose times matter."""

    mstx: bool = False
    """Record mstx ranges of the host and the device: those of the program, of communication, and a profiler's stages,
    which are ordinary marks of the host otherwise. Default: off."""

    mstx_domain_include: tuple[str, ...] = ()
    """Record only mstx ranges of these domains; stages are in the domain `default`, and ordinary marks where that is
    left out. Default: all domains. Needs `mstx`."""

    mstx_domain_exclude: tuple[str, ...] = ()
    """Record all mstx ranges but those of these domains, such as `[communication]`. Default: none is left out. Needs
    `mstx`; not together with `mstx_domain_include`."""

    sys_io: bool = False
    """Sample the traffic of the device's network ports. Default: off. The analysis then writes nic.csv and roce.csv."""

    sys_interconnection: bool = False
    """Sample the traffic between devices and to the host. Default: off. The analysis then writes hccs.csv and
    pcie.csv."""

    host_sys: tuple[HostSystem, ...] = ()
    """What CANN samples of the host: `cpu`, `mem`, `disk`, `network`, `osrt`, `numa`. Default: nothing. Some need
    tools such as iotop, perf and ltrace, and rights to use them."""

    gc_detect_threshold_ms: float | None = attrs.field(
        default=None, validator=validators.optional(validators.and_(validators.ge(0.0), validators.lt(float("inf"))))
    )
    """Record collections of Python's garbage that take at least as long, in milliseconds; 0 for all. Default: none.
    Needs the activity `cpu`."""

    data_simplification: bool = True
    """Let the analysis delete what it has read and no longer needs. Default: on. Off keeps all data of CANN."""

    export: tuple[Export, ...] = (Export.TEXT,)
    """What the analysis writes: `text` (trace_view.json and tables, default), `db` (one SQLite file), or both. Reading
    captures with `profdeck` needs `text`."""

    analyse: bool = True
    """Analyse each capture in a separate process after the capture has ended. Default: on. If off, only raw data is
    written; use `profdeck npu analyse` to analyse the data."""

    analyse_timeout_s: float = attrs.field(default=1800.0, validator=duration_validator(validators.gt(0.0)))
    """Time limit for the analysis of one directory, in seconds. Default: 1800. When it passes, all processes of the
    analysis are killed. The raw data is kept."""

    def __attrs_post_init__(self) -> None:
        """Check the fields against each other, and resolve which counters are read."""
        self._check_activities()
        metered = self.level in {Level.LEVEL1, Level.LEVEL2}
        if self.aic_metrics is None:
            metrics = AicMetrics.PIPE_UTILIZATION if metered and Activity.NPU in self.activities else AicMetrics.NONE
            object.__setattr__(self, "aic_metrics", metrics)  # so that manifests say what was recorded
        elif self.aic_metrics is not AicMetrics.NONE and not metered:
            raise ValueError(
                f"aic_metrics: the device reads {self.aic_metrics} at level1 and level2 only, and the level is "
                f"{self.level}; raise it, or remove aic_metrics"
            )
        if self.level is Level.NONE and not self.mstx:
            raise ValueError(
                "level: level_none records mstx ranges only, and mstx is off; turn it on, or choose level0"
            )
        self._check_domains()
        if not self.export:
            raise ValueError("export: the list is empty, so the analysis would write nothing; remove the key")
        if self.op_attr and Export.DB not in self.export:
            raise ValueError(
                "op_attr: attributes are only written to a database; add db to export, or turn op_attr off"
            )
        if self.with_flops:
            raise ValueError("with_flops: torch_npu's analysis does not read FLOPs, so nothing would show; turn it off")

    def _check_activities(self) -> None:
        if not self.activities:
            raise ValueError("activities: the list is empty, so nothing would be recorded; remove the key")
        allowed = ", ".join(SUPPORTED)
        if foreign := [str(activity) for activity in self.activities if activity not in SUPPORTED]:
            raise ValueError(f"activities: the backend npu does not record {', '.join(foreign)}; allowed: {allowed}")
        if Activity.CPU not in self.activities and self.gc_detect_threshold_ms is not None:
            raise ValueError(
                "gc_detect_threshold_ms: garbage is collected on the host; add cpu to activities, or remove it"
            )
        if Activity.NPU not in self.activities and (idle := [name for name in _OF_THE_DEVICE if self._given(name)]):
            raise ValueError(
                f"{idle[0]}: it has no effect without the device; add npu to activities, or remove {', '.join(idle)}"
            )

    def _check_domains(self) -> None:
        include, exclude = self.mstx_domain_include, self.mstx_domain_exclude
        for name, domains in (("mstx_domain_include", include), ("mstx_domain_exclude", exclude)):
            if domains and not self.mstx:
                raise ValueError(f"{name}: {', '.join(domains)} are domains of mstx, which is off; turn mstx on")
            if "" in domains:
                raise ValueError(f"{name}: the name of a domain is empty; expected a name such as communication")
        if include and exclude:
            raise ValueError("mstx_domain_exclude: give it or mstx_domain_include; torch_npu reads only one of them")

    def _given(self, name: str) -> bool:
        default: Any = attrs.fields_dict(type(self))[name].default
        return getattr(self, name) not in (default, AicMetrics.NONE)


# What torch_npu hands to the driver only, which it does not use without the activity npu.
_OF_THE_DEVICE = (
    "level",
    "aic_metrics",
    "l2_cache",
    "op_attr",
    "record_op_args",
    "mstx",
    "sys_io",
    "sys_interconnection",
    "host_sys",
)
