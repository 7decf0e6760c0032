"""Python API of `profdeck capture job`: captures a running job, and waits until the capture ends."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import attrs

from profdeck.base.errors import CaptureError
from profdeck.base.observer import Observer
from profdeck.base.text import sentence
from profdeck.on_demand import requests
from profdeck.on_demand.requests import JobProcess, OnDemandRequest, StepPlan
from profdeck.on_demand.stores import Store, open_store
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.verification.report_model import RunReport
from profdeck.verification.run_report import read_about, read_run, recorded_config
from profdeck_traces.base.errors import ConfigError, ProfdeckError, describe_error
from profdeck_traces.base.text import shell_path, short_path

TIMEOUT_S = 3600.0
"""Default time limit of a request."""

# Polling interval. Polling more often has no benefit, because steps take seconds and file systems can be slow.
_POLL_S = 0.2
# Maximum time for a launcher to restart a killed process.
_RESTART_S = 60.0
# Maximum time for processes to appear in a remote store, and for all of them to see a request.
_JOIN_S = 10.0
# A process that sends no heartbeat for this long is treated as dead.
_SILENT_S = 30.0
_MOST_NAMED = 4


@attrs.frozen(kw_only=True)
class JobRequest:
    """Parameters for capturing a running job."""

    run: Path = attrs.field(converter=Path)
    """Run directory of the job."""
    steps: int = 1
    """Number of global steps to record."""
    in_steps: int | None = None
    """Number of global steps before the recording begins. Default: 2, plus the steps of the warm-up."""
    store: str | None = None
    """``NAME:ADDRESS`` of the job's store, if its hosts share no directory. Default: the store in the run directory."""
    timeout_s: float = TIMEOUT_S
    """Time limit in seconds. If the job has not begun the capture by then, the request is withdrawn."""


@attrs.frozen(kw_only=True)
class ProcessCapture:
    """Captures that one process of a job made for a request."""

    process: JobProcess
    captures: tuple[str, ...]
    """IDs of the captures."""
    directory: PurePosixPath
    """Run directory on the host of the process."""
    files_here: bool | None
    """True if the files are in the run directory on this host; ``None`` if the process made no capture."""
    problem: str | None
    """Cause of a missing or incomplete capture."""


@attrs.frozen(kw_only=True)
class JobCapture:
    """Result of capturing a running job."""

    run: Path
    first_step: int
    last_step: int
    processes: tuple[ProcessCapture, ...]
    is_over: bool
    """False if the time limit passed while some processes were still recording."""
    report: RunReport | None
    """State of the captures on this host. ``None`` if all files of the captures are on other hosts."""
    directories: tuple[Path, ...]
    """Directories of the captured steps on this host."""


def capture_job(
    job: JobRequest, observer: Observer | None = None, read: Callable[..., RunReport] = read_run
) -> JobCapture:
    """Capture a running job, and wait until the capture has ended.

    Args:
        job: The parameters of the request.
        observer: Receives messages and progress.
        read: Reads the run after the capture, with the arguments of `read_run`.

    Raises:
        ConfigError: The job does not accept the request.
        CaptureError: Nothing was captured, or the job cannot be reached.
    """
    _check(job)
    observer = observer or Observer()
    with contextlib.closing(open_store(job.run, job.store)) as store:
        about = {} if store.remote else read_about(job.run)
        try:
            processes = _find_processes(store, observer)
        except OSError as error:
            raise CaptureError(f"The job cannot be reached: {describe_error(error)}") from error
        if not processes:
            raise _no_process_error(job.run, store, about)
        request = requests.create_request(store, _in_steps(job, processes), job.steps)
        try:
            return _capture(
                _RequestWaiter(job, observer, store, request, {process.id for process in processes}), processes, read
            )
        except OSError as error:
            raise CaptureError(
                f"The request was sent, but the job can no longer be reached: {sentence(describe_error(error))} "
                f"To list what was captured on this host: profdeck ls {shell_path(job.run)}"
            ) from error


def _check(job: JobRequest) -> None:
    for name, value in (("steps", job.steps), ("in_steps", job.in_steps)):
        if value is not None and not 1 <= value <= requests.MOST_STEPS:
            raise ConfigError(f"{name} must be between 1 and {requests.MOST_STEPS:,}, got {value}.")
    if not 0 < job.timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds, got {job.timeout_s}.")


