"""Tests for deleting old steps. Only complete steps are deleted, and the run's status does not change."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from profdeck import Profiler
from profdeck.after_capture.finish_child import await_own_finishes
from profdeck.after_capture.prune import prune
from profdeck.cli import app
from profdeck.records.status import Status
from profdeck.verification.run_report import read_run
from profdeck_traces.inputs.sources import find_sources

pytestmark = pytest.mark.usefixtures("tally")
STEPS = [1, 3, 5, 7]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four captures."""
    profiler = Profiler.from_config(
        settings={"output": str(tmp_path), "run": "run", "steps": STEPS, "trainer.backend": "tally"}
    )
    for step in range(STEPS[-1] + 2):
        with profiler.capture(step):
            pass
    return tmp_path / "run"


def cli(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*map(str, arguments)])


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in run.glob("step_*"))


def is_complete(run: Path) -> bool:
    report = read_run(run)
    return (report.status, report.problems) == (Status.COMPLETE, ())


def of(run: Path, step: int) -> Path:
    return run / f"step_{step:06d}"


def manifest(run: Path, step: int) -> Path:
    return of(run, step) / "trainer" / f"rank_0000.step{step}.json"


def test_the_newest_steps_stay(run: Path) -> None:
    size_bytes = sum(path.stat().st_size for path in of(run, 1).rglob("*") if path.is_file())
    result = cli("prune", run, "--steps", 2)
    assert (result.exit_code, result.output.count("\n")) == (0, 1)
    assert result.output.startswith("Deleted 2 steps (")
    assert "2 steps (" in result.output.partition(";")[2]
    assert steps(run) == [5, 7]
    assert is_complete(run)
    listed = cli("ls", run)
    assert listed.exit_code == 0
    assert "2 older steps were pruned: " in listed.output
    (first, second) = json.loads(cli("ls", run, "--json").output)["pruned"]
    assert (first["first_step"], first["last_step"], first["captures"], second["first_step"]) == (1, 1, ["step1"], 3)
    assert first["size_bytes"] >= size_bytes
    assert cli("summary", run).exit_code == 0
    assert cli("prune", run, "--steps", 2).output.startswith("Deleted 0 steps (")
    assert sorted(path.name for path in run.iterdir()) == [
        "processes",
        "pruned",
        "run.json",
        *(of(run, step).name for step in (5, 7)),
    ]


def test_prune_as_the_command_of_a_finish(tmp_path: Path) -> None:
    command = f'{sys.executable} -m profdeck prune "$PROFDECK_FINISH_DIRECTORY/.." --steps 2'
    settings = {"output": str(tmp_path), "run": "run", "steps": STEPS, "trainer.backend": "tally"}
    profiler = Profiler.from_config(settings=settings | {"finish.command": command})
    for step in range(STEPS[-1] + 2):
        with profiler.capture(step):
            pass
        await_own_finishes()
    assert (steps(tmp_path / "run"), is_complete(tmp_path / "run")) == ([5, 7], True)


def test_by_size_and_by_age(run: Path) -> None:
    prune(run, age_days=1)
    assert steps(run) == STEPS
    about = json.loads(manifest(run, 1).read_text())
    manifest(run, 1).write_text(json.dumps(about | {"ended_ns": about["ended_ns"] - 2 * 86_400_000_000_000}))
    prune(run, age_days=1)
    assert steps(run) == STEPS[1:]
    room = sum(step.pruned.size_bytes for step in prune(run, dry_run=True)[1:])
    prune(run, size_bytes=room)
    assert steps(run) == STEPS[2:]
    prune(run, size_bytes=0, steps=1, age_days=0)
    assert steps(run) == STEPS[-1:]  # the newest stays
    assert is_complete(run)


def test_the_option_role_was_removed(run: Path) -> None:
    result = cli("prune", run, "--role", "trainer", "--steps", 1)
    assert (result.exit_code, "--role was removed" in result.output) == (2, True)
    assert steps(run) == STEPS


def test_deletions_by_earlier_versions_are_listed(run: Path) -> None:
    """Earlier versions could delete one role's captures. If interrupted, they left a ``.pruned.*`` directory."""
    (run / "pruned").mkdir()
    step = {"first_step": 1, "last_step": 1, "captures": ["step1"], "size_bytes": 7, "pruned_ns": 1}
    (run / "pruned" / "step_000001.rollout.json").write_text(json.dumps(step | {"role": "rollout"}))
    (run / ".pruned.step_000001.rollout").mkdir()
    assert "1 older step of rollout was pruned" in cli("ls", run).stdout
    prune(run, steps=1)
    assert not (run / ".pruned.step_000001.rollout").exists()
    listed = cli("ls", run).stdout
    assert "1 older step of rollout was pruned" in listed
    assert "3 older steps were pruned" in listed
    assert is_complete(run)


