"""Global steps that several callers of one process share, such as the workers in one actor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from profdeck.base.errors import ConfigError
from profdeck.records.capture import Unit

if TYPE_CHECKING:
    from profdeck.lifecycle.role_group import RoleGroup


class SharedSteps:
    """The global steps of one role in one process, which each of its callers begins and ends."""

    def __init__(self, group: RoleGroup, arguments: Mapping[str, object]) -> None:
        """Args:
        group: the roles.
        arguments: the arguments of the first caller.
        """
        self.group = group
        self.arguments = arguments
        self._mutex = threading.Lock()
        self._step: int | None = None
        self._inside: set[object] = set()
        """Callers that have begun the step and not ended it."""
        self._reported: int | None = None
        """The global step that was reported last."""
        self._counting: object = None
        """The caller whose mini-batches count in the step."""

    def enter(self, caller: object, step: int) -> bool:
        """Begin a step for a caller; return whether it is the first."""
        with self._mutex:
            if step != self._step:
                self._inside.clear()  # callers that are still inside have not ended the previous step
            self._step, first = step, not self._inside
            self._inside.add(caller)
            if first:
                self._counting = None
            return first

    def is_inside(self, caller: object, step: int) -> bool:
        """Return whether a caller has begun the step and not ended it."""
        with self._mutex:
            return step == self._step and caller in self._inside

    def leave(self, caller: object) -> bool:
        """End the step for a caller; return whether it was the last."""
        with self._mutex:
            if caller not in self._inside:
                return False
            self._inside.discard(caller)
            return not self._inside

    def counts(self, caller: object, index: int, unit: Unit) -> bool:
        """Return whether a boundary that a caller reports counts."""
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
"""By process and role; removed with the last caller."""


def join(role: str | None, arguments: Mapping[str, object], open_roles: Callable[[], RoleGroup]) -> SharedSteps:
    """Return the shared steps of a role in this process. The first call opens them.

    Args:
        role: the name of the role.
        arguments: the arguments of the caller, None for those that it leaves out.
        open_roles: opens the roles.

    Raises:
        ConfigError: an argument differs from that of the first call.
    """
    key = os.getpid(), role  # a forked child has its own
    steps = _shared.get(key)
    if steps is None:
        steps = _shared.setdefault(key, SharedSteps(open_roles(), arguments))
    for name, value in arguments.items():
        first = steps.arguments.get(name)
        if value is not None and value is not first and value != first:
            raise ConfigError(
                f"{name}: the role '{role}' of this process is shared already, with {first!r} and not {value!r}. Pass "
                "the same to all profilers of the role, or choose another role."
            )
    return steps
