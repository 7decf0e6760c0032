from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from profdeck.cli import _output

Cli = Callable[..., Result]
Program = Callable[..., "subprocess.CompletedProcess[str]"]
Record = Callable[..., Path]


def test_run(cli: Cli, record: Record) -> None:
    result = cli("summary", record(3, ranks=(0, 1), world_size=2))
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:2] == ["profiles/job/step_000003/trainer/rank_0000.step3.trace.json", "trainer, rank 0, 5 events"]
    assert "Device 0: busy 0.002 ms of 0.002 ms (100.0%), idle 0.000 ms" in lines
    assert "3 4.000 0.002" in lines
    assert "paper::fold2 1 0.012 0.012" in lines
    assert "1 0.002 2.0 2.0 100.0% unclassified void [press]<int," in lines
    assert "trainer, rank 1, 5 events" in lines


def test_json_document(cli: Cli, record: Record) -> None:
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


def test_top(cli: Cli, record: Record) -> None:
    run = record(3, sheets=20)
    (trace,) = json.loads(cli("summary", run, "--top", 2, "--json").stdout)["ranks"]
    assert len(trace["operators"]) == 20  # a document is whole: it may be the baseline of a comparison
    assert cli("summary", run, "--top", 2).stdout.count("paper::fold") == 2
    assert cli("summary", run).stdout.count("paper::fold") == 15
    assert cli("summary", run, "--top", 0).stdout.count("paper::fold") == 20


def test_file_with_its_manifest_and_without(cli: Cli, record: Record, tmp_path: Path) -> None:
    trace = next(record(3).rglob("*.trace.json"))
    alone = trace.rename(tmp_path / "any.json")
    copied = trace.parent / trace.name
    copied.write_bytes(alone.read_bytes())
    first, second = json.loads(cli("summary", copied, alone, copied, "--json").stdout)["ranks"]
    assert (first["role"], first["rank"]) == ("trainer", 0)
    assert (second["role"], second["rank"]) == (None, 6)


def test_truncated_trace_is_summarised_with_a_warning(cli: Cli, record: Record) -> None:
    trace = next(record(3).rglob("*.trace.json"))
    os.truncate(trace, trace.stat().st_size - 20)
    result = cli("summary", trace.parent)
    assert result.exit_code == 0
    assert "paper::fold2" in result.stdout
    assert "warning: profiles/job/step_000003/trainer/rank_0000.step3.trace.json: " in result.stderr
    (plain,) = json.loads(cli("summary", trace, "--json").stdout)["ranks"]
    assert plain["whole"] is False
    assert plain["problem"] is not None


def test_unreadable_ones_do_not_hide_the_others(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3)
    (tmp_path / "no.txt").write_text("not a trace", encoding="utf-8")
    result = cli("summary", tmp_path / "absent.json", tmp_path / "no.txt", run, "--json")
    assert result.exit_code == 4
    assert len(json.loads(result.stdout)["ranks"]) == 1
    absent, no_trace = result.stderr.splitlines()
    assert absent.startswith("error: Cannot read ")
    assert no_trace == f"error: {tmp_path}/no.txt: The JSON is broken at offset 0: unexpected 'n'."


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
    with _output.progress("Reading") as on_progress:
        for done in range(10):
            on_progress(done, 10)
        assert threading.active_count() == threads
    assert "Reading" in capsys.readouterr().err


def test_directory_without_traces(cli: Cli, tmp_path: Path) -> None:
    result = cli("summary", tmp_path)
    assert (result.exit_code, result.stdout) == (4, "")
    assert "there is no trace below this directory" in result.stderr


def test_manifest_that_cannot_be_read_costs_the_names_only(cli: Cli, record: Record) -> None:
    run = record(3)
    next(run.rglob("rank_0000.step3.json")).write_text("{", encoding="utf-8")
    (trace,) = json.loads(cli("summary", run, "--json").stdout)["ranks"]
    assert (trace["role"], trace["rank"]) == (None, 6)
