"""Snapshot tests for the output of `summary`, `diff` and `trend` in terminals and pipes.

To update the snapshots, run this file as a script. Review them before you commit.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pytest

from captured_runs import write_capture, write_run
from gpu_job import GpuJob

SCREENS = Path(__file__).parent / "screens"
SIZES = {"80x24": (80, 24), "120x35": (120, 35), "piped": None}
WIDE = ("summary-8-ranks", "summary-roles", "diff")
"""Commands with a snapshot for the size 120x35."""
COMMANDS = {
    "summary-8-ranks": ("summary", "eight"),
    "summary-roles": ("summary", "roles"),
    "summary-long-names": ("summary", "long"),
    "summary-full-names": ("summary", "long", "--full-names"),
    "diff": ("diff", "two", "slower"),
    "diff-same": ("diff", "two", "two"),
    "trend": ("trend", "captures"),
}
LONG_NAME = "void at::native::(anonymous namespace)::" + "vectorized_layer_norm_kernel<float, " * 20 + "float>" * 20
SCREENSHOTS = [(name, size) for name in COMMANDS for size in SIZES if size != "120x35" or name in WIDE]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def write_jobs(directory: Path) -> None:
    GpuJob(ranks=8, slow_rank=5, products=12, items=2).write(directory / "eight")
    GpuJob(ranks=1, name=LONG_NAME).write(directory / "long")
    GpuJob(ranks=2, steps=8).write(directory / "two")
    GpuJob(ranks=2, steps=8, product_us=500).write(directory / "slower")
    write_run(directory / "captures", 24, _job_of_capture)
    for step in (0, 50):
        write_capture(directory / "roles", step, GpuJob(ranks=2, slow_rank=1, items=2), role="trainer")
        write_capture(directory / "roles", step, GpuJob(ranks=2, load_us=900), role="ref")
        write_capture(directory / "roles", step, GpuJob(product_us=90, launch_us=60), role="rollout")


def _job_of_capture(number: int) -> GpuJob:
    """Return the job of a capture. From capture 12, the data loader is slow on one rank."""
    return GpuJob(ranks=2, steps=3, load_us=30 + number % 5, slow_rank=1 if number >= 12 else None, slow_load_us=700)


def screen_text(directory: Path, command: tuple[str, ...], size: tuple[int, int] | None) -> str:
    """Run a command in a terminal with the given columns and rows, or in a pipe, and return its output."""
    arguments = [sys.executable, "-m", "profdeck", *command]
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    if size is None:
        completed = subprocess.run(
            arguments, check=False, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
        )
        return completed.stdout
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    process = subprocess.Popen(
        arguments,
        cwd=directory,
        env=environment | {"TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.DEVNULL,
    )
    os.close(terminal)
    data = b""
    try:
        while block := os.read(controller, 1 << 16):
            data += block
    except OSError:  # the last process has closed the terminal
        pass
    finally:
        os.close(controller)
        process.wait()
    return _ESCAPES.sub("", data.decode()).replace("\r\n", "\n")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("screens")
    write_jobs(path)
    return path


@pytest.mark.parametrize(("name", "size"), SCREENSHOTS)
def test_output_equals_its_snapshot(directory: Path, name: str, size: str) -> None:
    text = screen_text(directory, COMMANDS[name], SIZES[size])
    assert text == (SCREENS / f"{name}.{size}.txt").read_text(encoding="utf-8")
    lines = text.splitlines()
    if name != "summary-full-names":
        assert max(map(len, lines)) <= (SIZES[size] or (120, 0))[0]
    if size == "piped":
        assert [line for line in lines if line != line.rstrip()] == []
    if COMMANDS[name][0] in {"summary", "diff"} and SIZES[size] is not None:
        assert len(lines) < SIZES[size][1]  # leave one line for the prompt


@pytest.mark.parametrize("size", ["80x24", "120x35", "piped"])
def test_the_account_is_the_first_table(directory: Path, size: str) -> None:
    lines = screen_text(directory, COMMANDS["summary-8-ranks"], SIZES[size]).splitlines()
    tables = [line for line in lines if line.startswith(("share", "ms/step", "device: work", "count"))]
    assert tables[0].split()[:3] == ["share", "ms/step", "gain"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as _temporary:
        write_jobs(Path(_temporary))
        for _name, _size in SCREENSHOTS:
            _text = screen_text(Path(_temporary), COMMANDS[_name], SIZES[_size])
            (SCREENS / f"{_name}.{_size}.txt").write_text(_text, encoding="utf-8")
