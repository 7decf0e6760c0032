"""What summaries say, as data: the documented, stable JSON of ``profdeck summary --json``.

Times are microseconds, exact to the nanosecond; ``start_us`` counts from the earliest complete event that was read:
of the trace, or of its devices and annotations where only these were asked for.
Shares are fractions of 1. Where something cannot be known from the traces, the value is ``None``.
"""

from __future__ import annotations

from typing import Any

import attrs

from profdeck_traces.account.model import Account
from profdeck_traces.analysis.detail_model import (
    BatchDetails,
    CollectiveCalls,
    DurationBin,
    FunctionTime,
    HostTimes,
    IdleCause,
    MemorySummary,
    Period,
    PerStep,
    RecordingCost,
    RuntimeCalls,
    ShapeCalls,
    StackFrame,
    StepOfDevice,
    Timeline,
)
from profdeck_traces.analysis.recorder_model import CommunicationSummary, CoreSummary, DeviceStepSummary
from profdeck_traces.analysis.run_model import CauseState, Finding
from profdeck_traces.attribution.model import AttributedTimes, Utilization
from profdeck_traces.inputs.facts import CaptureStatus, RecordingAbout
from profdeck_traces.inputs.host_load import HostLoad
from profdeck_traces.reading.identifiers import Id


@attrs.frozen(kw_only=True)
class KernelSummary:
    """All runs of one kernel, copy or fill on the devices of a rank."""

    name: str
    category: str
    """Its class, such as ``gemm`` or ``communication``; ``unclassified`` where no rule fits."""
    kind: str
    """The category of its events in the trace, such as ``kernel`` or ``gpu_memcpy``."""
    count: int
    total_us: float
    mean_us: float
    max_us: float
    share: float
    """Of the total of all kernels, copies and fills of the rank."""
    per_step: PerStep | None = None
    type: str | None = None
    """Type of the operator that the kernel runs, if the recorder reports it, such as CANN's ``MatMulV2``."""
    cold_us: float = 0.0
    """Portion of ``total_us`` in cold steps that statistics exclude."""
    mean_blocks: float | None = None
    """Mean number of thread blocks per launch; ``None`` if the grids were not recorded."""


@attrs.frozen(kw_only=True)
class OperatorSummary:
    """All calls of one operator or annotation."""

    name: str
    count: int
    self_us: float | None
    """Time in which it was the innermost operator or annotation open on its thread; ``None`` where only devices were
    read."""
    total_us: float
    """Time from start to end, summed; a recursive operator counts its inner calls again."""
    max_us: float
    per_step: PerStep | None = None
    """Variation of ``self_us`` (``total_us`` for annotations)."""
    cold_us: float = 0.0
    """Portion of ``self_us`` (``total_us`` for annotations) in cold steps that statistics exclude."""


@attrs.frozen(kw_only=True)
class CategorySummary:
    """All kernels, copies and fills of one class."""

    category: str
    count: int
    total_us: float
    share: float
    """Of the total of all classes; they may run at the same time, so this is no share of the busy time."""
    per_step: PerStep | None = None
    cold_us: float = 0.0
    """Portion of ``total_us`` in cold steps that statistics exclude."""


@attrs.frozen(kw_only=True)
class CopySummary:
    """All copies or fills of one direction."""

    name: str
    count: int
    total_us: float
    size_bytes: int | None
    """What they moved; ``None`` where one of them does not say."""


@attrs.frozen(kw_only=True)
class StreamSummary:
    """One stream of a device."""

    stream: Id
    events: int
    busy_us: float
    """Time in which something ran on the stream."""


@attrs.frozen(kw_only=True)
class Gap:
    """One of the longest times in which a device did nothing."""

    start_us: float
    duration_us: float
    cause: str
    """What took most of it."""
    host: str | None
    """The name of the host's event that was open for most of it, the innermost one of those."""
    step: int | None = None
    """The number of the step that the host was in at its middle, if that has one."""
    before: str | None = None
    """What ran last before it on the device."""
    after: str | None = None
    """What ran first after it."""


