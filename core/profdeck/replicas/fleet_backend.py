"""A fleet as a target: one backend whose start and stop are those of many engines, at once.

A start has four parts: the targets are discovered; all are reached, while their manifests are claimed; those that are
ready start through one gate; and the policy judges whether enough of them have. What came of each target is in the
manifest of the fleet, and a target that was asked has a capture and a manifest of its own.

A start takes ``start_timeout_s`` at most and a stop ``stop_timeout_s``; then what is late is given up. It is told to
stop, which takes up to three seconds more. A start that is given up as a whole ends with the stop of what has started.
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
from profdeck.replicas.member import NOT_COMPLETE, Member, counted, error_of, late_error, listed, shortened, target_key
from profdeck.replicas.placement import PlacedEngine, on_gpu_ranks
from profdeck.replicas.start_gate import GatePass, StartGate
from profdeck.replicas.worker_kinds import select_kinds
from profdeck_traces.base.errors import ConfigError, describe_error

logger = logging.getLogger("profdeck")

TITLE = "fleet"
"""What a fleet is called as a target, as long as the number of its targets is unknown."""
_RESERVE_AFTER_S = 0.25
"""How long all targets have been asked whether they are there, before their manifests are claimed: in the time in which
they answer."""


@attrs.define
class FleetBackend(EngineBackend):
    """Asks many engines to record, each by a backend of its own."""

    name: ClassVar[str] = TITLE

    member: type[EngineBackend]
    """The backend of each target."""
    config: TargetsConfig
    recorder: manifest.ManifestWriter
    """What is the same in the manifests of all targets."""
    given: Sequence[object] | None = None
    """The targets that the host names; None if the config says where they are."""
    _numbers: ReplicaNumbers = attrs.field(factory=ReplicaNumbers, init=False)
    _backends: dict[object, tuple[EngineBackend, str]] = attrs.field(factory=dict, init=False)
    """By URL or actor, or by the identity of an object: they live from capture to capture."""
    _placed: dict[object, tuple[int, ...]] = attrs.field(factory=dict, init=False)
    _members: list[Member] = attrs.field(factory=list, init=False)
    _reserving: asyncio.Future[None] | None = attrs.field(default=None, init=False)
    """Task that reserves the file names of the members' manifests."""
    _hooks: RoleHooks = attrs.field(init=False)
    _manifests: ManifestBatch = attrs.field(factory=ManifestBatch, init=False)
    """Those of the targets."""

    def __attrs_post_init__(self) -> None:
        """Refuse what can be known to be wrong before any capture.

        Raises:
            ConfigError: a target is none that the backend controls, the file of targets is wrong, or there is none.
        """
        if self.given is None and not self.config.discovers:
            raise ConfigError(
                "targets: they say nowhere where targets are: give urls, router or file, name actors, or pass the "
                "targets, as in Profiler.from_config(..., target=[llm_1, llm_2])."
            )
        if self.given is not None and self.config.discovers:
            raise ConfigError(
                "targets: the host names the targets, and so do urls, router or file, or actors; give one of both."
            )
        if self.given is not None and not self.given:
            raise ConfigError("target: the list is empty, so nothing would be recorded.")
        if self.given is None:
            check_file(self.config)
            return
        self.given = [self._named(handle) for handle in self.given]
        seen: set[object] = set()
        for handle in self.given:
            name = str(handle) if isinstance(handle, ActorGroup) else self._bound(handle)[1]
            if target_key(handle) in seen:
                raise ConfigError(f"target: {name} is in the list twice.")
            seen.add(target_key(handle))

    def _named(self, target: object) -> object:
        """Convert objects of a cluster to actors or groups. Store the GPU ranks of a placed engine."""
        where, handle = self.config.actor_attribute, target.target if isinstance(target, PlacedEngine) else target
        named = as_cluster_target(handle, where) or handle
        if isinstance(target, PlacedEngine):
            self._placed[target_key(named)] = target.gpu_ranks
        return named

    def preflight(self) -> None:
        """Run the checks of the targets' backend."""
        self.member(self.options).preflight()

    def use_hooks(self, hooks: RoleHooks) -> None:
        """Call the hooks of each target with the wrappers of the role's listeners."""
        self._hooks = RoleHooks(self.member, role=hooks)

    @hookimpl
    def profile_start(self, capture: CaptureRecord) -> Awaitable[None]:
        """Start all targets, or as many as the policy needs."""
        return self._start(capture)

    @hookimpl
    def profile_step(self, capture: CaptureRecord, step: Step) -> Awaitable[None] | None:  # noqa: ARG002  # hook signature
        """Pass a boundary on, if the backend of the targets wants to know of it."""
        if not self._hooks.calls("profile_step"):
            return None
        recording = [member.recording for member in self._members if member.recording is not None]

        async def passed() -> None:
            await finish(begin(one.step(step) for one in recording))

        return passed()

    @hookimpl
    def profile_stop(self, capture: CaptureRecord) -> Awaitable[Sequence[object]]:
        """Stop all targets that have started, and wait for their files."""
        return self._stop(capture)

    async def state(self, capture: EngineCapture) -> TargetState:  # noqa: ARG002  # only one capture runs at a time
        """Ask all targets that record how far they are; of one that is gone nothing more will come."""
        recording = [member for member in self._members if member.recording is not None]

        async def ask(member: Member) -> TargetState:
            return await member.asked.state(member.capture)

        limit_s = self.config.start_timeout_s
        results = await fan_out(ask, recording, timeout_s=limit_s, each_timeout_s=limit_s)
        known = [result for result in results if isinstance(result, TargetState)]
        if recording and not known:
            reason = describe_error(error_of(results[0]))
            raise CaptureError(f"None of the {len(recording)} targets responded. {reason}")
        return TargetState(
            ended=all(state.ended for state in known),
            iterations=min((state.iterations for state in known), default=0),
            waits_for=next((state.waits_for for state in known if state.waits_for), None),
        )

    @property
    def states(self) -> Mapping[str, TargetState]:
        """How far each target said that it was when it was last asked."""
        asked = [member.backend for member in self._members if member.backend is not None]
        return {name: state for backend in asked for name, state in backend.states.items()}

    # The start.

    async def _start(self, capture: CaptureRecord) -> None:
        loop, self._members, self._reserving = asyncio.get_running_loop(), [], None
        deadline_s = loop.time() + self.config.start_timeout_s
        skew_s = None
        self._tell(capture, skew_s)
        try:
            found, notes = await find_targets(self.config, self.given, self._numbers, self._ask)
            placed = on_gpu_ranks(found, self._placed, capture.request.ranks if capture.request else "all")
            targets, of_kinds = select_kinds(placed, capture.request.batch_kinds if capture.request else ())
            capture.notes += [*notes, *of_kinds]
            here = {target_key(target.handle) for target in targets}
            self._backends = {key: bound for key, bound in self._backends.items() if key in here}
            self._members = [self._member(target, capture) for target in targets]
            capture.target, capture.expected_ranks = f"{TITLE} of {len(self._members)}", ()
            ready = await self._prepared(capture)
            self._judge(ready, "are ready")
            left_s = max(deadline_s - loop.time(), 0.0)
            gate = StartGate(timeout_s=left_s / 2)  # one that hangs before it must not cost the others their start
            started = await self._fired(ready, gate, left_s)
            skew_s = gate.skew_s
            noted = [member.said(note) for member in started for note in member.capture.notes]
            capture.notes += shortened(noted)
            self._judge(started, "have started")
            if others := [member for member in self._members if member.recording is None]:
                left_out = f"{len(others)} of {len(self._members)}"
                logger.warning("Capture %s goes on without %s targets. %s", capture.id, left_out, listed(others))
        except BaseException as error:
            # Not ended by a second interrupt: what has started is stopped.
            await asyncio.shield(self._abandon(error))
            raise
        finally:
            self._tell(capture, skew_s)

    async def _ask(self, actor: Actor) -> None:
        await self._bound(actor)[0].reach()

    def _member(self, target: Target, whole: CaptureRecord) -> Member:
        assert whole.request is not None  # noqa: S101  # core makes it for targets
        identity = attrs.evolve(whole.identity, replica=target.replica)
        # A token each: who lists one engine twice must not end with the one start what the other has begun.
        request = attrs.evolve(
            whole.request,
            replica=target.replica,
            ranks=target.ranks or whole.request.ranks,
            batch_kinds=target.batch_kinds or whole.request.batch_kinds,
            token=secrets.token_hex(8),
        )
        backend, name, problem = None, str(target.handle), None
        try:
            if target.problem is not None:
                raise target.problem
            backend, name = self._bound(target.handle)
        except (ConfigError, TargetError) as error:  # of what was discovered: such as a worker of another protocol
            problem = error
        capture = CaptureRecord(
            id=whole.id,
            directory=run_directory.replica_directory(whole.directory, target.replica),
            identity=identity,
            first_step=whole.first_step,
            current_step=whole.current_step,
            stage=whole.stage,
            iterations=whole.iterations,
            target=name,
            request=request,
            demand=whole.demand,
        )
        recorder = attrs.evolve(self.recorder, write=self._manifests.put)
        member = Member(target=target, name=name, backend=backend, capture=capture, recorder=recorder)
        if problem is not None:
            member.failed(problem)
        elif not target.healthy:
            member.backend, member.outcome = None, Outcome.UNREACHABLE
            member.reason = "Its router says that it is not healthy, so it was not asked."
            member.fix = "See its log and that of the router."
        return member

    def _bound(self, handle: object) -> tuple[EngineBackend, str]:
        if (key := target_key(handle)) not in self._backends:
            backend = self.member(self.options)
            self._backends[key] = backend, backend.bind(handle)
        return self._backends[key]

    async def _prepared(self, whole: CaptureRecord) -> list[Member]:
        """Reach all targets and reserve the names of their manifests; returns those that can start."""
        members = [member for member in self._members if member.backend is not None]
        limit_s = self.config.start_timeout_s / 2

        async def reach(member: Member) -> None:
            await member.asked.reach()

        reached = asyncio.Event()
        reserved = self._reserving = asyncio.ensure_future(self._reserve(members, whole, reached))
        try:
            results = await fan_out(reach, members, timeout_s=limit_s, each_timeout_s=limit_s)
        finally:
            reached.set()
            await asyncio.shield(reserved)
        late = late_error(
            f"It could not be reached within {limit_s:g} seconds, half of start_timeout_s", "start_timeout_s"
        )
        for member, result in zip(members, results, strict=True):
            if isinstance(result, BaseException):
                member.failed(result, late)
        return [member for member in members if member.outcome is None]

    @staticmethod
    async def _reserve(members: Sequence[Member], whole: CaptureRecord, reached: asyncio.Event) -> None:
        assert whole.request is not None  # noqa: S101  # as above
        directory = run_directory.RunDirectory(whole.request.output, whole.request.run, {})

        def reserve(member: Member) -> None:
            capture = member.capture
            try:
                directory.reserve(capture, member.recorder)
            except (OSError, CaptureError) as error:
                member.failed(CaptureError(f"Cannot write to {capture.directory}: {describe_error(error)}"))
            else:
                capture.move_to(Life.STARTING)
                if capture.request is not None and capture.id != whole.id:  # the name was taken
                    capture.request = attrs.evolve(capture.request, id=capture.id)

        await wait_for(reached, _RESERVE_AFTER_S)
        await run_in_threads(reserve, members)

    async def _fired(self, ready: Sequence[Member], gate: StartGate, limit_s: float) -> list[Member]:
        """Start all through the gate; returns those that record."""
        passes = [(member, gate.issue()) for member in ready]

        async def start(pair: tuple[Member, GatePass]) -> None:
            await pair[0].start(pair[1], self._hooks)

        results = await fan_out(start, passes, timeout_s=limit_s, each_timeout_s=limit_s)
        late = late_error(
            f"It did not start within start_timeout_s={self.config.start_timeout_s:g} seconds", "start_timeout_s"
        )
        for member, result in zip(ready, results, strict=True):
            if isinstance(result, BaseException):
                member.failed(result, late)
        await self._stop_others("it did not start")
        return [member for member in ready if member.recording is not None]

    def _judge(self, there: Sequence[Member], what: str) -> None:
        """Raise CaptureError if these are fewer than the policy needs."""
        total, needed = len(self._members), self._needed
        if len(there) >= needed:
            return
        policy = self.config.policy
        rule = f"policy {policy} needs {needed}" if policy is Policy.QUORUM else f"policy {policy}"
        others = [member for member in self._members if member.outcome not in {None, Outcome.STARTED}]
        raise CaptureError(f"Only {len(there)} of {total} targets {what} ({rule}). {listed(others)}")

    @property
    def _needed(self) -> int:
        return len(self._members) if self.config.needed is None else self.config.needed

    async def _abandon(self, error: BaseException) -> None:
        """Stop what has started, and end the captures of the others."""
        if self._reserving is not None:
            await asyncio.wait([self._reserving])  # otherwise, a manifest reserved later would never be completed
        why = "the start of the fleet was given up"
        reason = f"{why}: too few targets took part" if isinstance(error, CaptureError) else why
        await self._stop_all(reason)
        await self._stop_others(reason)

    async def _stop_others(self, reason: str) -> None:
        """End the captures whose names are reserved and that nothing records."""
        others = [member for member in self._members if member.recording is None]
        reserved = [member for member in others if member.capture.state is Life.STARTING]
        for member in reserved:
            member.abandon(reason)
        for member in others:
            if member.backend is not None:
                await member.backend.release()
        await self._written()

    # The stop.

    async def _stop(self, capture: CaptureRecord) -> Sequence[object]:
        reason = " ".join(capture.problems) or None
        for member in self._members:  # what the whole has learnt since it began
            member.capture.current_step, member.capture.demand = capture.current_step, capture.demand
        skew_ms = capture.fleet.start_skew_ms if capture.fleet else None
        try:
            await self._stop_all(reason)
        finally:
            self._tell(capture, None if skew_ms is None else skew_ms / 1e3)
        absent = [member for member in self._members if member.started_ns is None]
        poor = [
            member
            for member in self._members
            if member.started_ns is not None
            and member.capture.status is not Status.COMPLETE
            and not (reason and member.outcome and member.outcome.ends_well)  # all end before their time
        ]
        for members, what in ((absent, "did not take part"), (poor, NOT_COMPLETE)):
            if members:
                outcomes = [member.outcome for member in members]
                capture.problems.append(counted(outcomes, len(self._members), what))
        return ()

    async def _stop_all(self, reason: str | None) -> None:
        recording = [member for member in self._members if member.recording is not None]
        limit_s = self.config.stop_timeout_s

        async def stop(member: Member) -> None:
            await member.stop(reason)

        late = late_error(f"It was not stopped within stop_timeout_s={limit_s:g} seconds", "stop_timeout_s")
        try:
            results = await fan_out(stop, recording, timeout_s=limit_s, each_timeout_s=limit_s)
            for member, result in zip(recording, results, strict=True):
                if result is not None:
                    member.failed(error_of(result), late)
                    member.capture.problems.append(str(member.reason))
                    manifest.write_manifest(member.capture, member.recorder)
        finally:
            await self._written()

    async def _written(self) -> None:
        """Wait until the manifests of all targets are written."""
        if problems := await self._manifests.written():
            for member in self._members:
                if error := problems.get(member.capture.manifest_path):
                    problem = f"The manifest cannot be written: {error}."
                    member.capture.problems.append(problem)
                    member.reason = " ".join(filter(None, [member.reason, problem]))

    def _tell(self, capture: CaptureRecord, skew_s: float | None) -> None:
        """Put into the capture what has come of all targets so far."""
        capture.fleet = FleetRecord(
            policy=self.config.policy,
            needed=self._needed if self._members else None,
            start_skew_ms=None if skew_s is None else round(skew_s * 1e3, 3),
            targets=tuple(member.record for member in self._members),
        )
