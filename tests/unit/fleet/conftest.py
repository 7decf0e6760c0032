"""A backend for simulated servers, and servers whose ranks record."""

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
from simulated_servers import RecordingEngine, offer

Build = Callable[..., Profiler]


@pytest.fixture(scope="session")
def simulated_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH that offers the backend `simulated` as an installed distribution would."""
    return offer(tmp_path_factory.mktemp("site"))


@pytest.fixture
def simulated(simulated_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the backend `simulated` available in this process."""
    for path in simulated_path.split(os.pathsep):
        monkeypatch.syspath_prepend(path)
    plugin_manager.cache_clear()  # tests add hooks to the class


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """The config of a job that captures steps 1 and 3 of its rollouts into tmp_path/run."""
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
def build(simulated: None, settings: dict[str, Any]) -> Build:
    """Build a profiler of many targets; keywords are keys of `targets`."""

    def make(handles: Sequence[object] | None = None, own: Mapping[str, Any] | None = None, **targets: Any) -> Profiler:
        given = {"rollout.targets": targets} if targets else {}
        return Profiler.from_config(role="rollout", settings=settings | given | dict(own or {}), target=handles)

    return make


@pytest.fixture
def recording(tally: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RecordingEngine]:
    """Make an engine that records."""
    # Its iterations are run by the test, and its commands by the thread of the servers.
    monkeypatch.setattr(tally.TallyBackend, "thread_bound", False)
    return functools.partial(RecordingEngine, "tally-device")


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., Manifest]:
    """Read the manifest of the fleet, or of one replica as a target."""

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
    """A process of its own that drives a fleet: it starts and stops when it is told."""

    def __init__(self, path: str, *arguments: str) -> None:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([path, *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
        )

    def go_on(self) -> None:
        """Let it do the next thing."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def said(self) -> str:
        """Return the next line that it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """End it as kill -9 does."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def driver(simulated_path: str, settings: dict[str, Any]) -> Iterator[Callable[..., Driver]]:
    """Start drivers; what is left of them is killed."""
    drivers: list[Driver] = []

    def start(urls: Sequence[str], *, stops: bool = True, **own: Any) -> Driver:
        arguments = (json.dumps([settings | own, list(urls)]), json.dumps(stops))
        drivers.append(Driver(simulated_path, *arguments))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()
