from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Cli = Callable[..., Result]

VALID_CONFIG = """
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
    path.write_text(VALID_CONFIG, encoding="utf-8")
    return path


def failed_checks(result: Result) -> dict[str, str]:
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


def test_check_creates_no_files(cli: Cli, config: Path, tmp_path: Path) -> None:
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
    arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    result = cli("check", config, "--json", "--set", "nonsense", *arguments)
    problems = failed_checks(result)
    assert result.exit_code == 2
    assert "expected key=value" in problems["--set"]
    assert problems["steps"].startswith("No step is selected")
    assert "file is not a directory" in problems["output"]
    assert "profile_stop has no argument 'paper'" in problems["listeners.paper-wrong"]
    assert "Did you mean 'paper-log'?" in problems["listeners.papr-log"]
    assert "'sheets' must be >= 1" in problems["roles.trainer.options"]
    assert "Did you mean 'paper'?" in problems["roles.rollout.backend"]
    assert "pip install" in problems["roles.ref.backend"]
    assert "expected an integer" in problems["roles.ref.options"]
    assert "version 1.5 is installed" in problems["roles.critic.backend"]
    assert "No module named 'paper_nowhere'" in problems["roles.reward.backend"]
    assert len(problems) == 11


def test_unusable_plugin_has_its_own_exit_code(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--set", "trainer.backend=paper-absent")
    assert result.exit_code == 3
    assert "10 checked, 1 failed." in result.stdout


def test_all_errors_of_an_invalid_config_are_reported(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--json", "--set", "on_error=explode", "--set", "trainer.warmup_steps=true")
    assert result.exit_code == 2
    assert "on_error: expected one of warn, raise" in failed_checks(result)["config"]
    assert "roles.trainer.warmup_steps: expected an integer" in failed_checks(result)["config"]


def test_invalid_key_does_not_hide_errors_of_backends(cli: Cli, config: Path) -> None:
    settings = ("on_error=explode", "trainer.warmup_steps=true", "trainer.options.sheets=0", "rollout.backend=papper")
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    problems = failed_checks(cli("check", config, "--json", *arguments))
    assert problems.keys() == {"config", "roles.trainer.options", "roles.rollout.backend"}
    assert "'sheets' must be >= 1" in problems["roles.trainer.options"]
    assert "Did you mean 'paper'?" in problems["roles.rollout.backend"]


@pytest.mark.parametrize(("name", "text"), [("absent.yaml", None), ("a.json", "{}"), ("b.toml", "= 1")])
def test_file_that_is_not_a_config_is_reported(cli: Cli, tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    result = cli("check", tmp_path / name, "--json")
    assert result.exit_code == 2
    assert name in failed_checks(result)["config"]


def test_first_step_after_the_final_step_is_reported(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--json", "--set", "final_step=5")
    assert failed_checks(result) == {"steps": "The first selected step is 10, but final_step is 5."}


def test_config_without_roles_is_rejected(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text("steps: [1]", encoding="utf-8")
    result = cli("check", path, "--json")
    assert (result.exit_code, [*failed_checks(result)]) == (2, ["roles"])


def test_role_option_skips_other_roles(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--json", "--role", "trainer", "--set", "rollout.backend=papper")
    assert result.exit_code == 0
    assert "roles.rollout" not in result.stdout


def test_unknown_role_suggests_the_nearest(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--json", "--role", "trainr")
    assert result.exit_code == 2
    assert "Did you mean 'trainer'? Its roles: trainer, rollout." in failed_checks(result)["roles.trainr"]


def test_output_without_write_access_is_reported(cli: Cli, config: Path) -> None:
    problems = failed_checks(cli("check", config, "--json", "--set", "output=/proc/profiles"))
    assert problems["output"].startswith("/proc cannot be written: ")


def test_removed_measure_option_is_an_error(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--connect", "--measure")
    assert result.exit_code == 2
    assert "--measure was removed without a replacement" in result.stderr


def test_here_runs_the_preflight_of_the_backend(cli: Cli, config: Path) -> None:
    arguments = ("check", config, "--json", "--set", "trainer.options.jammed=true")
    assert cli(*arguments).exit_code == 0
    result = cli(*arguments, "--here")
    assert result.exit_code == 2
    assert failed_checks(result) == {"roles.trainer on this machine": "The paper is jammed. Open the tray."}


def test_here_uses_the_identity_of_the_launcher(cli: Cli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = cli("check", config, "--json", "--here", "--set", "trainer.ranks=[4]")
    assert failed_checks(result) == {
        "roles.trainer on this machine": "None of the selected ranks is in this job, which has the ranks 0 to 3."
    }


@pytest.mark.usefixtures("tally")
def test_config_of_engines_needs_no_steps(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("roles: {chat: {backend: tally-engine}}\n")
    result = cli("check", config, "--json")
    assert result.exit_code == 0, result.stdout
    config.write_text("on_demand: false\nroles: {chat: {backend: tally-engine}, trainer: {backend: tally}}\n")
    assert "No step is selected" in failed_checks(cli("check", config, "--json"))["steps"]


def test_on_demand_config_needs_no_steps(cli: Cli, config: Path) -> None:
    result = cli("check", config, "--set", "steps=[]")
    assert result.exit_code == 0
    assert "none: captures are started on demand while the job runs" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("steps", "warnings"),
    [
        ("[1..1000]", []),
        ("[1..1001]", ["steps 1 to 1001"]),
        ("[700..1300, 1..699, 5000..5010]", ["steps 1 to 1300"]),
        ("['every 1']", ["steps 1 to the end"]),
        ("['every 5000 for 2000']", ["steps 5000 to 6999"]),
        ("['every 2', 'every 1000 for 999']", []),
        ("['every 10 min for 1001']", ["1001 steps"]),
    ],
)
def test_check_warns_of_captures_longer_than_the_limit(cli: Cli, config: Path, steps: str, warnings: list[str]) -> None:
    config.write_text(VALID_CONFIG.replace("[10, 20..22]", steps), encoding="utf-8")
    result = cli("check", config, "--role", "trainer", "--json")
    assert result.exit_code == 0
    listed = [check for check in json.loads(result.stdout)["checks"] if check["warning"]]
    assert [check["detail"].partition(" will be stopped")[0] for check in listed] == [
        f"The capture of {text}" for text in warnings
    ]
    assert all(check["ok"] for check in listed)
    longer = cli("check", config, "--role", "trainer", "--set", "trainer.options.max_capture_steps=1000000", "--json")
    assert not any(check["warning"] for check in json.loads(longer.stdout)["checks"]) or warnings == [
        "steps 1 to the end"
    ]
    assert ("1 warning." in cli("check", config, "--role", "trainer").stdout) == bool(warnings)
