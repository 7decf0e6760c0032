from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import ascend_files
import pytest
from typer.testing import Result

from profdeck_traces.cli import terminal

Cli = Callable[..., Result]
Record = Callable[..., Path]
Program = Callable[..., "subprocess.CompletedProcess[str]"]


def output_lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_complete_run_is_listed_with_its_totals(cli: Cli, record: Record) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    result = cli("ls", run)
    assert result.exit_code == 0
    lines = output_lines(result)
    assert lines[0] == "steps role rank status size events"
    bytes_each = (run / "step_000003/trainer/rank_0000.step3.trace.json").stat().st_size
    assert lines[1:3] == [f"3 trainer {rank} complete {bytes_each} B 5" for rank in (0, 1)]
    assert lines[-1].startswith("profiles/job: 1 capture; ranks: 2 complete; ")
    assert lines[-1].endswith(" kB, 10 events")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_540_000, "1.5 MB"), (2 * 10**9, "2.0 GB"), (10**13, "10.0 TB")],
)
def test_size_is_formatted_with_a_decimal_unit(size_bytes: int, text: str) -> None:
    assert terminal.size(size_bytes) == text


def test_json_document_has_captures_and_ranks(cli: Cli, record: Record) -> None:
    run = record(3, 4, ranks=(1,), world_size=2, role="rollout", replica=2)
    result = cli("ls", run, "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    document = json.loads(result.stdout)
    assert document["status"] == "missing"
    assert document["totals"]["ranks_by_status"] == {"missing": 1, "complete": 1}
    (capture,) = document["captures"]
    assert (capture["first_step"], capture["last_step"], capture["replica"]) == (3, 4, 2)
    missing, complete = capture["ranks"]
    assert (missing["rank"], missing["status"], missing["events"]) == (0, "missing", 0)
    assert (complete["rank"], complete["status"], complete["events"]) == (1, "complete", 5)
    assert complete["artifacts"][0]["path"] == str(run / "step_000003/rollout/replica_002/rank_0001.step3.trace.json")


def test_missing_rank_is_reported(cli: Cli, record: Record) -> None:
    result = cli("ls", record(3, 4, ranks=(1,), world_size=2, role="rollout", replica=2))
    assert result.exit_code == 1
    assert "3..4 rollout/2 0 missing 0 B 0" in output_lines(result)
    assert "Step 3..4, rollout/2, rank 0: This rank was expected to record, but wrote no files" in " ".join(
        output_lines(result)
    )


def test_truncated_trace_is_partial(cli: Cli, record: Record) -> None:
    run = record(3)
    trace = run / "step_000003/trainer/rank_0000.step3.trace.json"
    os.truncate(trace, trace.stat().st_size - 20)
    result = cli("ls", run)
    assert result.exit_code == 1
    assert any(line.startswith("3 trainer 0 partial ") for line in output_lines(result))
    assert "rank 0: rank_0000.step3.trace.json: " in " ".join(output_lines(result))


def test_repeated_step_is_listed_as_a_second_take(cli: Cli, record: Record) -> None:
    record(3, stage="actor_update")
    run = record(3, stage="actor_update")
    lines = output_lines(cli("ls", run))
    assert any(line.startswith("3 trainer actor_update 0 complete ") for line in lines)
    assert any(line.startswith("3 take2 trainer actor_update 0 complete ") for line in lines)


def test_table_fits_80_columns_and_keeps_names(cli: Cli, record: Record) -> None:
    run = record(123456, role="a-role-with-a-rather-long-name", stage="a_stage_with_a_rather_long_name")
    trace = next(run.rglob("*.trace.json"))
    trace.unlink()
    result = cli("ls", run)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert trace.name in "".join(result.stdout.split("\n"))


@pytest.mark.parametrize("subdirectory", ["", "nothing"])
def test_path_that_is_not_a_run_is_reported(cli: Cli, tmp_path: Path, subdirectory: str) -> None:
    result = cli("ls", tmp_path / subdirectory, "--json")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "is not a run directory" in result.stderr


def test_runs_are_listed_newest_first_and_latest_is_resolved(
    cli: Cli, record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = record(3)
    monkeypatch.chdir(tmp_path)
    newer = tmp_path / "profiles" / "newer"
    shutil.copytree(job, newer)
    run_file = json.loads((newer / "run.json").read_text())
    (newer / "run.json").write_text(json.dumps(run_file | {"created_ns": run_file["created_ns"] + 5 * 10**9}))
    (trace,) = newer.rglob("*.trace.json*")
    trace.write_bytes(trace.read_bytes()[:-1])
    shutil.copytree(job, tmp_path / "profiles" / "broken")
    (tmp_path / "profiles" / "broken" / "run.json").write_text("{")

    result = cli("ls")
    assert result.exit_code == 0, result.output
    lines = output_lines(result)
    assert lines[0] == "started run captures size status"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d profiles/newer 1 [\d.]+ k?B partial", lines[1])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d profiles/job 1 [\d.]+ k?B complete", lines[2])
    assert lines[-1].endswith("profdeck ls profiles/newer")
    runs = {run["path"]: run for run in json.loads(cli("ls", "profiles", "--json").stdout)["runs"]}
    newer_run, job_run, broken_run = (runs[f"profiles/{name}"] for name in ("newer", "job", "broken"))
    assert (newer_run["status"], job_run["status"], broken_run["status"]) == ("partial", "complete", "failed")
    assert "cannot be read" in broken_run["problem"]
    assert newer_run["created_ns"] - job_run["created_ns"] == 5 * 10**9
    for name in ("latest", "profiles/latest"):
        latest = json.loads(cli("ls", name, "--json").stdout)
        assert latest["path"] == "profiles/newer"


def test_latest_is_rejected_without_runs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("summary", "latest")
    assert result.exit_code == 2
    assert "There is no run in profiles, so 'latest' cannot be resolved." in " ".join(result.stderr.split())


def test_run_without_captures_names_its_roles(cli: Cli, record: Record) -> None:
    run = record(3)
    for file in run.rglob("rank_*"):
        file.unlink()
    result = cli("ls", run)
    assert result.exit_code == 1
    assert output_lines(result)[0] == "The role 'trainer' recorded nothing."
    assert output_lines(result)[-1] == "profiles/job: 0 captures; ranks: none; 0 B, 0 events"


def test_invalid_file_name_in_a_manifest_is_reported(cli: Cli, record: Record) -> None:
    run = record(3)
    manifest = run / "step_000003/trainer/rank_0000.step3.json"
    manifest.write_text(manifest.read_text().replace("rank_0000.step3.trace.json", "x" * 300))
    result = cli("ls", run)
    assert result.exit_code == 1
    assert "the name is too long or has a null character" in " ".join(result.stdout.split())


def test_lines_are_not_wrapped_in_a_pipe(python: Program, record: Record) -> None:
    run = record(1, role="a-role-with-a-rather-long-name", stage="a_stage_with_a_rather_long_name")
    lines = python("-m", "profdeck", "ls", run).stdout.splitlines()
    (line,) = [line for line in lines if "complete" in line and "capture" not in line]
    assert "a-role-with-a-rather-long-name" in line
    assert "a_stage_with_a_rather_long_name" in line


@pytest.fixture
def torch_npu_directory(record: Record) -> Path:
    """Return a directory of raw torch_npu data in a run."""
    run = record(3)
    (trace,) = run.rglob("*.trace.json")
    trace.unlink()
    directory = ascend_files.raw(trace.parent, "rank_0000.step3_4711_20260102030405678_ascend_pt")
    manifest = trace.with_name("rank_0000.step3.json")
    content = json.loads(manifest.read_text())
    content["artifacts"] = [{"name": directory.name, "kind": "ascend_pt", "size_bytes": 1, "whole": True}]
    manifest.write_text(json.dumps(content))
    return directory


def test_raw_data_of_torch_npu_is_complete_without_events(cli: Cli, torch_npu_directory: Path) -> None:
    run = torch_npu_directory.parents[2]
    result = cli("ls", run)
    assert result.exit_code == 0
    size_bytes = sum(file.stat().st_size for file in torch_npu_directory.rglob("*") if file.is_file())
    assert output_lines(result)[1] == f"3 trainer 0 complete {size_bytes} B"  # the number of events is unknown
    assert f"rank 0: {torch_npu_directory.name}: raw data only, not analysed" in " ".join(output_lines(result))
    (artifact,) = json.loads(cli("ls", run, "--json").stdout)["captures"][0]["ranks"][0]["artifacts"]
    assert (artifact["events"], artifact["kind"], artifact["whole"]) == (None, "ascend_pt", True)
    assert artifact["notes"] == ["raw data only, not analysed"]


def test_analysis_of_torch_npu_data_is_verified(cli: Cli, torch_npu_directory: Path) -> None:
    output = ascend_files.analysed(torch_npu_directory)
    result = cli("ls", torch_npu_directory.parents[2])
    assert result.exit_code == 0
    assert output_lines(result)[1].startswith("3 trainer 0 complete 6.")
    assert output_lines(result)[1].endswith(" kB 35")
    (output / "trace_view.json").unlink()
    result = cli("ls", torch_npu_directory.parents[2])
    assert result.exit_code == 1
    assert "has neither trace_view.json nor a database: the analysis failed." in " ".join(output_lines(result))


@pytest.mark.parametrize(
    "command",
    [("ls",), ("ls", "latest"), ("plugins",), ("config", "show", "profdeck.yaml"), ("check", "profdeck.yaml")],
)
def test_no_trailing_spaces_in_a_pipe(cli: Cli, record: Record, command: tuple[str, ...]) -> None:
    record(3)
    Path("profdeck.yaml").write_text("steps: [1]\nroles: {trainer: {backend: paper}}\n")
    lines = cli(*command).stdout.splitlines()
    assert len(lines) > 1
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("roles", [5, "trainer", {"trainer": 1}, ["trainer", 5]])
def test_invalid_roles_of_a_run_are_reported(cli: Cli, record: Callable[..., Path], roles: object) -> None:
    run = record(3)
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"roles": roles}))
    result = cli("ls", run)
    assert result.exit_code == 1
    assert "run.json: `roles` is not a list of names" in " ".join(result.stdout.split())
    assert "all whole" not in cli("summary", run).stdout


