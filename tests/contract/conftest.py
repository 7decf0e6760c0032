"""Fixtures for contract tests.

By default, contract tests read committed facts. With ``--facts=check`` or ``--facts=write``, they read released wheels.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from release_facts import (
    MODULE,
    REGENERATE,
    Code,
    CommittedFacts,
    Wheel,
    differences,
    download,
    dumps,
    facts_file,
    load_facts,
)

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


def pytest_configure(config: pytest.Config) -> None:
    if _mode(config) != "read" and config.getoption("tx", None):
        raise pytest.UsageError(
            f"--facts={_mode(config)} requires all tests in one process. Remove -n from the command line and from "
            "PYTEST_ADDOPTS, or add -n 0."
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


def pytest_deselected(items: list[pytest.Item]) -> None:
    _DESELECTED.extend(items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _PASSED.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Check or write the facts that the tests read from the wheels."""
    mode = _mode(session.config)
    if mode == "read":
        return
    report = session.config.pluginmanager.get_plugin("terminalreporter")
    report.section("changed facts" if mode == "write" else "committed facts that differ from the wheels")
    missing = _missing_tests(session)
    recorded = {facts_file(DIRECTORY, wheel.distribution, wheel.version): wheel.facts for wheel in _RECORDED}
    lines = [missing] if missing else _compare(recorded)
    if mode == "write" and not missing:
        _write(recorded)
    elif lines and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if mode == "check" and lines and not missing:
        lines.append(REGENERATE)
    report.write_line("\n".join(lines) or "none")


_DESELECTED: list[pytest.Item] = []
_PASSED: set[str] = set()
_RECORDED: list[Wheel] = []


def _missing_tests(session: pytest.Session) -> str | None:
    """Return a message if a contract test did not pass. The recorded facts are incomplete without it."""
    if any("::" in argument for argument in session.config.args):
        missing = "The command line selects single tests."
    elif not {item.path for item in session.items + _DESELECTED}.issuperset(HERE.glob("test_*.py")):
        missing = f"The command line must name the directory {HERE.name}."
    elif _DESELECTED:
        missing = f"{len(_DESELECTED)} tests are deselected."
    elif others := [item.nodeid for item in session.items if item.nodeid not in _PASSED]:
        missing = f"{len(others)} tests did not pass, the first is {others[0]}."
    else:
        return None
    return f"{missing} --facts={_mode(session.config)} requires that all contract tests pass; it changed no file."


def _compare(recorded: dict[Path, dict[str, Any]]) -> list[str]:
    """Return a message for each difference between the committed facts and the wheels."""
    committed = set(DIRECTORY.glob("*.json"))
    lines = [f"{file.name}: no test reads this release" for file in sorted(committed - recorded.keys())]
    for file, facts in sorted(recorded.items()):
        if file not in committed:
            lines.append(f"{file.name}: a test reads this release, but no facts are committed")
            continue
        try:
            lines += differences(load_facts(file), facts)
        except ValueError as error:
            lines.append(str(error))
    return lines


def _write(recorded: dict[Path, dict[str, Any]]) -> None:
    for file in set(DIRECTORY.glob("*.json")) - recorded.keys():
        file.unlink()
    DIRECTORY.mkdir(exist_ok=True)
    for file, facts in recorded.items():
        file.write_text(f"{dumps(facts)}\n", encoding="utf-8")


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
