"""What a summary says beside kernels and operators: where the steps went, on the host and on each device.

Times are microseconds, as in `profdeck_traces.analysis.model`.
"""

from __future__ import annotations

import attrs

from profdeck_traces.reading.identifiers import Id


@attrs.frozen(kw_only=True)
class PerStep:
    """How a time varies from step to step, over the steps of one kind and stage: an estimate of its noise."""

    kind: str
    """Of these steps, as in `StepSummary`."""
    stage: str | None
    steps: int
    """How many steps there are, those without it included."""
    measured: int
    """How many of them were looked at: 256 at most."""
    median_us: float
    mad_us: float
    """Median absolute deviation from the median, not scaled."""


@attrs.frozen(kw_only=True)
class BatchDetails:
    """Additional request and token counts of one engine iteration. ``None`` if its name does not contain them.

    The fields match the regular expression groups of the same names, see `profdeck_traces.analysis.steps`.
    """

    running_requests: int | None = None
    """Requests that are decoding, but are not in this batch."""
    waiting_requests: int | None = None
    """Requests in the engine's queue."""
    resumed_requests: int | None = None
    """Requests in prefill that were preempted earlier."""
    resumed_tokens: int | None = None
    """Prefill tokens of the resumed requests. The engine computes them again."""
    draft_tokens: int | None = None
    """Draft tokens that this batch verifies."""
    rejected_tokens: int | None = None
    """Draft tokens that were rejected since the previous iteration."""
    kv_percent: int | None = None
    """KV cache usage in percent."""
    max_requests: int | None = None
    """The engine's limit on running requests."""


@attrs.frozen(kw_only=True)
class Period:
    """A period in which work or one stage runs."""

    name: str | None
    """Name of the stage; ``None`` for work."""
    start_us: float
    duration_us: float


@attrs.frozen(kw_only=True)
class HostState:
    """A part of some time, by what the threads of the host did together."""

    state: str
    """One of the causes of idle time: `profdeck_traces.analysis.host_states.CAUSES`."""
    time_us: float
    share: float
    """Of that time."""


@attrs.frozen(kw_only=True)
class StageSummary:
    """What the job marks inside its steps, under one name: the outermost marks of the thread that marks the steps."""

    name: str
    count: int
    """How often it ran."""
    steps: int
    """In how many of the steps."""
    total_us: float
    share: float
    """Of the time of all steps."""
    median_us: float
    """Of its time in a step, over the steps that have it."""
    max_us: float
    communication_us: float
    """The part of ``total_us`` in which a collective was open on some thread of the host: among others, it waited for
    other ranks then."""
    host: tuple[HostState, ...]
    """By time, longest first; they add up to ``total_us``. Empty where the host was not read."""
    loading_us: float = 0.0
    """Part of ``total_us`` during which the stage's thread was fetching from a DataLoader or reading a file."""


@attrs.frozen(kw_only=True)
class StepPart:
    """Time of one stage or host state in the longest step, and its median over all steps."""

    name: str
    kind: str
    """``stage`` or ``host state``. These are two independent breakdowns of the same step."""
    time_us: float
    median_us: float


@attrs.frozen(kw_only=True)
class LongestStep:
    """The longest step of a trace, and the parts that took longer than usual."""

    step: int | None
    """Step number, if the annotation has one."""
    duration_us: float
    median_us: float
    """Median duration of all steps."""
    parts: tuple[StepPart, ...]
    """Parts that exceed their median, sorted by the excess, largest first. At most five per kind."""


@attrs.frozen(kw_only=True)
class HostTimes:
    """Where the time of the steps went on the host; of a trace without steps, where all of it went."""

    basis: str
    """What the steps are: ``global_step``, ``iteration``, or ``recording`` for all that was recorded."""
    steps: int
    """How many there are; 1 for a recording."""
    total_us: float
    """The time of all of them."""
    states: tuple[HostState, ...]
    """As in `StageSummary`, of all steps."""
    stages: tuple[StageSummary, ...]
    """By total time, longest first. They do not overlap; what they leave of the steps is outside of all stages."""
    longest_step: LongestStep | None = None
    """``None`` if there are fewer than three steps."""


@attrs.frozen(kw_only=True)
class RecordingCost:
    """Comparison of the recorded steps of a capture with the unrecorded steps before it.

    A difference does not prove that the recording is the reason: the steps may also do different work.
    """

    recorded_step_us: float
    """Median duration of the recorded global steps, from the start of a step to the start of the next one."""
    unrecorded_step_us: float
    """Median duration of the global steps before the capture, measured in the same way."""
    ratio: float
    """``recorded_step_us`` divided by ``unrecorded_step_us``."""


@attrs.frozen(kw_only=True)
class IdleCause:
    """A part of a device's idle time, by what the host did then: one of `host_states.CAUSES`."""

    cause: str
    idle_us: float
    share: float
    """Of all idle time of the device, or of its step."""


