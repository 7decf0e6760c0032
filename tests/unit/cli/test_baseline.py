"""Tests for `profdeck baseline`: saved files, the limit, and output for continuous integration."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import Result

from captured_runs import write_run
from gpu_job import GpuJob
from profdeck_traces.cli import arguments as trace_arguments

Cli = Callable[..., Result]


@pytest.fixture(autouse=True)
def write_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write three runs of one capture: the baseline, an equal run and a slower run."""
    for name, product_us in (("main", 400.0), ("same", 400.0), ("slower", 500.0)):
        write_run(tmp_path / name, 1, lambda _, us=product_us: GpuJob(ranks=2, steps=8, product_us=us))  # type: ignore[misc]
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


@pytest.fixture
def saved_baseline(cli: Cli) -> None:
    assert cli("baseline", "save", "main", "main").exit_code == 0


def output_text(result: Result | str) -> str:
    return " ".join((result if isinstance(result, str) else result.output).split())


@pytest.mark.usefixtures("saved_baseline")
def test_slower_run_exceeds_the_limit(cli: Cli) -> None:
    result = cli("baseline", "check", "main", "slower")
    assert result.exit_code == 5
    assert "trainer is slower: the median global step takes 10.3" in output_text(result)
    assert output_text(result).endswith("Over the limit of 5%.")
    passed = cli("baseline", "check", "main", "slower", "--fail-over", "40%")
    assert (passed.exit_code, output_text(passed).endswith("Within the limit of 40%.")) == (0, True)
    assert cli("baseline", "check", "main", "same").exit_code == 0


@pytest.mark.usefixtures("saved_baseline")
def test_check_and_diff_report_the_same_change(cli: Cli) -> None:
    check_document = json.loads(cli("baseline", "check", "main", "slower", "--json").stdout)
    diff_document = json.loads(cli("diff", "main", "slower", "--json", "--fail-over", "5%").stdout)
    (change,) = check_document["judged"]
    (role,) = diff_document["roles"]
    assert {key: change[key] for key in role["iterations"][0]} == role["iterations"][0]
    assert change["over"] is bool(diff_document["regressions"]) is True
    assert cli("diff", "baselines/main.json", "slower", "--fail-over", "5%").exit_code == 5  # diff reads the saved file


@pytest.mark.usefixtures("saved_baseline")
def test_junit_and_github_report_the_same_failures(cli: Cli) -> None:
    result = cli(
        "baseline",
        "check",
        "main",
        "slower",
        "--junit",
        "out/j.xml",
        "--github",
        "--fail-on",
        "steps",
        "--fail-on",
        "device",
    )
    suite = ET.parse("out/j.xml").getroot()  # noqa: S314 - written by this test
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "2", "0")
    messages = [failure.get("message") for failure in suite.iter("failure")]
    (annotation,) = [line for line in result.output.splitlines() if line.startswith("::")]
    sentence = annotation.removeprefix("::error title=profdeck main::").replace("%25", "%")
    document = json.loads(cli("baseline", "check", "main", "slower", "--json", "--no-github").stdout)
    assert document["roles"] == [{"role": "trainer", "stage": None, "verdict": "slower", "headline": sentence}]
    assert sentence in output_text(result.output.partition("::")[0])
    (role,) = json.loads(cli("diff", "main", "slower", "--json", "--fail-over", "5%").stdout)["roles"]
    assert (role["verdict"], f"{role['headline']} Over the limit of 5%.") == ("slower", sentence)
    assert all(str(message).startswith(f"{sentence} trainer: ") for message in messages)