def test_a_trial_deletes_nothing(run: Path) -> None:
    before = sorted(run.rglob("*"))
    result = cli("prune", run, "--steps", 1, "--dry-run", "--json")
    found = json.loads(result.output)
    assert ([one["first_step"] for one in found["deleted"]], found["dry_run"]) == ([1, 3, 5], True)
    assert [one["first_step"] for one in found["kept"]] == [7]
    assert cli("prune", run, "--steps", 1, "--dry-run").output.startswith("Would delete 3 steps (")
    assert sorted(run.rglob("*")) == before


def pin(run: Path) -> None:
    (of(run, 1) / "pinned").touch()


def record(run: Path, **changed: Any) -> None:
    document = json.loads(manifest(run, 1).read_text()) | {"status": "recording"} | changed
    manifest(run, 1).write_text(json.dumps(document))


def finish(run: Path) -> None:
    (of(run, 1) / "finish.step1.json").write_text("no record")


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (pin, "it is pinned"),
        (record, "rank 0 of trainer may still be recording"),
        (lambda run: record(run, host="elsewhere"), "rank 0 of trainer may still be recording"),
        (lambda run: manifest(run, 1).write_text("{"), "not a readable manifest"),
        (finish, "finish.step1.json"),
    ],
    ids=["pinned", "recorded", "recorded elsewhere", "damaged", "a finish that cannot be read"],
)
def test_steps_that_must_not_be_deleted(run: Path, does: Callable[[Path], object], why: str) -> None:
    does(run)
    result = cli("prune", run, "--steps", 1)
    assert result.exit_code == 0
    assert "warning: Step 1 is kept: " in result.output
    assert why in result.output
    assert steps(run) == [1, 7]


def test_an_artifact_named_like_a_manifest_does_not_prevent_the_deletion(run: Path) -> None:
    artifact = manifest(run, 1).with_name("rank_0000.step1.memory.json")
    artifact.write_text("{}")
    content = json.loads(manifest(run, 1).read_text())
    content["artifacts"].append({"name": artifact.name, "kind": "memory", "size_bytes": 2, "whole": True})
    manifest(run, 1).write_text(json.dumps(content))
    prune(run, steps=1)
    assert steps(run) == [7]


def test_a_capture_of_a_dead_process_is_deleted(run: Path) -> None:
    record(run, pid=2**22 - 1)
    prune(run, steps=1)
    assert steps(run) == [7]


@pytest.mark.parametrize("is_renamed", [False, True])
def test_an_interrupted_deletion_is_completed(run: Path, is_renamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the deletion before or after the rename. In the second case, some files are already deleted."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*((shutil, "rmtree") if is_renamed else (Path, "rename")), interrupt)
        prune(run, steps=3)
    for file in run.glob(".pruned.step_000001/trainer/rank_0000.step1.json"):
        file.unlink()
    assert is_complete(run)
    assert len(read_run(run).pruned) == is_renamed
    assert len(find_sources([run])) == (3 if is_renamed else 4)
    prune(run, steps=3)
    assert [path.name for path in run.glob(".pruned*")] == []
    assert [step.captures for step in read_run(run).pruned] == [("step1",)]
    assert (steps(run), is_complete(run)) == ([3, 5, 7], True)


def test_several_calls_at_once(run: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prune(run, steps=1), range(8)))
    assert (steps(run), is_complete(run)) == ([7], True)
    assert len(read_run(run).pruned) == 3


def test_links_are_not_followed(run: Path, tmp_path: Path) -> None:
    of(run, 1).rename(tmp_path / "elsewhere")
    of(run, 1).symlink_to(tmp_path / "elsewhere")
    prune(run, steps=1)
    assert (tmp_path / "elsewhere" / "trainer").exists()
    assert steps(run) == [1, 7]


def test_a_limit_and_a_run_are_required(run: Path, tmp_path: Path) -> None:
    assert (cli("prune", run).exit_code, cli("prune", tmp_path / "none", "--steps", 1).exit_code) == (2, 4)
    assert "Specify what to keep: --steps N, --gigabytes GB or --days DAYS." in cli("prune", run).output
    assert cli("prune", run, "--steps", 0).exit_code == 2
    assert steps(run) == STEPS
