"""The process that finishes a capture: it waits until all have ended, reads the files back, and runs what is to be run.

`profdeck.finish` starts it as ``python -m profdeck.finisher RECORD``. A listener is told by a process of its own,
``python -m profdeck.finisher listener NAME``: so it has a deadline as the command has, and what it breaks is its own.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import attrs
import pluggy

from profdeck.capture import Status
from profdeck.entry_points import load
from profdeck.errors import ProfdeckError, describe
from profdeck.finish import SCHEMA, FinishRecord, FinishState, Part, finish_id, input_path, read_record, write_record
from profdeck.hookspecs import NAMESPACE, Hooks
from profdeck.plugins import LISTENERS
from profdeck.process import ProcessId
from profdeck.run import Manifest, is_manifest, is_running, read_manifest, replace
from profdeck.settle import settle_later
from profdeck.traces.ascend.analysis_state import read_state
from profdeck.traces.ascend.directory import KIND, files_below
from profdeck.verify import RankReport, RunReport, TargetReport, plain, read_about, read_run

OUTPUT_BYTES = 16 << 10
"""How much of the output of a command or a listener is kept: its end."""

# There is no event that reaches from one process to another by a shared file system.
_FIRST_POLL_S, _LAST_POLL_S = 0.05, 1.0
_NICENESS = 10
_TERM_GRACE_S = 5.0
_DRAIN_S = 1.0
_MOST_NAMED = 20


def main() -> None:
    """Carry out what the arguments say."""
    if sys.argv[1] == "listener":
        tell(sys.argv[2], json.load(sys.stdin.buffer))
        return
    # Who started this reads the pipe behind stderr: its end, and what keeps this from writing the record.
    news = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  # as a descriptor
        os.dup2(nowhere.fileno(), 2)
    for number in (signal.SIGINT, signal.SIGQUIT):  # which a shell has its children in the background ignore
        signal.signal(number, signal.SIG_DFL)
    with suppress(OSError):
        os.nice(_NICENESS)  # the job goes on beside it
    try:
        carry_out(Path(sys.argv[1]))
    except Exception as error:  # noqa: BLE001  # there is nobody else to tell
        with suppress(OSError):
            os.write(news, describe(error).encode())


def carry_out(path: Path) -> None:
    """Finish the captures that a record is of, and write what came of it into the record.

    Raises:
        OSError: the record cannot be written.
        ProfdeckError: it cannot be read.
        SystemExit: a SIGTERM came; what ran has been ended.
    """
    desk = _Desk(path, attrs.evolve(read_record(path), by=ProcessId()))
    desk.say()
    try:
        with _termination.raised():
            _finish(desk)
    except BaseException as error:
        own = isinstance(error, Exception)
        desk.say(
            state=FinishState.FAILED if own else FinishState.INTERRUPTED,
            problem=describe(error) if own else "its process was ended by SIGTERM",
            ended_ns=time.time_ns(),
        )
        if not own:
            raise


@attrs.define
class _Desk:
    """The record, as far as it is."""

    path: Path
    record: FinishRecord

    def say(self, **changes: Any) -> None:
        self.record = attrs.evolve(self.record, **changes)
        write_record(self.path, self.record)


def _finish(desk: _Desk) -> None:
    record, directory = desk.record, desk.path.parent
    others = Others(directory, record.capture, tuple(read_about(directory.parent).get("roles", ())))
    missing = _wait(others, desk)
    desk.say(state=FinishState.RUNNING, waits_for=missing)
    report = read_run(directory.parent, only=others.counts, within=directory.name)
    document = handed_over(record.capture, directory, report, missing)
    given = input_path(desk.path)
    replace(given, json.dumps(document, indent=1).encode(), durable=False)
    desk.say(status=document["status"])
    environment = {
        **os.environ,
        "PROFDECK_FINISH_MANIFEST": str(given),
        "PROFDECK_FINISH_DIRECTORY": str(directory),
        "PROFDECK_FINISH_CAPTURE": record.capture,
        "PROFDECK_FINISH_STATUS": document["status"],
    }
    parts = [("command", ["/bin/sh", "-c", record.command])] if record.command is not None else []
    this = [sys.executable, "-P", "-m", "profdeck.finisher"]
    parts += [(f"listener {name}", [*this, "listener", name]) for name in record.listeners]
    for name, arguments in parts:
        part = run_part(name, arguments, given, environment, record.timeout_s)
        desk.say(parts=(*desk.record.parts, part))
    failed = any(part.problem for part in desk.record.parts)
    desk.say(state=FinishState.FAILED if failed else FinishState.DONE, ended_ns=time.time_ns())


def handed_over(name: str, directory: Path, report: RunReport, missing: Sequence[str]) -> dict[str, Any]:
    """Return what the command and the listeners get, as JSON data.

    Args:
        name: of the finish.
        directory: of the step.
        report: on the captures.
        missing: who has not ended them.
    """
    reports: list[RankReport | TargetReport] = [rank for capture in report.captures for rank in capture.ranks]
    reports += report.targets
    paths = {one.manifest for one in reports} | {artifact.path for one in reports for artifact in one.artifacts}
    complete = report.status is Status.COMPLETE and not report.problems and not missing
    return {
        "schema": SCHEMA,
        "capture": name,
        "status": "complete" if complete else "partial",
        "directory": str(directory),
        "missing": list(missing),
        "files": sorted(str(path) for path in paths if path is not None and path.exists()),
        "ls": plain(report),
    }


# Who takes part.


@attrs.frozen
class Sight:
    """Who has not ended."""

    open: tuple[str, ...] = ()
    """Those who may still do so."""
    lost: tuple[str, ...] = ()
    """Those who never will, as their processes are gone."""
    at_work: bool = False
    """Whether one of those who may is known to be at it: on this host, and no longer than a capture may last."""


class Others:
    """Whoever takes part in the captures of a step, by their manifests."""

    def __init__(self, directory: Path, name: str, roles: Sequence[str]) -> None:
        """Args:
        directory: of the step.
        name: of the finish.
        roles: those of the job.
        """
        self._directory = directory
        self._name = name
        self._roles = roles
        self._over: dict[Path, Manifest] = {}
        """Those that are not written any more."""

    def counts(self, manifest: Manifest) -> bool:
        """Tell whether a manifest is of one of these captures."""
        return finish_id(manifest.first_step, manifest.request or manifest.capture) == self._name

    def look(self) -> tuple[Sight, object]:
        """See who has not ended; also returns what is another one when something has changed."""
        manifests = sorted(self._read(), key=lambda manifest: manifest.started_ns)
        last = {_process(manifest): manifest for manifest in manifests}
        found = [
            _at_work(manifest)
            for manifest in manifests
            if manifest.status is Status.RECORDING or (manifest.more_follow and last[_process(manifest)] is manifest)
        ]
        found += self._analyses()
        found += [Sight((f"{who}, which has not begun",)) for who in self._absent(manifests)]
        sight = Sight(
            tuple(name for one in found for name in one.open),
            tuple(name for one in found for name in one.lost),
            any(one.at_work for one in found),
        )
        return sight, (sight, len(manifests), len(self._over))

    def _read(self) -> Iterator[Manifest]:
        for file in filter(is_manifest, files_below(self._directory)):
            if (manifest := self._over.get(file)) is None:
                try:
                    manifest = read_manifest(file)
                except ProfdeckError:  # the report tells of it
                    continue
                if manifest.status is not Status.RECORDING and not manifest.more_follow:
                    self._over[file] = manifest
            if self.counts(manifest):
                yield manifest

    def _analyses(self) -> Iterator[Sight]:
        """Tell of what is still made of raw data."""
        for file, manifest in self._over.items():
            paths = [file.parent / record.name for record in manifest.artifacts if record.kind == KIND]
            for path in paths if self.counts(manifest) else ():
                with suppress(ProfdeckError):  # as above
                    state = read_state(path)
                    if state is not None and state.state in {"pending", "running"}:
                        who = f"the analysis of {path.name} (process {state.pid} on {state.host})"
                        alive = state.under_way if state.host == socket.gethostname() else None
                        yield Sight(lost=(who,)) if alive is False else Sight((who,), at_work=bool(alive))

    def _absent(self, manifests: Sequence[Manifest]) -> Iterator[str]:
        """Name those who take part and have not begun."""
        # Those of an engine are known when its stop is over, and nothing comes behind.
        own = [manifest for manifest in manifests if manifest.target is None and manifest.request is None]
        there, expected = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
        for manifest in own:
            there[manifest.role_and_replica].add(manifest.rank)
            expected[manifest.role_and_replica].update(manifest.expected_ranks)
        for role, ranks in sorted(expected.items()):
            yield from (f"{role} rank {rank}" for rank in sorted(ranks - there[role]))
        roles = {manifest.role for manifest in manifests}
        yield from (f"the role {role}" for role in self._roles if role not in roles)


def _process(manifest: Manifest) -> tuple[object, ...]:
    return manifest.role_and_replica, manifest.rank, manifest.target, manifest.host, manifest.pid


def _at_work(manifest: Manifest) -> Sight:
    """Tell whether a process that has not ended the captures may still do so."""
    what = f"({manifest.target})" if manifest.target else f"rank {manifest.rank}"
    who = f"{manifest.role_and_replica} {what} (process {manifest.pid} on {manifest.host})"
    if manifest.host != socket.gethostname():
        return Sight((who,))
    if not is_running(manifest.host, manifest.pid, manifest.process_started):
        return Sight(lost=(who,))
    limit_s = float(manifest.options.get("max_capture_s", 0.0))
    return Sight((who,), at_work=time.time() < manifest.started_ns / 1e9 + limit_s)


def _wait(others: Others, desk: _Desk) -> tuple[str, ...]:
    """Wait until all have ended, or nothing has been heard for long enough; returns who is missing then."""
    before: object = None
    quiet_since_s, pause_s = time.monotonic(), _FIRST_POLL_S
    while True:
        sight, seen = others.look()
        if not sight.open:
            return _named(sight.lost)
        if seen != before or sight.at_work:
            quiet_since_s = time.monotonic()
        elif time.monotonic() - quiet_since_s >= desk.record.wait_s:
            return _named((*sight.lost, *sight.open))
        if (waits_for := _named(sight.open)) != desk.record.waits_for:
            desk.say(waits_for=waits_for)
        pause_s = _FIRST_POLL_S if seen != before else min(pause_s * 1.5, _LAST_POLL_S)
        before = seen
        time.sleep(pause_s)


def _named(names: Sequence[str]) -> tuple[str, ...]:
    more = len(names) - _MOST_NAMED
    return (*names[:_MOST_NAMED], *([f"{more} more"] if more > 0 else []))


# What is run.


def run_part(
    name: str, arguments: Sequence[str], given: Path, environment: Mapping[str, str], timeout_s: float
) -> Part:
    """Run one thing to its end, or to its deadline, in a process group of its own.

    Args:
        name: what to call it.
        arguments: its command line.
        given: the file that is its input.
        environment: its environment.
        timeout_s: after so many seconds its group is ended.

    Raises:
        BaseException: what a signal's handler raised meanwhile, after the group has been ended.
    """
    started_ns, began_s = time.time_ns(), time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None
    problem: str | None = None
    tail = _Tail()
    try:
        with _termination.held(), given.open("rb") as stdin:
            process = subprocess.Popen(
                arguments,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            tail.follow(process.stdout)
        exit_code = process.wait(timeout_s)
        problem = _how_it_ended(exit_code)
    except (OSError, ValueError) as error:
        problem = f"cannot be started: {describe(error)}"
    except BaseException as error:
        assert process is not None  # noqa: S101  # a signal is held back until then
        exit_code = _end_group(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        problem = f"had not ended after timeout_s={timeout_s:g} seconds, and was ended"
    return Part(
        name=name,
        started_ns=started_ns,
        duration_s=round(time.monotonic() - began_s, 3),
        exit_code=exit_code,
        output=tail.text(),
        problem=problem,
    )


def _how_it_ended(exit_code: int) -> str | None:
    """Say it of what ended by itself; None if it ended well."""
    if exit_code >= 0:
        return f"ended with exit status {exit_code}" if exit_code else None
    names = {int(number): number.name for number in signal.Signals}
    return f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"


class _Tail:
    """Reads output to its end, so that nobody is blocked, and keeps the last of it."""

    def __init__(self) -> None:
        self._kept = b""
        self._thread: threading.Thread | None = None

    def follow(self, stream: IO[bytes] | None) -> None:
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        if self._thread is not None:
            self._thread.join(_DRAIN_S)  # what was left in the background may hold the pipe
        return self._kept[-OUTPUT_BYTES:].decode(errors="replace")

    def _read(self, stream: IO[bytes] | None) -> None:
        assert stream is not None  # noqa: S101  # it is a pipe
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self._kept = (self._kept + data)[-OUTPUT_BYTES:]


def _end_group(process: subprocess.Popen[bytes]) -> int | None:
    """End a process with all that it started in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_GRACE_S)
    return process.poll()


def tell(name: str, manifest: Mapping[str, Any]) -> None:
    """Tell one listener of a finished capture.

    Raises:
        PluginError: it cannot be loaded.
        Exception: whatever it raises.
    """
    plugin = load(LISTENERS, name)
    manager = pluggy.PluginManager(NAMESPACE)
    manager.add_hookspecs(Hooks)
    manager.register(plugin() if isinstance(plugin, type) else plugin, name)
    for result in manager.hook.capture_finished(manifest=manifest):
        if inspect.isawaitable(result):
            import asyncio

            asyncio.run(settle_later(result))


class _Termination:
    """Turns a SIGTERM into SystemExit, so that what runs is ended and the record says so."""

    def __init__(self) -> None:
        self._held = False
        self._came = False

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise it as long as the block runs."""
        signal.signal(signal.SIGTERM, self._end)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise it at the end of the block: so nothing is started that nobody ends."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._came:
            raise SystemExit(128 + signal.SIGTERM)

    def _end(self, number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the tidying up
        self._came = True
        if not self._held:
            raise SystemExit(128 + number)


_termination = _Termination()


if __name__ == "__main__":
    main()
