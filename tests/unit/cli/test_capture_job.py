"""Tests for `profdeck capture job`. Each job runs steps continuously in a separate process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from processes import ending, until
from profdeck import Identity, JobRequest, Profiler, capture_job
from profdeck.base.processes import ProcessId
from profdeck.on_demand import requests, stores
from profdeck.on_demand.requests import OnDemandRequest
from profdeck_traces.base.errors import ConfigError

Cli = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[str]"]

JOB = """
import json, select, sys
from pathlib import Path
from profdeck import Identity, Profiler
job = json.loads(sys.argv[1])
settings = job["settings"]
ranks = [
    Profiler.from_config(
        identity=Identity(rank=rank, world_size=job["world_size"]),
        settings=settings | {"output": settings["output"].format(rank=rank)},
    )
    for rank in job["ranks"]
]
print("ready", flush=True)
if job["stuck"]:
    sys.stdin.read()
    sys.exit()
run = Path(settings["output"], settings["run"])
step = 0
while not select.select([sys.stdin], [], [], 0.01)[0]:  # the timeout is the step time; input ends the job
    for rank, profiler in enumerate(ranks):
        if rank and job["ahead"] and not list(run.glob("demand.*.json")):
            continue  # rank 0 must choose the step
        with profiler.capture(step + rank * job["ahead"]), profiler.stage("work"):
            pass
    step += 1
"""


@pytest.fixture
def spawn(tally_path: str) -> Iterator[Start]:
    """Yield a function that starts Python with the backend `tally`. Running processes are killed after the test."""
    with ending() as started:

        def run(*arguments: object) -> subprocess.Popen[str]:
            path = os.pathsep.join([tally_path, *filter(None, sys.path)])
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                env=os.environ | {"PYTHONPATH": path, "COLUMNS": "500"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            return process

        yield run


@pytest.fixture
def job(spawn: Start, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts ranks of a job in a process and waits until they accept requests.

    Each rank is `ahead` steps ahead of the previous rank. The ranks of a `stuck` job run no steps.
    """

    def start(
        ranks: tuple[int, ...] = (0,), world_size: int = 1, *, ahead: int = 0, stuck: bool = False, **settings: Any
    ) -> subprocess.Popen[str]:
        config = {"output": str(tmp_path), "run": "run", "trainer.backend": "tally", "trainer.ranks": "all"} | settings
        content = {"ranks": ranks, "world_size": world_size, "ahead": ahead, "stuck": stuck, "settings": config}
        process = spawn("-c", JOB, json.dumps(content))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    return start


