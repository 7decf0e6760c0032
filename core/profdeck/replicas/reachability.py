"""Checks whether the configured targets are reachable, without a capture."""

from __future__ import annotations

from collections.abc import Sequence

from profdeck.backends.api import EngineBackend
from profdeck.config.options import CommonOptions
from profdeck.config.targets import TargetsConfig
from profdeck.engine.clusters import Actor
from profdeck.replicas.discovery import ReplicaNumbers, Target, discover
from profdeck.replicas.fan_out import fan_out


async def reach_all(
    backend: type[EngineBackend], options: CommonOptions, config: TargetsConfig
) -> Sequence[tuple[Target, BaseException | None]]:
    """Connect to all targets as a capture would.

    Args:
        backend: Backend of the targets.
        options: Options of the role.
        config: Specifies where to find the targets.

    Returns:
        Each target with its connection error, or with None if it is reachable.

    Raises:
        ProfdeckError: The targets cannot be listed, for example because a router does not respond.
    """

    async def reach(target: Target) -> None:
        if target.problem is not None:
            raise target.problem
        target_backend = backend(options)
        target_backend.bind(target.handle)
        try:
            await target_backend.reach()
        finally:
            await target_backend.release()

    async def ask(actor: Actor) -> None:
        await reach(Target(handle=actor, replica=0))

    targets, _ = await discover(config, ReplicaNumbers(), ask)
    limit_s = config.start_timeout_s / 2
    results = await fan_out(reach, targets, timeout_s=limit_s, each_timeout_s=limit_s)
    return [
        (target, result if isinstance(result, BaseException) else None)
        for target, result in zip(targets, results, strict=True)
    ]
