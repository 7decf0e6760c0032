"""What one process of a job records with, and when: its role's config, backend and place in the run directory."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import attrs

from profdeck.backends.api import Backend, EngineBackend
from profdeck.backends.building import build_backend, prepare, resolve_identity, warmup_steps
from profdeck.backends.hook_calls import RoleHooks
from profdeck.backends.plugins import require_libraries
from profdeck.backends.recording import Recording, abandon, reserve
from profdeck.base.blocking import Resolve
from profdeck.base.errors import CaptureError, ConfigError, describe, nearest
from profdeck.base.identity import Identity
from profdeck.base.processes import ProcessId
from profdeck.base.structuring import unstructure
from profdeck.config.model import Config, Mode, RoleConfig
from profdeck.config.schedule import OnDemandSteps, PlannedSteps
from profdeck.config.targets import TargetsConfig
from profdeck.lifecycle import last_word
from profdeck.lifecycle.listeners import is_notified_at_the_finish, role_hooks
from profdeck.on_demand.requests import JobProcess
from profdeck.on_demand.stores import publish_address, store_of_job
from profdeck.on_demand.watch import RequestWatch
from profdeck.records import manifest, run_directory
from profdeck.records.capture import Capture, CaptureState, Unit
from profdeck.records.request import BatchKind, CaptureRequest
from profdeck.records.status import Status

if TYPE_CHECKING:
    from profdeck.after_run.start import Finishes

logger = logging.getLogger("profdeck")

_SPEAKER = "trainer"
"""The role that speaks for the job, where there is one; else the first."""


@attrs.define
class Session:
    """The role of this process in the job, ready to record."""

    config: Config
    role: RoleConfig
    identity: Identity
    backend: Backend
    target: str | None
    """What the backend controls, when that is not this process."""
    steps: PlannedSteps
    _hooks: RoleHooks
    _run: run_directory.RunDirectory
    _recorder: manifest.ManifestWriter
    _watch: RequestWatch | None = None
    """Looks for captures that are asked for while the job runs."""
    _finishes: Finishes | None = None
    """Has something run when captures have ended everywhere."""

    @classmethod
    def open(
        cls,
        config: Config,
        *,
        role: str,
        identity: Identity | None = None,
        target: object = None,
        listeners: Iterable[object] = (),
    ) -> Session | None:
        """Check everything and build the session; None when this process has nothing to record.

        Args:
            config: the config of all processes.
            role: which role of the config this process has.
            identity: who this process is, when neither the launcher nor the backend's library knows.
            target: the engine object or URL that the backend controls, or a list of them.
            listeners: objects with hook implementations, in addition to the listeners that the config names.

        Raises:
            ConfigError: the config or an option is wrong.
            PluginError: a plugin cannot be used, or cannot record here.
        """
        name = identity.role if identity else role
        chosen = config.roles.get(name)
        if chosen is None:
            if config.roles:
                hint = nearest(name, config.roles) or f" It has {', '.join(config.roles)}."
                logger.warning("The config has no role '%s', so this process records nothing.%s", name, hint)
            return None
        backend = build_backend(config, name)
        if not isinstance(backend, EngineBackend):  # which may control servers only
            require_libraries(type(backend))
        identity = identity or resolve_identity(name, backend)
        if chosen.targets is not None and chosen.targets.discovers and identity.rank:
            logger.info("Rank 0 captures the targets of the role '%s', so this rank does nothing.", name)
            return None
        recorder = manifest.ManifestWriter(
            backend=backend.name,
            versions=dict(filter(None, (library.installed() for library in backend.libraries))),
            options=unstructure(backend.options),
            expected_ranks=(),
        )
        backend, bound = _bind(backend, chosen, identity, target, recorder)
        expected = () if bound else _expected_ranks(chosen, identity)
        if (not bound and identity.rank not in expected) or not (config.steps.spans or config.on_demand):
            return None
        prepare(backend)
        session = cls(
            config=config,
            role=chosen,
            identity=identity,
            backend=backend,
            target=bound,
            steps=PlannedSteps(
                config.steps, config.final_step, warmup_steps(chosen, backend, config.mode), config.join_steps
            ),
            hooks=role_hooks(backend, config, listeners),
            run=run_directory.RunDirectory(
                config.output.absolute(),
                run_directory.run_name(config.run),
                about={"config": unstructure(config), "roles": [*config.roles]},
            ),
            recorder=attrs.evolve(recorder, expected_ranks=expected),
        )
        if session._speaks:
            last_word.expect()
        notified = tuple(filter(is_notified_at_the_finish, config.listeners))
        if config.finish.command is not None or notified:
            from profdeck.after_run.start import Finishes

            session._finishes = Finishes(session._run.path, config.finish, notified, config.listener_options)
        if config.on_demand:
            session._take_requests()
        if not config.steps.spans and session._watch is None:
            return None
        session._hooks.open(identity.role, identity, backend.name)
        return session

    def look_for_requests(self, step: int, capture: Capture | None) -> None:
        """Look for captures that are asked for, at the boundary into a global step.

        Args:
            step: the step that begins.
            capture: the one that is under way.
        """
        if self._watch is not None:
            self._watch.look(step, capture)

    def enters(self, step: int) -> bool:
        """Look for requests at the boundary into a global step, with no capture under way; return whether something
        must begin there.
        """
        if self._watch is not None:
            self._watch.look(step, None)
        steps = self.steps
        if not steps.demands:
            begin, end = steps.quiet
            if begin <= step < end:
                return False
        return self.begins_at(step)

    def begin_stages(self, step: int) -> bool:
        """Begin a global step in discrete mode; return whether its stages are captured."""
        if (asked := self.steps.demand_at(step)) is not None:
            asked.begun = True
        return self.steps.selects(step)

    def begins_at(self, step: int) -> bool:
        """Tell whether something must begin at a global step: its capture, or the warm-up of a later one."""
        if self.config.mode is Mode.DISCRETE and self.steps.demand_at(step) is not None:
            return True
        return self.steps.begins(step) is not None

    def continues(self, capture: Capture) -> bool:
        """Tell whether the next global step belongs to the same capture."""
        if self.config.mode is Mode.DISCRETE:
            return False
        return self.steps.continues(capture.first_step, capture.current_step, capture.demand)

    async def begin(self, step: int, resolve: Resolve, *, stage: str | None = None, count: int = 1) -> Recording | None:
        """Start a recording at global step ``step``.

        Return None if the default warm-up cannot start, for example because another profiler is active. The capture
        then starts without warm-up.

        Args:
            step: the step that is under way; its capture may begin later, after warming up.
            resolve: how the façade awaits.
            stage: the stage that the capture is of, in discrete mode.
            count: which capture of that stage in that step this is, counted from 1.

        Raises:
            CaptureError: it could not start; the reason is in the manifest, if that could be written.
        """
        found = self.steps.begins(step) if stage is None else (step, self.steps.demand_at(step))
        assert found is not None  # noqa: S101  # the caller asked `begins_at` first
        first, demand = found
        repeated = f"-{count}" if count > 1 else ""
        capture = self._capture(first, demand, name=f"-{stage}{repeated}" if stage else "")
        capture.current_step, capture.stage = step, stage
        recorder = self._recorder_of(capture)
        try:
            reserve(capture, self._run, recorder)
            if demand is not None:
                demand.begun = True
                demand.captures.append(capture.id)
                if self.role.warmup_steps and step > first - self.role.warmup_steps:
                    capture.notes.append(f"It warmed up for {first - step} of {self.role.warmup_steps} steps.")
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
                    stages=tuple(map(BatchKind, self.role.stages)),
                    owner=ProcessId(),
                )
            return await Recording.begin(capture, self.backend, self._hooks, recorder, resolve)
        except BaseException as error:
            if isinstance(error, CaptureError) and self.may_withdraw(capture, host_is_done=False, failed=True):
                logger.info("Capture %s starts without warm-up: %s", capture.id, error)
                with contextlib.suppress(OSError):
                    run_directory.withdraw(capture)
                return None
            self._conclude(capture, describe(error))
            raise

    def interrupt(self, capture: Capture) -> str | None:
        """End a capture for one that was asked for and begins; return why the first is not whole then.

        A capture that the config selected is whole, and gets a note: the rest of it follows.
        """
        following = capture.current_step + 1
        demand = next((one for one in self.steps.demands if one.first == following and not one.begun), None)
        if demand is None or capture.stage is not None:
            return None
        why = f"a capture of steps {demand.first} to {demand.last} was asked for"
        own = next((one for one in self.steps.demands if one.token == capture.demand), None)
        if following <= capture.first_step or (own is not None and following <= own.last):
            return why
        if own is None and self.steps.configures(following):
            capture.notes.append(f"It ended after step {capture.current_step}: {why}.")
        return None

    def may_withdraw(self, capture: Capture, *, host_is_done: bool, failed: bool) -> bool:
        """Return whether a capture that ends now can be removed, because it is still warming up for a configured step.

        After a default warm-up, the capture can always be removed, because it would not have started without warm-up.
        After a configured warm-up, it can be removed in two cases:

        - Another capture was requested that records the step, or is followed by a capture that does.
        - The host has finished, and the schedule has no end.

        Args:
            capture: the capture.
            host_is_done: whether the capture ends because the host has finished.
            failed: whether the capture ends because of an error.
        """
        if capture.current_step >= capture.first_step or capture.demand is not None:
            return False
        if self.role.warmup_steps is None:
            return True
        return not failed and (not host_is_done or self.steps.schedule.is_endless_at(capture.first_step))

    def ended(self, capture: Capture) -> None:
        """Answer the request for a capture that has ended."""
        if self._speaks:
            last_word.count(self._run.path, capture)
        self._conclude(capture, " ".join(capture.problems) if capture.status is Status.MISSING else None)

    def end_step(self) -> None:
        """Answer requests for the stages of a global step that has ended, and have them finished."""
        if self._finishes is not None:
            self._finishes.begin()
        if self._watch is not None:
            self._watch.answer_stages()

    def pause_requests(self) -> None:
        """Take no requests until the next global step."""
        if self._watch is not None:
            self._watch.pause()

    @property
    def _speaks(self) -> bool:
        """Whether this process is the one of the job that says in the end what was captured."""
        first = _SPEAKER if _SPEAKER in self.config.roles else next(iter(self.config.roles))
        lowest = min(self._recorder.expected_ranks, default=0)
        return (self.identity.role, self.identity.rank, self.identity.replica or 0) == (first, lowest, 0)

    def _take_requests(self) -> None:
        try:
            store = store_of_job(self.config.on_demand, self._run.path)
            self._run.prepare()
            publish_address(store, self._run.path)
            self._watch = RequestWatch(
                store,
                self._run.path,
                JobProcess.of(self.identity, self.target, self.role.warmup_steps or 0, str(self._run.path.parent)),
                self.steps,
                discrete=self.config.mode is Mode.DISCRETE,
                miss=self._missed,
            )
        except (OSError, CaptureError) as error:
            logger.warning("No capture can be asked for while the job runs: %s", describe(error))
            return
        if self.config.steps.timed and self._speaks:
            from profdeck.on_demand.standing import StandingCaptures  # few jobs have any

            for wanted in self.config.steps.timed:
                weakref.finalize(self, StandingCaptures(store, wanted).leave)

    def _missed(self, demand: OnDemandSteps, reason: str) -> None:
        """Leave a manifest of a capture that this process is too late for."""
        capture = self._capture(demand.first, demand)
        capture.expected_ranks = () if self.target else (self.identity.rank,)
        reserve(capture, self._run, self._recorder)
        abandon(capture, self._recorder, reason)
        self._finish(capture)
        demand.captures.append(capture.id)

    def _capture(self, first: int, demand: OnDemandSteps | None, *, name: str = "") -> Capture:
        return Capture(
            id=f"step{first}{name}",
            directory=self._run.directory(first, self.identity),
            identity=self.identity,
            first_step=first,
            current_step=first,
            unit=Unit.MINI_BATCH if self.role.window else Unit.GLOBAL_STEP,
            window=self.role.window,
            iterations=self.role.iterations,
            target=self.target,
            demand=demand.token if demand else None,
        )

    def _conclude(self, capture: Capture, problem: str | None) -> None:
        """End the demand of a capture, in continuous mode; further stages may come in discrete mode."""
        self._finish(capture)
        for demand in self.steps.demands:
            if self._watch is not None and demand.token == capture.demand and self.config.mode is Mode.CONTINUOUS:
                self._watch.answer(demand, problem)

    def _recorder_of(self, capture: Capture) -> manifest.ManifestWriter:
        waited_for = self._finishes is not None and capture.stage is not None
        return attrs.evolve(self._recorder, more_follow=True) if waited_for else self._recorder

    def _finish(self, capture: Capture) -> None:
        """Have a capture finished that has ended here; one of a stage, when its step has."""
        if self._finishes is None or capture.state is not CaptureState.ENDED:  # as nothing could be written
            return
        self._finishes.add(capture, self._recorder_of(capture))
        if capture.stage is None:
            self._finishes.begin()


def _bind(
    backend: Backend, role: RoleConfig, identity: Identity, target: object, recorder: manifest.ManifestWriter
) -> tuple[Backend, str | None]:
    """Give an engine's backend its target, or make one of many for a list of them.

    Returns:
        The backend and the target's name; None for a backend of this process.
    """
    path, several = f"roles.{identity.role}", isinstance(target, list | tuple)
    if not isinstance(backend, EngineBackend):
        if target is not None:
            raise ConfigError(
                f"{path}.backend: '{backend.name}' records the process that it runs in and controls no target, such "
                f"as {target!r}. Leave out the target, or choose the backend of its engine."
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

    one = not isinstance(target if several else as_cluster_target(target) or target, ActorGroup | PlacedEngine)
    if role.targets is None and not several and one:
        return backend, backend.bind(target)
    if identity.replica is not None:
        raise ConfigError(f"{path}: many targets number their replicas by themselves; leave out that of the identity.")
    from profdeck.replicas.fleet_backend import TITLE, FleetBackend

    given = None if target is None else tuple(cast("Sequence[object]", target)) if several else (target,)
    return FleetBackend(backend.options, type(backend), role.targets or TargetsConfig(), recorder, given), TITLE


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
