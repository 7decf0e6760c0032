"""Tests that run `profdeck view` in a process, with file names that are not UTF-8 and with signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_job import GpuJob


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Undo that nohup or a shell made this process ignore signals, because its children inherit that."""
    ignored = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_view_deletes_its_files_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    (trace,) = GpuJob(steps=3, products=2).write(tmp_path / "job").iterdir()
    trace = trace.rename(trace.with_name("\udcff.trace.json.gz"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "profdeck", "view", str(trace), "--no-browser", "--processes", "1"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as view:
        assert view.stdout is not None
        url = view.stdout.readline().strip()
        assert list(temporary.iterdir())
        with urllib.request.urlopen(url) as page:  # noqa: S310  # the URL of a local server
            assert page.status == 200  # the title contains the name
        view.send_signal(number)
        _, stderr = view.communicate(timeout=60)
    assert view.returncode == 0, stderr
    assert "Traceback" not in stderr
    assert list(temporary.iterdir()) == []
