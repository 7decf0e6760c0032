"""`profdeck baseline`: what is kept, when a run is over the limit, and how continuous integration learns it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import Result

from captured_runs import write_run
from gpu_job import GpuJob

Cli = Callable[..., Result]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record three runs of one capture: like the baseline, and slower."""
    for name, product_us in (("main", 400.0), ("same", 400.0), ("slower", 500.0)):
        write_run(tmp_path / name, 1, lambda _, us=product_us: GpuJob(ranks=2, steps=8, product_us=us))  # type: ignore[misc]
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


@pytest.fixture
def saved(cli: Cli) -> None:
    assert cli("baseline", "save", "main", "main").exit_code == 0


def told(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.mark.usefixtures("saved")
def test_a_slower_run_is_over_the_limit(cli: Cli) -> None:
    found = cli("baseline", "check", "main", "slower")
    assert found.exit_code == 5
    assert "trainer is slower: the median global step takes 10.3" in told(found)
    assert told(found).endswith("Over the limit of 5%.")
    within = cli("baseline", "check", "main", "slower", "--fail-over", "40%")
    assert (within.exit_code, told(within).endswith("Within the limit of 40%.")) == (0, True)
    assert cli("baseline", "check", "main", "same").exit_code == 0


@pytest.mark.usefixtures("saved")
def test_it_agrees_with_diff(cli: Cli) -> None:
    checked = json.loads(cli("baseline", "check", "main", "slower", "--json").stdout)
    compared = json.loads(cli("diff", "main", "slower", "--json", "--fail-over", "5%").stdout)
    (change,) = checked["judged"]
    (role,) = compared["roles"]
    assert {key: change[key] for key in role["iterations"][0]} == role["iterations"][0]
    assert change["over"] is bool(compared["regressions"]) is True
    assert cli("diff", "baselines/main.json", "slower", "--fail-over", "5%").exit_code == 5  # it takes the file, too


@pytest.mark.usefixtures("saved")
def test_junit_and_github_say_the_same(cli: Cli) -> None:
    found = cli(
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
    suite = ET.parse("out/j.xml").getroot()  # noqa: S314 - our own file
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "2", "0")
    texts = [failure.get("message") for failure in suite.iter("failure")]
    assert [line.partition("::trainer")[0] for line in found.output.splitlines() if line.startswith("::")] == [
        "::error title=profdeck main"
    ] * 2
    assert all(f"::{str(text).replace('%', '%25')}" in found.output for text in texts)


@pytest.mark.usefixtures("saved")
def test_on_github_annotations_need_no_option(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert "::error title=profdeck main::" in cli("baseline", "check", "main", "slower").output
    assert "::error" not in cli("baseline", "check", "main", "slower", "--no-github").output
    json.loads(cli("baseline", "check", "main", "slower", "--json").stdout)


@pytest.mark.usefixtures("saved")
def test_what_cannot_be_judged_is_no_success(cli: Cli, tmp_path: Path) -> None:
    GpuJob(ranks=2, steps=8).write(tmp_path / "other")
    for trace in (tmp_path / "other").iterdir():  # without a device
        document = json.loads(gzip.decompress(trace.read_bytes()))
        document["traceEvents"] = [event for event in document["traceEvents"] if event["pid"] != 0]
        trace.write_bytes(gzip.compress(json.dumps(document).encode()))
    found = cli("baseline", "check", "main", "other", "--fail-on", "device", "--junit", "j.xml", "--github")
    assert found.exit_code == 4
    assert "::warning title=profdeck main::" in found.output
    (error,) = ET.parse("j.xml").getroot().iter("error")  # noqa: S314 - our own file
    assert str(error.get("message")) in told(found)


def test_a_run_that_is_not_whole_is_no_baseline(cli: Cli, tmp_path: Path) -> None:
    (cut, *_) = sorted((tmp_path / "main").rglob("*.gz"))
    cut.write_bytes(cut.read_bytes()[:-300])
    found = cli("baseline", "save", "main", "main")
    assert (found.exit_code, "cannot be a baseline because it is incomplete" in told(found)) == (4, True)
    assert not Path("baselines").exists()


def test_names_and_places(cli: Cli) -> None:
    missing = cli("baseline", "check", "main", "same")
    assert (missing.exit_code, "There is no baseline main in baselines" in told(missing)) == (2, True)
    assert cli("baseline", "save", "../main", "main").exit_code == 2
    assert cli("baseline", "save", "v1", "main", "--directory", "else/where").exit_code == 0
    assert Path("else/where/v1.json").is_file()
    Path("else/where/v1.json").write_text("{}")
    assert cli("baseline", "check", "v1", "same", "--directory", "else/where").exit_code == 4
