"""Tests of `prune`. Only complete steps are deleted, and the run's status does not change."""

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


def run_cli(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [*map(str, arguments)])


def list_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in run.glob("step_*"))


def is_complete(run: Path) -> bool:
    report = read_run(run)
    return (report.status, report.problems) == (Status.COMPLETE, ())


def step_directory(run: Path, step: int) -> Path:
    return run / f"step_{step:06d}"


def manifest_path(run: Path, step: int) -> Path:
    return step_directory(run, step) / "trainer" / f"rank_0000.step{step}.json"


def test_newest_steps_are_kept(run: Path) -> None:
    size_bytes = sum(path.stat().st_size for path in step_directory(run, 1).rglob("*") if path.is_file())
    result = run_cli("prune", run, "--steps", 2)
    assert (result.exit_code, result.output.count("\n")) == (0, 1)
    assert result.output.startswith("Deleted 2 steps (")
    assert "2 steps (" in result.output.partition(";")[2]
    assert list_steps(run) == [5, 7]
    assert is_complete(run)
    ls_result = run_cli("ls", run)
    assert ls_result.exit_code == 0
    assert "2 older steps were pruned: " in ls_result.output
    (first, second) = json.loads(run_cli("ls", run, "--json").output)["pruned"]
    assert (first["first_step"], first["last_step"], first["captures"], second["first_step"]) == (1, 1, ["step1"], 3)
    assert first["size_bytes"] >= size_bytes
    assert run_cli("summary", run).exit_code == 0
    assert run_cli("prune", run, "--steps", 2).output.startswith("Deleted 0 steps (")
    assert sorted(path.name for path in run.iterdir()) == [
        "processes",
        "pruned",
        "run.json",
        *(step_directory(run, step).name for step in (5, 7)),
    ]


def test_prune_runs_as_the_finish_command(tmp_path: Path) -> None:
    command = f'{sys.executable} -m profdeck prune "$PROFDECK_FINISH_DIRECTORY/.." --steps 2'
    settings = {"output": str(tmp_path), "run": "run", "steps": STEPS, "trainer.backend": "tally"}
    profiler = Profiler.from_config(settings=settings | {"finish.command": command})
    for step in range(STEPS[-1] + 2):
        with profiler.capture(step):
            pass
        await_own_finishes()
    assert (list_steps(tmp_path / "run"), is_complete(tmp_path / "run")) == ([5, 7], True)


def test_steps_are_pruned_by_age_and_size(run: Path) -> None:
    prune(run, age_days=1)
    assert list_steps(run) == STEPS
    document = json.loads(manifest_path(run, 1).read_text())
    manifest_path(run, 1).write_text(json.dumps(document | {"ended_ns": document["ended_ns"] - 2 * 86_400_000_000_000}))
    prune(run, age_days=1)
    assert list_steps(run) == STEPS[1:]
    limit_bytes = sum(step.pruned.size_bytes for step in prune(run, dry_run=True)[1:])
    prune(run, size_bytes=limit_bytes)
    assert list_steps(run) == STEPS[2:]
    prune(run, size_bytes=0, steps=1, age_days=0)
    assert list_steps(run) == STEPS[-1:]  # the newest step is always kept
    assert is_complete(run)


def test_removed_option_role_is_rejected(run: Path) -> None:
    result = run_cli("prune", run, "--role", "trainer", "--steps", 1)
    assert (result.exit_code, "--role was removed" in result.output) == (2, True)
    assert list_steps(run) == STEPS


def test_deletions_by_earlier_versions_are_listed(run: Path) -> None:
    """Earlier versions could delete one role's captures. If interrupted, they left a ``.pruned.*`` directory."""
    (run / "pruned").mkdir()
    step = {"first_step": 1, "last_step": 1, "captures": ["step1"], "size_bytes": 7, "pruned_ns": 1}
    (run / "pruned" / "step_000001.rollout.json").write_text(json.dumps(step | {"role": "rollout"}))
    (run / ".pruned.step_000001.rollout").mkdir()
    assert "1 older step of rollout was pruned" in run_cli("ls", run).stdout
    prune(run, steps=1)
    assert not (run / ".pruned.step_000001.rollout").exists()
    output = run_cli("ls", run).stdout
    assert "1 older step of rollout was pruned" in output
    assert "3 older steps were pruned" in output
    assert is_complete(run)


