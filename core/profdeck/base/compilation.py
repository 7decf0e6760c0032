"""Calls from code that ``torch.compile`` traces.

Such calls must do nothing: a graph break slows down the host, and with ``fullgraph=True`` it raises an error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

logger = logging.getLogger("profdeck")

_reported_calls: set[str] = set()


def compiling_check() -> Callable[[], bool]:
    """Return a function that returns True while ``torch.compile`` traces its caller. Requires that torch is imported.

    The compiler evaluates torch's own function during tracing, so its result does not depend on the global state.
    """
    return getattr(sys.modules.get("torch.compiler"), "is_dynamo_compiling", _is_not_compiling)


def _is_not_compiling() -> bool:
    return False


def report_compiled_call(call: str) -> None:
    """Log once that a call in compiled code does nothing."""
    if call not in _reported_calls:
        _reported_calls.add(call)
        logger.warning(
            "%s in code compiled by torch.compile does nothing. Call it outside the compiled function.", call
        )


# Like torch.compiler.assume_constant_result: the compiler calls this function while tracing, without a graph break.
setattr(report_compiled_call, "_dynamo_marked_constant", True)  # noqa: B010  # functions declare no such attribute
