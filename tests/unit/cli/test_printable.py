"""Tests that control characters in names are escaped in terminal output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.base.text import printable

CONTROL_CHARACTERS = "a\x1b]0;title\x07\x1b[31mb\x9bc\rd\u202ee"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain\ttext\n", "plain\ttext\\n"),
        ("größer 日本", "größer 日本"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\r\x07\x9b", "\\r\\x07\\x9b"),
        ("\udcff", "\\udcff"),
        ("\u202eevil", "\\u202eevil"),
    ],
)
def test_control_characters_are_escaped(text: str, escaped: str) -> None:
    assert printable(text) == escaped


def write_trace(path: Path, name: str) -> Path:
    event = {"ph": "X", "cat": "cpu_op", "name": name, "ts": 1, "dur": 5, "pid": 1, "tid": 1}
    path.write_text(json.dumps({"traceEvents": [event]}))
    return path


@pytest.mark.parametrize("name", [CONTROL_CHARACTERS, "half \ud800 of a pair"])
def test_event_names_are_escaped(cli: Callable[..., Any], tmp_path: Path, name: str) -> None:
    file = write_trace(tmp_path / "a.json", name)
    for command in (["summary", file], ["summary", file, "--full"], ["diff", file, file]):
        result = cli(*command)
        assert result.exit_code == 0, result.output
        assert not any(ord(character) < 32 and character not in "\n\t" for character in result.output), command
        assert "\x9b" not in result.output


def test_file_names_are_escaped(cli: Callable[..., Any], tmp_path: Path) -> None:
    result = cli("summary", write_trace(tmp_path / "\x1b[31mred.json", "x"))
    assert "\x1b" not in result.output
    result = cli("summary", tmp_path / "absent\x1b[2J.json")
    assert result.exit_code == 4
    assert "\x1b" not in result.output + result.stderr


def test_file_names_in_headings_are_escaped(cli: Callable[..., Any], tmp_path: Path) -> None:
    """If there are several traces or runs, headings contain their names."""
    for name in ("a\x1b[31m.json", "b\x1b[2J.json"):
        write_trace(tmp_path / name, "x")
    for command in (["summary", tmp_path], ["summary", tmp_path, "--full"], ["diff", tmp_path, tmp_path]):
        result = cli(*command)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output, command


def test_run_names_are_escaped(cli: Callable[..., Any], record: Callable[..., Path]) -> None:
    run = record(3)
    runs = [run.rename(run.with_name("0\x1b[2J"))]
    runs.append(Path(shutil.copytree(runs[0], run.with_name("1\x1b[31m"))))
    for command in (["summary", *runs], ["summary", *runs, "--full"], ["ls", runs[0]], ["ls", run.parent]):
        result = cli(*command)
        assert "\x1b" not in result.output, command
