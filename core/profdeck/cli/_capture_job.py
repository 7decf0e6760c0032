"""`profdeck capture --run`: a capture of a running job, asked for through its run directory or its store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import typer

from profdeck.after_capture.run_walk import await_finishes
from profdeck.base.errors import CaptureError
from profdeck.base.text import sentence
from profdeck.cli import _after_capture, ls
from profdeck.on_demand import requests
from profdeck.on_demand.requests import JobProcess, OnDemandRequest, StepPlan
from profdeck.on_demand.stores import Store, open_store
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.status import Status
from profdeck.verification.report_model import RunReport
from profdeck.verification.run_report import read_about
from profdeck_traces.base.errors import ConfigError, ProfdeckError, describe_error
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode

# Between two looks. A job takes seconds per step, and its directory may be far away.
_POLL_S = 0.2
# For how long a process that was killed may be on its way back: launchers start ranks again.
_RESTART_S = 60.0
# How long a process may take to say that it looks for a request, and how long it may say nothing.
_JOIN_S = 10.0
_SILENT_S = 30.0
_MOST_NAMED = 4


@attrs.frozen(kw_only=True)
class OnDemandOptions:
    """What is asked for."""

    run: Path
    in_steps: int | None
    steps: int
    timeout_s: float
    page: Path | None
    """Where the page of the capture goes, if one is wanted."""
    store: str | None = None
    """``NAME:ADDRESS`` of the store by which the job is asked; None if the run directory tells."""


def command(wish: OnDemandOptions, *, json: bool) -> None:
    """Ask a job for a capture, wait for it, and show it; exit with 1 if a process left it out or is incomplete.

    Raises:
        ConfigError: the job takes no such request.
        CaptureError: nothing is captured.
    """
    with contextlib.closing(open_store(wish.run, wish.store)) as store:
        about = {} if store.remote else read_about(wish.run)
        try:
            there = _processes(store)
        except OSError as error:
            raise CaptureError(f"The job cannot be reached: {describe_error(error)}") from error
        if not there:
            raise _nobody(wish.run, store, about)
        request = requests.ask(store, _in_steps(wish, there), wish.steps)
        try:
            _capture(wish, store, there, request, json=json)
        except OSError as error:
            raise CaptureError(
                f"The request was sent, but the job can no longer be reached: {sentence(describe_error(error))} "
                f"To list what was captured on this host: profdeck ls {terminal.short_path(wish.run)}"
            ) from error


def _capture(
    wish: OnDemandOptions, store: Store, there: list[JobProcess], request: OnDemandRequest, *, json: bool
) -> None:
    waiting = _Waiting(wish, store, request, {process.id for process in there})
    with requests.beats(store, request):
        try:
            waiting.for_lookouts(there)
            plan = waiting.for_plan()
            processes = waiting.processes() if plan is None or plan.problem else waiting.for_processes(plan)
        except KeyboardInterrupt:
            _say(waiting.withdraw())
            raise
        if plan is None or not any(_captured(process, request) for process in processes):
            if requests.withdraw(store, request):
                raise _nothing(waiting, plan, processes)
            plan = plan or requests.read_plan(store, request)
            assert plan is not None  # noqa: S101  # what has begun was agreed on
        report, elsewhere = _read(wish.run, store, request, plan, processes)
        if all(map(waiting.is_over, processes)):
            requests.forget(store, request)
            _await_finishes(report)
        else:
            _say(f"The capture continues. To see it later: profdeck ls {terminal.short_path(wish.run)}")
    problems = {process.id: problem for process in processes if (problem := _problem(process, request))}
    complete = not problems and (bool(elsewhere) if report is None else report.status is Status.COMPLETE)
    if json:
        terminal.print_json(
            {
                "run": str(wish.run),
                "complete": complete,
                "first_step": plan.first_step,
                "last_step": plan.last_step,
                "processes": [
                    _plain(process, request, problems.get(process.id), _directory(process, wish.run), elsewhere)
                    for process in processes
                ],
                "ls": report and ls.plain(report),
            }
        )
    else:
        if report is not None:
            ls.show(report)
        unlisted = {process.id for process in processes if not _captures(process, request)} | elsewhere
        _show_processes(wish.run, processes, {id_: problems[id_] for id_ in unlisted & problems.keys()}, elsewhere)
    if report is not None:
        _after_capture.show(report, _folders(wish.run, plan), wish.page, quiet=json)
    elif wish.page is not None:
        terminal.warn(f"{terminal.short_path(wish.page)} is not written: all files of this capture are on other hosts.")
    if not complete:
        raise typer.Exit(ExitCode.INCOMPLETE)


def _await_finishes(report: RunReport | None) -> None:
    if report is not None:
        with terminal.show_progress("Waiting for the finish"):
            await_finishes(report)


def _processes(store: Store) -> list[JobProcess]:
    """Return the processes that can be asked; those of a store join some seconds after the job has made it."""
    until_s = time.monotonic() + (_JOIN_S if store.remote else 0.0)
    with terminal.show_progress("Looking for the processes of the job") as on_progress:
        while True:
            there = [process for process in requests.read_processes(store) if not process.gone]
            if there or time.monotonic() >= until_s:
                return there
            on_progress(0, 1)
            time.sleep(_POLL_S)


def _nobody(run: Path, store: Store, about: dict[str, Any]) -> ConfigError:
    if not store.remote and not about.get("config", {}).get("on_demand", False):
        return ConfigError(
            f"{run}: this job takes no requests: its config says on_demand: false, or it was started by an earlier "
            "version of profdeck."
        )
    where = f" of the run '{run.name}' at {store.address}" if store.remote else ""
    return ConfigError(
        f"{run}: no process of this job{where} is there to be asked. A job takes requests from where it builds its "
        "Profiler until it ends."
    )


def _in_steps(wish: OnDemandOptions, there: list[JobProcess]) -> int:
    """Return in how many steps the capture begins.

    Raises:
        ConfigError: no process could warm up before.
    """
    longest = max(there, key=lambda process: process.warmup_steps)
    default = requests.default_in_steps(there)
    if wish.in_steps is not None and wish.in_steps <= longest.warmup_steps:
        raise ConfigError(
            f"--in {wish.in_steps}: the role '{longest.role}' warms up for {longest.warmup_steps} step(s) before a "
            f"capture. Give at least {longest.warmup_steps + 1}; the default is {default}, for ranks that differ by a "
            "step."
        )
    return default if wish.in_steps is None else wish.in_steps


@attrs.frozen
class _Waiting:
    """The wait for what becomes of a request."""

    wish: OnDemandOptions
    store: Store
    request: OnDemandRequest
    asked: set[str]
    """The processes that were there when it was made, by id."""
    dead_since_s: dict[str, float] = attrs.field(factory=dict)
    """When processes were first seen to be dead, by id."""
    looks: dict[str, tuple[bytes | None, float]] = attrs.field(factory=dict)
    """By id, what a process of a store said last of how often it has looked, and since when."""
    deadline_s: float = attrs.field(init=False)

    @deadline_s.default
    def _deadline_s(self) -> float:
        return time.monotonic() + self.wish.timeout_s

    def for_lookouts(self, there: list[JobProcess]) -> None:
        """Wait until all processes of a store look for the request at every boundary, and let them decide then."""
        if not self.store.remote:
            return
        until_s = time.monotonic() + _JOIN_S
        blind = there
        while blind and time.monotonic() < until_s:
            time.sleep(_POLL_S / 4)
            blind = [one for one in self.processes() if one.is_blind(self.request)]
        if blind:
            names = ", ".join(sorted(process.name for process in blind)[:_MOST_NAMED])
            _say(f"{_count(len(blind), 'process has', 'processes have')} not seen the request yet: {names}.")
        requests.release(self.store, self.request)

    def for_plan(self) -> StepPlan | None:
        """Wait until the steps are agreed on; None if the time is over before, or the job."""
        request = self.request
        _say(
            f"Sent the request to {_count(len(self.asked), 'process', 'processes')} of "
            f"{terminal.short_path(self.wish.run)}."
        )
        with terminal.show_progress("Waiting for a global step to begin") as on_progress:
            while (plan := requests.read_plan(self.store, request)) is None and not self._is_late():
                on_progress(0, 1)
                if all(map(self.is_over, self.processes())):
                    return requests.read_plan(self.store, request)  # which the last one may have left
                time.sleep(_POLL_S)
        return plan

    def for_processes(self, plan: StepPlan) -> list[JobProcess]:
        """Wait until the capture is over in all processes, or the time is."""
        steps = _steps(plan)
        _say(f"{steps[:1].upper()}{steps[1:]} will be captured, as {plan.by} decided at step {plan.at_step}.")
        with terminal.show_progress(f"Capturing {steps}") as on_progress:
            while True:
                late, processes = self._is_late(), self.processes()
                over = sum(map(self.is_over, processes))
                on_progress(over, len(processes))
                if late or over == len(processes):
                    return processes
                time.sleep(_POLL_S)

    def processes(self) -> list[JobProcess]:
        """Return those that were there when the request was made, or have come to be since."""
        token = self.request.token
        found = requests.read_processes(self.store)
        return [process for process in found if process.token == token or process.id in self.asked or not process.gone]

    def is_over(self, process: JobProcess) -> bool:
        """Tell whether nothing more will come of the request in a process, nor in one that takes its place."""
        if process.ended or (process.token == self.request.token and process.done):
            return True
        if not process.gone and not self._is_silent(process):
            return False
        now_s = time.monotonic()
        return now_s - self.dead_since_s.setdefault(process.id, now_s) >= _RESTART_S

    def withdraw(self) -> str:
        """Take the request back, if its capture has not begun; returns what has come of that."""
        run = self.wish.run
        try:
            if requests.withdraw(self.store, self.request):
                return "The request is withdrawn, and nothing is captured."
        except OSError as error:
            return f"The request cannot be withdrawn: {describe_error(error)}"
        return f"The capture has begun and continues. To see it: profdeck ls {terminal.short_path(run)}"

    def _is_silent(self, process: JobProcess) -> bool:
        """Tell whether a process of a store has not looked for too long: nothing else tells that its host is gone."""
        if not self.store.remote:
            return False
        looks, now_s = self.store.read(f"alive.{process.id}"), time.monotonic()
        before, since_s = self.looks.setdefault(process.id, (looks, now_s))
        if looks != before:
            self.looks[process.id] = looks, now_s
            return False
        return now_s - since_s > _SILENT_S

    def _is_late(self) -> bool:
        return time.monotonic() >= self.deadline_s


def _captured(process: JobProcess, request: OnDemandRequest) -> bool:
    """Tell whether a process has made the capture, well or badly."""
    return process.token == request.token and process.done and not process.problem


def _problem(process: JobProcess, request: OnDemandRequest) -> str | None:
    """Return the reason why a process's capture is missing or incomplete, or ``None`` if there is no problem."""
    if process.token != request.token:
        return "it ended before it saw the request" if process.gone else "it has begun no global step since"
    if not process.done:
        return "it ended before the capture was over" if process.gone else "it has not come to the end of the capture"
    return process.problem or process.incomplete


