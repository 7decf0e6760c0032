"""On-demand captures: a job's processes check for requests, agree on the steps and publish their status.

The processes exchange notes in a store (`profdeck.on_demand.stores`): the run directory if all processes share it, or
a store that the job already runs. In a run directory, the notes are files::

    demand.json                        the request, while its requester waits for the capture
    demand.<token>.plan.json           the planned steps, written by the first process that reads the request
    demand.<token>.start.json          the start decision: begun, or withdrawn; the first writer decides
    processes/trainer.rank_0000.json   the status of one process: whether it accepts requests, its last request

`decide` creates plans and start decisions atomically: one writer succeeds, and all other processes read its note. This
also works on network file systems. Therefore, all processes use the same steps, and a capture cannot be withdrawn after
it has begun. A process that reads the request too late for the planned steps reports a missed capture.

With a run directory, every step boundary checks for a request. With other stores, a background thread
(`profdeck.on_demand.request_poller`) polls the store. When the thread has found a request, the process announces that
its boundaries check the store. The steps are planned after all processes have announced this.
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
from profdeck.on_demand.request_poller import RequestPoller
from profdeck.on_demand.requests import (
    MOST_STEPS,
    PROCESSES,
    REQUEST,
    JobProcess,
    OnDemandRequest,
    StartDecision,
    StepPlan,
    decide,
    decode,
    encode,
    plan_name,
    read_note,
    start_name,
    withdrawal_reason,
)
from profdeck.on_demand.stores import Store
from profdeck.records.capture import CaptureRecord
from profdeck_traces.base.errors import ProfdeckError, describe_error

logger = logging.getLogger("profdeck")


class _OwnStatus:
    """Status note of this process in the store."""

    # By note address. If a process has several profilers for one role, only the newest profiler writes the note.
    _writers: ClassVar[weakref.WeakValueDictionary[str, _OwnStatus]] = weakref.WeakValueDictionary()

    def __init__(self, store: Store, process: JobProcess) -> None:
        replica = "" if process.replica is None else f".replica_{process.replica:03d}"
        self._store = store
        self._mutex = threading.RLock()  # re-entrant: signal handlers can write the note
        self._name = f"{PROCESSES}{process.role}{replica}.rank_{process.rank:04d}.json"
        self.process = process
        self._writers[self._address] = self

    @property
    def _address(self) -> str:
        return f"{self._store.address}/{self._name}"

    def join(self) -> None:
        """Announce that this process accepts requests. A restarted process keeps the result of its last request.

        Raises:
            OSError: the store cannot be reached.
        """
        previous = self._read()
        if previous is not None and previous.at != self.process.at and not previous.ended and previous.at.alive:
            text = (
                "Process %d on %s is also %s. Start the processes with a launcher that sets ranks, or give each "
                "process its own Identity."
            )
            logger.warning(text, previous.at.pid, previous.at.host, previous.name)
        if previous is not None and previous.done and self.process.token is None:
            fields = ("token", "step", "done", "captures", "problem", "incomplete")
            self.process = attrs.evolve(self.process, **{field: getattr(previous, field) for field in fields})
        self.update()

    def update(self, **changes: Any) -> None:
        """Change fields of the status and write the note.

        Raises:
            OSError: the store cannot be reached.
        """
        with self._mutex:
            self.process = attrs.evolve(self.process, **changes)
            if self._writers.get(self._address) is self:
                self._store.put(self._name, encode(self.process))

    def close(self) -> None:
        """Announce that this process no longer accepts requests. Never raises."""
        if self.process.at.pid != os.getpid():  # in a forked child, the note belongs to the parent process
            return
        try:
            current = self._read()
            if current is not None and current.id == self.process.id:
                self.update(ended=True)
        except OSError as error:
            logger.debug("%s: %s", self._address, describe_error(error))

    def _read(self) -> JobProcess | None:
        text = self._store.read(self._name)
        return None if text is None else decode(text, JobProcess)


REST_S = 1e-4
"""After a step shorter than ``REST_S / 2``, boundaries skip the check for this long, in seconds.