@pytest.fixture
def start_capture(spawn: Start, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts the command. It waits only 0.5 seconds for restarted ranks."""
    program = (
        "import profdeck.on_demand.client as client; from profdeck.cli import main; client._RESTART_S = 0.5; main()"
    )
    return lambda *options: spawn("-c", program, "capture", "job", tmp_path / "run", *options)


def read_line_with(text: str, process: subprocess.Popen[str]) -> str:
    """Read stderr until a line contains `text`, and return the line."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"stderr ended without {text!r}")


def join_lines(text: str) -> str:
    return " ".join(text.split())


def test_running_job_is_captured_at_the_requested_steps(cli: Cli, job: Start, tmp_path: Path) -> None:
    job((0, 1), 2)
    result = cli("capture", "job", tmp_path / "run", "--in", 20, "--steps", 3)
    assert result.exit_code == 0, result.output
    messages = result.stderr.splitlines()
    assert messages[0] == "Sent the request to 2 processes of run."
    plan = re.fullmatch(
        r"Steps (\d+) to (\d+) will be captured, as planned by trainer rank 0 at step (\d+)\.",
        messages[1],
    )
    assert plan is not None, messages
    first, last, planned_at = map(int, plan.groups())
    assert (first - planned_at, last - planned_at) == (20, 22)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert [line for line in lines if re.match(rf"{first}\.\.{last} trainer [01] complete ", line)]
    assert any(line.startswith("run: 1 capture; ranks: 2 complete;") for line in lines)
    assert "work" in result.stdout  # the summary has the stage
    assert not (tmp_path / "run" / "demand.json").exists()


def test_json_document_contains_only_the_requested_capture(cli: Cli, job: Start, tmp_path: Path) -> None:
    process = job(steps=[0])
    result = cli("capture", "job", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (capture,) = document["ls"]["captures"]
    assert (document["complete"], document["run"]) == (True, str(tmp_path / "run"))
    assert capture["first_step"] == capture["last_step"] == document["first_step"] == document["last_step"] > 0
    assert document["processes"] == [
        {
            "role": "trainer",
            "replica": None,
            "rank": 0,
            "target": None,
            "host": ProcessId().host,
            "pid": process.pid,
            "captures": [f"step{document['first_step']}"],
            "directory": str(tmp_path / "run"),
            "files_here": True,
            "problem": None,
        }
    ]
    assert len(list((tmp_path / "run").glob("step_*"))) == 2


def test_stages_of_a_discrete_job_are_captured_separately(cli: Cli, job: Start, tmp_path: Path) -> None:
    job(mode="discrete")
    result = cli("capture", "job", tmp_path / "run", "--steps", 2, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    first = document["first_step"]
    assert [capture["id"] for capture in document["ls"]["captures"]] == [f"step{first}-work", f"step{first + 1}-work"]
    assert document["processes"][0]["captures"] == [f"step{first}-work", f"step{first + 1}-work"]


def test_rank_far_ahead_makes_the_capture_partial(cli: Cli, job: Start, tmp_path: Path) -> None:
    job((0, 1), 2, ahead=1000)
    result = cli("capture", "job", tmp_path / "run", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["complete"]) == (1, False)
    assert [process["problem"] is None for process in document["processes"]] == [True, False]
    assert re.search(r"seen here at step 1\d{3}, after step \d+ had begun", document["processes"][1]["problem"])


def test_rank_without_steps_makes_the_capture_partial(cli: Cli, job: Start, tmp_path: Path) -> None:
    job((0,), 2)
    job((1,), 2, stuck=True)
    result = cli("capture", "job", tmp_path / "run", "--timeout", 2)
    assert result.exit_code == 1
    assert re.search(
        r"trainer rank 1, process \d+ on .*: It has not begun a global step since the request\.",
        join_lines(result.stdout),
    )
    assert re.search(r"\d+ trainer 1 missing", join_lines(result.stdout))
    assert "The capture continues. To see it later: profdeck ls run" in result.stderr
    assert (tmp_path / "run" / "demand.json").exists()  # because one rank has not read it


def test_request_times_out_if_the_job_runs_no_step(cli: Cli, job: Start, tmp_path: Path) -> None:
    process = job(stuck=True)
    result = cli("capture", "job", tmp_path / "run", "--timeout", 0.3)
    assert result.exit_code == 1
    assert "No process has begun a global step for 0.3 seconds, so the request is withdrawn." in result.stderr
    assert f"The request was sent to: trainer rank 0 (process {process.pid} on " in result.stderr
    assert not (tmp_path / "run" / "demand.json").exists()
    assert result.stdout == ""


def test_request_times_out_before_the_capture_begins(cli: Cli, job: Start, tmp_path: Path) -> None:
    job()
    result = cli("capture", "job", tmp_path / "run", "--in", 1_000_000, "--timeout", 2)
    assert result.exit_code == 1
    assert (
        "Nothing was captured, and the request is withdrawn. trainer rank 0: it has not reached the end of the "
        "capture." in result.stderr
    )
    assert not (tmp_path / "run" / "demand.json").exists()


def test_job_that_ends_before_the_step_is_reported(job: Start, start_capture: Start, tmp_path: Path) -> None:
    process, command = job(), start_capture("--in", 1_000_000)
    read_line_with("will be captured", command)
    process.communicate("end")
    _, stderr = command.communicate()
    assert command.returncode == 1
    assert "trainer rank 0: it ended before the capture had ended." in stderr
    assert not (tmp_path / "run" / "demand.json").exists()


def test_job_killed_before_it_reads_the_request_is_reported(job: Start, start_capture: Start, tmp_path: Path) -> None:
    process, command = job(stuck=True), start_capture()
    read_line_with("Sent the request to 1 process", command)
    process.kill()
    process.wait()
    _, stderr = command.communicate()
    assert command.returncode == 1
    assert "Nothing was captured, because the job ended before it began another global step." in stderr


def test_capture_is_incomplete_if_the_job_is_killed_during_it(job: Start, start_capture: Start, tmp_path: Path) -> None:
    process, command = job(), start_capture("--steps", 1_000_000, "--json")
    until(lambda: list((tmp_path / "run").glob("step_*/trainer/rank_0000.*.json")))
    process.kill()
    process.wait()
    stdout, _ = command.communicate()
    document = json.loads(stdout)
    assert (command.returncode, document["complete"]) == (1, False)
    assert document["processes"][0]["problem"] == "it ended before the capture had ended"
    (capture,) = document["ls"]["captures"]
    assert capture["status"] == "missing"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_withdraws_a_request_before_the_capture_begins(
    job: Start, start_capture: Start, tmp_path: Path, number: signal.Signals
) -> None:
    job()
    command = start_capture("--in", 1_000_000)
    read_line_with("will be captured", command)
    command.send_signal(number)
    _, stderr = command.communicate()
    assert command.returncode == 130
    assert "The request is withdrawn. Nothing is captured." in stderr
    assert not (tmp_path / "run" / "demand.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be between 1 and 1,000,000, got 0."),
        ({"in_steps": -1}, "in_steps must be between 1 and"),
        ({"timeout_s": float("nan")}, "timeout_s must be a positive number of seconds, got nan."),
    ],
)
def test_invalid_requests_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        capture_job(JobRequest(run=tmp_path, **changes))


def test_ctrl_c_does_not_stop_a_started_capture(job: Start, start_capture: Start, tmp_path: Path) -> None:
    process, command = job(), start_capture("--steps", 1_000_000)
    until(lambda: list((tmp_path / "run").glob("step_*/trainer/rank_0000.*.json")))
    command.send_signal(signal.SIGINT)
    _, stderr = command.communicate()
    assert command.returncode == 130
    assert "The capture has begun and continues. To see it: profdeck ls run" in stderr
    process.communicate("end")
    (manifest,) = (tmp_path / "run").glob("step_*/trainer/rank_0000.*[0-9].json")
    assert json.loads(manifest.read_text())["status"] == "partial"


def test_second_request_is_rejected_while_the_first_is_pending(
    cli: Cli, job: Start, start_capture: Start, tmp_path: Path
) -> None:
    job(stuck=True)
    first = start_capture()
    read_line_with("Sent the request to 1 process", first)
    result = cli("capture", "job", tmp_path / "run")
    assert result.exit_code == 1
    assert f"requested by process {first.pid} on " in result.stderr
    assert "is pending. Wait until it has ended" in result.stderr


def test_request_of_a_killed_command_is_replaced(cli: Cli, job: Start, start_capture: Start, tmp_path: Path) -> None:
    job((0,), 2)
    stuck = job((1,), 2, stuck=True)
    first = start_capture("--in", 1_000_000)
    read_line_with("will be captured", first)
    first.kill()
    first.wait()
    stuck.communicate("end")
    result = cli("capture", "job", tmp_path / "run", "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["complete"]) == (1, False)  # rank 1 has exited, but was expected to record
    assert document["first_step"] < 1_000_000


def test_capture_after_the_last_step_is_rejected(cli: Cli, job: Start, tmp_path: Path) -> None:
    job(final_step=999_999)
    result = cli("capture", "job", tmp_path / "run", "--in", 1_000_000)
    assert result.exit_code == 1
    assert re.search(
        r"Nothing is captured: the capture would begin at step 1\d{6}, and the job ends with step 999999\.",
        join_lines(result.stderr),
    )


def test_capture_begins_after_the_warm_up(cli: Cli, job: Start, tmp_path: Path) -> None:
    job(**{"trainer.warmup_steps": 3})
    result = cli("capture", "job", tmp_path / "run", "--in", 3)
    assert result.exit_code == 2
    assert (
        "The capture cannot begin in 3 steps: the role 'trainer' warms up for 3 step(s) before a capture. Use at "
        "least 4. The default, 5, allows for ranks that are one step apart." in join_lines(result.stderr)
    )
    result = cli("capture", "job", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    (manifest,) = (tmp_path / "run").glob("step_*/trainer/rank_0000.*[0-9].json")
    assert json.loads(manifest.read_text())["notes"] == []


def test_ended_job_is_rejected(cli: Cli, tmp_path: Path) -> None:
    settings = {"output": str(tmp_path), "run": "run", "trainer.backend": "paper"}
    with Profiler.from_config(settings=settings) as profiler, profiler.capture(0):
        pass
    result = cli("capture", "job", tmp_path / "run")
    assert result.exit_code == 2
    assert "no process of this job accepts capture requests" in result.stderr


def test_command_waits_for_a_job_to_join_its_store(
    spawn: Start, job: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (board := tmp_path / "board").mkdir()
    monkeypatch.setenv("PAPER_BOARD", str(board))
    arguments = (tmp_path / "run", "--store", f"paper-board:{board}", "--json")
    command = spawn("-m", "profdeck", "capture", "job", *arguments)
    until((board / "read").exists, timeout_s=60)
    job(on_demand="paper-board")
    stdout, stderr = command.communicate(timeout=60)
    assert command.returncode == 0, stderr
    assert json.loads(stdout)["complete"]


@pytest.fixture
def start_on_two_hosts(job: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that starts two ranks and returns the address of their store.

    Rank 0 writes to the directory `host0`, and rank 1 to `host1`.
    """

    def start(**settings: Any) -> str:
        (board := tmp_path / "board" / "run").mkdir(parents=True)
        monkeypatch.setenv("PAPER_BOARD", str(board))
        job((0, 1), 2, output=str(tmp_path / "host{rank}"), on_demand="paper-board", **settings)
        return f"paper-board:{board}"

    return start


def rank_statuses(document: dict[str, Any]) -> list[tuple[int, str]]:
    return [(rank["rank"], rank["status"]) for capture in document["ls"]["captures"] for rank in capture["ranks"]]


def test_files_on_another_host_are_reported(cli: Cli, start_on_two_hosts: Callable[..., str], tmp_path: Path) -> None:
    run, address = tmp_path / "host0" / "run", start_on_two_hosts()
    result = cli("capture", "job", run, "--store", address, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["complete"], rank_statuses(document)) == (True, [(0, "complete")])
    assert [(process["directory"], process["files_here"], process["problem"]) for process in document["processes"]] == [
        (str(run), True, None),
        (str(tmp_path / "host1" / "run"), False, None),
    ]
    assert not list(run.glob("step_*/trainer/rank_0001*"))
    result = cli("capture", "job", run, "--store", address)
    assert result.exit_code == 0, result.output
    directory = tmp_path / "host1" / "run"
    assert f"trainer rank 1: its files are on {ProcessId().host}, in {directory}" in join_lines(result.stdout)
    assert "copy the step_* directories from there into host0/run" in join_lines(result.stdout)
    assert "missing" not in result.stdout
    result = cli("collect", run)
    assert result.exit_code == 0, result.output
    assert "Files that processes of the job wrote on other hosts are not fetched." in join_lines(result.stderr)
    # The run is complete after its files have been copied.
    for file in directory.glob("step_*/trainer/*"):
        shutil.copy2(file, run / file.relative_to(directory))
    assert cli("ls", run).exit_code == 0


def test_capture_is_complete_on_a_host_without_run_files(
    cli: Cli, start_on_two_hosts: Callable[..., str], tmp_path: Path
) -> None:
    run = tmp_path / "elsewhere" / "run"
    result = cli("capture", "job", run, "--store", start_on_two_hosts(), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["complete"], document["ls"]) == (True, None)
    assert [process["files_here"] for process in document["processes"]] == [False, False]
    assert not run.exists()


def test_incomplete_capture_on_another_host_is_reported(
    cli: Cli, start_on_two_hosts: Callable[..., str], tmp_path: Path
) -> None:
    address = start_on_two_hosts(**{"trainer.options.fail_at": "stop"})
    result = cli("capture", "job", tmp_path / "run", "--store", address, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["complete"]) == (1, False)
    assert all("stop does not work" in process["problem"] for process in document["processes"])


def test_job_that_accepts_no_requests_is_rejected(cli: Cli, tmp_path: Path) -> None:
    settings = {"output": str(tmp_path), "run": "run", "trainer.backend": "paper", "steps": [0], "on_demand": False}
    with Profiler.from_config(settings=settings).capture(0):
        pass
    result = cli("capture", "job", tmp_path / "run")
    assert result.exit_code == 2
    assert "this job accepts no capture requests. Its config contains on_demand: false" in result.stderr

    (tmp_path / "run/run.json").write_text('{"config": []}')
    with_invalid_config = cli("capture", "job", tmp_path / "run")
    assert (with_invalid_config.exit_code, with_invalid_config.stderr) == (result.exit_code, result.stderr)


def test_path_that_is_not_a_run_is_reported(cli: Cli, tmp_path: Path) -> None:
    result = cli("capture", "job", tmp_path / "absent")
    assert result.exit_code == 4
    assert "absent is not a run directory. It does not exist." in result.stderr


def test_run_directory_without_write_access_is_reported(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Any
) -> None:
    settings = {"output": str(tmp_path), "run": "run", "trainer.backend": "tally"}
    profiler = Profiler.from_config(identity=Identity(), settings=settings)

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(stores, "write_new", fail)
    result = cli("capture", "job", tmp_path / "run")
    assert profiler.enabled
    assert result.exit_code == 1
    assert "demand.json cannot be written: PermissionError" in join_lines(result.stderr)


def test_error_names_the_host_of_a_pending_request(cli: Cli, job: Start, tmp_path: Path) -> None:
    job(stuck=True)
    request = OnDemandRequest(in_steps=1, steps=1, by=ProcessId(host="another-host", pid=7))
    (tmp_path / "run" / "demand.json").write_bytes(requests.encode(request))
    result = cli("capture", "job", tmp_path / "run")
    assert result.exit_code == 1
    assert "requested by process 7 on another-host" in join_lines(result.stderr)
