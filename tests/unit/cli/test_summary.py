from __future__ import annotations

import csv
import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from ascend_job import GROUP, Job
from typer.testing import Result

from profdeck_traces.cli import terminal

Cli = Callable[..., Result]
Program = Callable[..., "subprocess.CompletedProcess[str]"]
Record = Callable[..., Path]


def test_screen_of_a_run_has_its_kernels_and_steps(cli: Cli, record: Record) -> None:
    result = cli("summary", record(3, ranks=(0, 1), world_size=2))
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "profiles/job: 1 capture, 2 ranks of trainer, step 3, 10 events, all whole" in lines
    assert "0.002 100.0% 1 unclassified [press]<int, 2>" in lines
    assert "1 4.000 4.000 4.000 global step" in lines or "1 4.000 global step" in lines


def test_full_output_has_the_tables_of_each_trace(cli: Cli, record: Record) -> None:
    lines = [
        " ".join(line.split())
        for line in cli("summary", record(3, ranks=(0, 1), world_size=2), "--full").stdout.splitlines()
    ]
    first = lines.index("profiles/job/step_000003/trainer/rank_0000.step3.trace.json")
    assert lines[first + 1] == "trainer rank 0, 5 events"
    assert "Device 0: busy 0.002 ms, idle 0.000 ms" in lines
    assert "1 0.012 0.012 paper::fold2" in lines
    assert "1 0.002 2.0 2.0 100.0% unclassified [press]<int, 2>" in lines
    assert "trainer rank 1, 5 events" in lines


@pytest.mark.parametrize(
    ("changes", "unit", "label"),
    [
        ({}, "global_step", "global step"),
        ({"window": {"active": 1}}, "mini_batch", "mini batch"),
        ({"request": "step3"}, "engine_iteration", "profiler step"),
    ],
)
def test_unit_of_steps_is_read_from_the_manifest(
    cli: Cli, record: Record, changes: dict[str, object], unit: str, label: str
) -> None:
    run = record(3)
    manifest = next(run.rglob("rank_0000.step3.json"))
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))
    lines = [" ".join(line.split()) for line in cli("summary", run).stdout.splitlines()]
    assert f"1 4.000 {label}" in lines
    (trace,) = json.loads(cli("summary", run, "--json").stdout)["ranks"]
    assert (trace["unit"], trace["iterations"][0]["kind"]) == (unit, "global_step")


def test_json_document_has_the_facts_of_a_trace(cli: Cli, record: Record) -> None:
    run = record(3, role="rollout", replica=1)
    (trace,) = json.loads(cli("summary", run / "step_000003", "--json").stdout)["ranks"]
    assert trace["path"] == str(run / "step_000003/rollout/replica_001/rank_0000.step3.trace.json")
    assert (trace["role"], trace["replica"], trace["rank"], trace["capture"]) == ("rollout", 1, 0, "step3")
    assert (trace["whole"], trace["problem"], trace["events"]) == (True, None, 5)
    assert [operator["name"] for operator in trace["operators"]] == [f"paper::fold{n}" for n in (2, 1, 0)]
    assert trace["operators"][0]["self_us"] == 12
    assert trace["kernels"][0]["total_us"] == 2
    assert trace["devices"][0]["busy_us"] == 2
    (step,) = trace["steps"]
    assert (step["kind"], step["step"], step["pid"]) == ("global_step", 3, 1)
    assert (step["start_us"], step["duration_us"], step["device_us"]) == (0, 4000, 2)


def test_top_limits_the_operators(cli: Cli, record: Record) -> None:
    run = record(3, sheets=20)
    (trace,) = json.loads(cli("summary", run, "--top", 2, "--json").stdout)["ranks"]
    assert len(trace["operators"]) == 20  # --top has no effect on JSON, which can be a baseline
    for options, count in ((["--top", 2], 2), ([], 15), (["--top", 0], 20)):
        assert cli("summary", run, "--full", *options).stdout.count("paper::fold") == count


def test_role_and_rank_are_read_from_the_manifest_of_a_trace(cli: Cli, record: Record, tmp_path: Path) -> None:
    trace = next(record(3).rglob("*.trace.json"))
    without_manifest = trace.rename(tmp_path / "any.json")
    copied = trace.parent / trace.name
    copied.write_bytes(without_manifest.read_bytes())
    first, second = json.loads(cli("summary", copied, without_manifest, copied, "--json").stdout)["ranks"]
    assert (first["role"], first["rank"]) == ("trainer", 0)
    assert (second["role"], second["rank"]) == (None, 6)


