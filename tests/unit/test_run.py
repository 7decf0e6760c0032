from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import ascend_files
import pytest

from profdeck import Profiler, Status
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.processes import process_started
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
def test_processes_of_a_job_agree_on_its_name(configured: str | None, environ: dict[str, str], expected: str) -> None:
    assert run_name(configured, environ) == expected


def test_ranks_of_one_launcher_agree_on_its_start_time() -> None:
    name = run_name(None, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert name.endswith(f"-{os.getppid()}")
    assert run_name(None, {}).endswith(f"-{os.getpid()}")


@pytest.fixture
def record(tally: ModuleType, tmp_path: Path):  # a function
    """Capture a step of a run in tmp_path/run, as one rank of two."""

    def run(rank: int = 0, **settings: Any) -> Path:
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

    return run


def files(run: Path, pattern: str) -> list[Path]:
    return sorted(run.glob(f"step_*/**/{pattern}"))


def test_an_intact_run_is_complete(record) -> None:
    record(0)
    report = read_run(record(1))
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [rank.events for rank in report.captures[0].ranks] == [1, 1]
    about = json.loads((report.path / "run.json").read_text())
    assert (about["schema"], about["roles"], about["config"]["steps"]) == (1, ["trainer"], [1])
    assert not list(report.path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("damage", "status", "problem", "is_there"),
    [
        (lambda path: path.unlink(), Status.MISSING, "does not exist", False),
        (lambda path: path.write_bytes(b""), Status.MISSING, "empty", False),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), Status.PARTIAL, "", False),
        (lambda path: path.write_text('{"traceEvents": []}'), Status.PARTIAL, "no event", False),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), Status.PARTIAL, "bytes, but", True),
        (lambda path: (path.unlink(), path.symlink_to("/dev/null")), Status.MISSING, "not a regular file", False),
    ],
)
def test_damaged_files_are_detected(record, damage: Any, status: Status, problem: str, *, is_there: bool) -> None:
    run = record(0)
    damage(files(run, "*.trace.json")[0])
    rank = read_run(run).captures[0].ranks[0]
    assert (rank.status, rank.events > 0) == (status, is_there)
    assert problem in " ".join(rank.problems)


def test_a_capture_of_an_exited_process_is_missing(record, tmp_path: Path) -> None:
    (manifest,) = files(record(0), "*step1.json")
    content = json.loads(manifest.read_text()) | {"status": "recording", "artifacts": []}
    for changes, status in (
        ({}, Status.RECORDING),
        ({"process_started": "1"}, Status.MISSING),  # the pid was given to another process
        ({"pid": 2**22 - 1}, Status.MISSING),
        ({"host": "elsewhere"}, Status.MISSING),
    ):
        manifest.write_text(json.dumps(content | changes))
        assert read_run(tmp_path / "run").captures[0].ranks[0].status is status


def test_files_without_a_capture_are_listed(record) -> None:
    run = record(0, **{"rollout.backend": "tally"})
    (run / "step_000001" / "trainer" / "rank_0007.step1.trace.json.gz").write_bytes(b"x")
    (run / "step_000001" / "trainer" / "rank_0008.step1.json").write_text("{")
    problems = read_run(run).problems
    assert any("rank_0007.step1.trace.json.gz is not listed in any manifest" in problem for problem in problems)
    assert any("rank_0008.step1.json: not a readable manifest" in problem for problem in problems)
    assert "The role 'rollout' recorded nothing." in problems


@pytest.mark.parametrize("status", ["complete", "recording"])
def test_an_artifact_with_a_name_like_a_manifest_is_not_a_problem(record, status: str) -> None:
    run = record(0, **{"trainer.ranks": [0]})
    (manifest,) = files(run, "*step1.json")
    artifact = manifest.with_name("rank_0000.step1.memory.json")
    artifact.write_text("{}")
    content = json.loads(manifest.read_text())
    listed = [*content["artifacts"], {"name": artifact.name, "kind": "memory", "size_bytes": 2, "whole": True}]
    manifest.write_text(json.dumps(content | {"status": status, "artifacts": listed if status == "complete" else []}))

    report = read_run(run)

    assert (report.status, report.problems) == (Status(status), ())


def test_an_artifact_cannot_replace_the_manifest(tmp_path: Path) -> None:
    capture = CaptureRecord(id="step1", directory=tmp_path, identity=Identity(), first_step=1, current_step=1)
    with pytest.raises(CaptureError, match=r"rank_0000.step1.json is the capture's manifest. Use a suffix with a name"):
        capture.artifact_path(".json")
    assert capture.artifact_path(".memory.json").name == "rank_0000.step1.memory.json"
    assert capture.artifact_path(".json", "memory").name == "rank_0000.step1.memory.json"


