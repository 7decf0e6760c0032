"""Run directories: their names, and the status and problems that `read_run` reports."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ascend_files
import pytest

from profdeck import Profiler, Status
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.processes import ProcessId, process_started
from profdeck.records.capture import CaptureRecord
from profdeck.records.manifest import read_manifest
from profdeck.records.run_directory import run_name
from profdeck.verification.report_model import RankReport, RunReport
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ProfdeckError


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        ("night", {}, "night"),
        ("night", {"PROFDECK_RUN": "day"}, "day"),
        (None, {"PROFDECK_RUN": "../../etc"}, "etc"),
        (None, {"TORCHELASTIC_RUN_ID": "abc/1"}, "torchrun-abc_1"),
        (None, {"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "77"}, "slurm-77"),
        (None, {"RAY_JOB_ID": "01000000", "WORLD_SIZE": "2"}, "ray-01000000"),
        (
            None,
            {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"},
            "job-h1-29500",
        ),
    ],
)
def test_run_name_is_shared_by_all_processes_of_a_job(
    configured: str | None, environ: dict[str, str], expected: str
) -> None:
    assert run_name(configured, environ) == expected


def test_run_name_contains_the_launcher_process_id() -> None:
    name = run_name(None, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert name.endswith(f"-{os.getppid()}")
    assert run_name(None, {}).endswith(f"-{os.getpid()}")


@pytest.fixture
def capture_rank(tally: ModuleType, tmp_path: Path):
    """Function that captures step 1 of a run in tmp_path/run as one of two ranks. It returns the run directory."""

    def capture(rank: int = 0, **settings: Any) -> Path:
        profiler = Profiler.from_config(
            identity=Identity(rank=rank, world_size=2),
            settings={
                "output": str(tmp_path), "run": "run", "steps": [1], "trainer.backend": "tally", "trainer.ranks": "all",
                **settings,
            },
        )  # fmt: skip
        with profiler.capture(1):
            pass
        return tmp_path / "run"

    return capture


def find_files(run: Path, pattern: str) -> list[Path]:
    return sorted(run.glob(f"step_*/**/{pattern}"))


def test_run_with_all_files_is_complete(capture_rank) -> None:
    capture_rank(0)
    report = read_run(capture_rank(1))
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [rank.events for rank in report.captures[0].ranks] == [1, 1]
    run_document = json.loads((report.path / "run.json").read_text())
    assert (run_document["schema"], run_document["roles"], run_document["config"]["steps"]) == (1, ["trainer"], [1])
    assert not list(report.path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "status", "problem", "has_events"),
    [
        (lambda path: path.unlink(), Status.MISSING, "does not exist", False),
        (lambda path: path.write_bytes(b""), Status.MISSING, "empty", False),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), Status.PARTIAL, "", False),
        (lambda path: path.write_text('{"traceEvents": []}'), Status.PARTIAL, "no event", False),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), Status.PARTIAL, "bytes, but", True),
        (lambda path: (path.unlink(), path.symlink_to("/dev/null")), Status.MISSING, "not a regular file", False),
    ],
)
def test_missing_truncated_or_changed_files_are_detected(
    capture_rank, change: Any, status: Status, problem: str, *, has_events: bool
) -> None:
    run = capture_rank(0)
    change(find_files(run, "*.trace.json")[0])
    rank = read_run(run).captures[0].ranks[0]
    assert (rank.status, rank.events > 0) == (status, has_events)
    assert problem in " ".join(rank.problems)


def test_capture_of_an_exited_process_is_missing(capture_rank, tmp_path: Path) -> None:
    (manifest,) = find_files(capture_rank(0), "*step1.json")
    content = json.loads(manifest.read_text()) | {"status": "recording", "artifacts": []}
    for changes, status in (
        ({}, Status.RECORDING),
        ({"process_started": "1"}, Status.MISSING),  # another process uses this process ID
        ({"pid": 2**22 - 1}, Status.MISSING),
        ({"host": "elsewhere"}, Status.RECORDING),  # unknown
        (
            {"pid": 2**22 - 1, "pid_namespace": "pid:[1]"},
            Status.RECORDING,
        ),  # as in a container that shares the host name
        ({"pid": 2**22 - 1, "pid_namespace": None}, Status.MISSING),  # written by an earlier version
    ):
        manifest.write_text(json.dumps(content | changes))
        assert read_run(tmp_path / "run").captures[0].ranks[0].status is status


def test_files_without_a_capture_are_reported(capture_rank) -> None:
    run = capture_rank(0, **{"rollout.backend": "tally"})
    (run / "step_000001" / "trainer" / "rank_0007.step1.trace.json.gz").write_bytes(b"x")
    (run / "step_000001" / "trainer" / "rank_0008.step1.json").write_text("{")
    problems = read_run(run).problems
    assert any("rank_0007.step1.trace.json.gz is not listed in any manifest" in problem for problem in problems)
    assert any("rank_0008.step1.json: not a readable manifest" in problem for problem in problems)
    assert "The role 'rollout' recorded nothing." in problems


@pytest.mark.parametrize("status", ["complete", "recording"])
def test_artifact_named_like_a_manifest_is_not_a_problem(capture_rank, status: str) -> None:
    run = capture_rank(0, **{"trainer.ranks": [0]})
    (manifest,) = find_files(run, "*step1.json")
    artifact = manifest.with_name("rank_0000.step1.memory.json")
    artifact.write_text("{}")
    content = json.loads(manifest.read_text())
    listed = [*content["artifacts"], {"name": artifact.name, "kind": "memory", "size_bytes": 2, "whole": True}]
    manifest.write_text(json.dumps(content | {"status": status, "artifacts": listed if status == "complete" else []}))

    report = read_run(run)

    assert (report.status, report.problems) == (Status(status), ())


def test_artifact_cannot_replace_the_manifest(tmp_path: Path) -> None:
    capture = CaptureRecord(id="step1", directory=tmp_path, identity=Identity(), first_step=1, current_step=1)
    with pytest.raises(CaptureError, match=r"rank_0000.step1.json is the capture's manifest. Use a suffix with a name"):
        capture.artifact_path(".json")
    assert capture.artifact_path(".memory.json").name == "rank_0000.step1.memory.json"
    assert capture.artifact_path(".json", "memory").name == "rank_0000.step1.memory.json"


def test_directory_that_is_not_a_run_is_rejected(capture_rank, tmp_path: Path) -> None:
    capture_rank(0)
    with pytest.raises(ProfdeckError, match=r"contains 1 run: run. Pass the path of a run, such as"):
        read_run(tmp_path)
    with pytest.raises(ProfdeckError, match="does not exist"):
        read_run(tmp_path / "none")
    with pytest.raises(ProfdeckError, match=r"has no run.json"):
        read_run(tmp_path / "run" / "step_000001")


def test_manifest_schema_is_checked_and_unknown_keys_are_ignored(capture_rank) -> None:
    (manifest,) = find_files(capture_rank(0), "*step1.json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"news": 1}))
    assert read_manifest(manifest).capture == "step1"
    manifest.write_text(json.dumps(content | {"schema": 2}))
    with pytest.raises(ProfdeckError, match="update profdeck"):
        read_manifest(manifest)


def test_link_out_of_the_output_directory_is_not_followed(capture_rank, tmp_path: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (tmp_path / "run").symlink_to(elsewhere)
    capture_rank(0)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("replaced", ["run", "run/step_000001", "run/step_000001/trainer"])
def test_link_put_in_place_during_a_capture_is_not_followed(
    tally: ModuleType, tmp_path: Path, tmp_path_factory: Any, replaced: str
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("step_000001/trainer", "trainer"):
        (elsewhere / name).mkdir(parents=True)
    settings = {"output": str(tmp_path), "run": "run", "steps": [1], "trainer.backend": "tally"}
    with Profiler.from_config(settings=settings).capture(1):
        (tmp_path / replaced).rename(tmp_path / "moved")
        (tmp_path / replaced).symlink_to(elsewhere)
    assert not [path for path in elsewhere.rglob("*") if path.is_file()]


def test_link_loop_fails_only_the_capture(capture_rank, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_000001").symlink_to("step_000001")
    capture_rank(0)
    assert "Step 1: " in caplog.text


def test_unwritable_directory_fails_only_the_capture(capture_rank, caplog: Any) -> None:
    capture_rank(0, output="/proc/profdeck")  # not writable, even by root
    assert "Step 1: cannot write to /proc/profdeck" in caplog.text


def test_file_instead_of_a_directory_fails_only_the_capture(capture_rank, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "run").write_text("in the way")
    capture_rank(0)
    assert "cannot write to" in caplog.text


def test_only_existing_processes_have_a_start_time() -> None:
    assert process_started(os.getpid())
    assert process_started(2**22 - 1) is None
    assert socket.gethostname()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create a PID namespace")
@pytest.mark.parametrize("mount", [(), ("--mount-proc",)], ids=["outer /proc", "own /proc"])
def test_process_in_another_pid_namespace_cannot_be_checked(mount: tuple[str, ...]) -> None:
    script = (
        "import attrs, json; from profdeck.base.processes import ProcessId; own = ProcessId()\n"
        "print(json.dumps([attrs.asdict(own), own.alive]), flush=True); input()"
    )
    command = ["unshare", "--pid", "--fork", *mount, sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        fields, is_alive = json.loads(process.stdout.readline())
        contained = ProcessId(**fields)
        assert (is_alive, contained.pid, contained.host) == (True, 1, socket.gethostname())
        assert contained.alive is None
        process.communicate("\n")
    assert contained.alive is None
    assert ProcessId().alive
    assert ProcessId(process_started="1").alive is False  # a container that was restarted reuses process IDs


@pytest.fixture
def torch_npu_directory(capture_rank):
    """Function that replaces the trace of rank 0 with a torch_npu data directory and returns the directory."""

    def create(**artifact: Any) -> Path:
        (manifest,) = find_files(capture_rank(0), "rank_0000.step1.json")
        find_files(manifest.parents[2], "*.trace.json")[0].unlink()
        directory = ascend_files.raw(manifest.parent, "rank_0000.step1_4711_20260102030405678_ascend_pt", rank=0)
        content = json.loads(manifest.read_text())
        content["artifacts"] = [
            {"name": directory.name, "kind": "ascend_pt", "size_bytes": 7, "whole": True, **artifact}
        ]
        manifest.write_text(json.dumps(content))
        return directory

    return create


def read_rank_0(directory: Path) -> tuple[RunReport, RankReport]:
    report = read_run(directory.parents[2])
    return report, report.captures[0].ranks[0]


def test_recorder_problem_is_reported_with_later_problems(torch_npu_directory) -> None:
    directory = torch_npu_directory(whole=False, problem="nothing of the device")
    assert read_rank_0(directory)[1].artifacts[0].problem == "nothing of the device"
    (directory / "profiler_info_0.json").unlink()
    (artifact,) = read_rank_0(directory)[1].artifacts
    assert not artifact.whole
    assert artifact.problem == ("nothing of the device profiler_info.json is missing: the recording did not finish.")


def test_deleted_torch_npu_directory_is_missing(torch_npu_directory) -> None:
    directory = torch_npu_directory()
    shutil.rmtree(directory)
    _, rank = read_rank_0(directory)
    assert (rank.status, rank.problems) == (Status.MISSING, (f"{directory.name}: does not exist",))


def test_unlisted_torch_npu_directory_is_reported_after_the_recording(torch_npu_directory) -> None:
    directory = torch_npu_directory()
    (manifest,) = find_files(directory.parents[2], "rank_0000.step1.json")
    (directory / "FRAMEWORK" / "rank_0000.trace.json").touch()  # files in the directory are not checked
    content = json.loads(manifest.read_text()) | {"artifacts": []}
    manifest.write_text(json.dumps(content))
    problems = (f"step_000001/trainer/{directory.name} is not listed in any manifest.",)
    assert read_rank_0(directory)[0].problems == problems
    manifest.write_text(json.dumps(content | {"status": "recording"}))
    assert read_rank_0(directory)[0].problems == ()
    manifest.write_text(json.dumps(content | {"status": "recording", "process_started": "1"}))
    assert read_rank_0(directory)[0].problems == problems


def test_manifest_has_the_load_of_the_host(capture_rank) -> None:
    (manifest,) = find_files(capture_rank(0), "*step1.json")
    load = read_manifest(manifest).host_load
    assert load is not None
    assert load.wall_s > 0
    assert load.cpus >= 1
    content = json.loads(manifest.read_text())
    del content["host_load"]
    manifest.write_text(json.dumps(content))
    assert read_manifest(manifest).host_load is None