@pytest.mark.parametrize("level", ["step_000003", "step_000003/trainer"])
def test_linked_directory_counts_in_no_command(
    cli: Cli, record: Callable[..., Path], tmp_path: Path, level: str
) -> None:
    run = record(1, 3)
    (run / level).rename(tmp_path / "elsewhere")
    (run / level).symlink_to(tmp_path / "elsewhere")
    results = {name: cli(name, run) for name in ("ls", "summary", "trend")}
    assert results["ls"].exit_code == 1
    for result in results.values():
        assert "cannot be read: it is a symbolic link" in " ".join(result.output.split())
    assert "all whole" not in results["summary"].stdout
    assert cli("baseline", "save", "main", run).exit_code == 4
    assert "is inconclusive" in cli("diff", run, run).stdout


@pytest.mark.parametrize("fault", ["link without a target", "file", "corrupt manifest", "pipe"])
def test_unread_part_of_a_run_is_not_called_whole(
    cli: Cli, record: Callable[..., Path], tmp_path: Path, fault: str
) -> None:
    run = record(1, 3)
    step, manifest_file = run / "step_000003", next(run.rglob("rank_0000.step3.json"))
    if fault in {"corrupt manifest", "pipe"}:
        manifest_file.unlink()
        os.mkfifo(manifest_file) if fault == "pipe" else manifest_file.write_text("{")
    else:
        step.rename(tmp_path / "elsewhere")
        step.write_text("") if fault == "file" else step.symlink_to(tmp_path / "missing")
    assert cli("ls", run).exit_code == 1
    assert "all whole" not in cli("summary", run).stdout
    assert "1 path not readable" in " ".join(cli("summary", run).stdout.split())
    assert cli("baseline", "save", "main", run, "--directory", tmp_path / "baselines").exit_code == 4
