"""Adds the scheduler's state to its outputs, so that workers can include it in iteration names.

In vLLM V1, the scheduler runs in the engine core process, and the workers receive only its outputs. Pickling an output
preserves all of its attributes, including attributes that are not fields of ``SchedulerOutput``.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

logger = logging.getLogger("profdeck")

_STATE = "_profdeck_state"
_PATCHED = "_profdeck_original_schedule"


class SchedulerState(NamedTuple):
    """Scheduler state after an iteration has been scheduled."""

    waiting: int
    """Number of requests waiting to be scheduled."""
    kv_percent: int
    """KV cache usage in percent."""


def install() -> None:
    """Patch ``Scheduler.schedule`` in this process. Subclasses usually call the base implementation."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, _PATCHED):
        return
    original = Scheduler.schedule

    @functools.wraps(original)
    def schedule(scheduler: Scheduler, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = original(scheduler, *args, **kwargs)
        try:
            setattr(output, _STATE, tuple(_state_of(scheduler)))
        except Exception as error:  # noqa: BLE001  # an exception here would terminate the engine
            logger.warning("The queue and the KV cache of vLLM's scheduler are not recorded: %r", error)
            Scheduler.schedule = original
        return output

    setattr(Scheduler, _PATCHED, original)
    Scheduler.schedule = schedule


def read_state(output: SchedulerOutput) -> SchedulerState | None:
    """Return the state attached to an output, or ``None`` if its scheduler is not patched."""
    state = getattr(output, _STATE, None)
    return None if state is None else SchedulerState(*state)


def _state_of(scheduler: Scheduler) -> SchedulerState:
    _, waiting = scheduler.get_request_counts()
    return SchedulerState(int(waiting), int(100 * scheduler.kv_cache_manager.usage))
