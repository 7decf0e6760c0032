"""Options of the Ascend NPU backend.

torch_npu replaces invalid values and combinations by defaults and only prints a warning. The options are therefore
validated here. Their names and meanings are those of ``torch_npu.profiler._ExperimentalConfig`` in the releases 2.6 to
2.14.
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
    """Level of detail of the device data."""

    NONE = "level_none"
    LEVEL0 = "level0"
    LEVEL1 = "level1"
    LEVEL2 = "level2"


class AicMetrics(StrEnum):
    """AI core counter groups, with torch_npu's names."""

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
    """Host metrics that CANN can sample."""

    CPU = "cpu"
    MEM = "mem"
    DISK = "disk"
    NETWORK = "network"
    OSRT = "osrt"
    NUMA = "numa"


class Export(StrEnum):
    """Output formats of the analysis."""

    TEXT = "text"
    DB = "db"


@attrs.frozen(kw_only=True)
class NpuOptions(CommonOptions):
    """Options of the backend `npu`."""

    activities: tuple[Activity, ...] = SUPPORTED
    """Activities to record: `cpu` and `npu`. Default: both. Without `npu`, the capture does not use the driver's
    profiler and does not lease the device."""

    level: Level = Level.LEVEL1
    """Level of detail of the device data. `level0`: kernels and communication. `level1` (default): also CANN calls, AI
    core counters and the parts of each communication. `level2`: also CANN runtime calls and AI CPU tasks. `level_none`:
    only mstx ranges; requires `mstx`. Higher levels take more time and disk space."""

    aic_metrics: AicMetrics | None = None
    """AI core counters to record as columns of kernel_details.csv: `PipeUtilization`, `ArithmeticUtilization`,
    `Memory`, `MemoryL0`, `MemoryUB`, `ResourceConflictRatio`, `L2Cache`, `MemoryAccess`, or `AiCoreNone` for no
    counters. Default: `PipeUtilization` at `level1` and `level2`. Lower levels support no counters."""

    l2_cache: bool = False
    """Record the L2 cache hit rate of each kernel. The analysis writes it to l2_cache.csv. Default: off."""

    op_attr: bool = False
    """Record operator attributes. Default: off. The analysis only writes them to the database, so `export` must
    contain `db`."""

    record_op_args: bool = False
    """Write operator statistics for CANN's tuning tool AOE to a separate directory next to the capture. Default: off.
    Do not use this option for captures whose timings matter."""

    mstx: bool = False
    """Record mstx ranges on the host and the device: the ranges of the program and of communication libraries, and
    profdeck's stages. Default: off; stages are then recorded as host annotations."""

    mstx_domain_include: tuple[str, ...] = ()
    """Domains of the mstx ranges to record. Default: all domains. Requires `mstx`. Stages use the domain `default`. If
    it is not recorded, stages are host annotations."""

    mstx_domain_exclude: tuple[str, ...] = ()
    """Domains of mstx ranges to exclude, such as `[communication]`. Default: no domains. Requires `mstx`, and cannot be
    combined with `mstx_domain_include`."""

    sys_io: bool = False
    """Sample the traffic of the device's network ports. The analysis writes it to nic.csv and roce.csv. Default:
    off."""

    sys_interconnection: bool = False
    """Sample the traffic between devices and between device and host. The analysis writes it to hccs.csv and pcie.csv.
    Default: off."""

    host_sys: tuple[HostSystem, ...] = ()
    """Host metrics that CANN samples: `cpu`, `mem`, `disk`, `network`, `osrt`, `numa`. Default: none. Some metrics
    require tools such as iotop, perf and ltrace, and the permission to run them."""

    gc_detect_threshold_ms: float | None = attrs.field(
        default=None, validator=validators.optional(validators.and_(validators.ge(0.0), validators.lt(float("inf"))))
    )
    """Minimum duration of the Python garbage collections to record, in milliseconds. 0 records all collections.
    Default: no recording. Requires the activity `cpu`."""

    data_simplification: bool = True
    """Delete raw CANN data that is unnecessary after the analysis. Default: on."""

    export: tuple[Export, ...] = (Export.TEXT,)
    """Output formats of the analysis: `text` (trace_view.json and tables, default), `db` (one SQLite file), or both.
    `profdeck` can only read captures in the format `text`."""

    analyse: bool = True
    """Analyse each capture in a separate process after the capture has ended. Default: on. If off, only raw data is
    written; use `profdeck npu analyse` to analyse the data."""

    analyse_timeout_s: float = attrs.field(default=1800.0, validator=duration_validator(validators.gt(0.0)))
    """Time limit for the analysis of one directory, in seconds. Default: 1800. When it passes, all processes of the
    analysis are killed. The raw data is kept."""

    def __attrs_post_init__(self) -> None:
        """Validate combinations of options, and resolve the default of `aic_metrics`."""
        self._check_activities()
        has_counters = self.level in {Level.LEVEL1, Level.LEVEL2}
        if self.aic_metrics is None:
            is_recorded = has_counters and Activity.NPU in self.activities
            metrics = AicMetrics.PIPE_UTILIZATION if is_recorded else AicMetrics.NONE
            object.__setattr__(self, "aic_metrics", metrics)  # manifests contain the resolved value
        elif self.aic_metrics is not AicMetrics.NONE and not has_counters:
            raise ValueError(
                f"aic_metrics: {self.aic_metrics} requires level1 or level2, but the level is {self.level}; increase "
                "the level, or remove aic_metrics"
            )
        if self.level is Level.NONE and not self.mstx:
            raise ValueError("level: level_none only records mstx ranges, but mstx is off; turn on mstx, or use level0")
        self._check_domains()
        if not self.export:
            raise ValueError("export: the list is empty, so the analysis would write nothing; remove the key")
        if self.op_attr and Export.DB not in self.export:
            raise ValueError(
                "op_attr: attributes are only written to the database; add db to export, or turn off op_attr"
            )
        if self.with_flops:
            raise ValueError("with_flops: torch_npu's analysis does not support FLOPs; turn off with_flops")

    def _check_activities(self) -> None:
        if not self.activities:
            raise ValueError("activities: the list is empty, so nothing would be recorded; remove the key")
        allowed = ", ".join(SUPPORTED)
        if unsupported := [str(activity) for activity in self.activities if activity not in SUPPORTED]:
            raise ValueError(
                f"activities: the backend npu does not record {', '.join(unsupported)}; allowed: {allowed}"
            )
        if Activity.CPU not in self.activities and self.gc_detect_threshold_ms is not None:
            raise ValueError(
                "gc_detect_threshold_ms: requires the activity cpu; add cpu to activities, or remove "
                "gc_detect_threshold_ms"
            )
        if Activity.NPU not in self.activities:
            unused = [name for name in _DEVICE_OPTIONS if self._is_set(name)]
            if unused:
                raise ValueError(
                    f"{unused[0]}: requires the npu activity; add npu to activities, or remove {', '.join(unused)}"
                )

    def _check_domains(self) -> None:
        include, exclude = self.mstx_domain_include, self.mstx_domain_exclude
        for name, domains in (("mstx_domain_include", include), ("mstx_domain_exclude", exclude)):
            if domains and not self.mstx:
                raise ValueError(f"{name}: requires mstx, which is off; turn on mstx, or remove {name}")
            if "" in domains:
                raise ValueError(f"{name}: a domain name is empty; expected a name such as communication")
        if include and exclude:
            raise ValueError(
                "mstx_domain_exclude: torch_npu does not support it together with mstx_domain_include; remove one"
            )

    def _is_set(self, name: str) -> bool:
        default: Any = attrs.fields_dict(type(self))[name].default
        return getattr(self, name) not in (default, AicMetrics.NONE)


# torch_npu passes these options only to the driver, which records nothing without the activity npu.
_DEVICE_OPTIONS = (
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
