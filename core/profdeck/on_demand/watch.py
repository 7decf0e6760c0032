"""Captures that are asked for while a job runs: requests, the agreement on steps, and what each process answers.

All of it goes through notes in a store (`profdeck.on_demand.stores`): the run directory, if all processes share it, or
one that the job has anyway. In the run directory they are files::

    demand.json                        the request, while somebody waits for its capture
    demand.<token>.plan.json           the steps: written by the first process that sees the request, read by all others
    demand.<token>.start.json          whether it begins: written by the first process that does, or by who withdraws it
    processes/trainer.rank_0000.json   what that process does with requests: it takes them, knows of one, is done

A plan is agreed on, and a request withdrawn, by creating a note that must not exist (`decide`). Stores do that for one
of many, file systems over a network included, and later ones read it. So no two processes can think of different
steps, and no capture can be withdrawn that begins. What a process can be is too late: it says so.

In a directory each boundary looks for a request. In other stores `profdeck.on_demand.lookout` does, beside the job; the
boundaries look from when the process has said that they do, and steps are decided on when all have said so.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import attrs

from profdeck.config.schedule import OnDemandSteps, PlannedSteps
from profdeck.on_demand.lookout import Lookout
from profdeck.on_demand.requests import (
    MOST_STEPS,
    PROCESSES,
    REQUEST,
    JobProcess,
    OnDemandRequest,
    StartDecision,
    StepPlan,
    abandonment,
    decide,
    decode,
    encode,
    plan_name,
    read_note,
    start_name,
)
from profdeck.on_demand.stores import Store
from profdeck.records.capture import CaptureRecord
from profdeck_traces.base.errors import ProfdeckError, describe_error

logger = logging.getLogger("profdeck")


# The side of the job.


class _OwnAnswer:
    """The note in which a process says what it does with requests."""

    # By place: of several profilers in one, the last one speaks.
    _speaking: ClassVar[weakref.WeakValueDictionary[str, _OwnAnswer]] = weakref.WeakValueDictionary()

    def __init__(self, store: Store, process: JobProcess) -> None:
        replica = "" if process.replica is None else f".replica_{process.replica:03d}"
        self._store = store
        self._mutex = threading.RLock()  # re-entrant for signal handlers
        self._name = f"{PROCESSES}{process.role}{replica}.rank_{process.rank:04d}.json"
        self.process = process
        self._speaking[self._place] = self

    @property
    def _place(self) -> str:
        return f"{self._store.address}/{self._name}"

    def join(self) -> None:
        """Say that this process takes requests; one that was started again has answered.

        Raises:
            OSError: the store cannot be reached.
        """
        before = self._there()
        if before is not None and before.done and self.process.token is None:
            kept = ("token", "step", "done", "captures", "problem", "incomplete")
            self.process = attrs.evolve(self.process, **{name: getattr(before, name) for name in kept})
        self.say()

    def say(self, **changes: Any) -> None:
        with self._mutex:
            self.process = attrs.evolve(self.process, **changes)
            if self._speaking.get(self._place) is self:
                self._store.put(self._name, encode(self.process))

    def close(self) -> None:
        """Say that requests are not taken any more. Never raises."""
        if self.process.at.pid != os.getpid():  # a forked child
            return
        try:
            there = self._there()
            if there is not None and there.id == self.process.id:
                self.say(ended=True)
        except OSError as error:
            logger.debug("%s: %s", self._place, describe_error(error))

    def _there(self) -> JobProcess | None:
        text = self._store.read(self._name)
        return None if text is None else decode(text, JobProcess)


REST_S = 1e-4
"""After a step shorter than half of this, no step looks for so long: a look is a system call, which takes a microsecond
or more. Longer steps all look.
"""
_MOST_UNSEEN = 16
"""Of so many boundaries, at least one looks."""

OnMissed = Callable[[OnDemandSteps, str], None]
"""Told of a demand that this process is too late for, and why."""


class RequestWatch:
    """Looks for requests at the boundaries of one process, takes part in the agreement, and answers."""

    def __init__(  # noqa: PLR0913  # by name
        self,
        store: Store,
        run: Path,
        process: JobProcess,
        steps: PlannedSteps,
        *,
        discrete: bool,
        miss: OnMissed,
    ) -> None:
        """Args:
        store: where requests are.
        run: the run directory, which exists.
        process: this one.
        steps: where demands are added when they are certain, and from which they are removed when they are over.
        discrete: whether each stage is a capture of its own.
        miss: leaves a trace in the run of what this process was too late for.

        Raises:
            OSError: the run directory cannot be written.
        """
        self._store = store
        self._steps = steps
        self._discrete = discrete
        self._miss = miss
        self._entry = _OwnAnswer(store, process)
        self._mutex = threading.RLock()  # re-entrant: a signal's handler may end a capture in the middle of a look
        self._step: int | None = None
        self._since: int | None = None
        self._seen: bytes | None = None
        self._request: OnDemandRequest | None = None
        self._agreed: list[OnDemandSteps] = []
        self._busy = False
        self._failed = False
        self._boundary_s = self._rests_until_s = 0.0
        self._rests_for = 0
        """How many boundaries need not look before that time."""
        self._is_fast = False
        """Whether the last step was so short that others may rest."""
        self._lookout: Lookout | None = None
        self._is_asked: Callable[[], bool]
        if store.remote:
            self._lookout = lookout = Lookout(store, self._entry)
            self._is_asked = lambda: lookout.is_asked
            weakref.finalize(self, lookout.close)  # at the end of the process at the latest
        else:
            # Unlike stat it raises nothing while there is nothing, and takes half the time.
            self._is_asked = functools.partial(os.access, os.fspath(run / REQUEST), os.F_OK)
            self._entry.join()
            weakref.finalize(self, self._entry.close)

    def look(self, step: int, capture: CaptureRecord | None) -> None:
        """Look for a request at the boundary into a global step, unless that was just done. Never raises.

        Args:
            step: the step that begins.
            capture: the one that is under way.
        """
        if step == self._step:
            return
        if not self._busy:
            now_s = monotonic()
            last_s, self._boundary_s = now_s - self._boundary_s, now_s
            if self._rests_for and now_s < self._rests_until_s:
                self._rests_for -= 1
                return
            self._is_fast = last_s < 2 * REST_S
            if last_s < REST_S / 2:
                self._rests_for, self._rests_until_s = _MOST_UNSEEN - 1, now_s + REST_S
        before, self._step = self._step, step
        if before is None:
            self._since = step
        if self._busy or self._is_asked():
            if self._lookout is not None and not self._lookout.is_reached:
                return  # steps do not wait for a store that is away
            with self._mutex:
                self._look(step, before, capture)

    def answer(self, demand: OnDemandSteps, problem: str | None = None) -> None:
        """Answer that a demand is over here. Never raises."""
        with self._mutex:
            self._agreed = [other for other in self._agreed if other is not demand]
            self._steps.remove(demand)
            if self._entry.process.token == demand.token:
                incomplete = " ".join(demand.incomplete) or None
                self._answer(done=True, captures=tuple(demand.captures), problem=problem, incomplete=incomplete)

    def answer_stages(self, step: int | None = None) -> None:
        """Answer, in discrete mode, demands of which no stage will come any more. Never raises.

        Args:
            step: the last step that is over; the present one if None.
        """
        over = self._step if step is None else step
        for demand in self._steps.demands:
            if self._discrete and demand.begun and over is not None and demand.last <= over:
                self.answer(demand)

    def pause(self) -> None:
        """Take no requests until the next step. Never raises."""
        with self._mutex:
            self._entry.close()
            self._step = None
            self._busy = True  # the next boundary has something to say

    def _look(self, step: int, before: int | None, capture: CaptureRecord | None) -> None:
        if self._entry.process.ended:
            self._answer(ended=False)
        try:
            self._find()
            if self._request is not None:
                self._agree(self._request, step, capture)
            for demand in self._agreed:
                if demand.first >= step >= demand.first - self._steps.warmup_steps:
                    self._start(demand, capture)
        except OSError as error:
            if not self._failed:
                logger.warning("Cannot answer a capture request: %s", describe_error(error))
            self._failed = True
            if self._lookout is not None:
                self._lookout.is_reached = False
        for demand in (*self._agreed, *self._steps.demands):
            if not demand.begun and demand.first < step:
                went = f"the host went from step {before} to step {step}"
                self._late(demand, went if before is None or before < demand.first else "it could not begin")
        self.answer_stages(step - 1)
        asked = self._lookout is not None and self._lookout.is_asked  # at every boundary, as this process has said
        self._busy = bool(self._request or self._agreed or self._steps.demands or asked)

    def _find(self) -> None:
        """Read the request if there is a new one."""
        text = self._store.read(REQUEST)
        if text is None:
            self._request = None
        if text is None or text == self._seen:
            return
        request = decode(text, OnDemandRequest)
        if request is None or not (0 < request.in_steps <= MOST_STEPS and 0 < request.steps <= MOST_STEPS):
            where = f"{self._store.address}/{REQUEST}"
            logger.warning("%s is no request that this version of profdeck understands.", where)
        elif request.ready and request.token != self._entry.process.token:
            self._request = request
        self._seen = text

    def _agree(self, request: OnDemandRequest, step: int, capture: CaptureRecord | None) -> None:
        """Learn the steps of a request, or decide on them if nobody has."""
        plan = decide(self._store, plan_name(request.token), self._plan(request, step))
        if plan is None:
            return  # the next boundary tries again
        self._request = None
        self._answer(token=request.token, step=step, done=False, captures=(), problem=None, incomplete=None)
        if plan.first_step is None or plan.last_step is None:
            self._answer(done=True, problem=plan.problem)
            return
        demand = OnDemandSteps(request.token, plan.first_step, plan.last_step)
        if step <= demand.first:
            self._agreed.append(demand)
        elif (start := read_note(self._store, start_name(demand.token), StartDecision)) is not None and not start.begun:
            self.answer(demand, abandonment(start))
        elif not self._take_from_config(demand, capture):
            reason = f"the request was seen here at step {step}, after step {demand.first} had begun"
            if plan.at_step is not None:
                enough = max(step - plan.at_step + self._steps.warmup_steps, request.in_steps + 1)
                reason += f"; asked for with --in {enough} it would have been in time"
            self._late(demand, reason)

    def _plan(self, request: OnDemandRequest, step: int) -> StepPlan:
        rests = self._is_fast and self._lookout is None
        rest = _MOST_UNSEEN if rests else 0  # others may see the request so many steps later
        first, final_step = step + rest + request.in_steps, self._steps.final_step
        last = first + request.steps - 1
        by, token = self._entry.process.name, request.token
        if final_step is not None and first > final_step:
            problem = f"the capture would begin at step {first}, and the job ends with step {final_step}"
            return StepPlan(token=token, by=by, at_step=step, problem=problem)
        last = last if final_step is None else min(last, final_step)
        return StepPlan(token=token, by=by, at_step=step, first_step=first, last_step=last)

    def _start(self, demand: OnDemandSteps, capture: CaptureRecord | None) -> None:
        """Find out whether an agreed capture begins, or make that certain."""
        begun = StartDecision(token=demand.token, begun=True, by=self._entry.process.name)
        start = decide(self._store, start_name(demand.token), begun)
        if start is None:
            return  # the next boundary tries again, or it is too late
        if not start.begun:
            self.answer(demand, abandonment(start))
            return
        self._agreed = [other for other in self._agreed if other is not demand]
        self._steps.add(demand)
        if capture is not None and capture.first_step == demand.first and capture.stage is None:
            self._take_over(demand, capture)  # it warms up for that very step

    def _take_from_config(self, demand: OnDemandSteps, capture: CaptureRecord | None) -> bool:
        """Let the config's own captures stand for those that this process is too late for; return whether they do."""
        if self._since is None or demand.first < self._since:
            return False
        if self._discrete and self._steps.are_all_configured(demand.first, demand.last):
            demand.begun = True
            self._steps.add(demand)
            return True
        if self._discrete or not self._steps.is_one_capture(demand.first, demand.last):
            return False
        if capture is not None and capture.first_step == demand.first:
            self._take_over(demand, capture)
            self._steps.add(demand)
        else:
            demand.captures.append(f"step{demand.first}")
            self.answer(demand)
        return True

    @staticmethod
    def _take_over(demand: OnDemandSteps, capture: CaptureRecord) -> None:
        """Let a capture that the config began be the one that was asked for."""
        demand.begun = True
        demand.captures.append(capture.id)
        capture.demand = demand.token

    def _late(self, demand: OnDemandSteps, reason: str) -> None:
        logger.warning("The capture of steps %d to %d is missed: %s.", demand.first, demand.last, reason)
        try:
            self._miss(demand, reason)
        except ProfdeckError as error:
            logger.warning("%s", error)
        self.answer(demand, reason)

    def _answer(self, **changes: Any) -> None:
        try:
            self._entry.say(**changes)
        except OSError as error:
            logger.warning("Cannot answer a capture request: %s", describe_error(error))
