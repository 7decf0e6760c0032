"""The roles of one profiler, which start and stop together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from profdeck.base.operations import Blocker, Operation, RunningOperation, begin, finish
from profdeck_traces.base.errors import describe_error

if TYPE_CHECKING:
    from profdeck.lifecycle.role import Role


@attrs.define(eq=False)
class RoleGroup:
    """The roles of one profiler."""

    roles: Sequence[Role] = attrs.field(default=(), init=False)
    busy: set[Role] = attrs.field(factory=set, init=False)
    """Roles that are capturing, or may capture in this step. Each role adds and removes itself."""
    blocker: Blocker = attrs.field(factory=Blocker, init=False)

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
        failed = isinstance(error, Exception)
        reason = f"the start of another role failed: {describe_error(error)}" if failed else "interrupted"
        return {role: role.close(reason) for role in self.roles}
