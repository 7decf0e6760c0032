"""Old captures are deleted whole or not at all, and the rest of the run is as complete as before."""

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
from profdeck.after_run.pruning import Limits, prune
from profdeck.after_run.start import await_own
from profdeck.base.identity import Identity
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


def test_as_the_command_of_a_finish(tmp_path: Path) -> None:
    command = f'{sys.executable} -m profdeck prune "$PROFDECK_FINISH_DIRECTORY/.." --steps 2'
    settings = {"output": str(tmp_path), "run": "run", "steps": STEPS, "trainer.backend": "tally"}
    profiler = Profiler.from_config(settings=settings | {"finish.command": command})
    for step in range(STEPS[-1] + 2):
        with profiler.capture(step):
            pass
        await_own()
    assert (steps(tmp_path / "run"), is_complete(tmp_path / "run")) == ([5, 7], True)


def test_by_size_and_by_age(run: Path) -> None:
    prune(run, Limits(age_days=1))
    assert steps(run) == STEPS
    about = json.loads(manifest(run, 1).read_text())
    manifest(run, 1).write_text(json.dumps(about | {"ended_ns": about["ended_ns"] - 2 * 86_400_000_000_000}))
    prune(run, Limits(age_days=1))
    assert steps(run) == STEPS[1:]
    kept = prune(run, Limits(), is_trial=True).kept
    room = sum(step.pruned.size_bytes for step in kept[1:])
    prune(run, Limits(size_bytes=room))
    assert steps(run) == STEPS[2:]
    prune(run, Limits(size_bytes=0, steps=1, age_days=0))
    assert steps(run) == STEPS[-1:]  # the newest stays
    assert is_complete(run)


@pytest.fixture
def two_roles(tmp_path: Path) -> Path:
    """A run of four captures of a trainer and of two replicas of a rollout."""
    roles = {"trainer": {"backend": "tally"}, "rollout": {"backend": "tally"}}
    settings = {"output": str(tmp_path), "run": "run", "steps": STEPS, "roles": roles}
    who = [("trainer", None), ("rollout", 0), ("rollout", 1)]
    for role, replica in who:
        identity = Identity(role=role, rank=0, world_size=1, replica=replica)
        with Profiler.from_config(settings=settings, role=role, identity=identity) as profiler:
            for step in range(STEPS[-1] + 2):
                with profiler.capture(step):
                    pass
    return tmp_path / "run"


def test_a_role_is_pruned_by_itself(two_roles: Path) -> None:
    trainer = {file: file.read_bytes() for file in two_roles.glob("step_*/trainer/*")}
    (of(two_roles, 3) / "pinned").touch()
    result = cli("prune", two_roles, "--role", "rollout", "--steps", 1)
    assert result.exit_code == 0, result.output
    assert [path.parent.name for path in sorted(two_roles.glob("step_*/rollout"))] == ["step_000003", "step_000007"]
    assert trainer == {file: file.read_bytes() for file in two_roles.glob("step_*/trainer/*")}
    assert is_complete(two_roles)
    assert "2 older steps of rollout were pruned" in cli("ls", two_roles).stdout
    assert cli("prune", two_roles, "--steps", 1).exit_code == 0
    assert steps(two_roles) == [3, 7]
    listed = cli("ls", two_roles).stdout
    assert "2 older steps of rollout were pruned" in listed
    assert "2 older steps were pruned" in listed
    assert is_complete(two_roles)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_an_interrupted_deletion_of_a_role_is_completed(two_roles: Path, is_recorded: bool) -> None:
    aside = two_roles / ".pruned.step_000003.rollout"
    if is_recorded:
        cli("prune", two_roles, "--role", "rollout", "--steps", 1)
        aside.mkdir()
    else:
        (of(two_roles, 3) / "rollout").rename(aside)
    assert is_complete(two_roles)
    assert cli("prune", two_roles, "--role", "trainer", "--steps", 4).exit_code == 0
    assert not aside.exists()
    said = [one for one in read_run(two_roles).pruned if one.first_step == 3]
    assert [(one.role, one.captures) for one in said] == [("rollout", ("step3",))]


