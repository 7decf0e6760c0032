"""Tests of the modules that commands import. Imports take most of the run time of short commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Program = Callable[..., "subprocess.CompletedProcess[str]"]
Record = Callable[..., Path]

# typer and its imports, except pydantic, which is imported only to report invalid arguments.
COMMAND_LINE = {"typer", "annotated_doc", "shellingham", "typing_extensions"}
LIBRARIES = {"attr", "attrs", "isal", "msgspec", "numpy", *COMMAND_LINE}
PLUGINS = {
    "profdeck_npu",
    "profdeck_npu.artifact_kinds",
    "profdeck_sglang",
    "profdeck_sglang.trace_names",
    "profdeck_vllm",
    "profdeck_vllm.trace_names",
}
CORE = {
    "profdeck",
    "profdeck.cli",
    "profdeck.cli._cluster_options",
    "profdeck.cli._commands",
    "profdeck.cli._values",
    "profdeck.plugin",
    "profdeck.verification",
    "profdeck.verification.run_records",
}
LARGE_STANDARD_MODULES = {
    "asyncio",
    "concurrent.futures",
    "ssl",
    "http.client",
    "urllib.request",
    "xml.etree",
    "tomllib",
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Path of a trace that has one step and does not belong to a run."""
    times = {"ph": "X", "pid": 1, "tid": 1, "ts": 1000, "dur": 50}
    events = [
        {"cat": "user_annotation", "name": "ProfilerStep#0", **times},
        {"cat": "cpu_op", "name": "aten::mm", **times},
    ]
    file = tmp_path / "traces" / "small.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"traceEvents": events}))
    return file


def imported_by(python: Program, *arguments: object) -> set[str]:
    """Return the names of all modules that a command imports."""
    code = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from profdeck.cli import main
main()
"""
    result = python("-c", code, *arguments)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.splitlines()[-1].split())


def packages(modules: set[str]) -> set[str]:
    """Return the third-party packages to which the modules belong."""
    names = {name.partition(".")[0] for name in modules}
    standard = {*sys.stdlib_module_names, *sys.builtin_module_names}
    return {name for name in names - standard if not name.startswith(("_", "profdeck")) and name != "sitecustomize"}


@pytest.mark.parametrize("cache", ["--cache", "--no-cache"])
def test_summary_imports_only_the_reader_and_the_command_line(python: Program, trace: Path, cache: str) -> None:
    modules = imported_by(python, "summary", trace, "--json", cache)
    assert packages(modules) <= LIBRARIES
    assert {name for name in modules if name.startswith("profdeck_") and "profdeck_traces" not in name} <= PLUGINS
    assert {name for name in modules if name.startswith("profdeck.") or name == "profdeck"} <= CORE
    assert modules & LARGE_STANDARD_MODULES == set()


@pytest.mark.parametrize("options", [[], ["--by", "operator"]])
def test_summary_as_text_also_imports_rich(python: Program, trace: Path, options: list[str]) -> None:
    modules = imported_by(python, "summary", trace, *options)
    assert packages(modules) - LIBRARIES == {"rich"}


def test_ls_of_a_checked_run_imports_no_reader(python: Program, record: Record) -> None:
    run = record(1)
    for trace in run.rglob("*.trace.json"):
        os.utime(trace, (0, 0))  # the cache skips recently changed files
    first = imported_by(python, "ls", run)
    assert "numpy" in first
    modules = imported_by(python, "ls", run)
    assert packages(modules) <= LIBRARIES - {"numpy"} | {"rich"}
    assert modules & LARGE_STANDARD_MODULES == set()


@pytest.mark.parametrize("command", ["collect", "export", "merge", "prune", "report", "trim", "upload", "view"])
def test_help_of_a_command_imports_no_reader(python: Program, command: str) -> None:
    modules = imported_by(python, command, "--help")
    assert packages(modules) & {"numpy", "pydantic", "rich", "yaml", "pandas", "pyarrow"} == set()


def test_help_imports_no_command(python: Program) -> None:
    modules = imported_by(python, "--help")
    assert packages(modules) & {"numpy", "pydantic", "rich", "yaml"} == set()
    assert modules & {"profdeck.cli.check", "profdeck_traces.cli.summary"} == set()
