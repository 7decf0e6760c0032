from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import profdeck

Cli = Callable[..., Result]
Program = Callable[..., "subprocess.CompletedProcess[str]"]


def test_version_option_prints_the_version(cli: Cli) -> None:
    result = cli("--version")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"profdeck {profdeck.__version__}\n", "")


def test_package_can_be_run_as_a_module(python: Program) -> None:
    result = python("-m", "profdeck", "--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"profdeck {profdeck.__version__}\n", "")


def test_version_option_imports_no_large_module(python: Program) -> None:
    code = """
import sys
from profdeck.cli import app
try:
    app(["--version"])
except SystemExit:
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"numpy", "torch", "msgspec", "attrs"}))
"""
    assert python("-c", code).stdout.splitlines()[1:] == ["[]"]


def test_help_lists_all_commands_in_80_columns(cli: Cli) -> None:
    result = cli("--help")
    assert result.exit_code == 0
    sections = result.stdout.partition("Capture:\n")[2].split("\n\n")
    commands = [[line.split()[0] for line in section.splitlines() if line.startswith("  ")] for section in sections]
    assert {"capture", "check", "ls"} < set(commands[0])
    assert {"diff", "report", "summary"} < set(commands[1])
    assert {"demo", "paper-cut", "run"} < set(commands[2])
    assert max(map(len, result.stdout.splitlines())) <= 80
    without_plugins = "\n".join(line for line in result.stdout.splitlines() if "paper" not in line)
    assert "..." not in without_plugins.partition("Capture:")[2], "a short help text is truncated"


@pytest.mark.parametrize("command", ["check", "plugins", "capture", "collect", "ls", "summary", "config"])
def test_every_command_has_help(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.exit_code == 0
    assert "Args:" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_help_is_shown_without_a_command(cli: Cli) -> None:
    result = cli()
    assert result.exit_code == 2
    assert "Read traces:" in result.output


def test_unknown_command_suggests_the_nearest(cli: Cli) -> None:
    result = cli("sumary")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "No such command 'sumary'. Did you mean 'summary'?" in result.stderr


def test_plugin_commands_are_functions_and_groups(cli: Cli) -> None:
    assert cli("paper-cut", "--times", "2").stdout == "cut 2\n"
    assert cli("paper-fold", "once").stdout == "folded\n"
    assert cli("paper-cut", "--times", "0").exit_code == 2


def test_help_lists_plugin_commands_including_broken_ones(cli: Cli) -> None:
    lines = [" ".join(line.split()) for line in cli("--help").stdout.splitlines()]
    assert "paper-cut Cut paper." in lines
    assert "paper-fold Fold paper." in lines
    assert any(line.startswith("paper-broken Unavailable: ") for line in lines)
    assert any(line.startswith("paper-exit Unavailable: ") for line in lines)
    assert any(line.startswith("paper-number Unavailable: ") for line in lines)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("file", "--any=option")])
def test_failed_import_of_a_plugin_command_is_reported(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli("paper-broken", *arguments)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("error: The command 'paper-broken' of paper 1.5 fails to import")
    assert "No module named 'paper_nowhere'" in result.stderr


def test_plugin_command_that_is_not_a_function_is_reported(cli: Cli) -> None:
    result = cli("paper-number")
    assert result.exit_code == 3
    assert (
        "The entry point 'paper-number' in profdeck.commands must be a function or a typer.Typer, got 3"
        in result.stderr
    )


def test_plugin_cannot_replace_a_command(cli: Cli) -> None:
    assert "Cut paper" not in cli("check", "--help").stdout


def test_plugin_commands_are_imported_on_demand(python: Program) -> None:
    code = """
import sys
from profdeck.cli import app
try:
    app(["plugins", "paper"])
except SystemExit as error:
    print(error.code, "paper_commands" in sys.modules)
"""
    assert python("-c", code).stdout.splitlines()[-1] == "0 False"


def test_error_has_no_traceback(cli: Cli) -> None:
    result = cli("paper-cut", "--fail")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: The scissors are blunt.\n       Sharpen them.\n"


def test_bug_has_a_traceback(python: Program) -> None:
    result = python("-m", "profdeck", "paper-cut", "--bug")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("RuntimeError: scissors\n")


def test_interrupt_exits_with_status_130(cli: Cli) -> None:
    result = cli("paper-cut", "--interrupt")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("arguments", [("plugins",), ("plugins", "--json")])
def test_closed_pipe_exits_quietly(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    site = Path(__file__).parent / "site"
    monkeypatch.setenv("PYTHONPATH", ":".join([str(site), *filter(None, sys.path)]))
    command = [sys.executable, "-W", "error", "-m", "profdeck", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_verbose_logs_to_stderr_and_restores_logging(cli: Cli) -> None:
    logger = logging.getLogger("profdeck")
    initial = (logger.level, [*logger.handlers])
    assert "The scissors are open." in cli("-v", "paper-cut").stderr
    assert cli("paper-cut").stderr == ""
    assert (logger.level, logger.handlers) == initial


@pytest.mark.parametrize("options", [(), ("-v",)])
def test_log_messages_forge_no_line(cli: Cli, options: tuple[str, ...]) -> None:
    stderr = cli(*options, "paper-cut", "--warning", "x\n::error::forged\x1b[2J").stderr
    assert r"The scissors say x\n::error::forged\x1b[2J" in stderr.splitlines()[-1]
