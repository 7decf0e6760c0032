"""Tests of the results table that `make test` prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "run_sessions.py"
NOXFILE = """
import sys
import nox

nox.options.default_venv_backend = "none"

@nox.session
def style(session): pass

@nox.session
def unit(session):
    options = ("-p", "no:cacheprovider", "--override-ini=addopts=", "--rootdir=.")
    session.run(sys.executable, "-m", "pytest", *options, "--junitxml=.nox/results/unit.py3.xml", "cases.py")

@nox.session
def killed(session):
    with open(".nox/results/killed.py3.xml", "w") as file: file.write("<testsuites><testsuite>")
    with open(".nox/results/killed.py4.xml", "w") as file: pass
    session.error("Exit code -9 \u2013 no memory")

@nox.session
def device(session): session.skip("There is no device.")

@nox.session
def engine(session): session.error("The environment cannot be built.")
"""
CASES = """
import pytest

@pytest.fixture
def broken():
    yield
    raise OSError

def test_passes(): pass
def test_fails(): assert False
def test_fails_and_cannot_be_cleaned_up(broken): assert False
def test_needs_a_gpu(): pytest.skip("needs a CUDA device")
def test_needs_the_same_gpu(): pytest.skip("needs a CUDA device")
"""


BLOCKING = """
import sys
import nox

nox.options.default_venv_backend = "none"

@nox.session
def blocked(session):
    session.run(sys.executable, "-c", "import threading; print('recording', flush=True); threading.Event().wait()")
"""


def run_script(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        cwd=directory,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=False,
        capture_output=True,
        text=True,
    )


def test_table_lists_counts_failures_and_reasons(tmp_path: Path) -> None:
    pytest.importorskip("nox")
    (tmp_path / "noxfile.py").write_text(NOXFILE, encoding="utf-8")
    (tmp_path / "cases.py").write_text(CASES)
    (tmp_path / ".nox" / "results").mkdir(parents=True)
    (tmp_path / ".nox" / "results" / "style.of_an_earlier_run.xml").write_text("<")

    result = run_script(tmp_path)

    assert result.returncode == 1, result.stderr
    table = result.stdout[result.stdout.rindex("\nsession ") :].strip()
    assert re.sub(r" +\d+\.\d$", " MINUTES", table, flags=re.MULTILINE).splitlines() == [
        "session   result      passed  failed  skipped  minutes",
        "style     success          -       -        - MINUTES",
        "unit      failed           1       2        2 MINUTES",
        "  failed: cases::test_fails",
        "  failed: cases::test_fails_and_cannot_be_cleaned_up",
        "  2 skipped: needs a CUDA device",
        "killed    aborted          -       -        - MINUTES",
        "  Exit code -9 ? no memory",
        "  unreadable results: .nox/results/killed.py3.xml",
        "  unreadable results: .nox/results/killed.py4.xml",
        "device    skipped          -       -        - MINUTES",
        "  There is no device.",
        "engine    aborted          -       -        - MINUTES",
        "  The environment cannot be built.",
        "total MINUTES",
    ]


def test_invalid_option_prints_no_table(tmp_path: Path) -> None:
    pytest.importorskip("nox")
    (tmp_path / "noxfile.py").write_text(NOXFILE)

    result = run_script(tmp_path, "--session", "unknown")

    assert result.returncode != 0
    assert "unknown" in result.stderr
    assert "minutes" not in result.stdout


def test_ctrl_c_returns_the_status_of_nox_without_a_traceback(tmp_path: Path) -> None:
    pytest.importorskip("nox")
    (tmp_path / "noxfile.py").write_text(BLOCKING)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # child processes would inherit SIG_IGN
    try:
        script = subprocess.Popen(
            [sys.executable, SCRIPT],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    assert script.stdout is not None
    assert script.stdout.readline() == "recording\n"

    os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    _, errors = script.communicate(timeout=60)

    assert script.returncode == 130, errors
    assert str(SCRIPT) not in errors