def _capture(waiter: _RequestWaiter, recipients: list[JobProcess], read: Callable[..., RunReport]) -> JobCapture:
    job, store, request = waiter.job, waiter.store, waiter.request
    with requests.send_heartbeats(store, request):
        try:
            waiter.wait_until_seen(recipients)
            plan = waiter.wait_for_plan()
            processes = waiter.read_processes() if plan is None or plan.problem else waiter.wait_for_processes(plan)
        except KeyboardInterrupt:
            waiter.observer.note(waiter.withdraw())
            raise
        if plan is None or not any(_captured(process, request) for process in processes):
            if requests.withdraw(store, request):
                raise _no_capture_error(waiter, plan, processes)
            plan = plan or requests.read_plan(store, request)
            assert plan is not None  # noqa: S101  # a capture begins only after its steps are planned
        assert plan.first_step is not None  # noqa: S101  # as above
        assert plan.last_step is not None  # noqa: S101  # as above
        directories = _directories(job.run, plan.first_step, plan.last_step)
        report, elsewhere = _read(waiter, directories, processes, read)
        is_over = all(map(waiter.is_over, processes))
        if is_over:
            requests.remove_request(store, request)
        else:
            waiter.observer.note(f"The capture continues. To see it later: profdeck ls {shell_path(job.run)}")
    return JobCapture(
        run=job.run,
        first_step=plan.first_step,
        last_step=plan.last_step,
        processes=tuple(
            ProcessCapture(
                process=process,
                captures=(captures := _captures(process, request)),
                directory=PurePosixPath(process.output, job.run.name),
                files_here=process.id not in elsewhere if captures else None,
                problem=_problem(process, request),
            )
            for process in processes
        ),
        is_over=is_over,
        report=report,
        directories=tuple(directories),
    )


def _find_processes(store: Store, observer: Observer) -> list[JobProcess]:
    """Return the processes that accept requests.

    In a remote store, processes appear only some seconds after the job starts, so wait for the first one.
    """
    deadline_s = time.monotonic() + (_JOIN_S if store.remote else 0.0)
    with observer.phase("Looking for the processes of the job") as on_progress:
        while True:
            processes = [process for process in requests.read_processes(store) if not process.is_gone]
            if processes or time.monotonic() >= deadline_s:
                return processes
            on_progress(0, 1)
            time.sleep(_POLL_S)


def _no_process_error(run: Path, store: Store, about: dict[str, Any]) -> ConfigError:
    if not store.remote and not recorded_config(about).get("on_demand", False):
        return ConfigError(
            f"{run}: this job accepts no capture requests. Its config contains on_demand: false, or it was started by "
            "an earlier version of profdeck."
        )
    location = f" (run '{run.name}' at {store.address})" if store.remote else ""
    return ConfigError(
        f"{run}: no process of this job{location} accepts capture requests. Processes accept requests after they have "
        "created a Profiler, until they end."
    )


def _in_steps(job: JobRequest, processes: list[JobProcess]) -> int:
    """Return the number of global steps until the capture begins.

    Raises:
        ConfigError: the requested number is too small for the warm-up.
    """
    longest = max(processes, key=lambda process: process.warmup_steps)
    default = requests.default_in_steps(processes)
    if job.in_steps is not None and job.in_steps <= longest.warmup_steps:
        raise ConfigError(
            f"The capture cannot begin in {job.in_steps} steps: the role '{longest.role}' warms up for "
            f"{longest.warmup_steps} step(s) before a capture. Use at least {longest.warmup_steps + 1}. The default, "
            f"{default}, allows for ranks that are one step apart."
        )
    return default if job.in_steps is None else job.in_steps


