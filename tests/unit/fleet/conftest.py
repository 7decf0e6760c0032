"""Fixtures for captures of simulated servers."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from profdeck import Profiler
from profdeck.backends.plugin_manager import plugin_manager
from profdeck.records.manifest import Manifest, read_manifest
from simulated_servers import RecordingEngine, install_backends

BuildProfiler = Callable[..., Profiler]


@pytest.fixture(scope="session")
def simulated_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with the entry point of the backend `simulated`."""
    return install_backends(tmp_path_factory.mktemp("site"))


@pytest.fixture
def simulated_backend(simulated_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the backend `simulated` in this process."""
    for path in simulated_path.split(os.pathsep):
        monkeypatch.syspath_prepend(path)
    plugin_manager.cache_clear()  # tests add hooks to the backend class


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Config of a job that captures the rollouts of steps 1 and 3 in `tmp_path/run`."""
    return {
        "output": str(tmp_path),
        "run": "run",
        "steps": [1, 3],
        "on_error": "raise",
        "on_demand": False,
        "rollout.backend": "simulated",
        "rollout.ranks": "all",
    }


@pytest.fixture
def build_profiler(simulated_backend: None, settings: dict[str, Any]) -> BuildProfiler:
    """Function that creates a profiler of several targets. Keyword arguments are keys of `targets`."""

    def build(
        handles: Sequence[object] | None = None, overrides: Mapping[str, Any] | None = None, **targets: Any
    ) -> Profiler:
        target_settings = {"rollout.targets": targets} if targets else {}
        merged = settings | target_settings | dict(overrides or {})
        return Profiler.from_config(role="rollout", settings=merged, target=handles)

    return build


@pytest.fixture
def make_engine(tally: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RecordingEngine]:
    """Function that creates engines which record traces."""
    # The test runs the iterations, but the servers' thread runs the commands.
    monkeypatch.setattr(tally.TallyBackend, "thread_bound", False)
    return functools.partial(RecordingEngine, "tally-device")


@pytest.fixture
def load_manifest(tmp_path: Path) -> Callable[..., Manifest]:
    """Function that reads the manifest of the fleet, or of a replica's target."""

    def read(step: int = 1, replica: int | None = None, name: str | None = None, output: Path = tmp_path) -> Manifest:
        directory = output / "run" / f"step_{step:06d}" / "rollout"
        directory = directory if replica is None else directory / f"replica_{replica:03d}"
        return read_manifest(directory / f"target.{name or f'step{step}'}.json")

    return read


DRIVER = """
import json, sys
from profdeck import Profiler
from profdeck.base.errors import CaptureError

settings, urls = json.loads(sys.argv[1])
profiler = Profiler.from_config(role="rollout", settings=settings, target=urls)
sys.stdin.readline()
try:
    profiler.start(1)
except CaptureError as error:
    print("failed", error, flush=True)
else:
    print("started", flush=True)
sys.stdin.readline()
if json.loads(sys.argv[2]):
    try:
        profiler.stop()
    except CaptureError as error:
        print("stopped:", error, flush=True)
    else:
        print("stopped", flush=True)
"""


class Driver:
    """A driver of a fleet in a separate process. It starts and stops a capture on request."""

    def __init__(self, path: str, *arguments: str) -> None:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([path, *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
        )

    def resume(self) -> None:
        """Continue the driver with its next command."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def read_line(self) -> str:
        """Return the next line of output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_driver(simulated_path: str, settings: dict[str, Any]) -> Iterator[Callable[..., Driver]]:
    """Function that starts drivers. They are killed after the test."""
    drivers: list[Driver] = []

    def start(urls: Sequence[str], *, stops: bool = True, **overrides: Any) -> Driver:
        arguments = (json.dumps([settings | overrides, list(urls)]), json.dumps(stops))
        drivers.append(Driver(simulated_path, *arguments))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()
