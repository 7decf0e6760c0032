"""Global steps that several callers in one process share, such as the workers in one actor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from profdeck.records.capture import Unit
from profdeck_traces.base.errors import ConfigError

if TYPE_CHECKING:
    from profdeck.lifecycle.role_group import RoleGroup


class SharedSteps:
    """Global steps of one role that several callers in this process begin and end together."""

    def __init__(self, group: RoleGroup, arguments: Mapping[str, object]) -> None:
        """Args:
        group: the roles that the callers share.
        arguments: the arguments of the first caller.
        """
        self.group = group
        self.arguments = arguments
        self._mutex = threading.Lock()
        self._step: int | None = None
        self._inside: set[object] = set()
        """Callers that have begun the step but not ended it."""
        self._reported: int | None = None
        """The last global step that was reported."""
        self._counting: object = None
        """The caller whose mini-batches are counted in this step."""

    def enter(self, caller: object, step: int) -> bool:
        """Begin a step for a caller. Return True for the first caller of the step."""
        with self._mutex:
            if step != self._step:
                self._inside.clear()  # remove callers that have not ended the previous step
            self._step, first = step, not self._inside
            self._inside.add(caller)
            if first:
                self._counting = None
            return first

    def is_inside(self, caller: object, step: int) -> bool:
        """Return whether a caller has begun the step but not ended it."""
        with self._mutex:
            return step == self._step and caller in self._inside

    def leave(self, caller: object) -> bool:
        """End the step for a caller. Return True for the last caller of the step."""
        with self._mutex:
            if caller not in self._inside:
                return False
            self._inside.discard(caller)
            return not self._inside

    def counts(self, caller: object, index: int, unit: Unit) -> bool:
        """Return whether to process the end of a global step or unit that a caller reports.

        The end of a global step is processed once. For other units, only one caller's reports are processed per step.
        """
        with self._mutex:
            if unit is not Unit.GLOBAL_STEP:
                self._counting = self._counting or caller
                return self._counting is caller
            first, self._reported = index != self._reported, index
            return first

    def clear(self) -> None:
        """End the step for all callers."""
        with self._mutex:
            self._inside.clear()


_shared: WeakValueDictionary[tuple[int, str | None], SharedSteps] = WeakValueDictionary()
"""Shared steps, by process ID and role. An entry is removed when no caller refers to it any longer."""


def join(role: str | None, arguments: Mapping[str, object], build_group: Callable[[], RoleGroup]) -> SharedSteps:
    """Return the shared steps of a role in this process. The first call builds the roles.

    Args:
        role: the name of the role.
        arguments: the caller's arguments. Omitted arguments are None.
        build_group: function that builds the roles.

    Raises:
        ConfigError: an argument differs from the same argument of the first call.
    """
    key = os.getpid(), role  # a forked child has its own steps
    steps = _shared.get(key)
    if steps is None:
        steps = _shared.setdefault(key, SharedSteps(build_group(), arguments))
    for name, value in arguments.items():
        first = steps.arguments.get(name)
        if value is not None and value is not first and value != first:
            raise ConfigError(
                f"{name}: the shared profiler of the role '{role}' was created with {first!r}, not {value!r}. Pass "
                "the same value to all profilers of the role, or use another role."
            )
    return steps