def test_truncated_trace_is_summarised_with_a_warning(cli: Cli, record: Record) -> None:
    trace = next(record(3).rglob("*.trace.json"))
    os.truncate(trace, trace.stat().st_size - 20)
    result = cli("summary", trace.parent)
    assert result.exit_code == 0
    assert "partial: trainer step 3 rank 0" in result.stdout
    assert "[press]" in result.stdout
    assert "warning: profiles/job/step_000003/trainer/rank_0000.step3.trace.json: " in result.stderr
    (document,) = json.loads(cli("summary", trace, "--json").stdout)["ranks"]
    assert document["whole"] is False
    assert document["problem"] is not None


def test_unreadable_trace_does_not_hide_others(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3)
    (tmp_path / "no.txt").write_text("not a trace", encoding="utf-8")
    result = cli("summary", tmp_path / "absent.json", tmp_path / "no.txt", run, "--json")
    assert result.exit_code == 4
    assert len(json.loads(result.stdout)["ranks"]) == 1
    absent, invalid = result.stderr.splitlines()
    assert absent.startswith("error: Cannot read ")
    assert invalid == f"error: {tmp_path}/no.txt: Malformed JSON at offset 0: neither an object nor an array begins."


def test_progress_is_on_stderr_and_only_on_a_terminal(python: Program, record: Record) -> None:
    code = """
import os, pty, subprocess, sys
terminal, program = pty.openpty()
command = [sys.executable, "-m", "profdeck", "summary", sys.argv[1], "--json"]
document = subprocess.run(command, stdout=subprocess.PIPE, stderr=program, check=True).stdout
sys.stderr.buffer.write(os.read(terminal, 65536))
sys.stdout.buffer.write(document)
"""
    result = python("-c", code, record(3))
    assert len(json.loads(result.stdout)["ranks"]) == 1
    assert "Reading the traces" in result.stderr


def test_progress_starts_no_thread(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    threads = threading.active_count()
    with terminal.show_progress("Reading") as on_progress:
        for completed in range(10):
            on_progress(completed, 10)
        assert threading.active_count() == threads
    assert "Reading" in capsys.readouterr().err


def test_directory_without_traces_is_reported(cli: Cli, tmp_path: Path) -> None:
    result = cli("summary", tmp_path)
    assert (result.exit_code, result.stdout) == (4, "")
    assert "No trace found in" in result.stderr


def test_trace_with_an_unreadable_manifest_is_read(cli: Cli, record: Record) -> None:
    run = record(3)
    next(run.rglob("rank_0000.step3.json")).write_text("{", encoding="utf-8")
    (trace,) = json.loads(cli("summary", run, "--json").stdout)["ranks"]
    assert (trace["role"], trace["rank"]) == (None, 6)


JOB = Job(lambda rank, _step: 700.0 + 300 * (rank == 1), ranks=2)


def test_npu_tables_and_findings_are_shown(cli: Cli, tmp_path: Path) -> None:
    JOB.write(tmp_path / "job")
    result = cli("summary", tmp_path / "job", "--full")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "device compute ms communication ms exposed ms prepare ms recorder's step" in lines
    assert "0 0.700 0.400 0.400 0.050 3" in lines
    assert "6 4.200 63.6% AI_CORE" in lines
    assert "calls total ms transit ms wait ms sync ms idle ms group communication" in lines
    assert "6 2.400 0.600 1.800 0.000 0.000 445 allReduce" in lines
    assert "HCCS 120.0 MB 0.600 200.0 120 50.0% 445 allReduce" in lines
    assert "Collectives: the others wait for rank 1" in lines
    assert "The other rank waits" in result.stdout  # the finding


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("kernels", {"name": "MatMulV2", "count": "6", "total_us": "4200.0", "type": "MatMulV2"}),
        ("cores", {"core": "AI_CORE", "count": "6", "total_us": "4200.0"}),
        ("device-steps", {"device": "0", "step": "3", "compute_us": "700.0", "preparation_us": "50.0"}),
        ("communication", {"kind": "collective", "group": GROUP, "name": "allReduce", "wait_us": "1800.0"}),
        ("links", {"name": "allReduce", "link": "HCCS", "size_bytes": "120000000", "bytes_per_s": "200000000000.0"}),
    ],
)
def test_rows_option_selects_the_csv_table(cli: Cli, tmp_path: Path, rows: str, expected: dict[str, str]) -> None:
    JOB.write(tmp_path / "job")
    options = [] if rows == "kernels" else ["--rows", rows]
    first, *other_rows = csv.DictReader(cli("summary", tmp_path / "job", "--csv", *options).stdout.splitlines())
    assert first["rank"] == "0"
    assert other_rows[-1]["rank"] == "1"
    assert first | expected == first


