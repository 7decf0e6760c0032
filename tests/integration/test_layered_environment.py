"""Tests of child processes that find their packages on PYTHONPATH instead of in their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import Shell


@pytest.fixture(autouse=True)
def layered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the base Python of this environment. It contains neither profdeck nor its scripts."""
    monkeypatch.setattr(sys, "executable", sys._base_executable)  # type: ignore[attr-defined]  # not documented
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def test_job_inherits_packages(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start("import profdeck, tally_backend")
    assert process.wait(60) == 0, process.communicate()


def test_page_inherits_packages_and_commands(tmp_path: Path) -> None:
    result = Shell(tmp_path).run_command("profdeck --version && python -c 'import profdeck'")
    assert result.returncode == 0, result.stdout