def _nothing(waiting: _Waiting, plan: StepPlan | None, processes: list[JobProcess]) -> CaptureError:
    """Say why nothing has come of a request."""
    timeout_s = waiting.wish.timeout_s
    if plan is not None and plan.problem:
        return CaptureError(f"Nothing is captured: {plan.problem}.")
    if plan is not None:
        which = "; ".join(f"{process.name}: {_problem(process, waiting.request)}" for process in processes)
        return CaptureError(f"Nothing was captured, and the request is withdrawn. {which}.")
    if all(process.gone for process in processes):
        return CaptureError("The job has ended before it began another global step. Nothing was captured.")
    stuck = ", ".join(f"{process.name} ({process.at})" for process in processes if not process.gone)
    return CaptureError(
        f"No process has begun a global step for {timeout_s:g} seconds, so the request is withdrawn. Is the job in a "
        f"long step, or does it wait for something? --timeout waits longer. Asked were: {stuck}."
    )


def _read(
    run: Path, store: Store, request: OnDemandRequest, plan: StepPlan, processes: list[JobProcess]
) -> tuple[RunReport | None, set[str]]:
    """Read the captures that were made for a request.

    Returns:
        A report on the files in the run directory, and the IDs of the processes whose files are on other hosts. The
        report is ``None`` if a remote store is used and the run directory has no files of the request.
    """
    manifests = list[Manifest]()
    for folder in _folders(run, plan):
        for file in filter(is_manifest, folder.glob("**/*.json")):
            with contextlib.suppress(ProfdeckError):  # reported by `ls.read`
                manifests.append(read_manifest(file))
    elsewhere = set[str]()
    if store.remote:
        answered = [process for process in processes if _captures(process, request)]
        elsewhere = {process.id for process in answered if not any(_made(process, one, request) for one in manifests)}
    local = [process for process in processes if process.id not in elsewhere]
    made = {(process.role, process.replica, id_) for process in local for id_ in _captures(process, request)}
    made |= {_origin(manifest) for manifest in manifests if manifest.demand == request.token}
    if store.remote and made.isdisjoint(map(_origin, manifests)):
        return None, elsewhere
    report = ls.read(run, only=lambda manifest: _origin(manifest) in made)
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


