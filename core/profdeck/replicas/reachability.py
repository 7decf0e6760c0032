"""Asks the targets of a config whether they answer, without a capture."""

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
    """Reach each target as a capture would.

    Args:
        backend: That of each target.
        options: Those of the role.
        config: Where the targets are.

    Returns:
        Each of them, and why it cannot be reached.

    Raises:
        ProfdeckError: A router or a file does not say what the targets are.
    """

    async def reach(target: Target) -> None:
        if target.problem is not None:
            raise target.problem
        asked = backend(options)
        asked.bind(target.handle)
        try:
            await asked.reach()
        finally:
            await asked.release()

    async def ask(actor: Actor) -> None:
        await reach(Target(handle=actor, replica=0))

    targets, _ = await discover(config, ReplicaNumbers(), ask)
    limit_s = config.start_timeout_s / 2
    results = await fan_out(reach, targets, timeout_s=limit_s, each_timeout_s=limit_s)
    return [
        (target, result if isinstance(result, BaseException) else None)
        for target, result in zip(targets, results, strict=True)
    ]
