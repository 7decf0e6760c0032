"""Device time or self CPU time by operator, shape, module, stage and line of code."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class AttributedTime:
    """Time attributed to one operator, module, stage or line."""

    name: str
    """Name of the owner, or the reason why the time has no owner."""
    kind: str
    """``operator``, ``module``, ``stage``, ``line``, ``annotation`` or ``runtime call``; ``none`` for time without an
    owner."""
    shapes: str | None = None
    """Input shapes as JSON. Set only in the table by shape."""
    dtypes: str | None = None
    """Data types of the input tensors, such as ``bfloat16, float32``. Set only in the table by shape."""
    count: int
    """Number of kernels, copies and fills, or of operator calls if the trace has no device events."""
    time_us: float
    share: float
    """Fraction of ``total_us``."""
    flops: int | None = None
    """Floating-point operations in matrix products, attention and convolutions; ``None`` if none were counted."""
    size_bytes: int | None = None
    """Minimum memory traffic of the counted operators, including norms and embeddings."""
    work_us: float | None = None
    """Duration of the events with counted work. For a job on the CPU, it includes operators called by the counted ones.
    ``None`` if the trace has no device events but may be of a machine with a device, which was not recorded."""
    peak_share: float | None = None
    """Minimum time for the work, given the device's peak rate and memory bandwidth, as a fraction of ``work_us``.
    ``None`` if the device or data type is unknown."""
    bound: str | None = None
    """``compute`` or ``memory``: the limit that determines most of the minimum time."""


@attrs.frozen(kw_only=True)
class Utilization:
    """FLOPs of matrix products, attention and convolutions on the devices of a trace, and the resulting MFU."""

    device: str | None
    """Device name in the trace; ``None`` if the trace has no name or lists several models."""
    flops: int
    dtype: str | None
    """Data type with the most FLOPs, such as ``bfloat16``."""
    dtype_share: float
    """Fraction of the FLOPs in ``dtype``."""
    peak_flops_per_s: float | None
    """Dense peak rate of one device for ``dtype``; ``None`` if the device or the rate is unknown."""
    covered: float
    """Fraction of kernel time, excluding communication, spent in operators with counted work."""
    mfu: float | None
    """Minimum time for the FLOPs at the peak rates of their data types, as a fraction of the step time.

    If there are no steps, it is a fraction of the devices' recorded span. ``None`` if a peak rate is unknown or
    ``covered`` is below 0.5.
    """


@attrs.frozen(kw_only=True)
class AttributedTimes:
    """Time in one trace by owner. The rows of each table add up to ``total_us`` and are sorted by time.

    If an event has no owner of the table's kind, its time is attributed to an owner of another kind, such as its
    operator.
    """

    basis: str
    """``device``: total duration of kernels, copies and fills. ``host``: self time of operators, if the trace has no
    device events."""
    total_us: float
    has_stacks: bool
    """True if Python frames were recorded. Modules and lines require them."""
    has_shapes: bool
    """True if input shapes were recorded."""
    operators: tuple[AttributedTime, ...]
    shapes: tuple[AttributedTime, ...]
    """Time by operator, input shapes and data types."""
    modules: tuple[AttributedTime, ...]
    """Time by path of module classes, such as ``GPT > Block > Linear``. A backward operator belongs to the module of
    its forward operator."""
    stages: tuple[AttributedTime, ...]
    lines: tuple[AttributedTime, ...]
    """Time by innermost function in user code, as ``file(line): function``. The line is the function's first line."""
    note: str | None = None
    """Number of graph launches with known operators; ``None`` without graph captures."""