@attrs.frozen(kw_only=True)
class DeviceSummary:
    """What one device did between the first and the last thing that it did in the trace."""

    device: Id
    """The process id of its events: Kineto's device index."""
    name: str | None
    """From ``deviceProperties``."""
    events: int
    span_us: float
    busy_us: float
    """Time in which at least one kernel, copy or fill ran: the union of their intervals."""
    idle_us: float
    """``span_us - busy_us``."""
    compute_us: float
    """Union of the kernels that are no communication."""
    communication_us: float
    """Union of the communication kernels."""
    memory_us: float
    """Union of copies and fills."""
    overlap_us: float
    """Communication during which something else ran on the device."""
    exposed_communication_us: float
    """``communication_us - overlap_us``: what communication adds to the time."""
    streams: tuple[StreamSummary, ...]
    idle: tuple[IdleCause, ...]
    """By time, longest first; they add up to ``idle_us``. Empty where the host was not read."""
    gaps: tuple[Gap, ...]
    """The longest, longest first."""


@attrs.frozen(kw_only=True)
class StepSummary:
    """One global step or engine iteration."""

    kind: str
    """``global_step``: a step of the recorder, in the ``unit`` of the rank; ``iteration``: one that an engine marks."""
    name: str
    step: int | None
    """Its number, if the name has one."""
    stage: str | None
    """``prefill``, ``decode`` or ``mixed``, of an iteration; other words of the engine in small letters."""
    pid: Id
    start_us: float
    duration_us: float
    requests: int | None
    prefill_tokens: int | None
    decode_tokens: int | None
    device_us: float | None
    """Time of the kernels, copies and fills that started in it; ``None`` without a device."""
    devices: tuple[StepOfDevice, ...] = ()
    """What each device did in it: of the global steps, or of the iterations of a trace without global steps."""
    cold: bool = False
    """True if the recorder started in this step, without warm-up; the step took longer. Statistics exclude a cold step
    if the trace has other steps of the same kind and stage."""
    flops: int | None = None
    """Floating-point operations of the counted operators on ``devices``, or ``None`` if none were counted."""
    mfu: float | None = None
    """MFU of this step, as in `Utilization`."""
    prefill_requests: int | None = None
    decode_requests: int | None = None
    details: BatchDetails | None = None
    """``None`` if the iteration's name contains no details."""
    slowdown: float | None = None
    """How much longer kernels take than the same kernels in the fastest quarter of the steps, as a factor. ``None`` if
    they cannot be compared, for example because the sizes of their inputs may differ."""


@attrs.frozen(kw_only=True)
class IterationStatistics:
    """Durations of all steps of one kind and stage, except cold steps. Percentiles use linear interpolation."""

    kind: str
    stage: str | None
    count: int
    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float
    tokens_per_s: float | None
    """Tokens over the time of the iterations that state them, on the device where there is one; ``None`` where the
    batches are not known."""
    tokens_per_wall_s: float | None = None
    """Tokens over the time from the start of each iteration to that of the next one of any stage, the last one up to
    its end: what a user sees."""


@attrs.frozen(kw_only=True)
class ImplausibleEvents:
    """Events that share a name and have invalid or implausible times."""

    name: str
    count: int


