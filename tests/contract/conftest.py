"""Fixtures for contract tests.

By default, contract tests read committed facts. With ``--facts=check`` or ``--facts=write``, they read released wheels.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from release_facts import MODULE, REGENERATE, Code, CommittedFacts, Wheel, differences, download, dumps, facts_file

HERE = Path(__file__).parent
DIRECTORY = HERE / "facts"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "profdeck" / "wheels"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--facts",
        choices=["read", "check", "write"],
        default="read",
        help="read committed facts, check them against the wheels, or write them from the wheels",
    )


@pytest.fixture
def code(request: pytest.FixtureRequest) -> Callable[[str, str, str], Code]:
    """Return a function that opens a file in a wheel. Its arguments are the distribution, the version and the path."""
    if request.node.get_closest_marker("wheels"):
        open_release = _source
    elif _mode(request.config) == "read":
        open_release = _committed
    else:
        open_release = _recorded

    def read(distribution: str, version: str, path: str) -> Code:
        release = open_release(distribution, version)
        if not release.defines(path, MODULE):
            raise KeyError(f"{release} has no file {path}")
        return Code(release, path)

    return read


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("wheels") and _mode(item.config) == "read":
        pytest.skip("requires the released wheels. Run `nox -s contract`.")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Check or write the facts that the tests read from the wheels."""
    mode = _mode(session.config)
    if mode == "read":
        return
    report = session.config.pluginmanager.get_plugin("terminalreporter")
    report.section("changed facts" if mode == "write" else "committed facts that differ from the wheels")
    if session.testsfailed or not {item.path for item in session.items}.issuperset(HERE.glob("test_*.py")):
        report.write_line("Skipped: a test failed, or some contract tests did not run.")
        return
    committed = {file: file.read_text(encoding="utf-8") for file in sorted(DIRECTORY.glob("*.json"))}
    recorded = {facts_file(DIRECTORY, wheel.distribution, wheel.version): wheel.facts for wheel in _RECORDED}
    lines = [f"{file.name}: no test reads this release" for file in sorted(committed.keys() - recorded.keys())]
    for file, facts in sorted(recorded.items()):
        if file in committed:
            lines += differences(json.loads(committed[file]), facts)
        else:
            lines.append(f"{file.name}: a test reads this release, but no facts are committed")
    if mode == "write":
        for file in committed.keys() - recorded.keys():
            file.unlink()
        for file, facts in recorded.items():
            file.write_text(f"{dumps(facts)}\n", encoding="utf-8")
    elif lines:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        lines.append(REGENERATE)
    report.write_line("\n".join(lines) or "none")


_RECORDED: list[Wheel] = []


@functools.cache
def _source(distribution: str, version: str) -> Wheel:
    return download(CACHE, distribution, version)


@functools.cache
def _recorded(distribution: str, version: str) -> Wheel:
    """Open a wheel and register it for `pytest_sessionfinish`."""
    _RECORDED.append(download(CACHE, distribution, version))
    return _RECORDED[-1]


@functools.cache
def _committed(distribution: str, version: str) -> CommittedFacts:
    return CommittedFacts(DIRECTORY, distribution, version)


def _mode(config: pytest.Config) -> str:
    """Return ``--facts``. pytest defines the option only if this directory is on its command line."""
    return config.getoption("facts", "read")