def test_default_csv_table_of_a_run_without_kernels_is_operators(cli: Cli, tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    (tmp_path / "cpu.json").write_text(json.dumps({"traceEvents": [event]}))
    result = cli("summary", "cpu.json", "--csv")
    (row,) = csv.DictReader(result.stdout.splitlines())
    assert (row["name"], result.stderr) == ("aten::mm", "")
    empty = cli("summary", "cpu.json", "--csv", "--rows", "kernels")
    assert (empty.exit_code, empty.stderr) == (0, "warning: The table kernels is empty.\n")
    assert empty.stdout.count("\n") == 1


def test_names_in_csv_are_escaped(cli: Cli) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "a\x1b[2J\n::error::b", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    Path("cpu\udcff\n::error::c.json").write_text(json.dumps({"traceEvents": [event]}))
    result = cli("summary", "cpu\udcff\n::error::c.json", "--csv")
    assert (result.exit_code, len(result.stdout.splitlines()), "\x1b" in result.stdout) == (0, 2, False)
    assert "\n::error::" not in result.stdout


def test_unknown_table_is_rejected(cli: Cli, record: Record) -> None:
    result = cli("summary", record(3), "--csv", "--rows", "nope")
    assert (result.exit_code, "Value error" in result.stderr) == (2, False)
    assert "'nope' is not one of 'ranks', 'kernels'" in result.stderr


@pytest.mark.parametrize("command", ["summary", "trend", "report", "export --parquet out", "merge -o out.json"])
def test_run_without_traces_refers_to_the_statuses(cli: Cli, record: Record, command: str) -> None:
    if "parquet" in command:
        pytest.importorskip("pyarrow")
    run = record(3, ranks=(0, 1), world_size=2)
    for trace in run.rglob("*.trace.json"):
        trace.unlink()
    name, *options = command.split()
    result = cli(name, run.relative_to(Path.cwd()), *options)
    assert result.exit_code == 4
    assert "For the reasons: profdeck ls profiles/job" in " ".join(result.output.split())


def test_rows_require_csv(cli: Cli, record: Record) -> None:
    result = cli("summary", record(3), "--rows", "links")
    assert result.exit_code == 2
    assert "Specify --csv as well" in result.stderr


def test_corrupt_npu_table_is_reported(cli: Cli, tmp_path: Path) -> None:
    directory = JOB.write_rank(tmp_path / "job", 0)
    table = directory / "ASCEND_PROFILER_OUTPUT" / "communication.json"
    os.truncate(table, table.stat().st_size - 20)
    result = cli("summary", directory, "--full")
    assert result.exit_code == 0
    assert "AI_CORE" in result.stdout
    assert "communication.json: The JSON is truncated" in result.stderr


def test_trace_that_was_not_read_is_not_called_whole(cli: Cli, record: Record, tmp_path: Path) -> None:
    traces = sorted(record(3, ranks=(0, 1), world_size=2).rglob("*.trace.json"))
    (tmp_path / "copies").mkdir()
    for trace in traces:
        (tmp_path / "copies" / trace.name).write_bytes(trace.read_bytes())
    broken = tmp_path / "copies" / traces[0].name
    broken.write_text("invalid")
    result = cli("summary", "copies")
    assert (result.exit_code, "all whole" in result.stdout) == (4, False)
    assert "1 path not readable" in result.stdout
    assert f"1 path could not be read, such as copies/{broken.name}" in " ".join(result.stdout.split())
    assert json.loads(cli("summary", "copies", "--json").stdout)["unread"] == [f"copies/{broken.name}"]
    assert "is inconclusive" in cli("diff", "copies", "copies").stdout
    merged = cli("merge", "copies", "-o", "merged.json")
    assert (merged.exit_code, "not all could be read completely" in " ".join(merged.stdout.split())) == (4, True)


@pytest.mark.parametrize("name", ["summary", "trend", "merge", "export", "report", "diff", "ls"])
def test_nothing_is_said_about_a_run_that_does_not_exist(cli: Cli, name: str) -> None:
    output = {"merge": ("-o", "out.json"), "export": ("--parquet", "out"), "report": ("-o", "out.html")}
    result = cli(name, "absent", *(["absent"] if name == "diff" else output.get(name, ())))
    assert result.exit_code == 4
    assert "absent" in result.stderr
    assert not any(words in result.stdout for words in ("whole", "stands out", "the same", "complete", "0 traces"))
