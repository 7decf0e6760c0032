"""Fixtures that run the real torch_npu without an NPU, in child processes with a stub driver.

stub_driver.c and stub_msprof.py document their limits. The test process does not import torch: with torch_npu
installed, the import only succeeds in processes with the stub driver. The fixture `job` starts such processes.
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
# Libraries of CANN that torch_npu links or loads. libascendcl.so has all symbols of the stub.
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
    """One driver call."""

    name: str
    arguments: dict[str, str]
    """Arguments as text. Numbers are decimal, and masks are hexadecimal."""

    tid: int


def read_calls(path: Path) -> list[Call]:
    """Read the calls that a stub driver has logged so far, in call order."""
    calls = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        fields = json.loads(line)
        name, tid, *_ = [fields.pop(field) for field in ("call", "tid", "pid", "time_ns", "failed")]
        calls.append(Call(name, {field: str(value) for field, value in fields.items()}, tid))
    return calls


@attrs.frozen
class Job:
    """Result of a finished process, and its driver calls."""

    returncode: int
    stdout: str
    stderr: str
    all_calls: list[Call]

    @property
    def calls(self) -> list[Call]:
        """Calls of the driver's profiler, in call order."""
        return [call for call in self.all_calls if call.name.startswith(PROFILING)]


@attrs.frozen
class Jobs:
    """Starts Python processes with the stub driver, and kills running processes at the end."""

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
        """Run code or a file and wait until it exits. With `check`, a nonzero exit status fails the test."""
        process, log = self.start(script, *arguments, env=env)
        stdout, stderr = process.communicate(timeout=timeout_s)
        job = Job(process.returncode, stdout, stderr, read_calls(log))
        assert not check or job.returncode == 0, f"the job exited with {job.returncode}\n{stdout}\n{stderr}"
        return job

    def start(
        self, script: str | Path, *arguments: object, env: Mapping[str, str] | None = None
    ) -> tuple[subprocess.Popen[str], Path]:
        """Start code or a file. Return the process and the path of its driver log; see `read_calls`."""
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
        """Kill the process groups of running processes."""
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
    """Directory of the stub libraries."""

    environ: dict[str, str]
    """Environment of processes that use the stub libraries."""

    @contextlib.contextmanager
    def jobs(self, directory: Path, **environ: str) -> Iterator[Jobs]:
        """Start jobs in a directory. Used by fixtures with a wider scope than a test."""
        jobs = Jobs(directory, self.environ | environ)
        try:
            yield jobs
        finally:
            jobs.end()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Compile the stub driver once per session."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the NPU stub driver cannot be compiled, because the PATH contains no C compiler (cc)")
    home = tmp_path_factory.mktemp("cann")
    build = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra"]
    main = home / "libascendcl.so"
    subprocess.run([*build, "-Wl,-soname,libascendcl.so", "-o", main, HERE / "stub_driver.c"], check=True)
    for name in (*LINKED, *LOADED):
        options = [f"-Wl,-soname,lib{name}.so", "-Wl,--no-as-needed", f"-L{home}", "-lascendcl"]
        subprocess.run([*build, "-x", "c", os.devnull, *options, "-o", home / f"lib{name}.so"], check=True)
    # Ignore variables from a CANN installation or another test. Autoload is on, as for users.
    foreign = ("ASCEND_", "STUB_", "PROFILING_", "PROFILER_", "PROF_", "MSMONITOR_", "KINETO_", "TORCH_DEVICE_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    library_path = os.pathsep.join([str(home), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return Driver(home, environ | {"LD_LIBRARY_PATH": library_path})


@pytest.fixture
def job(driver: Driver, tmp_path: Path) -> Iterator[Jobs]:
    """Run Python code with the stub driver in the test's directory."""
    with driver.jobs(tmp_path, PROFDECK_LEASE_DIR=os.environ["PROFDECK_LEASE_DIR"]) as jobs:
        yield jobs


@pytest.fixture(scope="session")
def msprof_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH that contains the msprof stub."""
    # torch_npu checks that a script of CANN exists next to the program. It does not start the script.
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
    """Put the msprof stub on the PATH of the test's jobs and return its path."""
    job.environ["PATH"] = msprof_path
    return Path(msprof_path.partition(os.pathsep)[0]) / "msprof"
