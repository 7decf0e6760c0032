"""Fixtures for tests with real processes. Each fixture stops only the processes that it started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from processes import ending, python_path

pytest.register_assert_rewrite("engine_contract", "server_contract", "pages")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tally_path: str, tmp_path: Path) -> Iterator[Start]:
    """Return a function that runs Python code in a child process, with the backend `tally` installed.

    Running processes are stopped after the test.
    """
    with ending() as started:

        def run(code: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": python_path(tally_path)} | environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            return process

        yield run


@pytest.fixture(autouse=True)
def no_trace_analysis(isolated_directories: None, request: pytest.FixtureRequest) -> None:
    """Disable the analysis of traces after captures, except in tests marked `analysis`.

    The background processes would slow down other tests and change the directories that tests compare.
    """
    if request.node.get_closest_marker("analysis") is None:
        Path(os.environ["PROFDECK_LEASE_DIR"], "trace_analysis.lease").mkdir(parents=True)  # cannot be locked


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory for the runs of a server that the tests of a module share."""
    return tmp_path_factory.mktemp("root") / "profiles"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny model. See `engine_servers.write_tiny_model`."""
    from engine_servers import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model"))
