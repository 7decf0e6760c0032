"""Executes the examples of a documentation page in an empty directory.

Fenced blocks are executed in order, including blocks in HTML comments, which are not rendered:

- If the info string has a second word, the block is written to the file of that name. Configs are validated.
- Other ``python`` blocks are executed as scripts.
- In ``console`` blocks, lines that start with ``$`` are executed. All other lines must be in the output. Measured
  numbers may differ, and ``...`` represents omitted lines.

A comment on the line before a block changes how the block is executed:

- ``<!-- skip: REASON -->``: the block requires something unavailable. A separate test is skipped with the reason.
- ``<!-- exit N -->``: the last command exits with status N instead of 0.
- ``<!-- output varies -->``: only the exit statuses are checked.
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
    r"^(?:<!-- (?P<annotation>[^\n]*?) -->\n)?```(?P<language>\w+)(?: (?P<file>\S+))?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# On a busy machine, torch 2.13 sometimes aborts a gloo rank, also without profdeck (once in 35 jobs).
_GLOO_ABORTED = "terminate called without an active exception"
_MEASURED = re.compile(
    r"(< )?(\d[\d,]*\.\d[\d.,]*(\+\w+)?|\d[\d,]*(?=( ?(%|[kMG]?B|[mnu]?s)(?!\w)| events))|\d{3,}|\d+(,\d{3})+)"
    r"( [kMG]?B\b)?"
)
"""Numbers with a decimal point or a unit, event counts and other numbers of at least three digits."""
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
    annotation: str

    @property
    def location(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def skipped(self) -> str | None:
        """The reason to skip the block, or None."""
        return self.annotation.removeprefix("skip: ") if self.annotation.startswith("skip: ") else None

    @property
    def exit_code(self) -> int:
        return int(self.annotation.removeprefix("exit ")) if self.annotation.startswith("exit ") else 0

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command of a console block with its expected output."""
        for text in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, *expected = text.splitlines()
            yield command, expected


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("language")) + 1,
            language=match["language"],
            file=match["file"],
            text=match["text"],
            annotation=match["annotation"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


class Shell:
    """Executes the blocks of one page in a directory."""

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
            assert commands, f"{block.location} has no command"
            for number, (command, expected) in enumerate(commands, 1):
                if actual := self.local_command(command):
                    self.run(block, actual, expected, block.exit_code if number == len(commands) else 0)

    def local_command(self, command: str) -> str | None:
        """Return the command to execute in this environment, or None for commands that set up an environment."""
        if command == "make demo":
            return "profdeck demo"
        if command == "pip install .":
            return f"python -m pip install --quiet --no-deps --no-build-isolation --target {self.site} ."
        return None if command.startswith(("make ", "pip ", "git ")) else command

    def run(self, block: Block, command: str, expected: list[str], exit_code: int) -> None:
        result = self.run_command(command)
        if result.returncode and _GLOO_ABORTED in result.stdout and (run := _RUN.search(command)):
            shutil.rmtree(self.directory / "profiles" / run[1], ignore_errors=True)
            result = self.run_command(command)
        context = f"{block.location}: $ {command}\n{result.stdout}"
        assert result.returncode == exit_code, f"exited with {result.returncode} instead of {exit_code}: {context}"
        if block.annotation == "output varies":
            return
        lines = iter(normalized_lines(result.stdout))
        missing = [line for line in normalized_lines("\n".join(expected)) if line != "..." and line not in lines]
        assert missing == [], f"the output lacks lines of the page, such as {missing[0]!r}: {context}"

    def run_command(self, command: str) -> subprocess.CompletedProcess[str]:
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


def normalized_lines(output: str) -> list[str]:
    """Return the lines with spaces normalized and measured numbers replaced by 0.

    Counts and step numbers aren't measured, so a page must state the actual values.
    """
    text = _MEASURED.sub("0", output)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line]
