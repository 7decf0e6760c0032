"""Tests that control characters in names are escaped in terminal output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.base.text import printable, shell_word

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
        ("::error::text", "\\x3a:error::text"),
        ("  ::warning file=a::text", "  \\x3a:warning file=a::text"),
        ("at::native::copy", "at::native::copy"),
        ("a ##[add-mask]b", "a \\x23#[add-mask]b"),
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
        assert result.exit_code in {0, 6 if command[0] == "diff" else 0}, result.output
        assert not any(ord(character) < 32 and character not in "\n\t" for character in result.output), command
        assert "\x9b" not in result.output


def test_pages_contain_no_control_characters(cli: Callable[..., Any], tmp_path: Path) -> None:
    file, page = write_trace(tmp_path / "a.json", CONTROL_CHARACTERS), tmp_path / "a.html"
    assert cli("report", file, "-o", page).exit_code == 0
    text = page.read_text()
    assert not [character for character in CONTROL_CHARACTERS if not character.isprintable() and character in text]
    assert "\\u001b[31mb" in text


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
        assert result.exit_code in {0, 6 if command[0] == "diff" else 0}, result.output
        assert "\x1b" not in result.output, command


def test_run_names_are_escaped(cli: Callable[..., Any], record: Callable[..., Path]) -> None:
    run = record(3)
    runs = [run.rename(run.with_name("0\x1b[2J"))]
    runs.append(Path(shutil.copytree(runs[0], run.with_name("1\x1b[31m"))))
    for command in (["summary", *runs], ["summary", *runs, "--full"], ["ls", runs[0]], ["ls", run.parent]):
        result = cli(*command)
        assert "\x1b" not in result.output, command


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("runs/a", "runs/a"),
        ("~", "'./~'"),
        ("-a", "./-a"),
        ("a b'c", "'a b'\"'\"'c'"),
        ("a$b", "'a$b'"),
        ("a\n\x1b'\\", r"$'a\x0a\x1b\x27\x5c'"),
        ("\udcff", r"$'\xff'"),
    ],
)
def test_shell_word_names_the_same_file(tmp_path: Path, name: str, word: str) -> None:
    assert shell_word(name) == word
    (tmp_path / name).mkdir(parents=True)
    shell = subprocess.run(
        ["bash", "-c", f"cd {shell_word(name)} && pwd"], cwd=tmp_path, capture_output=True, check=True
    )
    assert Path(os.fsdecode(shell.stdout[:-1])) == tmp_path / name


@pytest.mark.parametrize("name", ["a\n::error::forged\x1b[2J", "a\nerror: forged", "::error::forged", "\udcff\n"])
@pytest.mark.parametrize(
    "command",
    [
        "ls PATH",
        "summary PATH",
        "report PATH",
        "diff PATH PATH",
        "trend PATH",
        "merge PATH -o out.json",
        "check PATH",
        "config show PATH",
        "trim PATH --steps 1",
        "baseline save a PATH",
        "baseline check PATH .",
        "prune PATH --steps 1",
        "capture job PATH",
        "finish PATH",
        "collect PATH",
        "view PATH",
        "export PATH --parquet PATH",
        "PATH",
        "--PATH",
        "summary . --PATH",
        "plugins PATH",
        "check . --set PATH",
        "summary . --rules PATH",
        "baseline save a . --directory PATH",
    ],
)
def test_names_in_errors_forge_no_line(cli: Callable[..., Any], command: str, name: str) -> None:
    result = cli(*(word.replace("PATH", name) for word in command.split()))
    assert result.exit_code != 0 or command == "export PATH --parquet PATH"
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "\x1b" not in result.output
    assert not any(line.lstrip().startswith(("::", "error: forged")) for line in result.output.splitlines())
    result.output.encode()


@pytest.mark.parametrize("name", ["a\n::error::forged\x1b", "::error::forged"])
def test_names_in_tables_forge_no_line(cli: Callable[..., Any], tmp_path: Path, name: str) -> None:
    file = write_trace(tmp_path / f"{name}.json", name)
    page = tmp_path / f"{name}.html"
    for command in (
        ["summary", file], ["summary", file, "--full"], ["summary", file, "--json"], ["diff", file, file],
        ["report", file, "-o", page], ["merge", file, "-o", f"{name}.merged.json"],
        ["trim", file, "--category", "cpu_op", "-o", f"{name}.out"],
    ):  # fmt: skip
        result = cli(*command)
        assert result.exit_code in {0, 6 if command[0] == "diff" else 0}, result.output
        assert not any(line.lstrip().startswith("::") for line in result.output.splitlines()), command
        assert "\x1b" not in result.output