A check is a system call and takes a microsecond or more. After longer steps, every boundary checks.
"""
_MAX_CHECK_INTERVAL = 16
"""Maximum number of boundaries from one check to the next."""

OnMissed = Callable[[OnDemandSteps, str], None]
"""Callback for a demand that this process has missed. Its arguments are the demand and the reason."""


class RequestWatch:
    """Handles the capture requests of one process.

    Checks for requests at step boundaries, agrees with the other processes on the steps, and publishes the results of
    this process. A demand is a request with planned steps.
    """

    def __init__(  # noqa: PLR0913  # one call site
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
        store: the job's store.
        run: the run directory, which must exist.
        process: the initial status of this process.
        steps: the planned steps. A demand is added when its start is certain, and removed when it has ended.
        discrete: True if each stage is a separate capture.
        miss: writes a manifest for a demand that this process has missed.

        Raises:
            OSError: the run directory cannot be written.
        """
        self._store = store
        self._steps = steps
        self._discrete = discrete
        self._miss = miss
        self._status = _OwnStatus(store, process)
        self._mutex = threading.RLock()  # re-entrant: a signal handler can end a capture during a check
        self._step: int | None = None
        self._first_step: int | None = None
        """The first step that this process began."""
        self._last_text: bytes | None = None
        self._request: OnDemandRequest | None = None
        """The request whose steps are not planned yet."""
        self._agreed: list[OnDemandSteps] = []
        """Demands whose start is not decided yet."""
        self._must_check = False
        """True if the next boundary must check the store, even if there is no new request."""
        self._failed = False
        self._boundary_s = self._skip_until_s = 0.0
        self._skips_left = 0
        """Number of boundaries that may still skip the check before ``_skip_until_s``."""
        self._is_fast = False
        """True if the last step was so short that other processes may skip checks."""
        self._poller: RequestPoller | None = None
        self._has_request: Callable[[], bool]
        if store.remote:
            self._poller = poller = RequestPoller(store, self._status)
            self._has_request = lambda: poller.has_request
            weakref.finalize(self, poller.close)  # also called at interpreter exit
        else:
            # os.access raises no error if the file does not exist, and takes half the time of os.stat.
            self._has_request = functools.partial(os.access, os.fspath(run / REQUEST), os.F_OK)
            self._status.join()
            weakref.finalize(self, self._status.close)

    def check(self, step: int, capture: CaptureRecord | None) -> None:
        """Check for requests before a global step. Repeated calls for the same step do nothing. Never raises.

        Args:
            step: the global step that begins.
            capture: the running capture.
        """
        if step == self._step:
            return
        if not self._must_check:
            now_s = monotonic()
            last_s, self._boundary_s = now_s - self._boundary_s, now_s
            if self._skips_left and now_s < self._skip_until_s:
                self._skips_left -= 1
                return
            self._is_fast = last_s < 2 * REST_S
            if last_s < REST_S / 2:
                self._skips_left, self._skip_until_s = _MAX_CHECK_INTERVAL - 1, now_s + REST_S
        previous_step, self._step = self._step, step
        if previous_step is None:
            self._first_step = step
        if self._must_check or self._has_request():
            if self._poller is not None and not self._poller.is_reachable:
                return  # an unreachable store must not delay steps
            with self._mutex:
                self._check_store(step, previous_step, capture)

    def complete(self, demand: OnDemandSteps, problem: str | None = None) -> None:
        """Remove a demand and publish its result. Never raises.

        Args:
            demand: the demand.
            problem: the reason why this process captured nothing.
        """
        with self._mutex:
            self._agreed = [other for other in self._agreed if other is not demand]
            self._steps.remove(demand)
            if self._status.process.token == demand.token:
                incomplete = " ".join(demand.incomplete) or None
                self._publish(done=True, captures=tuple(demand.captures), problem=problem, incomplete=incomplete)

    def complete_stages(self, last_step: int | None = None, problem: str | None = None) -> None:
        """In discrete mode, complete the demands that have no further stages. Never raises.

        Args:
            last_step: the last global step that has ended. Default: the current step.
            problem: the reason why the host did not complete this step; None if the step was completed.
        """
        ended = self._step if last_step is None else last_step
        for demand in self._steps.demands:
            if self._discrete and demand.begun and ended is not None and demand.last <= ended:
                if problem is not None:
                    demand.incomplete.append(problem)
                self.complete(demand)

    def pause(self) -> None:
        """Stop accepting requests until the next step begins. Never raises."""
        with self._mutex:
            self._status.close()
            self._step = None
            self._must_check = True  # the next boundary announces that this process accepts requests again

    def _check_store(self, step: int, previous_step: int | None, capture: CaptureRecord | None) -> None:
        if self._status.process.ended:
            self._publish(ended=False)
        try:
            self._read_request()
            if self._request is not None:
                self._agree(self._request, step, capture)
            for demand in self._agreed:
                if demand.first >= step >= demand.first - self._steps.warmup_steps:
                    self._decide_start(demand, capture)
        except OSError as error:
            if not self._failed:
                logger.warning("Cannot answer a capture request: %s", describe_error(error))
            self._failed = True
            if self._poller is not None:
                self._poller.is_reachable = False
        for demand in (*self._agreed, *self._steps.demands):
            if not demand.begun and demand.first < step:
                skipped = f"the host went from step {previous_step} to step {step}"
                is_skipped = previous_step is None or previous_step < demand.first
                self._report_missed(demand, skipped if is_skipped else "it could not begin")
        self.complete_stages(step - 1)
        # If the poller has found a request, this process has announced that it checks every boundary.
        is_polled = self._poller is not None and self._poller.has_request
        self._must_check = bool(self._request or self._agreed or self._steps.demands or is_polled)

    def _read_request(self) -> None:
        """Read the request and store it if it is new and ready."""
        text = self._store.read(REQUEST)
        if text is None:
            self._request = None
        if text is None or text == self._last_text:
            return
        request = decode(text, OnDemandRequest)
        if request is None or not (0 < request.in_steps <= MOST_STEPS and 0 < request.steps <= MOST_STEPS):
            address = f"{self._store.address}/{REQUEST}"
            logger.warning("%s is not a capture request that this version of profdeck can read.", address)
        elif request.ready and request.token != self._status.process.token:
            self._request = request
        self._last_text = text

    def _agree(self, request: OnDemandRequest, step: int, capture: CaptureRecord | None) -> None:
        """Read the plan of a request, or write it if no process has planned the steps of the request yet."""
        plan = decide(self._store, plan_name(request.token), self._plan(request, step))
        if plan is None:
            return  # retried at the next boundary
        self._request = None
        self._publish(token=request.token, step=step, done=False, captures=(), problem=None, incomplete=None)
        if plan.first_step is None or plan.last_step is None:
            self._publish(done=True, problem=plan.problem)
            return
        demand = OnDemandSteps(request.token, plan.first_step, plan.last_step)
        if step <= demand.first:
            self._agreed.append(demand)
        elif (start := read_note(self._store, start_name(demand.token), StartDecision)) is not None and not start.begun:
            self.complete(demand, withdrawal_reason(start))
        elif not self._use_configured_captures(demand, capture):
            reason = f"the request was seen here at step {step}, after step {demand.first} had begun"
            if plan.at_step is not None:
                in_steps = max(step - plan.at_step + self._steps.warmup_steps, request.in_steps + 1)
                reason += f"; --in {in_steps} would have been early enough"
            self._report_missed(demand, reason)

    def _plan(self, request: OnDemandRequest, step: int) -> StepPlan:
        # If steps are short, other processes may read the request up to _MAX_CHECK_INTERVAL boundaries later.
        delay = _MAX_CHECK_INTERVAL if self._is_fast and self._poller is None else 0
        first, final_step = step + delay + request.in_steps, self._steps.final_step
        last = first + request.steps - 1
        by, token = self._status.process.name, request.token
        if final_step is not None and first > final_step:
            problem = f"the capture would begin at step {first}, and the job ends with step {final_step}"
            return StepPlan(token=token, by=by, at_step=step, problem=problem)
        last = last if final_step is None else min(last, final_step)
        return StepPlan(token=token, by=by, at_step=step, first_step=first, last_step=last)

    def _decide_start(self, demand: OnDemandSteps, capture: CaptureRecord | None) -> None:
        """Begin a demand, unless its request was withdrawn first."""
        begun = StartDecision(token=demand.token, begun=True, by=self._status.process.name)
        start = decide(self._store, start_name(demand.token), begun)
        if start is None:
            return  # retried at the next boundary; if that is too late, the demand is missed
        if not start.begun:
            self.complete(demand, withdrawal_reason(start))
            return
        self._agreed = [other for other in self._agreed if other is not demand]
        self._steps.add(demand)
        if capture is not None and capture.first_step == demand.first and capture.stage is None:
            self._assign_capture(demand, capture)  # the capture is warming up for the same step

    def _use_configured_captures(self, demand: OnDemandSteps, capture: CaptureRecord | None) -> bool:
        """Use scheduled captures if other processes have already started on the request.

        Returns:
            True if scheduled captures of this process cover the steps of the demand.
        """
        if self._first_step is None or demand.first < self._first_step:
            return False
        if self._discrete and self._steps.are_all_configured(demand.first, demand.last):
            demand.begun = True
            self._steps.add(demand)
            return True
        if self._discrete or not self._steps.is_one_capture(demand.first, demand.last):
            return False
        if capture is not None and capture.first_step == demand.first:
            self._assign_capture(demand, capture)
            self._steps.add(demand)
        else:
            demand.captures.append(f"step{demand.first}")
            self.complete(demand)
        return True

    @staticmethod
    def _assign_capture(demand: OnDemandSteps, capture: CaptureRecord) -> None:
        """Make a scheduled capture the capture of a demand."""
        demand.begun = True
        demand.captures.append(capture.id)
        capture.demand = demand.token

    def _report_missed(self, demand: OnDemandSteps, reason: str) -> None:
        logger.warning("The capture of steps %d to %d is missed: %s.", demand.first, demand.last, reason)
        try:
            self._miss(demand, reason)
        except ProfdeckError as error:
            logger.warning("%s", error)
        self.complete(demand, None if demand.incomplete else reason)

    def _publish(self, **changes: Any) -> None:
        try:
            self._status.update(**changes)
        except OSError as error:
            logger.warning("Cannot answer a capture request: %s", describe_error(error))
