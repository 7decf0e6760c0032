"""Backend for a fleet: starts and stops the captures of many engines together.

A start has four phases:

1. Discover the targets.
2. Connect to all targets, and reserve the file names of their manifests.
3. Start all reachable targets at the same time, through a `StartGate`.
4. Check whether the policy allows the capture to continue with the started targets.

The manifest of the fleet contains the outcome of each target. Each contacted target also has its own capture and
manifest.

A start is limited to ``start_timeout_s``, and a stop to ``stop_timeout_s``. A late target is sent a stop command, which
takes up to three more seconds. If a start fails, the started targets are stopped.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from typing import ClassVar

import attrs

from profdeck.backends.api import EngineBackend, TargetState
from profdeck.backends.hook_calls import RoleHooks
from profdeck.backends.hookspecs import hookimpl
from profdeck.base.blocking import run_in_threads, wait_for
from profdeck.base.errors import CaptureError, TargetError
from profdeck.base.operations import begin, finish
from profdeck.base.outcome import Outcome
from profdeck.config.targets import Policy, TargetsConfig
from profdeck.engine.clusters import Actor, ActorGroup, as_cluster_target
from profdeck.records import manifest, run_directory
from profdeck.records.capture import CaptureRecord, CaptureState as Life, EngineCapture, Step
from profdeck.records.status import Status
from profdeck.records.targets import FleetRecord
from profdeck.replicas.discovery import ReplicaNumbers, Target, check_file, find_targets
from profdeck.replicas.fan_out import fan_out
from profdeck.replicas.manifest_batch import ManifestBatch
from profdeck.replicas.member import (
    NOT_COMPLETE,
    Member,
    count_outcomes,
    list_reasons,
    target_key,
    timeout_error,
    truncate,
)
from profdeck.replicas.placement import PlacedEngine, on_gpu_ranks
from profdeck.replicas.start_gate import GatePass, StartGate
from profdeck.replicas.worker_kinds import select_kinds
from profdeck_traces.base.errors import ConfigError, describe_error

logger = logging.getLogger("profdeck")

TITLE = "fleet"
"""Target name of a fleet, until the number of its targets is known."""
_RESERVE_AFTER_S = 0.25
"""Delay before file names are reserved, while requests to all targets are sent. Names are then reserved while the
targets reply."""


@attrs.define
class FleetBackend(EngineBackend):
    """Controls many engines, each with its own backend instance."""

    name: ClassVar[str] = TITLE

    member: type[EngineBackend]
    """Backend class of the targets."""
    config: TargetsConfig
    recorder: manifest.ManifestWriter
    """Manifest writer with the fields that are common to all targets."""
    given: Sequence[object] | None = None
    """Targets from the host; None if the config specifies where to find them."""
    _numbers: ReplicaNumbers = attrs.field(factory=ReplicaNumbers, init=False)
    _backends: dict[object, tuple[EngineBackend, str]] = attrs.field(factory=dict, init=False)
    """Backend and name of each target, by `target_key`. They are reused by later captures."""
    _placements: dict[object, tuple[int, ...]] = attrs.field(factory=dict, init=False)
    _members: list[Member] = attrs.field(factory=list, init=False)
    _reserving: asyncio.Future[None] | None = attrs.field(default=None, init=False)
    """Task that reserves the file names of the manifests."""
    _hooks: RoleHooks = attrs.field(init=False)
    _manifests: ManifestBatch = attrs.field(factory=ManifestBatch, init=False)
    """Manifests of the targets."""

    def __attrs_post_init__(self) -> None:
        """Report errors in the targets before the first capture.

        Raises:
            ConfigError: no target is specified, the backend does not support a target, or the targets file is invalid.
        """
        if self.given is None and not self.config.discovers:
            raise ConfigError(
                "targets: no target is specified. Set urls, router, file or actors, or pass the targets, as in "
                "Profiler.from_config(..., target=[llm_1, llm_2])."
            )
        if self.given is not None and self.config.discovers:
            raise ConfigError(
                "targets: both the host and the config specify targets. Remove urls, router, file and actors, or do "
                "not pass targets."
            )
        if self.given is not None and not self.given:
            raise ConfigError("target: the list is empty, so nothing would be recorded.")
        if self.given is None:
            check_file(self.config)
            return
        self.given = [self._convert(target) for target in self.given]
        keys: set[object] = set()
        for handle in self.given:
            name = str(handle) if isinstance(handle, ActorGroup) else self._bind(handle)[1]
            if target_key(handle) in keys:
                raise ConfigError(f"target: the list contains {name} twice.")
            keys.add(target_key(handle))

    def _convert(self, target: object) -> object:
        """Convert objects of a cluster to actors or groups. Store the GPU ranks of a placed engine."""
        handle = target.target if isinstance(target, PlacedEngine) else target
        converted = as_cluster_target(handle, self.config.actor_attribute) or handle
        if isinstance(target, PlacedEngine):
            self._placements[target_key(converted)] = target.gpu_ranks
        return converted

    def preflight(self) -> None:
        """Run the checks of the targets' backend."""
        self.member(self.options).preflight()

    def use_hooks(self, hooks: RoleHooks) -> None:
        """Set the hooks of the targets, which include the wrappers of the role's listeners."""
        self._hooks = RoleHooks(self.member, role=hooks)

    @hookimpl
    def profile_start(self, capture: CaptureRecord) -> Awaitable[None]:
        """Start all targets."""
        return self._start(capture)

    @hookimpl
    def profile_step(self, capture: CaptureRecord, step: Step) -> Awaitable[None] | None:  # noqa: ARG002  # hook signature
        """Call the targets' ``profile_step`` hooks, if there are any."""
        if not self._hooks.calls("profile_step"):
            return None
        recordings = [member.recording for member in self._members if member.recording is not None]

        async def call_hooks() -> None:
            await finish(begin(recording.step(step) for recording in recordings))

        return call_hooks()

    @hookimpl
    def profile_stop(self, capture: CaptureRecord) -> Awaitable[Sequence[object]]:
        """Stop all started targets, and wait for their files."""
        return self._stop(capture)

    async def state(self, capture: EngineCapture) -> TargetState:  # noqa: ARG002  # only one capture runs at a time
        """Query the states of all recording targets. Targets that do not respond are ignored.

        Raises:
            CaptureError: no target responds.
        """
        recording = [member for member in self._members if member.recording is not None]

        async def query(member: Member) -> TargetState:
            return await member.bound_backend.state(member.capture)

        limit_s = self.config.start_timeout_s
        results = await fan_out(query, recording, timeout_s=limit_s, each_timeout_s=limit_s)
        states = [result for result in results if isinstance(result, TargetState)]
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and not states:
            raise CaptureError(f"None of the {len(recording)} targets responded. {describe_error(errors[0])}")
        return TargetState(
            ended=all(state.ended for state in states),
            iterations=min((state.iterations for state in states), default=0),
            waits_for=next((state.waits_for for state in states if state.waits_for), None),
        )

    @property
    def states(self) -> Mapping[str, TargetState]:
        """Last reported state of each target, by name."""
        backends = [member.backend for member in self._members if member.backend is not None]
        return {name: state for backend in backends for name, state in backend.states.items()}

    # Start.

    async def _start(self, capture: CaptureRecord) -> None:
        loop, self._members, self._reserving = asyncio.get_running_loop(), [], None
        deadline_s = loop.time() + self.config.start_timeout_s
        skew_s = None
        self._update_record(capture, skew_s)
        try:
            all_targets, notes = await find_targets(self.config, self.given, self._numbers, self._reach)
            placed = on_gpu_ranks(all_targets, self._placements, capture.request.ranks if capture.request else "all")
            targets, kind_notes = select_kinds(placed, capture.request.batch_kinds if capture.request else ())
            capture.notes += [*notes, *kind_notes]
            keys = {target_key(target.handle) for target in targets}
            self._backends = {key: bound for key, bound in self._backends.items() if key in keys}
            self._members = [self._member(target, capture) for target in targets]
            capture.target, capture.expected_ranks = f"{TITLE} of {len(self._members)}", ()
            ready = await self._prepare(capture)
            self._check_policy(ready, "are ready")
            remaining_s = max(deadline_s - loop.time(), 0.0)
            gate = StartGate(timeout_s=remaining_s / 2)  # one hanging target must not delay the others too long
            started = await self._start_members(ready, gate, remaining_s)
            skew_s = gate.skew_s
            capture.notes += truncate([member.prefix(note) for member in started for note in member.capture.notes])
            self._check_policy(started, "have started")
            if missing := [member for member in self._members if member.recording is None]:
                count = f"{len(missing)} of {len(self._members)}"
                logger.warning("Capture %s continues without %s targets. %s", capture.id, count, list_reasons(missing))
        except BaseException as error:
            # A second interrupt must not cancel the stop of the started targets.
            await asyncio.shield(self._abandon(error))
            raise
        finally:
            self._update_record(capture, skew_s)

    async def _reach(self, actor: Actor) -> None:
        await self._bind(actor)[0].reach()

    def _member(self, target: Target, fleet_capture: CaptureRecord) -> Member:
        fleet_request = fleet_capture.request
        assert fleet_request is not None  # noqa: S101  # captures of targets have a request
        identity = attrs.evolve(fleet_capture.identity, replica=target.replica)
        request = attrs.evolve(
            fleet_request,
            replica=target.replica,
            ranks=target.ranks or fleet_request.ranks,
            batch_kinds=target.batch_kinds or fleet_request.batch_kinds,
            # If an engine is listed twice, a failed second start must not stop the capture of the first one.
            token=secrets.token_hex(8),
        )
        backend, name, problem = None, str(target.handle), None
        try:
            if target.problem is not None:
                raise target.problem
            backend, name = self._bind(target.handle)
        except (ConfigError, TargetError) as error:  # for example, a worker with an unsupported protocol
            problem = error
        capture = CaptureRecord(
            id=fleet_capture.id,
            directory=run_directory.replica_directory(fleet_capture.directory, target.replica),
            identity=identity,
            first_step=fleet_capture.first_step,
            current_step=fleet_capture.current_step,
            stage=fleet_capture.stage,
            iterations=fleet_capture.iterations,
            target=name,
            request=request,
            demand=fleet_capture.demand,
        )
        recorder = attrs.evolve(self.recorder, write=self._manifests.add)
        member = Member(target=target, name=name, backend=backend, capture=capture, recorder=recorder)
        if problem is not None:
            member.set_failure(problem)
        elif not target.healthy:
            member.backend, member.outcome = None, Outcome.UNREACHABLE
            member.reason = "The router reports that this worker is unhealthy, so it was not contacted."
            member.fix = "Check the logs of the worker and of the router."
        return member

    def _bind(self, handle: object) -> tuple[EngineBackend, str]:
        """Return the backend and the name of a target. Create the backend if necessary."""
        if (key := target_key(handle)) not in self._backends:
            backend = self.member(self.options)
            self._backends[key] = backend, backend.bind(handle)
        return self._backends[key]

    async def _prepare(self, fleet_capture: CaptureRecord) -> list[Member]:
        """Connect to all targets, and reserve the names of their manifests. Return the targets that can start."""
        members = [member for member in self._members if member.backend is not None]
        limit_s = self.config.start_timeout_s / 2

        async def reach(member: Member) -> None:
            await member.bound_backend.reach()

        reached = asyncio.Event()
        reserved = self._reserving = asyncio.ensure_future(self._reserve(members, fleet_capture, reached))
        try:
            results = await fan_out(reach, members, timeout_s=limit_s, each_timeout_s=limit_s)
        finally:
            reached.set()
            await asyncio.shield(reserved)
        error = timeout_error(
            f"The connection was not established within {limit_s:g} seconds, half of start_timeout_s", "start_timeout_s"
        )
        for member, result in zip(members, results, strict=True):
            if isinstance(result, BaseException):
                member.set_failure(result, error)
        return [member for member in members if member.outcome is None]

    @staticmethod
    async def _reserve(members: Sequence[Member], fleet_capture: CaptureRecord, reached: asyncio.Event) -> None:
        """Reserve the names of the manifests when all targets were reached, or after a delay."""
        request = fleet_capture.request
        assert request is not None  # noqa: S101  # captures of targets have a request
        directory = run_directory.RunDirectory(request.output, request.run, {})

        def reserve(member: Member) -> None:
            capture = member.capture
            try:
                directory.reserve(capture, member.recorder)
            except (OSError, CaptureError) as error:
                member.set_failure(CaptureError(f"Cannot write to {capture.directory}: {describe_error(error)}"))
            else:
                capture.move_to(Life.STARTING)
                if capture.request is not None and capture.id != fleet_capture.id:  # the name already existed
                    capture.request = attrs.evolve(capture.request, id=capture.id)

        await wait_for(reached, _RESERVE_AFTER_S)
        await run_in_threads(reserve, members)

    async def _start_members(self, ready: Sequence[Member], gate: StartGate, limit_s: float) -> list[Member]:
        """Start targets through a gate. Return the targets that record."""
        passes = [(member, gate.issue()) for member in ready]

        async def start(pair: tuple[Member, GatePass]) -> None:
            await pair[0].start(pair[1], self._hooks)

        results = await fan_out(start, passes, timeout_s=limit_s, each_timeout_s=limit_s)
        error = timeout_error(
            f"The start did not finish within start_timeout_s={self.config.start_timeout_s:g} seconds",
            "start_timeout_s",
        )
        for member, result in zip(ready, results, strict=True):
            if isinstance(result, BaseException):
                member.set_failure(result, error)
        await self._abandon_others("the target did not start")
        return [member for member in ready if member.recording is not None]

    def _check_policy(self, members: Sequence[Member], predicate: str) -> None:
        """Check that the policy allows the capture to continue with these targets.

        Args:
            members: the targets that are ready or have started.
            predicate: verb phrase about these targets, for the error message.

        Raises:
            CaptureError: the policy requires more targets.
        """
        if len(members) >= self._needed:
            return
        policy = self.config.policy
        rule = f"policy {policy} needs {self._needed}" if policy is Policy.QUORUM else f"policy {policy}"
        failed = [member for member in self._members if member.outcome not in {None, Outcome.STARTED}]
        raise CaptureError(
            f"Only {len(members)} of {len(self._members)} targets {predicate} ({rule}). {list_reasons(failed)}"
        )

    @property
    def _needed(self) -> int:
        return len(self._members) if self.config.needed is None else self.config.needed

    async def _abandon(self, error: BaseException) -> None:
        """Stop all started targets, and end the captures of the other targets."""
        if self._reserving is not None:
            await asyncio.wait([self._reserving])  # otherwise, a manifest reserved later would never be completed
        reason = "the start of the fleet was cancelled"
        if isinstance(error, CaptureError):
            reason += " because too few targets participated"
        await self._stop_all(reason)
        await self._abandon_others(reason)

    async def _abandon_others(self, reason: str) -> None:
        """End the captures of targets that do not record, and release their backends."""
        others = [member for member in self._members if member.recording is None]
        for member in others:
            member.abandon(reason)
        for member in others:
            if member.backend is not None:
                await member.backend.release()
        await self._flush_manifests()

    # Stop.

    async def _stop(self, capture: CaptureRecord) -> Sequence[object]:
        reason = " ".join(capture.problems) or None
        for member in self._members:  # these fields change while a capture runs
            member.capture.current_step, member.capture.demand = capture.current_step, capture.demand
        skew_ms = capture.fleet.start_skew_ms if capture.fleet else None
        try:
            await self._stop_all(reason)
        finally:
            self._update_record(capture, None if skew_ms is None else skew_ms / 1e3)
        not_started = [member for member in self._members if member.started_ns is None]
        incomplete = [
            member
            for member in self._members
            if member.started_ns is not None
            and member.capture.status is not Status.COMPLETE
            # If the whole capture ends early, its reason already explains why the targets are incomplete.
            and not (reason and member.outcome and member.outcome.ends_well)
        ]
        for members, predicate in ((not_started, "did not participate"), (incomplete, NOT_COMPLETE)):
            if members:
                outcomes = [member.outcome for member in members]
                capture.problems.append(count_outcomes(outcomes, len(self._members), predicate))
        return ()

    async def _stop_all(self, reason: str | None) -> None:
        recording = [member for member in self._members if member.recording is not None]
        limit_s = self.config.stop_timeout_s

        async def stop(member: Member) -> None:
            await member.stop(reason)

        text = f"The stop did not finish within stop_timeout_s={limit_s:g} seconds"
        error = timeout_error(text, "stop_timeout_s")
        try:
            results = await fan_out(stop, recording, timeout_s=limit_s, each_timeout_s=limit_s)
            for member, result in zip(recording, results, strict=True):
                if isinstance(result, BaseException):
                    member.set_failure(result, error)
                    member.capture.problems.append(str(member.reason))
                    manifest.write_manifest(member.capture, member.recorder)
        finally:
            await self._flush_manifests()

    async def _flush_manifests(self) -> None:
        """Wait until the manifests of all targets are written. Add write errors to the problems of the captures."""
        if errors := await self._manifests.flush():
            for member in self._members:
                if error := errors.get(member.capture.manifest_path):
                    problem = f"The manifest cannot be written: {error}."
                    member.capture.problems.append(problem)
                    member.reason = " ".join(filter(None, [member.reason, problem]))

    def _update_record(self, capture: CaptureRecord, skew_s: float | None) -> None:
        """Store the current outcomes of all targets in the capture."""
        capture.fleet = FleetRecord(
            policy=self.config.policy,
            needed=self._needed if self._members else None,
            start_skew_ms=None if skew_s is None else round(skew_s * 1e3, 3),
            found=self._numbers.count if self._members else None,
            targets=tuple(member.record for member in self._members),
        )
