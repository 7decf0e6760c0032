from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata

import pytest
from typer.testing import Result

Cli = Callable[..., Result]


def test_broken_backends_do_not_break_the_list(cli: Cli) -> None:
    result = cli("backends", "--json")
    assert result.exit_code == 0
    offers = {offer["name"]: offer for offer in json.loads(result.stdout)["backends"]}
    assert offers["paper"] == {
        "name": "paper",
        "provided_by": "paper 1.5",
        "usable": True,
        "problem": None,
        "libraries": [{"names": ["paper"], "supported_versions": ">=1,<2", "installed": "paper 1.5"}],
    }
    assert "needs papyrus, which is not installed" in offers["paper-absent"]["problem"]
    assert offers["paper-absent"]["libraries"][0]["installed"] is None
    assert "version 1.5 is installed" in offers["paper-old"]["problem"]
    assert "No module named 'paper_nowhere'" in offers["paper-broken"]["problem"]


def test_table(cli: Cli) -> None:
    result = cli("backends")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "paper paper 1.5 paper 1.5 >=1,<2 yes" in lines
    assert "paper-absent paper 1.5 papyrus missing >=3 no" in lines
    assert "pip install 'profdeck[paper-absent]'" in " ".join(lines)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_none_installed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: metadata.EntryPoints())
    assert cli("backends").stdout.startswith("No backends are installed.")
    assert json.loads(cli("backends", "--json").stdout) == {"backends": []}


def test_options_of_one(cli: Cli) -> None:
    result = cli("backends", "paper")
    assert result.exit_code == 0
    assert "paper: Writes traces of invented operators." in result.stdout
    assert "Supports paper >=1,<2: paper 1.5." in result.stdout
    own, common = result.stdout.split("Options of every backend")
    assert "sheets: int = 3" in own
    assert "Default: 3. More give larger `.trace.json` files." in own
    assert "with_stack: bool = false" in common
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_options_as_json(cli: Cli) -> None:
    options = json.loads(cli("backends", "paper", "--json").stdout)["options"]
    assert options[0] == {
        "name": "sheets",
        "type": "int",
        "default": "3",
        "text": "Operators per trace. Default: 3. More give larger ``.trace.json`` files.",
        "common": False,
    }
    assert {option["name"] for option in options if option["common"]} >= {"with_stack", "record_shapes"}


def test_options_of_one_that_cannot_be_used(cli: Cli) -> None:
    result = cli("backends", "paper-absent")
    assert result.exit_code == 0
    assert "Supports papyrus >=3: not installed." in result.stdout
    assert "sheets: int = 3" in result.stdout
    assert result.stderr.startswith("warning: The backend 'paper-absent' needs papyrus")


@pytest.mark.parametrize(("name", "said"), [("papr", "Did you mean 'paper'?"), ("paper-broken", "fails to import")])
def test_one_that_cannot_be_explained(cli: Cli, name: str, said: str) -> None:
    result = cli("backends", name, "--json")
    assert (result.exit_code, result.stdout) == (3, "")
    assert said in result.stderr
