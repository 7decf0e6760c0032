from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Cli = Callable[..., Result]

GOOD = """
output: out/deep
steps: [10, 20..22]
listeners: [paper-log]
roles:
  trainer: {backend: paper, ranks: [0, 8], options: {sheets: 2}}
  rollout: {backend: paper, ranks: all}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def problems(result: Result) -> dict[str, str]:
    return {check["what"]: check["detail"] for check in json.loads(result.stdout)["checks"] if not check["ok"]}


def test_valid_config_lists_all_checks(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert document["file"] == str(config)
    assert [check["what"] for check in document["checks"]] == [
        "config", "steps", "output", "listeners.paper-log",
        "roles.trainer.ranks", "roles.trainer.backend", "roles.trainer.options",
        "roles.rollout.ranks", "roles.rollout.backend", "roles.rollout.options",
    ]  # fmt: skip


def test_no_files_are_created(cli: Cli, config: Path, tmp_path: Path) -> None:
    assert cli("check", config).exit_code == 0
    assert [*tmp_path.iterdir()] == [config]


def test_table_fits_80_columns(cli: Cli, config: Path) -> None:
    result = cli("check", config)
    assert "paper, with paper 1.5" in result.stdout
    assert result.stdout.endswith("10 checked, no problems.\n")
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_all_problems_are_reported_together(cli: Cli, config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = {
        "steps": "[]",
        "on_demand": "false",
        "output": "file/below",
        "listeners": "[paper-wrong, papr-log, paper-log]",
        "trainer.options.sheets": "0",
        "rollout.backend": "papper",
        "ref.backend": "paper-absent",
        "ref.options.sheets": "many",
        "critic.backend": "paper-old",
        "reward.backend": "paper-broken",
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    result = cli("check", config, "--json", "--set", "nonsense", *arguments)
    found = problems(result)
    assert result.exit_code == 2
    assert "expected key=value" in found["--set"]
    assert found["steps"].startswith("No step is selected")
    assert "file is not a directory" in found["output"]
    assert "profile_stop has no argument 'paper'" in found["listeners.paper-wrong"]
    assert "Did you mean 'paper-log'?" in found["listeners.papr-log"]
    assert "'sheets' must be >= 1" in found["roles.trainer.options"]
    assert "Did you mean 'paper'?" in found["roles.rollout.backend"]
    assert "pip install" in found["roles.ref.backend"]
    assert "expected an integer" in found["roles.ref.options"]
    assert "version 1.5 is installed" in found["roles.critic.backend"]
    assert "No module named 'paper_nowhere'" in found["roles.reward.backend"]
    assert len(found) == 11


def test_exit_code_of_a_plugin_problem(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--set", "trainer.backend=paper-absent")
    assert result.exit_code == 3
    assert "10 checked, 1 failed." in result.stdout


def test_invalid_config(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--json", "--set", "on_error=explode", "--set", "trainer.warmup_steps=true")
    assert result.exit_code == 2
    assert "on_error: expected one of warn, raise" in problems(result)["config"]
    assert "roles.trainer.warmup_steps: expected an integer" in problems(result)["config"]


@pytest.mark.parametrize(("name", "text"), [("absent.yaml", None), ("a.json", "{}"), ("b.toml", "= 1")])
def test_file_is_not_a_config(cli: Cli, tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    result = cli("check", tmp_path / name, "--json")
    assert result.exit_code == 2
    assert name in problems(result)["config"]


def test_first_step_is_after_final_step(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--json", "--set", "final_step=5")
    assert problems(result) == {"steps": "The first selected step is 10, but final_step is 5."}


def test_no_roles(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text("steps: [1]", encoding="utf-8")
    result = cli("check", path, "--json")
    assert (result.exit_code, [*problems(result)]) == (2, ["roles"])


def test_one_role(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--json", "--role", "trainer", "--set", "rollout.backend=papper")
    assert result.exit_code == 0
    assert "roles.rollout" not in result.stdout


def test_unknown_role(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--json", "--role", "trainr")
    assert result.exit_code == 2
    assert "Did you mean 'trainer'? Its roles: trainer, rollout." in problems(result)["roles.trainr"]


def test_output_is_not_writable(cli: Cli, config: Path) -> None:
    found = problems(cli("check", config, "--json", "--set", "output=/proc/profiles"))
    assert found["output"].startswith("/proc cannot be written: ")


def test_removed_measure_option_is_an_error(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--connect", "--measure")
    assert result.exit_code == 2
    assert "--measure was removed without a replacement" in result.stderr


def test_here_runs_the_preflight_of_the_backend(cli: Cli, config: Path) -> None:
    jammed = ("check", config, "--json", "--set", "trainer.options.jammed=true")
    assert cli(*jammed).exit_code == 0
    result = cli(*jammed, "--here")
    assert result.exit_code == 2
    assert problems(result) == {"roles.trainer on this machine": "The paper is jammed. Open the tray."}


def test_here_uses_the_identity_of_the_launcher(cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = cli("check", config, "--json", "--here", "--set", "trainer.ranks=[4]")
    assert problems(result) == {
        "roles.trainer on this machine": "None of the selected ranks is in this job, which has the ranks 0 to 3."
    }


@pytest.mark.usefixtures("tally")
def test_config_of_engines_needs_no_steps(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("roles: {chat: {backend: tally-engine}}\n")
    result = cli("check", config, "--json")
    assert result.exit_code == 0, result.stdout
    config.write_text("on_demand: false\nroles: {chat: {backend: tally-engine}, trainer: {backend: tally}}\n")
    assert "No step is selected" in problems(cli("check", config, "--json"))["steps"]


def test_on_demand_config_needs_no_steps(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--set", "steps=[]")
    assert result.exit_code == 0
    assert "none: captures are started on demand while the job runs" in " ".join(result.stdout.split())
