"""Device time or self CPU time by operator, shape, module, stage and line of code."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class AttributedTime:
    """Time of one operator, module, stage or line."""

    name: str
    """Name of the owner. For time without an owner, the reason."""
    kind: str
    """``operator``, ``module``, ``stage``, ``line``, ``annotation`` or ``runtime call``; ``none`` for time without an
    owner."""
    shapes: str | None = None
    """Shapes of the inputs as JSON, in the table by shape."""
    dtypes: str | None = None
    """Data types of the input tensors, in the table by shape: ``bfloat16, float32``."""
    count: int
    """Number of kernels, copies and fills; without a device, of operator calls."""
    time_us: float
    share: float
    """Fraction of ``total_us``."""


@attrs.frozen(kw_only=True)
class AttributedTimes:
    """Time of one trace by owner. The rows of each table add up to ``total_us``, and are sorted by time.

    If an event has no owner of the requested kind, it belongs to the nearest owner of another kind.
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
    """By operator, input shapes and data types."""
    modules: tuple[AttributedTime, ...]
    """By path of module classes, such as ``GPT > Block > Linear``. Backward operators belong to the module of their
    forward operator."""
    stages: tuple[AttributedTime, ...]
    lines: tuple[AttributedTime, ...]
    """By the innermost function of user code, ``file(line): function``. The line is the first line of the function."""