def test_dry_run_deletes_nothing(run: Path) -> None:
    before = sorted(run.rglob("*"))
    result = run_cli("prune", run, "--steps", 1, "--dry-run", "--json")
    document = json.loads(result.output)
    assert ([step["first_step"] for step in document["deleted"]], document["dry_run"]) == ([1, 3, 5], True)
    assert [step["first_step"] for step in document["kept"]] == [7]
    assert run_cli("prune", run, "--steps", 1, "--dry-run").output.startswith("Would delete 3 steps (")
    assert sorted(run.rglob("*")) == before


def test_pinned_steps_do_not_replace_newer_steps(run: Path) -> None:
    names = sorted(path.name for path in run.glob("step_*"))
    (run / names[0] / "pinned").touch()
    sizes = {step.directory.name: step.pruned.size_bytes for step in prune(run, dry_run=True, steps=len(names))}
    newest = names[-2:]
    for limits in ({"steps": 2}, {"size_bytes": sum(sizes[name] for name in newest)}):
        kept_steps = [step.directory.name for step in prune(run, dry_run=True, **limits) if not step.is_deleted]
        assert kept_steps == [names[0], *newest]


def pin_step(run: Path) -> None:
    (step_directory(run, 1) / "pinned").touch()


def change_manifest(run: Path, **fields: Any) -> None:
    document = json.loads(manifest_path(run, 1).read_text()) | {"status": "recording"} | fields
    manifest_path(run, 1).write_text(json.dumps(document))


def write_invalid_finish(run: Path) -> None:
    (step_directory(run, 1) / "finish.step1.json").write_text("no record")


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (pin_step, "it is pinned"),
        (change_manifest, "rank 0 of trainer may still be recording"),
        (lambda run: change_manifest(run, host="elsewhere"), "rank 0 of trainer may still be recording"),
        (lambda run: change_manifest(run, pid_namespace="pid:[1]"), "rank 0 of trainer may still be recording"),
        (lambda run: manifest_path(run, 1).write_text("{"), "not a readable manifest"),
        (write_invalid_finish, "finish.step1.json"),
    ],
    ids=[
        "pinned",
        "recorded",
        "recorded elsewhere",
        "recorded in another container",
        "damaged",
        "a finish that cannot be read",
    ],
)
def test_pinned_running_or_unreadable_steps_are_kept(run: Path, prepare: Callable[[Path], object], reason: str) -> None:
    prepare(run)
    result = run_cli("prune", run, "--steps", 1)
    assert result.exit_code == 0
    assert "warning: Step 1 is kept: " in result.output
    assert reason in result.output
    assert list_steps(run) == [1, 7]


def test_step_with_an_artifact_named_like_a_manifest_is_deleted(run: Path) -> None:
    artifact = manifest_path(run, 1).with_name("rank_0000.step1.memory.json")
    artifact.write_text("{}")
    content = json.loads(manifest_path(run, 1).read_text())
    content["artifacts"].append({"name": artifact.name, "kind": "memory", "size_bytes": 2, "whole": True})
    manifest_path(run, 1).write_text(json.dumps(content))
    prune(run, steps=1)
    assert list_steps(run) == [7]


def test_capture_of_an_exited_process_is_deleted(run: Path) -> None:
    change_manifest(run, pid=2**22 - 1)
    prune(run, steps=1)
    assert list_steps(run) == [7]


@pytest.mark.parametrize("is_renamed", [False, True])
def test_interrupted_deletion_is_completed(run: Path, is_renamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (list_steps(run), is_complete(run)) == ([3, 5, 7], True)


def test_concurrent_calls_delete_each_step_once(run: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prune(run, steps=1), range(8)))
    assert (list_steps(run), is_complete(run)) == ([7], True)
    assert len(read_run(run).pruned) == 3


def test_links_are_not_followed(run: Path, tmp_path: Path) -> None:
    step_directory(run, 1).rename(tmp_path / "elsewhere")
    step_directory(run, 1).symlink_to(tmp_path / "elsewhere")
    prune(run, steps=1)
    assert (tmp_path / "elsewhere" / "trainer").exists()
    assert list_steps(run) == [1, 7]


def test_limit_and_run_are_required(run: Path, tmp_path: Path) -> None:
    assert (run_cli("prune", run).exit_code, run_cli("prune", tmp_path / "none", "--steps", 1).exit_code) == (2, 4)
    assert "Specify what to keep: --steps N, --gigabytes GB or --days DAYS." in run_cli("prune", run).output
    assert run_cli("prune", run, "--steps", 0).exit_code == 2
    assert list_steps(run) == STEPS
