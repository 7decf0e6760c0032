from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Cli = Callable[..., Result]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(
        "steps: [10]\nroles:\n  trainer: {backend: paper, options: {torn: true}}\n  ref: {backend: papper}\n", "utf-8"
    )
    return path


def parse_rows(result: Result) -> dict[str, tuple[object, str]]:
    assert result.exit_code == 0
    return {row["key"]: (row["value"], row["source"]) for row in json.loads(result.stdout)["values"]}


def test_every_value_has_its_source(cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFDECK__TRAINER__RANKS", "all")
    rows = parse_rows(cli("config", "show", config, "--set", "trainer.options.sheets=5", "--json"))
    assert rows["steps"] == ([10], f"file {config}")
    assert rows["on_error"] == ("warn", "default")
    assert rows["roles.trainer.ranks"] == ("all", "environment PROFDECK__TRAINER__RANKS")
    assert rows["roles.trainer.options.sheets"] == (5, "--set")
    assert rows["roles.trainer.options.torn"] == (True, f"file {config}")
    assert rows["roles.trainer.options.with_stack"] == (False, "default")


def test_mapping_of_options_replaces_all_options(cli: Cli, config: Path) -> None:
    rows = parse_rows(cli("config", "show", config, "--set", "trainer.options={sheets: 4}", "--json"))
    assert rows["roles.trainer.options.sheets"] == (4, "--set")
    assert rows["roles.trainer.options.torn"] == (False, "default")


def test_options_of_an_unknown_backend_are_shown_without_defaults(cli: Cli, config: Path) -> None:
    arguments = ("config", "show", config, "--set", "ref.options.ink=red")
    result = cli(*arguments, "--json")
    assert parse_rows(result)["roles.ref.options.ink"] == ("red", "--set")
    (note,) = json.loads(result.stdout)["notes"]
    assert note.startswith("roles.ref.options are shown without defaults: There is no backend 'papper'.")
    assert result.stderr == ""
    assert cli(*arguments).stderr == f"warning: {note}\n"


def test_config_file_is_read_from_the_environment(cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_rows(cli("config", "show", "--json"))["steps"] == ([], "default")
    monkeypatch.setenv("PROFDECK_CONFIG", str(config))
    assert parse_rows(cli("config", "show", "--json"))["steps"] == ([10], f"file {config} (PROFDECK_CONFIG)")


def test_table_keeps_the_order_of_the_config(cli: Cli, config: Path) -> None:
    result = cli("config", "show", config.name)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["key", "value", "source"]
    assert ["steps", "[10]", "file", "a.yaml"] in lines
    assert ["final_step", "null", "default"] in lines
    keys = [line[0] for line in lines]
    assert keys.index("roles.trainer.options.sheets") < keys.index("roles.ref.backend")


def test_invalid_config_is_rejected(cli: Cli, config: Path) -> None:
    result = cli("config", "show", config, "--set", "step=[1]")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: step: ")