@pytest.mark.usefixtures("saved_baseline")
def test_github_annotations_are_enabled_in_github_actions(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert "::error title=profdeck main::" in cli("baseline", "check", "main", "slower").output
    assert "::error" not in cli("baseline", "check", "main", "slower", "--no-github").output
    json.loads(cli("baseline", "check", "main", "slower", "--json").stdout)


@pytest.mark.usefixtures("saved_baseline")
def test_check_without_comparable_times_fails(cli: Cli, tmp_path: Path) -> None:
    GpuJob(ranks=2, steps=8).write(tmp_path / "other")
    for trace in (tmp_path / "other").iterdir():  # remove device events
        document = json.loads(gzip.decompress(trace.read_bytes()))
        document["traceEvents"] = [event for event in document["traceEvents"] if event["pid"] != 0]
        trace.write_bytes(gzip.compress(json.dumps(document).encode()))
    result = cli("baseline", "check", "main", "other", "--fail-on", "device", "--junit", "j.xml", "--github")
    assert result.exit_code == 6
    assert "::warning title=profdeck main::" in result.output
    errors = [str(error.get("message")) for error in ET.parse("j.xml").getroot().iter("error")]  # noqa: S314 - written by this test
    assert errors == ["trainer: side 'after' has no kernels.", "trainer: one of the runs has no devices."]
    assert all(error.removeprefix("trainer: ").rstrip(".") in output_text(result) for error in errors)


def test_undecided_change_is_not_within_the_limit(cli: Cli, tmp_path: Path) -> None:
    """Steps vary by a factor of two in both runs, so the 27 % change may be due to chance."""
    levels = {"noisy": (400.0, 700, 420, 600, 390, 660), "changed": (700.0, 390, 680, 760, 400, 620)}
    for name, times_us in levels.items():
        write_run(tmp_path / name, 6, lambda number, times_us=times_us: GpuJob(steps=1, product_us=times_us[number]))  # type: ignore[misc]
    assert cli("baseline", "save", "noisy", "noisy").exit_code == 0
    for limit in ("5%", "30%"):
        result = cli("baseline", "check", "noisy", "changed", "--fail-over", limit)
        assert result.exit_code == 6
        assert "trainer is inconclusive: " in output_text(result)
        assert f"Inconclusive for the limit of {limit}." in output_text(result)
        assert output_text(result).count("record more steps") == 1
    arguments = ("baseline", "check", "noisy", "changed")
    (role,) = json.loads(cli(*arguments, "--json").stdout)["roles"]
    assert (
        f"::warning title=profdeck noisy::{role['headline'].replace('%', '%25')}" in cli(*arguments, "--github").output
    )


@pytest.mark.usefixtures("saved_baseline")
def test_corrupt_trace_is_inconclusive_in_check_and_diff(cli: Cli, tmp_path: Path) -> None:
    (trace, *_) = sorted((tmp_path / "slower").rglob("*.gz"))
    text = gzip.decompress(trace.read_bytes())
    trace.write_bytes(gzip.compress(text[: len(text) // 2]))
    for arguments in (("baseline", "check", "main", "slower"), ("diff", "main", "slower", "--fail-over", "5%")):
        result = cli(*arguments)
        assert (result.exit_code, "trainer is inconclusive: " in output_text(result)) == (6, True)
        assert "Within the limit" not in output_text(result)


@pytest.mark.usefixtures("saved_baseline")
def test_rank_that_was_not_recorded_is_inconclusive(cli: Cli, tmp_path: Path) -> None:
    for file in (tmp_path / "same").rglob("rank_0001*"):
        file.unlink()
    result = cli("baseline", "check", "main", "same")
    assert (result.exit_code, "Within the limit" not in output_text(result)) == (6, True)
    assert "only one side has" in output_text(result)


@pytest.mark.parametrize("create", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_baseline_that_is_not_a_regular_file_is_not_read(
    cli: Cli, tmp_path: Path, create: Callable[[Path], None]
) -> None:
    """Reading such a file would never finish."""
    (tmp_path / "baselines").mkdir()
    create(tmp_path / "baselines/a.json")
    result = cli("baseline", "check", "a", "main")
    assert (result.exit_code, result.stderr) == (4, "error: baselines/a.json is not a regular file.\n")


def damage_run(run: Path) -> None:
    for trace in run.rglob("*.gz"):
        trace.write_bytes(b"not a trace")


def damage_rank(run: Path) -> None:
    next(run.rglob("rank_0001*.gz")).write_bytes(b"not a trace")


def delete_baseline(_: Path) -> None:
    Path("baselines/main.json").unlink()


def damage_baseline(_: Path) -> None:
    Path("baselines/main.json").write_text("{")


@pytest.mark.usefixtures("saved_baseline")
@pytest.mark.parametrize(
    ("fault", "code"),
    [(shutil.rmtree, 4), (damage_run, 4), (damage_rank, 4), (delete_baseline, 2), (damage_baseline, 4)],
)
def test_junit_reports_an_error_if_files_cannot_be_read(
    cli: Cli, tmp_path: Path, fault: Callable[[Path], object], code: int
) -> None:
    assert cli("baseline", "check", "main", "same", "--junit", "j.xml").exit_code == 0
    fault(tmp_path / "same")
    result = cli("baseline", "check", "main", "same", "--junit", "j.xml", "--github")
    assert result.exit_code == code
    messages = [str(error.get("message")) for error in ET.parse("j.xml").getroot().iter("error")]  # noqa: S314 - written by this test
    assert messages
    reasons = [" ".join(message.split()).removeprefix("trainer: ").rstrip(".") for message in messages]
    assert all(reason in output_text(result) for reason in reasons)


@pytest.mark.usefixtures("saved_baseline")
def test_earlier_junit_file_is_deleted_if_the_check_is_interrupted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    assert cli("baseline", "check", "main", "same", "--junit", "j.xml").exit_code == 0
    monkeypatch.setattr(trace_arguments, "summarise_paths", interrupt)
    assert cli("baseline", "check", "main", "same", "--junit", "j.xml").exit_code == 130
    assert not Path("j.xml").exists()


def test_incomplete_run_cannot_be_a_baseline(cli: Cli, tmp_path: Path) -> None:
    (trace, *_) = sorted((tmp_path / "main").rglob("*.gz"))
    trace.write_bytes(trace.read_bytes()[:-300])
    result = cli("baseline", "save", "main", "main")
    assert (result.exit_code, "cannot be a baseline because it is incomplete" in output_text(result)) == (4, True)
    assert not Path("baselines").exists()


def test_baseline_names_and_directories_are_validated(cli: Cli) -> None:
    missing = cli("baseline", "check", "main", "same")
    assert (missing.exit_code, "There is no baseline main in baselines" in output_text(missing)) == (2, True)
    assert cli("baseline", "save", "../main", "main").exit_code == 2
    assert cli("baseline", "save", "v1", "main", "--directory", "else/where").exit_code == 0
    assert Path("else/where/v1.json").is_file()
    Path("else/where/v1.json").write_text("{}")
    assert cli("baseline", "check", "v1", "same", "--directory", "else/where").exit_code == 4
