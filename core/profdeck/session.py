"""What one process records with, and the recording itself: claim, lease, plugins, manifest."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import attrs

from profdeck import lease, run
from profdeck.backend import Backend
from profdeck.capture import Artifact, Capture, State, Unit
from profdeck.config import Config, Mode, RoleConfig
from profdeck.errors import CaptureError, ConfigError
from profdeck.identity import Identity, launcher_identity, parallel_from_environment
from profdeck.layers import load
from profdeck.options import CommonOptions
from profdeck.plugins import Plugins, Settle, describe, load_backend, load_plugins, require_libraries
from profdeck.strict import structure, unstructure

logger = logging.getLogger("profdeck")


@attrs.define
class Session:
    """The role of this process in the job, ready to record."""

    config: Config
    role: RoleConfig
    identity: Identity
    backend: Backend
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
    ) -> Session | None:
        """Check everything and build the session; None when this process has nothing to record.

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
        require_libraries(type(backend))
        identity = identity or resolve_identity(name, backend)
        expected = chosen.expected_ranks(identity.world_size)
        if not expected:
            raise ConfigError(
                f"roles.{name}.ranks: {list(chosen.ranks)} are all outside of this job, which has "
                f"{identity.world_size} rank(s) of that role, counted from 0."
            )
        if not isinstance(chosen.ranks, str) and len(expected) < len(set(chosen.ranks)):
            outside = sorted(set(chosen.ranks) - set(expected))
            logger.warning("roles.%s.ranks: %s are not in this job of %d.", name, outside, identity.world_size)
        if identity.rank not in expected or not config.steps.spans:
            return None
        backend.preflight()
        return cls(
            config=config,
            role=chosen,
            identity=identity,
            backend=backend,
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
        )
        try:
            self._run.prepare()
            self._run.claim(capture, self._recorder)
        except (OSError, CaptureError) as error:
            where = capture.directory
            raise CaptureError(f"Step {step}: nothing can be written to {where}: {describe(error)}") from error
        capture.move_to(State.STARTING)
        try:
            with ExitStack() as undo:
                devices = lease.acquire(self.backend.devices(), holder=f"{self.identity.role}, {capture.id}")
                undo.callback(devices.release)
                await self._plugins.start(capture, settle)
                return Recording(capture, self._plugins, self._recorder, undo.pop_all())
        except BaseException as error:
            capture.problems.append(describe(error))
            capture.finish(capture.artifacts)
            self._note(capture)
            if isinstance(error, Exception):
                raise CaptureError(f"Capture {capture.id} did not start: {describe(error)}") from error
            raise

    def _note(self, capture: Capture) -> None:
        try:
            run.write_manifest(capture, self._recorder)
        except OSError as error:
            logger.warning("The manifest %s cannot be written: %s", capture.manifest_path, error)


class Recording:
    """A capture that is running, with all that must be given back when it ends."""

    def __init__(self, capture: Capture, plugins: Plugins, recorder: run.Recorder, resources: ExitStack) -> None:
        self.capture = capture
        capture.move_to(State.RECORDING)
        self._plugins = plugins
        self._recorder = recorder
        self._resources = resources
        self.passed = plugins.step(capture)
        """Reports a boundary to all plugins; what fails becomes a problem of the capture."""

    async def end(self, reason: str | None, settle: Settle) -> None:
        """Stop every plugin, judge what came out and write the manifest. Never raises for a plugin's failure.

        Args:
            reason: why the capture ends before its time; None if it does not.
            settle: how the façade awaits.
        """
        capture = self.capture
        capture.move_to(State.STOPPING)
        if reason:
            capture.problems.append(_sentence(reason))
        artifacts: tuple[Artifact, ...] = ()
        try:
            artifacts = await self._plugins.stop(capture, settle)
        except BaseException as error:
            capture.problems.append(f"The stop was interrupted: {describe(error)}")
            raise
        finally:
            capture.finish(artifacts)
            self._resources.close()
            self._write()
        noted = len(capture.notes)
        await self._plugins.announce(capture, settle)
        if len(capture.notes) > noted:
            self._write()

    def _write(self) -> None:
        try:
            run.write_manifest(self.capture, self._recorder)
        except OSError as error:
            self.capture.problems.append(f"The manifest cannot be written: {error}")


def build_backend(config: Config, role: str) -> Backend:
    """Import the backend of a role and build it from its checked options; its library is not needed for that.

    Raises:
        ConfigError: an option is wrong.
        PluginError: the backend cannot be loaded.
    """
    chosen = config.roles[role]
    cls = load_backend(chosen.backend)
    options: CommonOptions = structure(dict(chosen.options), cls.Options, where=f"roles.{role}.options")
    return cls(options)


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


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
