"""The roles of one profiler, which start and stop together."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import attrs

from profdeck.base.identity import NAME
from profdeck.base.interrupts import is_interruption
from profdeck.base.operations import Blocker, Operation, RunningOperation, begin, finish
from profdeck.base.text import describe_value
from profdeck.records.capture import MAX_INDEX, Step, Unit
from profdeck_traces.base.errors import ConfigError, describe_error

if TYPE_CHECKING:
    from profdeck.lifecycle.role import Role

logger = logging.getLogger("profdeck")

_UNITS = "{}, {} or {}".format(*Unit)


@attrs.define(eq=False)
class RoleGroup:
    """The roles of one profiler."""

    roles: Sequence[Role] = attrs.field(default=(), init=False)
    busy: set[Role] = attrs.field(factory=set, init=False)
    """Roles that are capturing, or may capture in this step. Each role adds and removes itself."""
    blocker: Blocker = attrs.field(factory=Blocker, init=False)
    _rejected: set[str] = attrs.field(factory=set, init=False)
    """Names of arguments that were rejected."""

    def to_index(self, argument: str, value: SupportsIndex | None, unexpected: tuple[object, ...] = ()) -> int | None:
        """Convert a step number or index from the host. Return None if it is invalid, and 0 if there are no roles.

        Args:
            argument: the name of the argument.
            value: the argument's value.
            unexpected: extra positional arguments and names of unknown keyword arguments in the same call.
        """
        if not self.roles:
            return 0
        if not self._check_unexpected(argument, unexpected):
            return None
        if value is None:
            mini_batch = ", or the index of the mini-batch" if argument == "index" else ""
            self._reject(argument, f"expected the number of the global step{mini_batch}, got None")
            return None
        try:
            index = operator.index(value)
        except BaseException as error:  # the host object's `__index__` may raise any exception
            if is_interruption(error):
                raise
            self._reject(argument, f"expected an integer, got {describe_value(value)}")
            return None
        if not 0 <= index <= MAX_INDEX:
            self._reject(
                argument, f"expected 0 to {MAX_INDEX:,}, got a {'negative' if index < 0 else 'larger'} integer"
            )
            return None
        return index

    def to_step(
        self, index: SupportsIndex | None, unit: Unit | str, unexpected: tuple[object, ...] = ()
    ) -> Step | None:
        """Convert the arguments of `profdeck.Profiler.step`. Return None if they are invalid."""
        try:
            checked_unit = Unit(unit)
        except BaseException as error:  # the host object's `__hash__` or `__eq__` may raise any exception
            if is_interruption(error):
                raise
            self._reject("unit", f"expected {_UNITS}, got {describe_value(unit)}")
            return None
        number = self.to_index("index", index, unexpected)
        return None if number is None else Step(checked_unit, number)

    def report_missing_start(self) -> None:
        """Report that the host ends global steps but starts none.

        Raises:
            ConfigError: the config sets ``on_error: raise``.
        """
        self._reject("step", "no step can be captured, because the host has called neither start(n) nor capture(n)")

    def to_stage_name(self, name: object, unexpected: tuple[object, ...] = ()) -> str | None:
        """Convert a stage name from the host to a plain string. Return None if the name is invalid."""
        if not self._check_unexpected("stage", unexpected):
            return None
        # Not isinstance: it reads `__class__`, which can raise an exception on a lazy proxy.
        if issubclass(type(name), str) and NAME.fullmatch(text := str.__str__(name)):
            return text  # not str(name): for an enum member, it can contain the class name
        self._reject(
            "stage",
            "expected a letter, then up to 63 letters, digits, '_' or '-', because file names contain the stage, "
            f"got {describe_value(name)}",
        )
        return None

    def _check_unexpected(self, argument: str, unexpected: tuple[object, ...]) -> bool:
        """Report unexpected arguments in a call from the host. Return True if there are none."""
        if unexpected:
            self._reject(argument, f"unexpected argument {', '.join(map(describe_value, unexpected))}")
        return not unexpected

    def _reject(self, argument: str, problem: str) -> None:
        """Report an invalid argument in a call from the host.

        Raises:
            ConfigError: the config sets ``on_error: raise``.
        """
        from profdeck.config.model import OnError

        if any(role.config.on_error is OnError.RAISE for role in self.roles):
            raise ConfigError(f"{argument}: {problem}")
        if argument not in self._rejected:
            self._rejected.add(argument)
            logger.warning("%s: %s. The call is ignored.", argument, problem)

    @property
    def busy_roles(self) -> list[Role]:
        """The busy roles, in the order of ``roles``."""
        return [role for role in self.roles if role in self.busy]

    def phases(self, roles: list[Role]) -> list[list[Role]]:
        """Split roles into start phases, so that the captures of engines start before the capture of this process.

        Otherwise, the trace of this process would include the time that the engines' captures take to start.
        """
        if len(roles) == 1:  # the usual case
            return [roles]
        engines, devices = ([role for role in roles if (role.target is None) is device] for device in (False, True))
        return [phase for phase in (engines, devices) if phase]

    def finish_start(self, runs: list[RunningOperation]) -> list[Any]:
        """Block until the roles have started. If a role raises an error, end the captures of all roles."""
        try:
            return self.blocker.finish(runs)
        except BaseException as error:
            if len(self.roles) > 1:
                self.finish_end(self._close_operations(error))
            raise

    async def afinish_start(self, runs: list[RunningOperation]) -> list[Any]:
        """Async version of `finish_start`."""
        try:
            return await finish(runs)
        except BaseException as error:
            if len(self.roles) > 1:
                import asyncio

                await asyncio.shield(finish(begin(self._close_operations(error).values())))
            raise

    def finish_end(self, operations: Mapping[Role, Operation[None]]) -> None:
        """Finish operations that end captures. Inside a running event loop, captures of engines end later, in a task.

        Raises:
            BaseException: the first error of an operation.
        """
        self.blocker.finish_end(
            [operation for role, operation in operations.items() if role.target is None],
            [operation for role, operation in operations.items() if role.target is not None],
        )

    def _close_operations(self, error: BaseException) -> dict[Role, Operation[None]]:
        """Return operations that end all captures. After an exception, the host does not end the captures itself."""
        failed = not is_interruption(error)
        reason = f"the start of another role failed: {describe_error(error)}" if failed else "interrupted"
        return {role: role.close(reason) for role in self.roles}
