"""Detection of profdeck calls in code that ``torch.compile`` traces.

These calls must do nothing, because a graph break slows down the host and, with ``fullgraph=True``, raises an error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

logger = logging.getLogger("profdeck")

_reported_calls: set[str] = set()


def compiling_check() -> Callable[[], bool]:
    """Return a function that returns True while ``torch.compile`` traces its caller. Torch must already be imported.

    The compiler evaluates torch's own function while tracing, so the result does not depend on global state.
    """
    return getattr(sys.modules.get("torch.compiler"), "is_dynamo_compiling", _is_not_compiling)


def _is_not_compiling() -> bool:
    return False


def report_compiled_call(call: str) -> None:
    """Log a warning, once per kind of call, that the call has no effect in compiled code."""
    if call not in _reported_calls:
        _reported_calls.add(call)
        logger.warning(
            "%s has no effect in code compiled by torch.compile. Call it outside the compiled function.", call
        )


# Has the effect of torch.compiler.assume_constant_result: the compiler calls the function while tracing, which avoids a
# graph break.
setattr(report_compiled_call, "_dynamo_marked_constant", True)  # noqa: B010  # type checkers reject the assignment
