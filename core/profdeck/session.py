"""What one process of a job records with, and when: its role's config, backend and place in the run directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import attrs

from profdeck import run
from profdeck.backend import Backend, EngineBackend
from profdeck.capture import Capture, Unit
from profdeck.config import Config, Mode, RoleConfig
from profdeck.engine.request import Batch, CaptureRequest
from profdeck.errors import ConfigError
from profdeck.identity import Identity, launcher_identity, parallel_from_environment
from profdeck.layers import load
from profdeck.options import CommonOptions
from profdeck.plugins import Plugins, Settle, load_backend, load_plugins, require_libraries
from profdeck.recording import Recording, claim
from profdeck.strict import structure, unstructure

logger = logging.getLogger("profdeck")


@attrs.define
class Session:
    """The role of this process in the job, ready to record."""

    config: Config
    role: RoleConfig
    identity: Identity
    backend: Backend
    target: str | None
    """What the backend controls, when that is not this process."""
    _plugins: Plugins
    _run: run.RunDirectory
    _recorder: run.Recorder

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        role: str,
        identity: Identity | None = None,
        settings: Mapping[str, Any] | None = None,
        target: object = None,
    ) -> Session | None:
        """Check everything and build the session; None when this process has nothing to record.

        Args:
            path: the config file; see `profdeck.layers.load`.
            role: which role of the config this process has.
            identity: who this process is, when neither the launcher nor the backend's library knows.
            settings: config values by dotted key.
            target: the engine object or URL that the backend controls.

        Raises:
            ConfigError: the config or an option is wrong.
            PluginError: a plugin cannot be used, or cannot record here.
        """
        config = load(path, settings=settings).config
        name = identity.role if identity else role
        chosen = config.roles.get(name)
        if chosen is None:
            if config.roles:
                logger.info("The config has no role '%s', so this process records nothing.", name)
            return None
        backend = build_backend(config, name)
        if not isinstance(backend, EngineBackend):  # which may control servers only
            require_libraries(type(backend))
        identity = identity or resolve_identity(name, backend)
        bound = _bind(backend, chosen, name, target)
        expected = () if bound else _expected_ranks(chosen, identity)
        if (not bound and identity.rank not in expected) or not config.steps.spans:
            return None
        backend.preflight()
        return cls(
            config=config,
            role=chosen,
            identity=identity,
            backend=backend,
            target=bound,
            plugins=load_plugins(backend, config.listeners),
            run=run.RunDirectory(
                config.output.absolute(),
                run.run_name(config.run),
                about={"config": unstructure(config), "roles": [*config.roles]},
            ),
            recorder=run.Recorder(
                backend=backend.name,
                versions=dict(filter(None, (library.installed() for library in backend.libraries))),
                options=unstructure(backend.options),
                expected_ranks=expected,
            ),
        )

    def selects(self, step: int) -> bool:
        """Tell whether a global step is captured."""
        return step in self.config.steps and (self.config.final_step is None or step <= self.config.final_step)

    def wants(self, step: int) -> bool:
        """Tell whether something must happen at a global step: it is captured, or the warm-up of a later one."""
        return any(self.selects(later) for later in range(step, step + self.role.warmup_steps + 1))

    def continues(self, capture: Capture) -> bool:
        """Tell whether the next global step belongs to the same capture."""
        if self.config.mode is Mode.DISCRETE:
            return False
        return capture.current_step < capture.first_step or self.selects(capture.current_step + 1)

    async def begin(self, step: int, settle: Settle, *, stage: str | None = None, count: int = 1) -> Recording:
        """Start a recording at global step ``step``.

        Args:
            step: the step that is under way; its capture may begin later, after warming up.
            settle: how the façade awaits.
            stage: the stage that the capture is of, in discrete mode.
            count: which capture of that stage in that step this is, counted from 1.

        Raises:
            CaptureError: it could not start; the reason is in the manifest, if that could be written.
        """
        first = step if self.selects(step) else self.config.steps.after(step)
        assert first is not None  # noqa: S101  # the caller asked `wants` first
        repeated = f"-{count}" if count > 1 else ""
        capture = Capture(
            id=f"step{first}" + (f"-{stage}{repeated}" if stage else ""),
            directory=self._run.directory(first, self.identity),
            identity=self.identity,
            first_step=first,
            current_step=step,
            stage=stage,
            unit=Unit.MINI_BATCH if self.role.window else Unit.GLOBAL_STEP,
            window=self.role.window,
            iterations=self.role.iterations,
            target=self.target,
        )
        claim(capture, self._run, self._recorder)
        if self.target:
            capture.request = CaptureRequest(
                id=capture.id,
                output=self.config.output.absolute(),
                run=self._run.path.name,
                role=self.identity.role,
                replica=self.identity.replica,
                first_step=first,
                ranks=self.role.ranks,
                iterations=self.role.iterations,
                stages=tuple(map(Batch, self.role.stages)),
            )
        return await Recording.begin(capture, self._plugins, self._recorder, self.backend.devices, settle)


def _bind(backend: Backend, role: RoleConfig, name: str, target: object) -> str | None:
    """Give an engine's backend its target and return the target's name; None for a backend of this process."""
    if isinstance(backend, EngineBackend):
        if target is None:
            raise ConfigError(
                f"roles.{name}.backend: '{backend.name}' controls an engine and needs to know which: pass the engine "
                "object or the server's URL, as in Profiler.from_config(..., target=llm)."
            )
        if role.iterations and role.iterations.first is not None:
            raise ConfigError(
                f"roles.{name}.iterations.first: the engine then captures by itself, with no call from a host; a host "
                "that starts captures says skip."
            )
        return backend.bind(target)
    if target is not None:
        raise ConfigError(
            f"roles.{name}.backend: '{backend.name}' records the process that it runs in and controls no target, such "
            f"as {target!r}. Leave out the target, or choose the backend of its engine."
        )
    return None


def _expected_ranks(role: RoleConfig, identity: Identity) -> tuple[int, ...]:
    expected = role.expected_ranks(identity.world_size)
    if not expected:
        raise ConfigError(
            f"roles.{identity.role}.ranks: {list(role.ranks)} are all outside of this job, which has "
            f"{identity.world_size} rank(s) of that role, counted from 0."
        )
    if not isinstance(role.ranks, str) and len(expected) < len(set(role.ranks)):
        outside = sorted(set(role.ranks) - set(expected))
        logger.warning("roles.%s.ranks: %s are not in this job of %d.", identity.role, outside, identity.world_size)
    return expected


def build_backend(config: Config, role: str) -> Backend:
    """Import the backend of a role and build it from its checked options; its library is not needed for that.

    Raises:
        ConfigError: an option is wrong.
        PluginError: the backend cannot be loaded.
    """
    chosen = config.roles[role]
    cls = load_backend(chosen.backend)
    options: CommonOptions = structure(dict(chosen.options), cls.Options, where=f"roles.{role}.options")
    _check_keys(config, role, engine=issubclass(cls, EngineBackend))
    return cls(options)


def _check_keys(config: Config, name: str, *, engine: bool) -> None:
    """Check the keys of a role that depend on whether its backend is one of an engine."""
    role, path = config.roles[name], f"roles.{name}"
    if not engine:
        if role.iterations:
            raise ConfigError(f"{path}.iterations: '{role.backend}' is not the backend of an engine; use window.")
        if config.mode is Mode.CONTINUOUS and role.stages:
            raise ConfigError(
                f"{path}.stages: continuous mode records whole steps; use mode: discrete, or remove stages."
            )
        return
    for key in ("window", "warmup_steps"):
        if getattr(role, key):
            raise ConfigError(f"{path}.{key}: '{role.backend}' is the backend of an engine; use iterations.")
    if wrong := [stage for stage in role.stages if stage not in list(Batch)]:
        raise ConfigError(f"{path}.stages: {', '.join(wrong)}: an engine has the stages {', '.join(Batch)}.")


def resolve_identity(role: str, backend: Backend) -> Identity:
    """Find rank and world size: the launcher's environment, then the backend's library, then a single process.

    Raises:
        ConfigError: the environment contradicts itself.
    """
    try:
        found = launcher_identity(role) or attrs.evolve(backend.identify() or Identity(), role=role)
        parallel = parallel_from_environment()
        return attrs.evolve(found, parallel=parallel) if parallel else found
    except ValueError as error:
        raise ConfigError(f"The identity of this process is wrong: {error.args[0]}.") from None
