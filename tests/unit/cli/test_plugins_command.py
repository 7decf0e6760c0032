from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import Result

from distributions import install
from profdeck.config.options import LIMITS

Cli = Callable[..., Result]

LISTENERS = """
import attrs
from attrs import validators
from profdeck import Activity, hookimpl
from profdeck_traces.base.errors import MissingLibraryError

@attrs.frozen
class Options:
    word: str = attrs.field(validator=validators.and_(validators.min_len(1), validators.max_len(9)))
    activities: tuple[Activity, ...] | None = None
    ratios: tuple[float, ...] = attrs.field(default=(), validator=validators.min_len(0))

class Base:
    @hookimpl(tryfirst=True)
    def profile_stop(self): pass

class Fine(Base):
    Options = Options
    def __init__(self, options): raise AssertionError("a required option is not set")

class NoHooks: pass

class NoHooksButRequiredOptions:
    Options = Options
    def __init__(self, options): pass

class NoConstructor(Base): Options = Options

class OptionsAreADict(Base):
    Options = dict
    def __init__(self, options): pass

class NeedsOptions(Base):
    def __init__(self, options): pass

class NoLibrary(Base):
    def __init__(self): raise MissingLibraryError.for_library("It needs", "papyrus")

class NoInstance(Base):
    def __new__(cls): raise OSError("full")

class Fails(Base):
    def __init__(self): raise OSError("disk")
"""


