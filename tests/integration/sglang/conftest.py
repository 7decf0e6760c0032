"""Fixtures for real SGLang engines on the CPU: servers, and jobs in child processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_servers import (
    Job,
    Servers,
    SglangServer,
    runner,
    sglang_command,
    sglang_environment,
    skip_if_torch_crashed,
    wait_until_ready,
)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("sglang")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from skip_if_torch_crashed(item))


@pytest.fixture(scope="session")
def engine_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of the engines. It does not arm profdeck."""
    return sglang_environment(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def run_job(
    model: Path, engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Job]:
    """Return a function that runs a script of ``jobs/``."""
    return runner(HERE / "jobs", model, engine_environment, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def start_server(
    model: Path, engine_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., SglangServer]]:
    """Return a function that starts a server. Running servers are stopped at the end of the session."""
    with Servers(tmp_path_factory.mktemp) as servers:

        def start(*arguments: str, **environ: str) -> SglangServer:
            return wait_until_ready(
                servers.start(SglangServer, sglang_command(model, *arguments), engine_environment | environ)
            )

        yield start