@attrs.frozen(kw_only=True)
class StepOfDevice:
    """Work of one device in one step.

    The step lasts from its first device work to that of the next step. If no step follows immediately, it ends with its
    own last device work. A global step between two pauses also includes its duration on the host.
    """

    device: Id
    start_us: float
    duration_us: float
    busy_us: float
    compute_us: float
    communication_us: float
    exposed_communication_us: float
    memory_us: float
    idle: tuple[IdleCause, ...]
    """As of a device; where the host was not read, its cause is ``host not read``."""
    is_followed: bool = True
    """True if the step lasts until the next step. If False, idle time after its last work is missing."""

    @property
    def idle_us(self) -> float:
        """Time in which nothing ran."""
        return self.duration_us - self.busy_us


@attrs.frozen(kw_only=True)
class RuntimeCalls:
    """All calls of one function of the device's runtime or driver."""

    name: str
    state: str
    """What it does: ``launching``, ``synchronising``, ``copying``, ``allocating`` or ``other runtime calls``."""
    count: int
    total_us: float
    max_us: float


@attrs.frozen(kw_only=True)
class DurationBin:
    """The kernels whose duration is at least ``from_us`` and less than ``to_us``; each bin is twice as wide."""

    from_us: float
    to_us: float
    count: int
    total_us: float


@attrs.frozen(kw_only=True)
class CollectiveCalls:
    """All calls of one collective with one size in one process group, on one rank, where the trace states them."""

    name: str
    """Such as ``allreduce``, as torch calls it."""
    group: str
    """The name and the ranks of the process group."""
    group_size: int | None
    """How many ranks it has."""
    size_bytes: int | None
    """Of one call: the larger of what goes in and what comes out, as nccl-tests counts it."""
    count: int
    total_us: float
    """Waiting for the other ranks included."""
    min_us: float
    bus_bytes_per_s: float | None
    """Bus bandwidth of the shortest call, which waited least: see PERFORMANCE.md of NVIDIA/nccl-tests."""


@attrs.frozen(kw_only=True)
class StackFrame:
    """A function, operator or annotation, called from one place: a node of the tree of calls."""

    name: str
    parent: int | None
    """The index of what called it, which stands before it; ``None`` for a thread."""
    count: int
    total_us: float
    self_us: float
    """Without what it called, as far as that has frames of its own: less than 0.1 % of all is the caller's."""


@attrs.frozen(kw_only=True)
class FunctionTime:
    """All calls of one Python function."""

    name: str
    """With its file and line."""
    count: int
    self_us: float
    """In which it was the innermost function, operator or annotation open on its thread."""
    total_us: float
    """A call of it by itself, directly or not, counts once."""


@attrs.frozen(kw_only=True)
class ShapeCalls:
    """All calls of one operator with inputs of one shape."""

    name: str
    shapes: str
    """Of the inputs, as JSON: ``[[64], [32, 64], [64, 64], [], []]``; cut at 400 characters."""
    count: int
    total_us: float
    """Time from start to end on the host, summed: with a device, that of launching."""
    max_us: float
    flops: int | None
    """Floating-point operations of matrix products, attention and convolutions. ``None`` for other operators, and for
    operators whose work is counted in a nested operator."""
    dtypes: str | None = None
    """Data types of the input tensors, such as ``bfloat16, float32``."""


@attrs.frozen(kw_only=True)
class MemoryPoint:
    """How much memory was in use at most from here to the next point."""

    start_us: float
    allocated_bytes: int
    reserved_bytes: int


@attrs.frozen(kw_only=True)
class MemorySummary:
    """The memory of one device, by the marks of its allocations."""

    device: str
    """``CPU``, or the kind and number: ``GPU 0``."""
    events: int
    peak_allocated_bytes: int
    """Of what was recorded: an earlier peak is not in the trace."""
    peak_us: float
    """When that was."""
    peak_reserved_bytes: int
    """By the allocator from the device; 0 on the CPU."""
    points: tuple[MemoryPoint, ...]
    """200 at most, in the order of time."""


@attrs.frozen(kw_only=True)
class TimelineMark:
    """A step, an iteration or a stage in a picture."""

    name: str
    kind: str
    """``global_step``, ``iteration`` or ``stage``."""
    start_us: float
    duration_us: float


@attrs.frozen(kw_only=True)
class TimelineEvent:
    """An event that is long enough to be seen by itself."""

    lane: int
    """Index into the lanes of the picture."""
    name: str
    """Cut at 160 characters."""
    start_us: float
    duration_us: float


@attrs.frozen(kw_only=True)
class TimelineLane:
    """What one device, stream or thread did, over equal parts of the time."""

    kind: str
    """``path`` (the critical path), ``device``, ``stream`` or ``thread``. The classes are, respectively, kinds of
    owners; device states and causes of idle time; kernel classes; and host states."""
    name: str
    group: str
    """The device, or the process of a thread."""
    classes: tuple[str, ...]
    shares: str
    """Base64 of zlib of bytes: for each class a row of one byte for each part, the share of it in 255ths."""


@attrs.frozen(kw_only=True)
class Timeline:
    """A picture of a part of a trace."""

    title: str
    """``recording`` for all of it, else the name of a step."""
    start_us: float
    duration_us: float
    buckets: int
    """How many equal parts it has."""
    lanes: tuple[TimelineLane, ...]
    marks: tuple[TimelineMark, ...]
    """The 400 longest, in the order of time."""
    events: tuple[TimelineEvent, ...]
    """The 300 longest of each lane, in the order of time."""
