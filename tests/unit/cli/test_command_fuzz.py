"""Fuzz test of the commands that read traces: they must not print a traceback or report a corrupt trace as intact.

``PROFDECK_FUZZ_COMMANDS`` sets the number of files. ``PROFDECK_TEST_SEED`` sets the seed of the first file.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from test_fuzz import base, mutated, zipped
from typer.testing import Result

from profdeck_traces.cli.terminal import ExitCode
from seeds import FIRST_SEED

FILES = int(os.environ.get("PROFDECK_FUZZ_COMMANDS", "40"))
PARTS = 4
GOOD, BAD = "good.trace.json", "bad.trace.json"
COMMANDS = (
    f"summary --no-cache {BAD}",
    f"summary --no-cache --json {BAD}",
    f"summary --no-cache {GOOD} {BAD}",
    f"diff --no-cache {GOOD} {BAD}",
    f"diff --no-cache --json --fail-over 1 {BAD} {GOOD}",
    f"report --no-cache {BAD} -o out/page.html",
    f"export --no-cache {BAD} --speedscope out/stacks.json",
    f"trend --no-cache {BAD} {GOOD}",
    f"trim {BAD} --time 0s.. -o out/trace.json",
    f"trim {BAD} --category kernel -o out/trace.json",
    f"merge {GOOD} {BAD} -o out/trace.json",
    f"merge {BAD} {GOOD} -o out/trace.json.gz",
    f"merge {BAD} {GOOD} -o out/trace.pftrace",
)


def is_json(data: bytes) -> bool:
    """Return whether the data, plain or gzip, is JSON that the standard library can parse."""
    try:
        json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
    except (ValueError, OSError, EOFError, zlib.error, RecursionError):
        return False
    return True


@pytest.mark.parametrize("part", range(PARTS))
def test_commands_report_damaged_traces(cli: Callable[..., Result], tmp_path: Path, part: int) -> None:
    (tmp_path / GOOD).write_bytes(base(random.Random(0)))  # noqa: S311 - reproducible input
    (tmp_path / "out").mkdir()
    for seed in range(FIRST_SEED + part, FIRST_SEED + FILES, PARTS):
        chance = random.Random(seed)  # noqa: S311 - reproducible input
        data = zipped(mutated(base(chance), chance), chance)
        (tmp_path / BAD).write_bytes(data)
        command = chance.choice(COMMANDS)
        try:
            check(command, data, cli(*command.split()))
        except Exception as error:
            error.add_note(f"seed {seed}: {command}")
            raise
        for path in (tmp_path / "out").iterdir():
            path.unlink()


def check(command: str, data: bytes, result: Result) -> None:
    """Check a command's exit code, output and written files."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code in {*ExitCode} - {ExitCode.USAGE, ExitCode.PLUGIN}, result.output
    assert "Traceback" not in result.output
    if not is_json(data):
        assert "all whole" not in result.output
        if command.startswith("summary --no-cache --json") and result.exit_code == ExitCode.OK:
            assert not json.loads(result.stdout)["ranks"][0]["whole"]
    written = [path for path in Path("out").glob("*.json*") if path.stat().st_size]
    if command.startswith(("trim", "merge")):
        assert all(is_json(path.read_bytes()) for path in written)
