"""Builds the roles of a profiler: checks the config, builds the backends and binds them to their targets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import attrs

from profdeck.backends.api import Backend, EngineBackend
from profdeck.backends.backend_setup import build_backend, resolve_identity, run_preflight, warmup_steps
from profdeck.backends.plugins import require_libraries
from profdeck.base.identity import Identity
from profdeck.config.model import Config, Mode, RoleConfig
from profdeck.config.schedule import PlannedSteps
from profdeck.config.structuring import unstructure
from profdeck.config.targets import TargetsConfig
from profdeck.lifecycle import exit_summary
from profdeck.lifecycle.listeners import is_notified_at_the_finish, role_hooks
from profdeck.lifecycle.role import Role
from profdeck.lifecycle.role_group import RoleGroup
from profdeck.lifecycle.state_machine import CaptureMachine
from profdeck.records import manifest, run_directory
from profdeck_traces.base.credentials import redact_values
from profdeck_traces.base.errors import ConfigError, did_you_mean

logger = logging.getLogger("profdeck")


def build_group(  # noqa: PLR0913  # the arguments of `Profiler.of`
    config: Config,
    *,
    role: str | None,
    identity: Identity | None,
    target: object,
    targets: Mapping[str, Sequence[object]] | None,
    listeners: Iterable[object],
) -> RoleGroup:
    """Build the role of this process and the roles with targets. The arguments are the same as for `Profiler.of`.

    Raises:
        ConfigError: the config, an option or a target is invalid.
        PluginError: a plugin cannot be used, or cannot record in this process.
    """
    name, identities = role, dict[str, Identity]()
    if identity is not None:
        name, identities = identity.role, {identity.role: identity}
    if name is None and target is not None:
        raise ConfigError("target: a target needs a role. Pass role='rollout', or targets={'rollout': [...]}.")
    if target is not None and name in (targets or {}):
        raise ConfigError(f"targets: the role '{name}' already has a target. Pass target or targets, not both.")
    role_targets: dict[str, object] = {} if name is None else {name: target}
    if targets is not None or name is None:
        role_targets |= {
            other: None for other, options in config.roles.items() if options.targets and other not in role_targets
        }
        role_targets |= {other: list(handles) for other, handles in (targets or {}).items()}
    return build_roles(config, role_targets, identities, listeners)


def build_roles(
    config: Config,
    targets: Mapping[str, object],
    identities: Mapping[str, Identity],
    listeners: Iterable[object],
) -> RoleGroup:
    """Build the roles that can record in this process.

    Args:
        config: the config, the same for all processes of the job.
        targets: for each role, the engine object or URL that its backend controls, a list of these, or None.
        identities: for each role, the identity of this process if neither the launcher nor the backend's library
            provides it.
        listeners: objects with hook implementations, in addition to the listeners that the config names.

    Raises:
        ConfigError: the config or an option is invalid.
        PluginError: a plugin cannot be used, or cannot record in this process.
    """
    group, listeners = RoleGroup(), tuple(listeners)
    roles = [
        _build_role(config, name, identity=identities.get(name), target=target, listeners=listeners, group=group)
        for name, target in targets.items()
    ]
    group.roles = tuple(role for role in roles if role is not None)
    return group


def _build_role(  # noqa: PLR0913  # the arguments of `build_roles`, for one role
    config: Config,
    name: str,
    *,
    identity: Identity | None,
    target: object,
    listeners: Sequence[object],
    group: RoleGroup,
) -> Role | None:
    options = config.roles.get(name)
    if options is None:
        if config.roles:
            hint = did_you_mean(name, config.roles) or f" It has {', '.join(config.roles)}."
            logger.warning("The config has no role '%s', so this process records nothing.%s", name, hint)
        return None
    backend = build_backend(config, name)
    if not isinstance(backend, EngineBackend):  # an engine's library may be installed only on its server
        require_libraries(type(backend))
    identity = identity or resolve_identity(name, backend)
    if options.targets is not None and options.targets.discovers and identity.rank:
        logger.info("Rank 0 captures the targets of the role '%s', so this rank does nothing.", name)
        return None
    writer = manifest.ManifestWriter(
        backend=backend.name,
        versions=dict(filter(None, (library.installed() for library in backend.libraries))),
        options=unstructure(backend.options),
        expected_ranks=(),
    )
    backend, bound = _bind(backend, options, identity, target, writer)
    expected = () if bound else _expected_ranks(options, identity)
    if (not bound and identity.rank not in expected) or not (config.steps.spans or config.on_demand):
        return None
    run_preflight(backend)
    role = Role(
        config=config,
        options=options,
        identity=identity,
        backend=backend,
        target=bound,
        machine=CaptureMachine(
            PlannedSteps(
                config.steps, config.final_step, warmup_steps(options, backend, config.mode), config.join_steps
            ),
            default_warmup=options.warmup_steps is None,
            discrete=config.mode is Mode.DISCRETE,
            stages=options.stages,
            thread_bound=backend.thread_bound,
            max_steps=backend.options.max_capture_steps,
        ),
        busy_roles=group.busy,
        blocker=group.blocker,
        hooks=role_hooks(backend, config, listeners),
        run=run_directory.RunDirectory(
            config.output.absolute(),
            run_directory.run_name(config.run),
            about={"config": redact_values(unstructure(config)), "roles": [*config.roles]},
        ),
        writer=attrs.evolve(writer, expected_ranks=expected),
    )
    if role.is_reporter:
        exit_summary.register()
    notified = tuple(filter(is_notified_at_the_finish, config.listeners))
    if config.finish.command is not None or notified:
        from profdeck.after_capture.finish_child import Finishes

        role.finishes = Finishes(role.run.path, config.finish, notified, config.listener_options)
    if config.on_demand:
        role.accept_requests()
    if not config.steps.spans and role.watch is None:
        return None
    role.hooks.open(identity.role, identity, backend.name)
    return role


def _bind(
    backend: Backend, role: RoleConfig, identity: Identity, target: object, writer: manifest.ManifestWriter
) -> tuple[Backend, str | None]:
    """Bind an engine backend to its target. Several targets share one backend that controls all of them.

    Returns:
        The backend and the target's name. The name is None if the backend records this process.

    Raises:
        ConfigError: the backend and the target do not match.
    """
    path, is_list = f"roles.{identity.role}", isinstance(target, list | tuple)
    if not isinstance(backend, EngineBackend):
        if target is not None:
            raise ConfigError(
                f"{path}.backend: '{backend.name}' records its own process and does not accept the target {target!r}. "
                "Remove the target, or select the backend of the target's engine."
            )
        return backend, None
    if role.targets is None and target is None:
        raise ConfigError(
            f"{path}.backend: '{backend.name}' controls an engine, but no engine is specified. Pass the engine object, "
            "its actor or the server's URL, as in Profiler.from_config(..., target=llm). For several engines, set "
            "targets."
        )
    if role.iterations and role.iterations.first is not None:
        raise ConfigError(
            f"{path}.iterations.first: with this option, the engine starts captures without a host. If a host starts "
            "the captures, use skip instead."
        )
    from profdeck.engine.clusters import ActorGroup, as_cluster_target
    from profdeck.replicas.placement import PlacedEngine

    is_single = not isinstance(target if is_list else as_cluster_target(target) or target, ActorGroup | PlacedEngine)
    if role.targets is None and not is_list and is_single:
        return backend, backend.bind(target)
    if identity.replica is not None:
        raise ConfigError(
            f"{path}: the replicas of several targets are numbered automatically. Remove replica from the identity."
        )
    from profdeck.replicas.fleet_backend import TITLE, FleetBackend

    handles = None if target is None else tuple(cast("Sequence[object]", target)) if is_list else (target,)
    return FleetBackend(backend.options, type(backend), role.targets or TargetsConfig(), writer, handles), TITLE


def _expected_ranks(role: RoleConfig, identity: Identity) -> tuple[int, ...]:
    expected = role.expected_ranks(identity.world_size)
    if not expected:
        raise ConfigError(
            f"roles.{identity.role}.ranks: this job has none of the ranks {list(role.ranks)}. It has "
            f"{identity.world_size} rank(s) of this role, starting at 0."
        )
    if not isinstance(role.ranks, str) and len(expected) < len(set(role.ranks)):
        outside = sorted(set(role.ranks) - set(expected))
        logger.warning(
            "roles.%s.ranks: %s are not among the %d ranks of this job.", identity.role, outside, identity.world_size
        )
    return expected
