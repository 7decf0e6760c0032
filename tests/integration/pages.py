"""Executes what a page of the docs shows, in an empty directory.

Fenced blocks are taken in order, also those inside of HTML comments, which readers do not see:

- a block whose info string has a second word is written to the file of that name; configs are checked, too;
- other ``python`` blocks are executed as scripts;
- of ``console`` blocks the lines that begin with ``$`` are executed, and every other line must
  be in the output, whatever its numbers are; ``...`` stands for lines that are left out.

A comment on the line before a block changes that:

- ``<!-- skip: REASON -->``: it needs something that is not here; a test of its own is skipped with the reason;
- ``<!-- exit N -->``: its last command ends with N instead of 0;
- ``<!-- output varies -->``: only the exit codes count.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs

from processes import command_path, python_path
from profdeck.backends.backend_setup import build_backend
from profdeck.config.sources import load_config

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w+)(?: (?P<file>\S+))?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# As torch 2.13 ends a rank of gloo now and then on a busy machine, without profdeck as well (once in 35 jobs).
_GLOO_ABORTED = "terminate called without an active exception"
_RUN = re.compile(r"PROFDECK_RUN=(\w+) .*torchrun ")
_LAUNCHERS = ("PROFDECK", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "RAY_")
_RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@attrs.frozen
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    file: str | None
    text: str
    mark: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def skipped(self) -> str | None:
        """Why it cannot be executed here."""
        return self.mark.removeprefix("skip: ") if self.mark.startswith("skip: ") else None

    @property
    def exit_code(self) -> int:
        return int(self.mark.removeprefix("exit ")) if self.mark.startswith("exit ") else 0

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command of a console and the output that is shown below it."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, *shown = part.splitlines()
            yield command, shown


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"],
            file=found["file"],
            text=found["text"],
            mark=found["mark"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


class Shell:
    """A directory in which the blocks of one page are executed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "page"
        self.site = directory / "site"
        shims = directory / "bin"
        for path in (self.directory, self.site, shims):
            path.mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        self.environment = {name: value for name, value in inherited.items() if name not in _RANKS} | {
            "PATH": command_path(shims),
            "PYTHONPATH": python_path(self.site),
            "PROFDECK_LEASE_DIR": str(directory / "leases"),
            "PROFDECK_CACHE": str(directory / "results"),
            "COLUMNS": "80",
            "OMP_NUM_THREADS": "1",
        }

    def execute(self, block: Block) -> None:
        if block.file:
            (self.directory / block.file).write_text(block.text, encoding="utf-8")
            if block.file.endswith((".yaml", ".toml")) and "roles" in block.text:
                config = load_config(self.directory / block.file, environ={}).config
                assert [build_backend(config, role).name for role in config.roles] == ["torch"] * len(config.roles)
        elif block.language == "python":
            script = self.directory / f"block_{block.line}.py"
            script.write_text(block.text, encoding="utf-8")
            self.run(block, shlex.join(["python", script.name]), [], 0)
        elif block.language == "console":
            commands = list(block.commands())
            assert commands, f"{block.place} has no command"
            for number, (command, expected) in enumerate(commands, 1):
                if actual := self.here(command):
                    self.run(block, actual, expected, block.exit_code if number == len(commands) else 0)

    def here(self, command: str) -> str | None:
        """Return what is executed for a command; None for what sets up an environment, as this one is."""
        if command == "make demo":
            return "profdeck demo"
        if command == "pip install .":
            return f"python -m pip install --quiet --no-deps --no-build-isolation --target {self.site} ."
        return None if command.startswith(("make ", "pip ", "git ")) else command

    def run(self, block: Block, command: str, expected: list[str], exit_code: int) -> None:
        done = self._done(command)
        if done.returncode and _GLOO_ABORTED in done.stdout and (run := _RUN.search(command)):
            shutil.rmtree(self.directory / "profiles" / run[1], ignore_errors=True)
            done = self._done(command)
        about = f"{block.place}: $ {command}\n{done.stdout}"
        assert done.returncode == exit_code, f"ended with {done.returncode} instead of {exit_code}: {about}"
        if block.mark == "output varies":
            return
        lines = iter(likened(done.stdout))
        missing = [line for line in likened("\n".join(expected)) if line != "..." and line not in lines]
        assert missing == [], f"the page shows other lines, such as {missing[0]!r}: {about}"

    def _done(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=240,
        )


def likened(output: str) -> list[str]:
    """Make lines equal that differ in numbers, units and spaces only."""
    text = re.sub(r"(< )?\d[\d.,]*(\+\w+)?( [kMG]?B\b)?", "0", output)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line]