@pytest.mark.parametrize("role", ["rolout", "../step_000005", "..", ".", ""])
def test_a_role_that_is_not_there_is_refused(two_roles: Path, role: str) -> None:
    result = cli("prune", two_roles, "--role", role, "--steps", 1)
    assert result.exit_code == 2
    assert steps(two_roles) == STEPS
    assert is_complete(two_roles)


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
        (record, "rank 0 of trainer records, or its host is gone"),
        (lambda run: record(run, host="elsewhere"), "rank 0 of trainer records, or its host is gone"),
        (lambda run: manifest(run, 1).write_text("{"), "not a readable manifest"),
        (finish, "finish.step1.json"),
    ],
    ids=["pinned", "recorded", "recorded elsewhere", "damaged", "a finish that cannot be read"],
)
def test_what_stays_whatever_the_limits_are(run: Path, does: Callable[[Path], object], why: str) -> None:
    does(run)
    result = cli("prune", run, "--steps", 1)
    assert result.exit_code == 0
    assert "warning: Step 1 stays: " in result.output
    assert why in result.output
    assert steps(run) == [1, 7]


def test_an_artifact_with_a_name_like_a_manifest_keeps_no_step(run: Path) -> None:
    artifact = manifest(run, 1).with_name("rank_0000.step1.memory.json")
    artifact.write_text("{}")
    content = json.loads(manifest(run, 1).read_text())
    content["artifacts"].append({"name": artifact.name, "kind": "memory", "size_bytes": 2, "whole": True})
    manifest(run, 1).write_text(json.dumps(content))
    prune(run, Limits(steps=1))
    assert steps(run) == [7]


def test_what_a_dead_process_recorded_goes(run: Path) -> None:
    record(run, pid=2**22 - 1)
    prune(run, Limits(steps=1))
    assert steps(run) == [7]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_what_was_interrupted_is_completed(run: Path, is_recorded: bool) -> None:
    """After the rename, and after it was recorded: with all files or with some of them."""
    if is_recorded:
        shutil.copytree(of(run, 1), run / "copy")
        prune(run, Limits(steps=3))
        (run / "copy").rename(run / ".pruned.step_000001")
        (run / ".pruned.step_000001" / "trainer" / "rank_0000.step1.json").unlink()
    else:
        of(run, 1).rename(run / ".pruned.step_000001")
    assert read_run(run).status is Status.COMPLETE
    assert {source.path.parents[1].name for source in find_sources([run])} == {f"step_{step:06d}" for step in STEPS[1:]}
    prune(run, Limits(steps=4))
    assert [path.name for path in run.glob(".pruned*")] == []
    assert [step.captures for step in read_run(run).pruned] == [("step1",)]
    assert (steps(run), is_complete(run)) == ([3, 5, 7], True)


def test_two_at_once(run: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prune(run, Limits(steps=1)), range(8)))
    assert (steps(run), is_complete(run)) == ([7], True)
    assert len(read_run(run).pruned) == 3


def test_links_are_left_alone(run: Path, tmp_path: Path) -> None:
    of(run, 1).rename(tmp_path / "elsewhere")
    of(run, 1).symlink_to(tmp_path / "elsewhere")
    prune(run, Limits(steps=1))
    assert (tmp_path / "elsewhere" / "trainer").exists()
    assert steps(run) == [1, 7]


def test_it_asks_for_a_limit_and_a_run(run: Path, tmp_path: Path) -> None:
    assert (cli("prune", run).exit_code, cli("prune", tmp_path / "none", "--steps", 1).exit_code) == (2, 4)
    assert "Say what is kept: --steps N, --gigabytes GB or --days DAYS." in cli("prune", run).output
    assert cli("prune", run, "--steps", 0).exit_code == 2
    assert steps(run) == STEPS
