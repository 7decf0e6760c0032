"""Misbehaving jobs that are terminated at random times. They run one at a time, forked from a process with torch.

``chaos_jobs.py DIRECTORY FIRST_SEED COUNT`` writes the run, the job's progress (``lines``) and its exit
(``end.json``) to ``DIRECTORY/SEED``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import profile

from profdeck import Profiler

STEPS = 9
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT, "alarm": signal.SIGALRM}
SELECTED = (["1..2", 5], ["0..3"], [0, 2, 4, 6], ["6..8"], ["2..4", "6..7"])
ENDS = ("kill", "kill", "kill", "term", "interrupt", "alarm", "none", "none")
HOSTS = (
    *("quiet", "quiet", "own_profiler", "own_profiler_left_open", "thread", "threads_of_work"),
    *("fork", "fork_exit", "fork_goes_on", "exception", "os_exit", "sys_exit", "abort"),
    *("stops_twice", "starts_twice", "closes", "handles_term", "alarms", "changes_directory", "no_collector"),
)


class AlarmError(BaseException):  # an `Exception` raised in a hook would count as a hook failure
    """Raised by the job's SIGALRM handler, at an arbitrary line."""


def work() -> None:
    """Compute for about two milliseconds."""
    values = torch.rand(32, 32)
    for _ in range(40):
        values = torch.tanh(values @ values)


class Job:
    """Training loop whose host performs one unusual action in one step."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311  # no secret
        self.directory = directory
        self.lines = os.open(directory / "lines", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.selected = self.chance.choice(SELECTED)
        self.host = self.chance.choice(HOSTS)
        self.action_step = self.chance.randrange(STEPS)
        self.by_scope = self.chance.random() < 0.5
        self.profiler: Profiler | None = None
        self.guarded = False

    def write_line(self, *fields: object) -> None:
        """Write a line without buffering, so that it survives a crash."""
        os.write(self.lines, (" ".join(map(str, fields)) + "\n").encode())

    def run(self) -> None:
        """Train."""
        settings = {
            "output": str(self.directory),
            "run": "run",
            "steps": self.selected,
            "trainer.backend": "torch",
            "on_demand": False,
        }
        self.profiler = Profiler.from_config(settings=settings)
        getattr(self, f"begin_{self.host}", lambda: None)()
        self.write_line("host", self.host, self.action_step, *(f"{steps}" for steps in self.selected))
        for step in range(STEPS):
            try:
                self.guarded = True
                self.step(step)
                self.guarded = False
            except AlarmError:
                self.write_line("alarm", step)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.profiler.close()
        self.write_line("done")

    def step(self, step: int) -> None:
        """Train for a step."""
        assert self.profiler is not None
        self.write_line("start", step)
        if self.by_scope:
            with self.profiler.capture(step):
                self.inside(step)
                self.write_line("stop", step)
        else:
            self.profiler.start(step)
            self.inside(step)
            self.write_line("stop", step)
            self.profiler.stop()
        self.write_line("over", step)

    def inside(self, step: int) -> None:
        """Run the work of a step, with the host's action in the middle."""
        self.write_line("in", step)
        work()
        if step == self.action_step:
            getattr(self, f"do_{self.host}", work)()
        work()

    # Host actions.

    def do_own_profiler(self) -> None:
        with profile():
            work()

    def do_own_profiler_left_open(self) -> None:
        profile().start()

    def do_thread(self) -> None:
        thread = threading.Thread(target=self.do_own_profiler)
        thread.start()
        thread.join()

    def do_threads_of_work(self) -> None:
        for _ in range(4):
            threading.Thread(target=lambda: [work() for _ in range(20)], daemon=True).start()

    def do_fork(self) -> None:
        self._run_in_fork(lambda: os._exit(0))

    def do_fork_exit(self) -> None:
        self._run_in_fork(lambda: sys.exit(0))

    def do_fork_goes_on(self) -> None:
        def continue_profiling() -> None:
            assert self.profiler is not None
            self.profiler.stop()
            self.profiler.start(self.action_step + 1)
            self.profiler.stop()
            self.profiler.close()
            os._exit(0)

        self._run_in_fork(continue_profiling)

    def _run_in_fork(self, child: Callable[[], None]) -> None:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(Exception):
                child()
            os._exit(1)
        os.waitpid(pid, 0)

    def do_exception(self) -> None:
        self.write_line("raises")
        raise ValueError("raised by the host")

    def do_os_exit(self) -> None:
        os._exit(3)

    def do_sys_exit(self) -> None:
        sys.exit(3)

    def do_abort(self) -> None:
        os.abort()

    def do_stops_twice(self) -> None:
        assert self.profiler is not None
        self.profiler.stop()

    def do_starts_twice(self) -> None:
        assert self.profiler is not None
        self.profiler.start(self.action_step)

    def do_closes(self) -> None:
        assert self.profiler is not None
        self.profiler.close()

    def begin_handles_term(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.write_line("term"))

    def begin_alarms(self) -> None:
        def alarm(*_: object) -> None:
            if self.guarded:
                self.guarded = False
                self.write_line("rings")
                raise AlarmError

        signal.signal(signal.SIGALRM, alarm)
        first_s = self.chance.random() / 10 + 0.005
        signal.setitimer(signal.ITIMER_REAL, first_s, self.chance.random() / 5 + 0.05)

    def do_changes_directory(self) -> None:
        os.chdir("/")

    def do_no_collector(self) -> None:
        gc.disable()


def main(directory: Path, first: int, count: int) -> None:
    """Run the jobs."""
    for seed in range(first, first + count):
        job_directory = directory / str(seed)
        job_directory.mkdir(parents=True)
        chance = random.Random(-seed - 1)  # noqa: S311  # no secret
        end = chance.choice(ENDS)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            log = os.open(job_directory / "log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            run_job(job_directory, seed)
        if end != "none":
            deadline = time.monotonic() + 30
            while not (job_directory / "lines").exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(chance.random() * chance.choice([0.1, 0.5, 1.5]))
            os.kill(pid, SIGNALS[end])
        status = wait(pid)
        (job_directory / "end.json").write_text(json.dumps({"end": end, "code": os.waitstatus_to_exitcode(status)}))


def run_job(job_directory: Path, seed: int) -> None:
    """Run a job and exit like the interpreter."""
    code = 0
    job = Job(job_directory, seed)
    try:
        job.run()
    except SystemExit as error:
        code = int(error.code or 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # noqa: BLE001  # as at the end of a script
        job.write_line("raised", type(error).__name__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid: int, limit_s: float = 60) -> int:
    """Wait until a job exits and return its status. Kill a job that hangs and return -1."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        exited_pid, status = os.waitpid(pid, os.WNOHANG)
        if exited_pid:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return -1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