def _show_processes(run: Path, processes: list[JobProcess], problems: dict[str, str], elsewhere: set[str]) -> None:
    """Print problems that are not in the report, and the locations of files on other hosts."""
    console = terminal.stdout_console()
    for process in processes:
        if problem := problems.get(process.id):
            console.print(f"{process.name}, {process.at}: {sentence(problem)}")
        if process.id in elsewhere:
            where = f"{process.at.host}, in {_directory(process, run)}"
            console.print(f"{process.name}: its files are on {where}", soft_wrap=True)  # do not wrap the path
    if elsewhere:
        console.print(
            f"To read all ranks together, copy the step_* directories from there into {terminal.short_path(run)}, or "
            "set output to a directory that all hosts share."
        )


def _directory(process: JobProcess, run: Path) -> PurePosixPath:
    """Return the run directory on the process's host."""
    return PurePosixPath(process.output, run.name)


def _origin(manifest: Manifest) -> tuple[str, int | None, str]:
    """Name the capture that a manifest is of, or for an engine's process the one that it was asked for."""
    return manifest.role, manifest.replica, manifest.request or manifest.capture


def _folders(run: Path, plan: StepPlan) -> list[Path]:
    assert plan.first_step is not None  # noqa: S101  # or nothing would have been captured
    assert plan.last_step is not None  # noqa: S101  # as above
    numbers = {folder: folder.name.removeprefix("step_") for folder in run.glob("step_*")}
    steps = range(plan.first_step, plan.last_step + 1)
    return sorted(folder for folder, number in numbers.items() if number.isdecimal() and int(number) in steps)


def _plain(
    process: JobProcess, request: OnDemandRequest, problem: str | None, directory: PurePosixPath, elsewhere: set[str]
) -> dict[str, Any]:
    captures = _captures(process, request)
    return {
        "role": process.role,
        "replica": process.replica,
        "rank": process.rank,
        "target": process.target,
        "host": process.at.host,
        "pid": process.at.pid,
        "captures": captures,
        "directory": str(directory),
        "files_here": process.id not in elsewhere if captures else None,
        "problem": problem,
    }


def _steps(plan: StepPlan) -> str:
    one = plan.first_step == plan.last_step
    return f"step {plan.first_step}" if one else f"steps {plan.first_step} to {plan.last_step}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _say(text: str) -> None:
    """Tell how it goes on stderr: stdout has the result."""
    terminal.print_stderr(text)