@attrs.frozen
class _RequestWaiter:
    """Waits until the processes of a job have handled a request."""

    job: JobRequest
    observer: Observer
    store: Store
    request: OnDemandRequest
    recipients: set[str]
    """IDs of the processes that accepted requests when the request was made."""
    dead_since_s: dict[str, float] = attrs.field(factory=dict)
    """Monotonic time at which each process was first found dead, by ID."""
    heartbeats: dict[str, tuple[bytes | None, float]] = attrs.field(factory=dict)
    """Last heartbeat of each process of a remote store, and the monotonic time at which it was first seen."""
    deadline_s: float = attrs.field(init=False)

    @deadline_s.default
    def _deadline_s(self) -> float:
        return time.monotonic() + self.job.timeout_s

    def wait_until_seen(self, processes: list[JobProcess]) -> None:
        """If the store is remote, wait until the processes have seen the request, and then mark the request as ready.

        The processes plan the steps only after the request is ready.
        """
        if not self.store.remote:
            return
        deadline_s = time.monotonic() + _JOIN_S
        unaware = processes
        while unaware and time.monotonic() < deadline_s:
            time.sleep(_POLL_S / 4)
            unaware = [process for process in self.read_processes() if process.is_unaware_of(self.request)]
        if unaware:
            names = ", ".join(sorted(process.name for process in unaware)[:_MOST_NAMED])
            self.observer.note(
                f"{_count(len(unaware), 'process has', 'processes have')} not seen the request yet: {names}."
            )
        requests.mark_ready(self.store, self.request)

    def wait_for_plan(self) -> StepPlan | None:
        """Wait until the steps are planned. Return ``None`` if the job ends or the time limit passes first."""
        request = self.request
        self.observer.note(
            f"Sent the request to {_count(len(self.recipients), 'process', 'processes')} of {short_path(self.job.run)}."
        )
        with self.observer.phase("Waiting for a global step to begin") as on_progress:
            while (plan := requests.read_plan(self.store, request)) is None and not self._is_late():
                on_progress(0, 1)
                if all(map(self.is_over, self.read_processes())):
                    return requests.read_plan(self.store, request)  # the last process may have written the plan
                time.sleep(_POLL_S)
        return plan

    def wait_for_processes(self, plan: StepPlan) -> list[JobProcess]:
        """Wait until all processes have ended the capture or the time limit passes. Return the processes."""
        steps = _steps(plan)
        self.observer.note(
            f"{steps[:1].upper()}{steps[1:]} will be captured, as planned by {plan.by} at step {plan.at_step}."
        )
        with self.observer.phase(f"Capturing {steps}") as on_progress:
            while True:
                is_late, processes = self._is_late(), self.read_processes()
                ended = sum(map(self.is_over, processes))
                on_progress(ended, len(processes))
                if is_late or ended == len(processes):
                    return processes
                time.sleep(_POLL_S)

    def read_processes(self) -> list[JobProcess]:
        """Return the processes that received the request, and all others that can still handle it."""
        token = self.request.token
        return [
            process
            for process in requests.read_processes(self.store)
            if process.token == token or process.id in self.recipients or not process.is_gone
        ]

    def is_over(self, process: JobProcess) -> bool:
        """Return True if a process has completed the request, or has exited and was not restarted.

        A launcher can restart a killed process, so a dead process counts as exited only after `_RESTART_S`.
        """
        if process.ended or (process.token == self.request.token and process.done):
            return True
        if not process.is_gone and not self._is_silent(process):
            return False
        now_s = time.monotonic()
        return now_s - self.dead_since_s.setdefault(process.id, now_s) >= _RESTART_S

    def withdraw(self) -> str:
        """Withdraw the request unless its capture has begun. Return a message for the user."""
        try:
            if requests.withdraw(self.store, self.request):
                return "The request is withdrawn. Nothing is captured."
        except OSError as error:
            return f"The request cannot be withdrawn: {describe_error(error)}"
        return f"The capture has begun and continues. To see it: profdeck ls {shell_path(self.job.run)}"

    def _is_silent(self, process: JobProcess) -> bool:
        """Return True if a process's heartbeat has stopped, which is the only sign of a lost host in a remote store."""
        if not self.store.remote:
            return False
        heartbeat, now_s = self.store.read(f"alive.{process.id}"), time.monotonic()
        previous, since_s = self.heartbeats.setdefault(process.id, (heartbeat, now_s))
        if heartbeat != previous:
            self.heartbeats[process.id] = heartbeat, now_s
            return False
        return now_s - since_s > _SILENT_S

    def _is_late(self) -> bool:
        return time.monotonic() >= self.deadline_s


def _captured(process: JobProcess, request: OnDemandRequest) -> bool:
    """Return True if a process has made a capture for the request, even an incomplete one."""
    return process.token == request.token and process.done and not process.problem


def _problem(process: JobProcess, request: OnDemandRequest) -> str | None:
    """Return the reason why a process's capture is missing or incomplete, or ``None`` if there is no problem."""
    if process.token != request.token:
        return (
            "it ended before it read the request"
            if process.is_gone
            else "it has not begun a global step since the request"
        )
    if not process.done:
        return (
            "it ended before the capture had ended" if process.is_gone else "it has not reached the end of the capture"
        )
    return process.problem or process.incomplete