@attrs.frozen(kw_only=True)
class RankSummary:
    """One trace of one rank."""

    path: str
    role: str | None
    replica: int | None
    rank: int | None
    """By the manifest, else by the trace."""
    world_size: int | None
    host: str | None
    capture: str | None
    run: str | None = None
    """The directory of the run; ``None`` without a manifest, as for host and capture."""
    whole: bool
    """Whether every byte of the trace was read and found sound. False with ``problem`` ``None``: not all was looked
    at, because only devices were asked for."""
    problem: str | None
    """Where the trace ended if it is not whole, and what is wrong with tables beside it; the summary then covers what
    can be read."""
    events: int | None
    """Trace events, of any phase; ``None`` where devices were searched for, and nothing else was looked at."""
    span_us: float
    """From the first start to the last end of what was summarised."""
    busy_us: float | None
    """Sum over the devices, as the next four; ``None`` without a device."""
    idle_us: float | None
    communication_us: float | None
    overlap_us: float | None
    graph_launches: int | None
    """Launches of captured graphs of kernels; ``None`` where only devices were read."""
    kernels: tuple[KernelSummary, ...]
    """By total time, longest first."""
    categories: tuple[CategorySummary, ...]
    copies: tuple[CopySummary, ...]
    operators: tuple[OperatorSummary, ...]
    """By self time, longest first; by total time where that is not known."""
    annotations: tuple[OperatorSummary, ...]
    devices: tuple[DeviceSummary, ...]
    steps: tuple[StepSummary, ...]
    """In the order of time."""
    iterations: tuple[IterationStatistics, ...]
    cores: tuple[CoreSummary, ...] = ()
    """By total time, longest first. Like the next two only there where the recorder tells it, as Ascend's does."""
    device_steps: tuple[DeviceStepSummary, ...] = ()
    """In the order of the recorder's table: by device and step."""
    communication: tuple[CommunicationSummary, ...] = ()
    """By total time, longest first."""
    origin_unix_ns: int | None = None
    """The Unix time in nanoseconds that ``start_us`` counts from: by the clock anchors of the recorder, else by the
    trace; ``None`` where neither says it."""
    host_times: HostTimes | None = None
    """Where the time of the steps went on the host; ``None`` where only devices were read."""
    runtime: tuple[RuntimeCalls, ...] = ()
    """By total time, longest first."""
    kernel_durations: tuple[DurationBin, ...] = ()
    """Without the bins that no kernel is in."""
    collectives: tuple[CollectiveCalls, ...] = ()
    """By total time, longest first."""
    functions: tuple[FunctionTime, ...] = ()
    """By self time, longest first, 200 at most. Like the next one only there where stacks were recorded."""
    stacks: tuple[StackFrame, ...] = ()
    """The tree of calls: the 2,000 nodes with the most time of those with 0.1 % of it or more."""
    shapes: tuple[ShapeCalls, ...] = ()
    """The 500 with the most time, longest first, where shapes were recorded."""
    product_flops: int | None = None
    """Floating-point operations of all counted operators (matrix products, attention and convolutions) on devices and
    on the host. ``None`` if no shapes were recorded."""
    memory: tuple[MemorySummary, ...] = ()
    """Where allocations were recorded."""
    timelines: tuple[Timeline, ...] = ()
    """Pictures, where they were asked for: of all that was recorded, and of a typical step, of a trace by itself of
    each step that may be called so."""
    implausible: tuple[ImplausibleEvents, ...] = ()
    """Events whose ``ts`` or ``dur`` is missing or invalid, and device events with times outside the recording. They
    are excluded from all other numbers."""
    launches: int = 0
    """Number of runtime calls that launch kernels or graphs and have a ``correlation``."""
    launches_without_work: int = 0
    """Number of those launches for which no device work was recorded."""
    unrecorded_steps: tuple[int, ...] = ()
    """Numbers of the steps that have launches but no device work, although other launches have device work. For these
    steps, ``device_us`` is ``None``."""
    unit: str | None = None
    """What the steps of the recorder are: ``global_step``, ``mini_batch`` or ``engine_iteration``; ``None`` without a
    manifest."""
    account: Account | None = None
    """Time on the critical path of the steps, by owner. ``None`` for a kernel table."""
    attributed: AttributedTimes | None = None
    """Device time, or self time of operators, by owner. ``None`` for traces without host events."""
    host_load: HostLoad | None = None
    """Host load during the capture. ``None`` if it was not recorded."""
    recording_cost: RecordingCost | None = None
    """Durations of recorded and unrecorded steps. ``None`` if unknown, as for engines and without a manifest."""
    work: tuple[Period, ...] = ()
    """Periods in which operators or device work run, ignoring gaps of less than 1 % of the recording. Empty for engine
    traces."""
    stage_periods: tuple[Period, ...] = ()
    """The 64 longest stages, sorted by time. Empty for engine traces."""
    engine: str | None = None
    """Plugin that recognises the iterations, such as ``vllm``. ``None`` if there are no iterations."""
    utilization: Utilization | None = None
    """FLOPs and MFU. ``None`` if no FLOPs were counted on a device."""


