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
    """Floating-point operations of matrix products, attention and convolutions; ``None`` if none were counted."""
    size_bytes: int | None = None
    """Least memory traffic of the counted operators, which include norms and embeddings."""
    work_us: float | None = None
    """Part of ``time_us`` spent on ``flops`` and ``size_bytes``. ``None`` without device events, because operators may
    have launched work on a device that was not recorded."""
    peak_share: float | None = None
    """Least possible time for the work on the device, as a fraction of ``work_us``. The limit is the peak rate or the
    memory bandwidth, as ``bound`` states; ``None`` for an unknown device or data type."""
    bound: str | None = None
    """``compute`` or ``memory``: the limit that applies for most of the least possible time."""


@attrs.frozen(kw_only=True)
class Utilization:
    """FLOPs of the matrix products, attention and convolutions on the devices of a trace, and their MFU."""

    device: str | None
    """Device name in the trace; ``None`` if it has none, or if it lists devices of several models."""
    flops: int
    dtype: str | None
    """Data type with the most FLOPs, such as ``bfloat16``."""
    dtype_share: float
    """Share of the FLOPs in ``dtype``."""
    peak_flops_per_s: float | None
    """Dense peak rate of one device for ``dtype``; ``None`` if the device or the rate is unknown."""
    covered: float
    """Share of the kernels' time, without communication, in operators with counted work."""
    mfu: float | None
    """Least possible time for the FLOPs, each at the peak of its data type, as a fraction of the steps' time (without
    steps: of the devices' recorded span). ``None`` without peaks, or if ``covered`` is below one half."""


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