def _no_capture_error(waiter: _RequestWaiter, plan: StepPlan | None, processes: list[JobProcess]) -> CaptureError:
    """Return the error for a request that produced no capture."""
    timeout_s = waiter.job.timeout_s
    if plan is not None and plan.problem:
        return CaptureError(f"Nothing is captured: {plan.problem}.")
    if plan is not None:
        reasons = "; ".join(f"{process.name}: {_problem(process, waiter.request)}" for process in processes)
        return CaptureError(f"Nothing was captured, and the request is withdrawn. {reasons}.")
    if all(process.is_gone for process in processes):
        return CaptureError("Nothing was captured, because the job ended before it began another global step.")
    stuck = ", ".join(f"{process.name} ({process.at})" for process in processes if not process.is_gone)
    return CaptureError(
        f"No process has begun a global step for {timeout_s:g} seconds, so the request is withdrawn. Check whether the "
        f"job hangs. If its steps are long, increase --timeout. The request was sent to: {stuck}."
    )


def _read(
    waiter: _RequestWaiter,
    directories: Sequence[Path],
    processes: Sequence[JobProcess],
    read: Callable[..., RunReport],
) -> tuple[RunReport | None, set[str]]:
    """Read the captures that were made for a request.

    Returns:
        A report on the files in the run directory, and the IDs of the processes whose files are on other hosts. The
        report is ``None`` if a remote store is used and the run directory has no files of the request.
    """
    store, request = waiter.store, waiter.request
    manifests = list[Manifest]()
    for directory in directories:
        for file in filter(is_manifest, directory.glob("**/*.json")):
            with contextlib.suppress(ProfdeckError):  # `read` reports it
                manifests.append(read_manifest(file))
    elsewhere = set[str]()
    if store.remote:
        elsewhere = {
            process.id
            for process in processes
            if _captures(process, request) and not any(_made(process, manifest, request) for manifest in manifests)
        }
    local = [process for process in processes if process.id not in elsewhere]
    made = {(process.role, process.replica, id_) for process in local for id_ in _captures(process, request)}
    made |= {_origin(manifest) for manifest in manifests if manifest.demand == request.token}
    if store.remote and made.isdisjoint(map(_origin, manifests)):
        return None, elsewhere
    report = read(waiter.job.run, only=lambda manifest: _origin(manifest) in made)
    return (_without_absent(report, processes) if store.remote else report), elsewhere


def _captures(process: JobProcess, request: OnDemandRequest) -> tuple[str, ...]:
    """Return the IDs of the captures that a process made for a request."""
    return process.captures if process.token == request.token else ()


def _made(process: JobProcess, manifest: Manifest, request: OnDemandRequest) -> bool:
    """Return whether a manifest belongs to one of the process's captures for the request."""
    same = (manifest.role, manifest.replica, manifest.rank) == (process.role, process.replica, process.rank)
    # The manifest of a scheduled capture that ended before the request was made has no token.
    return same and manifest.capture in process.captures and manifest.demand in (request.token, None)


def _without_absent(report: RunReport, processes: Sequence[JobProcess]) -> RunReport:
    """Remove the job's processes that have no manifest on this host. Their files may be on another host."""
    ranks = {(process.role, process.replica, process.rank) for process in processes}
    captures = (
        attrs.evolve(
            capture,
            ranks=tuple(
                rank
                for rank in capture.ranks
                if rank.manifest is not None or (capture.role, capture.replica, rank.rank) not in ranks
            ),
        )
        for capture in report.captures
    )
    return attrs.evolve(report, captures=tuple(captures))


def _origin(manifest: Manifest) -> tuple[str, int | None, str]:
    """Return a manifest's role, replica and capture ID. For engine ranks, the ID is that of the request."""
    return manifest.role, manifest.replica, manifest.request or manifest.capture


def _directories(run: Path, first_step: int, last_step: int) -> list[Path]:
    """Return the existing step directories from `first_step` to `last_step`."""
    numbers = {directory: directory.name.removeprefix("step_") for directory in run.glob("step_*")}
    steps = range(first_step, last_step + 1)
    return sorted(directory for directory, number in numbers.items() if number.isdecimal() and int(number) in steps)


def _steps(plan: StepPlan) -> str:
    is_single = plan.first_step == plan.last_step
    return f"step {plan.first_step}" if is_single else f"steps {plan.first_step} to {plan.last_step}"


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"