@attrs.frozen(kw_only=True)
class RankSkew:
    """How one rank stood to the others at the collectives that all of a group took part in."""

    rank: int | None
    path: str
    clock_offset_us: float
    """What to add to its times to get those of the first rank of the group."""
    collectives: int
    last: int
    """At how many of them it arrived last: the others waited for it."""
    late_us: float
    """Sum, over the collectives, of how long after the first rank it arrived."""
    wait_us: float
    """Sum of how long it waited for the last to arrive."""


@attrs.frozen(kw_only=True)
class CollectiveSkew:
    """All calls of one collective, over the ranks that took part."""

    name: str
    count: int
    transfer_us: float
    """Sum of the times in which all ranks were in it: last arrival to the median end."""
    skew_us: float
    """Sum of last arrival minus first arrival."""


@attrs.frozen(kw_only=True)
class GroupSkew:
    """Ranks of one role, replica and capture that ran the same collectives."""

    role: str | None
    replica: int | None
    capture: str | None
    run: str | None = None
    collectives: tuple[CollectiveSkew, ...]
    ranks: tuple[RankSkew, ...]
    straggler: int | None
    """The rank that the others waited for; ``None`` if no rank stands out."""
    note: str | None
    """Why something could not be told."""


@attrs.frozen(kw_only=True)
class ServerSummary:
    """Statistics of the engine iterations of one server over all captures, excluding cold iterations.

    The values are those of the first recorded rank. They also describe its tensor-parallel peers, which run the same
    batches, but not other data-parallel ranks.
    """

    label: str
    """Role and replica, such as ``rollout/1``."""
    run: str | None
    role: str | None
    replica: int | None
    rank: int | None
    """Rank whose iterations were used."""
    iterations: int
    tokens_per_s: float | None
    """Decode tokens per second, including the pauses between iterations. ``None`` if unknown."""
    decode_p50_us: float | None
    """Median time from the start of a decode iteration to the start of the next iteration. If no request continues, the
    iteration's own duration is used. ``None`` if there are no decode iterations."""
    decode_p99_us: float | None
    prefill_tokens: int | None
    """Total number of prefill tokens. ``None`` if the number is unknown for an iteration with a prefill."""
    batch_size: float | None
    """Mean number of decode requests per iteration, over the iterations that have any."""
    idle_us: float
    """Total time between iterations in which the server had no unfinished requests."""


@attrs.frozen(kw_only=True)
class RunSummary:
    """Any number of traces."""

    ranks: tuple[RankSummary, ...]
    skew: tuple[GroupSkew, ...]
    captures: tuple[CaptureStatus, ...] = ()
    """Of the directories that were given, whether their traces can be read or not."""
    recordings: tuple[RecordingAbout, ...] = ()
    """With what each role was recorded, by the manifests; each way once."""
    silent_roles: tuple[str, ...] = ()
    """Roles of a run that recorded nothing."""
    findings: tuple[Finding, ...] = ()
    """Missing data first, then performance problems sorted by ``share``."""
    causes: tuple[CauseState, ...] = ()
    """Result of the search for each cause, sorted by name."""
    servers: tuple[ServerSummary, ...] = ()
    """Servers with engine iterations, sorted by run, role and replica."""
    unread: tuple[str, ...] = ()
    """Paths that could not be read: traces, directories, and files such as ``run.json``."""
    verdict: str = ""
    """The answer in one sentence: the first finding that is not a note, or else the largest owner."""
    headlines: tuple[str, ...] = ()
    """For each role with an account, its step time and each side's share of the critical path, in one sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as dicts, tuples and scalars."""
        return attrs.asdict(self)