def test_the_error_for_a_directory_that_is_not_a_run(record, tmp_path: Path) -> None:
    record(0)
    with pytest.raises(ProfdeckError, match=r"contains 1 run: run. Pass the path of a run, such as"):
        read_run(tmp_path)
    with pytest.raises(ProfdeckError, match="does not exist"):
        read_run(tmp_path / "none")
    with pytest.raises(ProfdeckError, match=r"has no run.json"):
        read_run(tmp_path / "run" / "step_000001")


def test_manifests_of_later_formats_are_rejected_and_unknown_keys_are_ignored(record) -> None:
    (manifest,) = files(record(0), "*step1.json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"news": 1}))
    assert read_manifest(manifest).capture == "step1"
    manifest.write_text(json.dumps(content | {"schema": 2}))
    with pytest.raises(ProfdeckError, match="update profdeck"):
        read_manifest(manifest)


def test_a_link_out_of_the_output_directory_is_not_followed(record, tmp_path: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (tmp_path / "run").symlink_to(elsewhere)
    record(0)
    assert list(elsewhere.iterdir()) == []


def test_a_link_loop_fails_only_the_capture(record, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_000001").symlink_to("step_000001")
    record(0)
    assert "Step 1: " in caplog.text


def test_an_unwritable_directory_fails_only_the_capture(record, caplog: Any) -> None:
    record(0, output="/proc/profdeck")  # not writable, even by root
    assert "Step 1: cannot write to /proc/profdeck" in caplog.text


def test_a_file_instead_of_a_directory_fails_only_the_capture(record, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "run").write_text("in the way")
    record(0)
    assert "cannot write to" in caplog.text


def test_this_process_has_a_start_time() -> None:
    assert process_started(os.getpid())
    assert process_started(2**22 - 1) is None
    assert socket.gethostname()


@pytest.fixture
def of_torch_npu(record):  # a function
    """Replace the trace of rank 0 by a data directory of torch_npu. Return the directory."""

    def run(**artifact: Any) -> Path:
        (manifest,) = files(record(0), "rank_0000.step1.json")
        files(manifest.parents[2], "*.trace.json")[0].unlink()
        directory = ascend_files.raw(manifest.parent, "rank_0000.step1_4711_20260102030405678_ascend_pt", rank=0)
        content = json.loads(manifest.read_text())
        content["artifacts"] = [
            {"name": directory.name, "kind": "ascend_pt", "size_bytes": 7, "whole": True, **artifact}
        ]
        manifest.write_text(json.dumps(content))
        return directory

    return run


def rank_0(directory: Path) -> tuple[RunReport, RankReport]:
    report = read_run(directory.parents[2])
    return report, report.captures[0].ranks[0]


def test_problems_of_the_recorder_are_kept(of_torch_npu) -> None:
    directory = of_torch_npu(whole=False, problem="nothing of the device")
    assert rank_0(directory)[1].artifacts[0].problem == "nothing of the device"
    (directory / "profiler_info_0.json").unlink()
    (artifact,) = rank_0(directory)[1].artifacts
    assert not artifact.whole
    assert artifact.problem == ("nothing of the device profiler_info.json is missing: the recording did not finish.")


def test_a_deleted_directory_of_torch_npu_is_missing(of_torch_npu) -> None:
    directory = of_torch_npu()
    shutil.rmtree(directory)
    _, rank = rank_0(directory)
    assert (rank.status, rank.problems) == (Status.MISSING, (f"{directory.name}: does not exist",))


def test_an_unlisted_directory_of_torch_npu_is_reported_after_the_recording(of_torch_npu) -> None:
    directory = of_torch_npu()
    (manifest,) = files(directory.parents[2], "rank_0000.step1.json")
    (directory / "FRAMEWORK" / "rank_0000.trace.json").touch()  # files in the directory are not checked
    content = json.loads(manifest.read_text()) | {"artifacts": []}
    manifest.write_text(json.dumps(content))
    listed = (f"step_000001/trainer/{directory.name} is not listed in any manifest.",)
    assert rank_0(directory)[0].problems == listed
    manifest.write_text(json.dumps(content | {"status": "recording"}))
    assert rank_0(directory)[0].problems == ()
    manifest.write_text(json.dumps(content | {"status": "recording", "process_started": "1"}))
    assert rank_0(directory)[0].problems == listed