@pytest.fixture
def listeners_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the classes in `LISTENERS` as listeners, and return a config that uses them."""
    names = [line.split()[1].split("(")[0].rstrip(":") for line in LISTENERS.splitlines() if line.startswith("class ")]
    names = [name for name in names if name not in {"Base", "Options"}]
    (tmp_path / "other_listeners.py").write_text(LISTENERS)
    points = "".join(f"{name} = other_listeners:{name}\n" for name in names)
    install(tmp_path, "other_listeners", f"[profdeck.listeners]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_listeners", raising=False)
    config = {
        "steps": [1],
        "roles": {"trainer": {"backend": "paper"}},
        "listeners": names,
        "listener_options": {name: {"word": "x"} for name in ("Fine", "NoHooksButRequiredOptions", "NoConstructor")},
    }
    file = tmp_path / "profdeck.yaml"
    file.write_text(json.dumps(config))
    return file


def test_plugins_with_errors_are_listed_with_their_problem(cli: Cli) -> None:
    result = cli("plugins", "--json")
    assert result.exit_code == 0
    plugins = {(plugin["kind"], plugin["name"]): plugin for plugin in json.loads(result.stdout)["plugins"]}
    assert plugins["backend", "paper"] == {
        "kind": "backend",
        "name": "paper",
        "provided_by": "paper 1.5",
        "usable": True,
        "problem": None,
        "hooks": [
            {"name": "profile_start", "wrapper": False, "order": None},
            {"name": "profile_stop", "wrapper": False, "order": None},
        ],
        "libraries": [{"names": ["paper"], "supported_versions": ">=1,<2", "installed": "paper 1.5"}],
    }
    assert "needs papyrus, which is not installed" in plugins["backend", "paper-absent"]["problem"]
    assert plugins["backend", "paper-absent"]["libraries"][0]["installed"] is None
    assert "version 1.5 is installed" in plugins["backend", "paper-old"]["problem"]
    assert "No module named 'paper_nowhere'" in plugins["backend", "paper-broken"]["problem"]
    assert plugins["listener", "paper-log"]["hooks"] == [{"name": "profile_stop", "wrapper": False, "order": None}]
    assert "profile_stop has no argument 'paper'" in plugins["listener", "paper-wrong"]["problem"]
    assert plugins["listener", "paper-timer"]["hooks"] == [{"name": "profile_start", "wrapper": True, "order": None}]
    assert plugins["command", "paper-cut"]["usable"]
    assert plugins["store", "paper-board"]["usable"]
    kinds = {"backend", "listener", "command", "artifact kind", "cluster", "host", "launcher", "store", "trace names"}
    assert {kind for kind, _ in plugins} == kinds


def test_table_lists_plugins_in_80_columns(cli: Cli) -> None:
    result = cli("plugins")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "backend paper paper 1.5 profile_start yes" in lines
    assert "backend paper-absent paper 1.5 profile_start no" in lines
    assert "listener paper-timer paper 1.5 profile_start yes (wrapper)" in " ".join(lines)
    assert "pip install 'profdeck[paper-absent]'" in " ".join(lines)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_environment_without_plugins_is_reported(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    command = metadata.EntryPoint("plugins", "profdeck.cli.plugins:command", "profdeck.commands")
    monkeypatch.setattr(metadata, "entry_points", lambda: metadata.EntryPoints([command]))
    assert cli("plugins").stdout.startswith("No plugins are installed.")
    assert json.loads(cli("plugins", "--json").stdout) == {"plugins": []}


def test_removed_command_names_its_replacement(cli: Cli) -> None:
    result = cli("backends")
    assert result.exit_code == 2
    assert "No such command 'backends'. Use 'profdeck plugins'." in result.stderr


def test_options_of_a_backend_are_listed(cli: Cli) -> None:
    result = cli("plugins", "paper")
    assert result.exit_code == 0
    assert "backend paper: Writes traces of invented operators." in result.stdout
    assert "Hooks: profile_start, profile_stop." in result.stdout
    assert "Supports paper >=1,<2: paper 1.5." in result.stdout
    backend_options, common_options = result.stdout.split("Supported common options")
    assert "sheets: int (>= 1) = 3" in backend_options
    assert "Default: 3. More give larger `.trace.json` files." in backend_options
    assert "max_capture_s: float (> 0.0, <= 31536000.0) = 1800.0" in common_options
    assert "with_stack" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_options_of_a_listener_are_listed(cli: Cli) -> None:
    result = cli("plugins", "paper-timer")
    assert "listener paper-timer: Measures starts." in result.stdout
    assert "Hooks: profile_start (wrapper)." in result.stdout
    assert "unit: Literal['s', 'ms'] = s" in result.stdout


def test_json_has_a_schema_of_the_options(cli: Cli) -> None:
    (plugin,) = json.loads(cli("plugins", "paper", "--json").stdout)["plugins"]
    schema = plugin["options_schema"]
    assert schema["properties"]["sheets"] == {
        "type": "integer",
        "minimum": 1,
        "description": "Operators per trace. Default: 3. More give larger `.trace.json` files.",
        "default": 3,
    }
    assert (schema["title"], schema["required"], schema["additionalProperties"]) == ("paper", [], False)
    assert schema["properties"].keys() == {"sheets", "torn", "jammed"} | LIMITS
    (timer,) = json.loads(cli("plugins", "paper-timer", "--json").stdout)["plugins"]
    assert timer["options_schema"]["properties"]["unit"]["enum"] == ["s", "ms"]


def test_options_of_an_unusable_backend_are_listed(cli: Cli) -> None:
    result = cli("plugins", "paper-absent")
    assert result.exit_code == 3
    assert "Supports papyrus >=3: not installed." in result.stdout
    assert "sheets: int (>= 1) = 3" in result.stdout
    assert result.stderr.startswith("warning: The backend 'paper-absent' needs papyrus")


def test_broken_or_unknown_plugin_is_reported(cli: Cli) -> None:
    (broken, _) = json.loads(cli("plugins", "paper-broken", "--json").stdout)["plugins"]
    assert "fails to import" in broken["problem"]
    result = cli("plugins", "papr", "--json")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "There is no plugin 'papr'. Did you mean 'paper'? List all: profdeck plugins" in result.stderr


PROBLEMS = {
    "NoHooks": "implements no hook. Mark its methods with @profdeck.hookimpl",
    "NoHooksButRequiredOptions": "implements no hook. Mark its methods with @profdeck.hookimpl",
    "NoConstructor": "A listener with Options requires a constructor __init__(self, options)",
    "OptionsAreADict": "has Options, so it must be a class, and Options must be an attrs class",
    "NeedsOptions": "Define a class Options, or remove the constructor's required arguments",
    "NoLibrary": "It needs papyrus, which is not installed. Install it with",
    "NoInstance": "OSError: full",
    "Fails": "cannot be created: OSError: disk",
}


def test_plugins_and_check_report_the_same_problems(cli: Cli, listeners_config: Path) -> None:
    plugins = {plugin["name"]: plugin for plugin in json.loads(cli("plugins", "--json").stdout)["plugins"]}
    check_list = json.loads(cli("check", listeners_config, "--json").stdout)["checks"]
    checks = {check["what"].removeprefix("listeners."): check for check in check_list}
    for name, problem in PROBLEMS.items():
        assert not plugins[name]["usable"]
        assert problem in plugins[name]["problem"]
        assert not checks[name]["ok"]
        assert problem in checks[name]["detail"]
    assert plugins["NoLibrary"]["hooks"] == [{"name": "profile_stop", "wrapper": False, "order": "tryfirst"}]


def test_listener_with_required_options_is_usable(cli: Cli, listeners_config: Path) -> None:
    (plugin,) = json.loads(cli("plugins", "Fine", "--json").stdout)["plugins"]
    assert (plugin["usable"], plugin["problem"]) == (True, None)
    properties = plugin["options_schema"]["properties"]
    assert properties["word"] == {"type": "string", "minLength": 1, "maxLength": 9}
    assert properties["ratios"] == {"type": "array", "items": {"type": "number"}, "minItems": 0, "default": []}
    assert properties["activities"]["anyOf"][0]["items"] == {"enum": ["cpu", "cuda", "npu"]}
    output = cli("plugins", "Fine").stdout
    assert "Hooks: profile_stop (tryfirst)." in output
    assert "word: str (length >= 1, length <= 9) = required" in output


def test_options_that_are_not_an_attrs_class_are_not_listed(cli: Cli, listeners_config: Path) -> None:
    result = cli("plugins", "OptionsAreADict")
    assert result.exit_code == 3
    assert "has Options, so it must be a class, and Options must be an attrs class" in result.stderr
