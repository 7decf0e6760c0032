"""Fixtures for real vLLM and SGLang servers on the CPU, and real routers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_servers import (
    Server,
    Servers,
    SglangServer,
    router_command,
    sglang_command,
    sglang_environment,
    skip_if_torch_crashed,
    vllm_command,
    vllm_environment,
    wait_until_ready,
)
from servers import TOKEN

from profdeck import Profiler

HERE = Path(__file__).parent
SGLANG = "PROFDECK_TEST_SGLANG_PYTHON"
# Command prefixes that simulate a second host, with its own hostname, shared memory and mount of the runs directory.
OTHER_HOST = ["unshare", "--uts", "--mount"]
MOUNT = ["sh", "-c", 'hostname other && mount -t tmpfs shm /dev/shm && mount --bind "$0" "$0" && exec "$@"']


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("fleet")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from skip_if_torch_crashed(item))


@pytest.fixture(scope="session")
def engine_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of vLLM engines, in which profdeck is not enabled."""
    return vllm_environment(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the runs, which all servers can write."""
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Servers that are stopped at the end of the test session."""
    with Servers(tmp_path_factory.mktemp) as started:
        yield started


@attrs.frozen
class Begin:
    """Starts servers that load profdeck, without waiting until they are ready."""

    servers: Servers
    model: Path
    root: Path
    vllm_environment: dict[str, str]
    sglang_environment: dict[str, str]
    sglang_python: str | None

    def vllm(self, *prefix: str | Path, arguments: Sequence[str] = ()) -> Server:
        """Start a vLLM server. The prefix precedes its command."""
        environ = self.vllm_environment | {"VLLM_PLUGINS": "profdeck"} | self._ours
        return self.servers.start(Server, [*prefix, *vllm_command(self.model, *arguments)], environ)

    def sglang(self) -> SglangServer | None:
        """Start an SGLang server. Return None if SGLang is not installed."""
        if self.sglang_python is None:
            return None
        environ = self.sglang_environment | {"SGLANG_PLUGINS": "profdeck,torchcpu"} | self._ours
        command = sglang_command(self.model, python=self.sglang_python)
        return self.servers.start(SglangServer, command, environ)

    @property
    def _ours(self) -> dict[str, str]:
        return {"PROFDECK__OUTPUT": str(self.root), **TOKEN}


@pytest.fixture(scope="session")
def begin(
    servers: Servers,
    model: Path,
    root: Path,
    engine_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Begin:
    """Object that starts servers which load profdeck and write to `root`."""
    python = os.environ.get(SGLANG)
    sglang = sglang_environment(tmp_path_factory.mktemp("sglang"), python) if python else {}
    return Begin(servers, model, root, engine_environment, sglang, python)


@attrs.frozen
class Engines:
    """The servers that all tests share. They start concurrently."""

    workers: tuple[Server, Server]
    on_two_hosts: bool
    """True if the second worker runs on a simulated second host."""

    reward: SglangServer | None


@pytest.fixture(scope="session")
def engines(begin: Begin, root: Path) -> Engines:
    """Shared servers, which may still be starting."""
    other = subprocess.run([*OTHER_HOST, "hostname", "other"], check=False, capture_output=True).returncode == 0
    second = begin.vllm(*([*OTHER_HOST, *MOUNT, root] if other else ()))
    return Engines((begin.vllm(), second), other, begin.sglang())


@pytest.fixture(scope="session")
def workers(engines: Engines) -> tuple[Server, Server]:
    """Two vLLM servers, on separate simulated hosts if this machine allows Linux namespaces."""
    first, second = map(wait_until_ready, engines.workers)
    return first, second


@pytest.fixture(scope="session")
def reward(engines: Engines) -> SglangServer:
    """An SGLang server. Tests are skipped if SGLang is not installed."""
    if engines.reward is None:
        pytest.skip(f"there is no SGLang: {SGLANG} names the interpreter of an environment that has it")
    return wait_until_ready(engines.reward)


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], Profiler]]:
    """Function that creates profilers of the role `rollout` with the servers' token. They are closed after the test."""
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    built: list[Profiler] = []

    def build(settings: dict[str, Any]) -> Profiler:
        built.append(Profiler.from_config(role="rollout", settings=settings))
        return built[-1]

    yield build
    for profiler in built:
        profiler.close()


@pytest.fixture
def start_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Function that starts routers. They are stopped after the test."""
    with Servers(tmp_path_factory.mktemp) as routers:

        def start(program: str, *arguments: str) -> Server:
            # Routers report that they are healthy before they have any worker, so this waits for /readiness.
            return wait_until_ready(
                routers.start(Server, router_command(program, *arguments), os.environ), "/readiness"
            )

        yield start
