from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata

import pytest
from typer.testing import Result

Cli = Callable[..., Result]


def test_broken_plugins_do_not_break_the_list(cli: Cli) -> None:
    result = cli("plugins", "--json")
    assert result.exit_code == 0
    plugins = {(plugin["kind"], plugin["name"]): plugin for plugin in json.loads(result.stdout)["plugins"]}
    assert plugins["backend", "paper"] == {
        "kind": "backend",
        "name": "paper",
        "provided_by": "paper 1.5",
        "usable": True,
        "problem": None,
        "hooks": [{"name": "profile_start", "wrapper": False}, {"name": "profile_stop", "wrapper": False}],
        "libraries": [{"names": ["paper"], "supported_versions": ">=1,<2", "installed": "paper 1.5"}],
    }
    assert "needs papyrus, which is not installed" in plugins["backend", "paper-absent"]["problem"]
    assert plugins["backend", "paper-absent"]["libraries"][0]["installed"] is None
    assert "version 1.5 is installed" in plugins["backend", "paper-old"]["problem"]
    assert "No module named 'paper_nowhere'" in plugins["backend", "paper-broken"]["problem"]
    assert plugins["listener", "paper-log"]["hooks"] == [{"name": "profile_stop", "wrapper": False}]
    assert "profile_stop has no argument 'paper'" in plugins["listener", "paper-wrong"]["problem"]
    assert plugins["listener", "paper-timer"]["hooks"] == [{"name": "profile_start", "wrapper": True}]
    assert plugins["command", "paper-cut"]["usable"]
    assert plugins["store", "paper-board"]["usable"]
    kinds = {"backend", "listener", "command", "artifact kind", "host", "store", "trace names"}
    assert {kind for kind, _ in plugins} == kinds


def test_table(cli: Cli) -> None:
    result = cli("plugins")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "backend paper paper 1.5 profile_start yes" in lines
    assert "backend paper-absent paper 1.5 profile_start no" in lines
    assert "listener paper-timer paper 1.5 profile_start yes (wrapper)" in " ".join(lines)
    assert "pip install 'profdeck[paper-absent]'" in " ".join(lines)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_none_installed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: metadata.EntryPoints())
    assert cli("plugins").stdout.startswith("No plugins are installed.")
    assert json.loads(cli("plugins", "--json").stdout) == {"plugins": []}


def test_the_former_command_names_its_replacement(cli: Cli) -> None:
    result = cli("backends")
    assert result.exit_code == 2
    assert "No such command 'backends'. Use 'profdeck plugins'." in result.stderr


def test_options_of_one(cli: Cli) -> None:
    result = cli("plugins", "paper")
    assert result.exit_code == 0
    assert "backend paper: Writes traces of invented operators." in result.stdout
    assert "Hooks: profile_start, profile_stop." in result.stdout
    assert "Supports paper >=1,<2: paper 1.5." in result.stdout
    own, common = result.stdout.split("Common options that it supports")
    assert "sheets: int = 3" in own
    assert "Default: 3. More give larger `.trace.json` files." in own
    assert "max_capture_s: float = 1800.0" in common
    assert "with_stack" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_options_of_a_listener(cli: Cli) -> None:
    result = cli("plugins", "paper-timer")
    assert "listener paper-timer: Measures starts." in result.stdout
    assert "Hooks: profile_start (wrapper)." in result.stdout
    assert "unit: Literal['s', 'ms'] = s" in result.stdout


def test_the_json_schema_of_options(cli: Cli) -> None:
    (plugin,) = json.loads(cli("plugins", "paper", "--json").stdout)["plugins"]
    schema = plugin["options_schema"]
    assert schema["properties"]["sheets"] == {
        "type": "integer",
        "description": "Operators per trace. Default: 3. More give larger `.trace.json` files.",
        "default": 3,
    }
    assert (schema["title"], schema["required"], schema["additionalProperties"]) == ("paper", [], False)
    assert schema["properties"]["activities"]["anyOf"][0]["items"] == {"enum": ["cpu", "cuda", "npu"]}
    (timer,) = json.loads(cli("plugins", "paper-timer", "--json").stdout)["plugins"]
    assert timer["options_schema"]["properties"]["unit"]["enum"] == ["s", "ms"]


def test_options_of_one_that_cannot_be_used(cli: Cli) -> None:
    result = cli("plugins", "paper-absent")
    assert result.exit_code == 0
    assert "Supports papyrus >=3: not installed." in result.stdout
    assert "sheets: int = 3" in result.stdout
    assert result.stderr.startswith("warning: The backend 'paper-absent' needs papyrus")


def test_a_plugin_that_cannot_be_loaded_has_its_reason(cli: Cli) -> None:
    (broken, _) = json.loads(cli("plugins", "paper-broken", "--json").stdout)["plugins"]
    assert "fails to import" in broken["problem"]
    result = cli("plugins", "papr", "--json")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "There is no plugin 'papr'. Did you mean 'paper'? List all: profdeck plugins" in result.stderr
