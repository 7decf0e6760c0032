"""The real torch_npu on a machine without an NPU: over a stub driver, in processes of their own.

stub_driver.c and stub_msprof.py say what they cannot show. Nothing here imports torch: with torch_npu installed it can
only be imported by processes that the stub driver is given to, which `job` starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import pytest

HERE = Path(__file__).parent
# What torch_npu is linked with and what it loads of CANN, besides libascendcl.so, which has all the stub's symbols.
LINKED = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
LOADED = ("msprofiler", "ms_tools_ext", "ascend_dump", "ascend_hal", "opapi")
PROFILING = ("aclprof", "mstx", "aclopStartDumpArgs", "aclopStopDumpArgs")
JOB_S = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("npu")


@attrs.frozen
class Call:
    """One call of the driver."""

    name: str
    arguments: dict[str, str]
    """What it was given, as text; ``{}`` for a call without arguments. Numbers are decimal, masks hexadecimal."""

    tid: int


def read_calls(path: Path) -> list[Call]:
    """Read what a stub driver logged so far, in the order of the calls."""
    calls = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        fields = json.loads(line)
        name, tid, *_ = [fields.pop(field) for field in ("call", "tid", "pid", "time_ns", "failed")]
        calls.append(Call(name, {field: str(value) for field, value in fields.items()}, tid))
    return calls


@attrs.frozen
class Job:
    """A process that has ended, and what it did to the driver."""

    returncode: int
    stdout: str
    stderr: str
    all_calls: list[Call]

    @property
    def calls(self) -> list[Call]:
        """The calls of the driver's profiler, in order."""
        return [call for call in self.all_calls if call.name.startswith(PROFILING)]


@attrs.frozen
class Jobs:
    """Starts Python with the stub driver in a folder, and ends what has not ended by itself."""

    directory: Path
    environ: dict[str, str]
    _started: list[subprocess.Popen[str]] = attrs.field(factory=list, init=False)

    def __call__(
        self,
        script: str | Path,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = JOB_S,
    ) -> Job:
        """Run code, or a file with code, to its end; with `check` an exit status other than 0 fails the test."""
        process, log = self.start(script, *arguments, env=env)
        stdout, stderr = process.communicate(timeout=timeout_s)
        job = Job(process.returncode, stdout, stderr, read_calls(log))
        assert not check or job.returncode == 0, f"the job ended with {job.returncode}\n{stdout}\n{stderr}"
        return job

    def start(
        self, script: str | Path, *arguments: object, env: Mapping[str, str] | None = None
    ) -> tuple[subprocess.Popen[str], Path]:
        """Start code, or a file with code; returns the process and the log of its driver, for `read_calls`."""
        log = self.directory / f"driver_{len(self._started)}.log"
        command = [
            sys.executable,
            *(["-c", script] if isinstance(script, str) else [str(script)]),
            *map(str, arguments),
        ]
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            env=self.environ | {"STUB_DRIVER_LOG": str(log)} | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process, log

    def end(self) -> None:
        """End the processes that still run, each with its process group."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


@attrs.frozen
class Driver:
    """The compiled stub driver."""

    libraries: Path
    """The folder of its libraries."""

    environ: dict[str, str]
    """What a process needs so that its torch_npu finds them."""

    @contextlib.contextmanager
    def jobs(self, directory: Path, **environ: str) -> Iterator[Jobs]:
        """Start jobs in a folder, for a fixture of wider scope than a test."""
        jobs = Jobs(directory, self.environ | environ)
        try:
            yield jobs
        finally:
            jobs.end()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """The stub driver, compiled once."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the stub driver of the NPU cannot be compiled: there is no C compiler (cc) on the PATH")
    home = tmp_path_factory.mktemp("cann")
    build = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra"]
    main = home / "libascendcl.so"
    subprocess.run([*build, "-Wl,-soname,libascendcl.so", "-o", main, HERE / "stub_driver.c"], check=True)
    for name in (*LINKED, *LOADED):
        options = [f"-Wl,-soname,lib{name}.so", "-Wl,--no-as-needed", f"-L{home}", "-lascendcl"]
        subprocess.run([*build, "-x", "c", os.devnull, *options, "-o", home / f"lib{name}.so"], check=True)
    # What a machine with CANN, or another test, has set would lead elsewhere; the autoload is what users have.
    foreign = ("ASCEND_", "STUB_", "PROFILING_", "PROFILER_", "PROF_", "MSMONITOR_", "KINETO_", "TORCH_DEVICE_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    found = os.pathsep.join([str(home), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return Driver(home, environ | {"LD_LIBRARY_PATH": found})


@pytest.fixture
def job(driver: Driver, tmp_path: Path) -> Iterator[Jobs]:
    """Run Python code with the stub driver, in the test's folder."""
    with driver.jobs(tmp_path, PROFDECK_LEASE_DIR=os.environ["PROFDECK_LEASE_DIR"]) as jobs:
        yield jobs


@pytest.fixture(scope="session")
def msprof_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with the stand-in for msprof."""
    # torch_npu looks for a script of CANN beside the program, and does not start it.
    home = tmp_path_factory.mktemp("msprof") / "tools" / "profiler"
    script = home / "profiler_tool" / "analysis" / "msprof" / "msprof.py"
    script.parent.mkdir(parents=True)
    script.touch()
    program = home / "bin" / "msprof"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "stub_msprof.py"}" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def msprof(job: Jobs, msprof_path: str) -> Path:
    """Let the test's jobs find the stand-in for msprof; returns its program."""
    job.environ["PATH"] = msprof_path
    return Path(msprof_path.partition(os.pathsep)[0]) / "msprof"
