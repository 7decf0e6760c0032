"""Tests for finish tasks and `profdeck finish`.

A finish task runs the finish command and the listeners after a step's captures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import msgspec
import pytest
from typer.testing import CliRunner

from processes import python_path
from profdeck import Identity, Profiler, Status
from profdeck.after_capture.finish import OUTPUT_BYTES, notify_listener, run_command
from profdeck.after_capture.finish_child import await_own_finishes
from profdeck.after_capture.finish_record import (
    MARGIN_S,
    CommandResult,
    FinishRecord,
    FinishState,
    finish_id,
    read_record,
    write_record,
)
from profdeck.after_capture.participants import Participants
from profdeck.after_capture.work_in_progress import FinishReport, await_finishes, read_finishes
from profdeck.base.processes import ProcessId, process_stat
from profdeck.cli import app
from profdeck.cli.ls import describe_finish
from profdeck.config.model import FinishConfig
from profdeck.records.manifest import is_manifest
from profdeck.verification.report_model import plain
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import BrokenPluginError, ConfigError, UnknownPluginError
from simulated_servers import RecordingEngine, ServersInThread, install_backends

Build = Callable[..., Profiler]
APPEND_STATUS = 'echo "$PROFDECK_FINISH_CAPTURE $PROFDECK_FINISH_STATUS" >> {}/finished'
LONG_S = 600


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def build(tally: ModuleType, tmp_path: Path) -> Iterator[Build]:
    """Function that creates a profiler of one rank. The fixture waits for the finish tasks at the end of the test."""

    def create(rank: int = 0, world_size: int = 1, role: str = "trainer", **settings: Any) -> Profiler:
        return Profiler.from_config(
            identity=Identity(role=role, rank=rank, world_size=world_size),
            settings={
                "output": str(tmp_path),
                "run": "run",
                "steps": [2],
                f"{role}.backend": "tally",
                f"{role}.ranks": "all",
                **settings,
            },
        )

    yield create
    await_own_finishes()


def read_finished(path: Path) -> list[str]:
    await_own_finishes()
    file = path / "finished"
    return file.read_text().splitlines() if file.exists() else []


def update_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def manifest_path(path: Path, rank: int = 0, capture: str = "step2") -> Path:
    return path / f"step_000002/trainer/rank_{rank:04d}.{capture}.json"


def missing_participants(path: Path, *roles: str, name: str = "step2") -> dict[str, bool | None]:
    return Participants(path / "step_000002", name, roles or ("trainer",)).missing()[0]


# One finish task per capture.


@pytest.mark.parametrize(
    ("capture", "name"),
    [
        ("step2", "step2"),
        ("step2-actor_update", "step2"),
        ("step2-actor_update-2", "step2"),
        ("step2-decode-3", "step2"),
        ("step2-take2", "step2-take2"),
        ("step2-actor_update-2-take3", "step2-take3"),
        ("step2-take2-decode-2", "step2-take2"),
        ("mine", "step2"),
    ],
)
def test_finish_id_is_shared_by_a_step_but_not_by_its_repetitions(capture: str, name: str) -> None:
    assert finish_id(2, capture) == name


def test_command_runs_once_per_capture(build: Build, tmp_path: Path, run: Path) -> None:
    profiler = build(steps=[2, "4..6"], **{"finish.command": APPEND_STATUS.format(tmp_path)})
    for step in range(8):
        with profiler.capture(step):
            pass
        if step == 6:
            assert sorted(read_finished(tmp_path)) == ["step2 complete", "step4 complete"]
    assert {path.name for path in run.glob("step_*/finish.*")} == {
        "finish.step2.json",
        "finish.step2.input.json",
        "finish.step4.json",
        "finish.step4.input.json",
    }
    assert list(read_finishes(read_run(run))) == [
        FinishReport(
            capture=name,
            state=FinishState.DONE,
            status="complete",
            by=str(read_record(path).by),
            record=path,
        )
        for name, path in (
            ("step2", run / "step_000002/finish.step2.json"),
            ("step4", run / "step_000004/finish.step4.json"),
        )
    ]


def test_repeated_step_has_a_new_finish_task(build: Build, tmp_path: Path) -> None:
    for _ in range(2):
        with build(**{"finish.command": APPEND_STATUS.format(tmp_path)}) as profiler, profiler.capture(2):
            pass
        read_finished(tmp_path)
    assert read_finished(tmp_path) == ["step2 complete", "step2-take2 complete"]


def test_stages_of_a_step_share_a_finish_task(build: Build, tmp_path: Path, run: Path) -> None:
    profiler = build(mode="discrete", **{"finish.command": APPEND_STATUS.format(tmp_path)})
    with profiler.capture(2):
        for name in ("generate", "update", "update"):
            with profiler.stage(name):
                pass
        files = sorted(filter(is_manifest, run.glob("step_000002/trainer/*.json")))
        assert [json.loads(file.read_text())["more_follow"] for file in files] == [True] * 3
        assert read_finished(tmp_path) == []
    # step2-update-2 ended last.
    assert [json.loads(file.read_text())["more_follow"] for file in files] == [True, False, True]
    assert read_finished(tmp_path) == ["step2 complete"]
    document = json.loads((run / "step_000002/finish.step2.input.json").read_text())
    assert [capture["id"] for capture in document["ls"]["captures"]] == [
        "step2-generate",
        "step2-update",
        "step2-update-2",
    ]


def test_failed_and_partial_captures_have_finish_tasks(build: Build, tmp_path: Path, run: Path) -> None:
    profiler = build(**{"finish.command": APPEND_STATUS.format(tmp_path), "trainer.options.fail_at": "start"})
    with profiler.capture(2) as capture:
        assert capture is None
    assert read_finished(tmp_path) == ["step2 partial"]
    with (
        pytest.raises(ValueError, match="boom"),
        build(run="second", **{"finish.command": APPEND_STATUS.format(tmp_path)}).capture(2),
    ):
        raise ValueError("boom")
    assert read_finished(tmp_path) == ["step2 partial", "step2 partial"]


def test_finish_task_does_not_run_if_its_record_cannot_be_written(
    build: Build, tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = build(**{"finish.command": "true"})
    (run / "step_000002").write_text("in the way")
    with profiler.capture(2) as capture:
        assert capture is None
    assert "cannot write to" in caplog.text


def test_job_without_finish_tasks_imports_and_writes_nothing_for_them(build: Build, run: Path) -> None:
    with build(listeners=["diary"]).capture(2):
        pass
    assert list(run.glob("step_*/finish.*")) == []
    code = (
        "import sys; from profdeck import Profiler\n"
        f"p = Profiler.from_config(settings={{'output': {str(run)!r}, 'run': 'b', 'steps': [1], "
        "'trainer.backend': 'tally'})\n"
        "with p.capture(1): pass\n"
        "unused = {'profdeck.after_capture.finish_child', 'profdeck.verification.run_report'}\n"
        "print(sorted(unused & set(sys.modules)))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert completed.stdout == "[]\n"


def test_invalid_finish_config_is_rejected(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"finish\.command"):
        build(**{"finish.command": ["true"]})
    with pytest.raises(ConfigError, match="finish: command: the command is empty"):
        build(**{"finish.command": " "})
    with pytest.raises(ConfigError, match="finish: 'timeout_s'"):
        build(**{"finish.timeout_s": 0})
    with pytest.raises(ConfigError, match="finish: 'wait_s'"):
        build(**{"finish.wait_s": -1})
    with pytest.raises(ConfigError, match="timeout_s"):
        build(**{"finish.timeout": 5})


# Participants.


def test_ranks_that_have_not_started_are_missing(build: Build, run: Path) -> None:
    with build(0, 3).capture(2):
        pass
    assert missing_participants(run) == {f"trainer rank {rank}, which has not started": None for rank in (1, 2)}
    for rank in (1, 2):
        with build(rank, 3).capture(2):
            pass
    assert missing_participants(run) == {}


def test_rank_is_recording_until_its_time_limit_or_process_exit(build: Build, run: Path) -> None:
    profiler = build()
    profiler.start(2)
    name = f"trainer rank 0 (process {os.getpid()} on {ProcessId().host})"
    assert missing_participants(run) == {name: True}
    update_json(manifest_path(run), options={"max_capture_s": 0.0})
    assert missing_participants(run) == {name: None}
    update_json(manifest_path(run), process_started="0")
    assert missing_participants(run) == {name: False}
    update_json(manifest_path(run), pid_namespace="pid:[1]")  # as in a container that shares the host name
    assert missing_participants(run) == {name: None}
    update_json(manifest_path(run), host="elsewhere")
    assert missing_participants(run) == {f"trainer rank 0 (process {os.getpid()} on elsewhere)": None}
    profiler.stop()
    assert missing_participants(run) == {}


def test_role_without_captures_is_missing(build: Build, run: Path) -> None:
    with build().capture(2):
        pass
    assert missing_participants(run, "trainer", "rollout") == {"the role rollout, which has not started": None}
    with build(role="rollout").capture(2):
        pass
    assert missing_participants(run, "trainer", "rollout") == {}


def test_rank_between_two_stages_is_missing(build: Build, run: Path) -> None:
    profiler = build(mode="discrete", **{"finish.command": "true"})
    profiler.start(2)
    for name in ("generate", "update"):
        with profiler.stage(name):
            pass
        assert len(missing_participants(run)) == 1
    profiler.stop()
    assert missing_participants(run) == {}


def test_repeated_step_has_separate_participants(build: Build, run: Path) -> None:
    with build().capture(2):
        pass
    profiler = build()
    profiler.start(2)
    assert missing_participants(run) == {}
    assert len(missing_participants(run, name="step2-take2")) == 1
    profiler.close()


def test_analysis_in_progress_is_missing(build: Build, run: Path) -> None:
    from profdeck_npu.traces.analysis_state import AnalysisState, write_state

    with build().capture(2):
        pass
    raw_directory = run / "step_000002/trainer/rank_0000.step2_ascend_pt"
    raw_directory.mkdir()
    record = {"name": raw_directory.name, "kind": "ascend_pt", "size_bytes": 0, "whole": True}
    update_json(manifest_path(run), artifacts=[record])
    assert missing_participants(run) == {}
    process = ProcessId()
    state = AnalysisState(
        state="pending", host=process.host, pid=process.pid, process_started=process.process_started, started_ns=1
    )
    write_state(raw_directory, state)
    name = f"the analysis of {raw_directory.name} (process {process.pid} on {process.host})"
    assert missing_participants(run) == {name: True}
    write_state(raw_directory, attrs.evolve(state, process_started="0"))
    assert missing_participants(run) == {name: False}
    write_state(raw_directory, attrs.evolve(state, state="done"))
    assert missing_participants(run) == {}


def test_document_lists_the_missing_participants(build: Build, tmp_path: Path, run: Path) -> None:
    with build(0, 30, **{"finish.command": APPEND_STATUS.format(tmp_path), "finish.wait_s": 0}).capture(2):
        pass
    assert read_finished(tmp_path) == ["step2 partial"]
    document = json.loads((run / "step_000002/finish.step2.input.json").read_text())
    assert document["missing"][0] == "trainer rank 1, which has not started"
    assert document["missing"][-1] == "9 more"
    assert len(document["missing"]) == 21


def test_recording_rank_is_awaited_beyond_wait_s(build: Build, tmp_path: Path, run: Path) -> None:
    settings = {"finish.command": APPEND_STATUS.format(tmp_path), "finish.wait_s": 0}
    recording_rank, pause = build(1, 2, **settings), threading.Event()
    recording_rank.start(2)
    with build(0, 2, **settings).capture(2):
        pass
    while not read_record(run / "step_000002/finish.step2.json").waits_for:
        pause.wait(0.01)
    recording_rank.stop()
    assert read_finished(tmp_path) == ["step2 complete"]


def test_rank_that_ends_after_the_finish_task_logs_a_warning(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"finish.command": APPEND_STATUS.format(tmp_path), "finish.wait_s": 0}
    for rank in (0, 1):
        with build(rank, 2, **settings).capture(2):
            pass
        assert read_finished(tmp_path) == ["step2 partial"]
    assert "The finish task for step2 continued without this process" in caplog.text


# The document.


def test_document_contains_the_files_and_the_report_of_the_capture(build: Build, run: Path) -> None:
    profiler = build(steps=[2, 3], **{"finish.command": "cat > $PROFDECK_FINISH_DIRECTORY/stdin"})
    for step in (2, 3):
        with profiler.capture(step):
            pass
    await_own_finishes()
    directory = run / "step_000002"
    document = json.loads((directory / "stdin").read_text())
    assert document == json.loads((directory / "finish.step2.input.json").read_text())
    assert document.pop("ls") == json.loads(
        json.dumps(plain(read_run(run, only=lambda manifest: manifest.capture == "step2")))
    )
    assert document == {
        "schema": 1,
        "capture": "step2",
        "status": "complete",
        "directory": str(directory),
        "missing": [],
        "files": [str(manifest_path(run)), str(manifest_path(run).with_suffix(".trace.json"))],
    }


def test_corrupt_file_makes_the_capture_partial(build: Build, tmp_path: Path, run: Path) -> None:
    with build(1, 2).capture(2):
        pass
    manifest_path(run, 1).with_suffix(".trace.json").write_text("{")
    with build(0, 2, **{"finish.command": APPEND_STATUS.format(tmp_path)}).capture(2):
        pass
    assert read_finished(tmp_path) == ["step2 partial"]


# The command.


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    path = tmp_path / "input.json"
    path.write_text("{}")
    return path


def run_shell(command: str, input_file: Path, timeout_s: float = LONG_S) -> CommandResult:
    return run_command("command", ["/bin/sh", "-c", command], input_file, os.environ, timeout_s)


@pytest.mark.parametrize(
    ("command", "exit_code", "output", "problem"),
    [
        ("cat; echo done >&2", 0, "{}done\n", None),
        ("echo refused; exit 3", 3, "refused\n", "failed with exit status 3"),
        ("kill -9 $$", -signal.SIGKILL, "", "was terminated by SIGKILL"),
        ("no-such-program", 127, None, "failed with exit status 127"),
        ("echo lost; echo kept > /dev/stderr; echo last", 0, "kept\nlast\n", None),
    ],
)
def test_command_result_contains_exit_code_output_and_problem(
    input_file: Path, command: str, exit_code: int, output: str | None, problem: str | None
) -> None:
    result = run_shell(command, input_file)
    assert (result.exit_code, result.problem) == (exit_code, problem)
    assert result.output == output if output is not None else "no-such-program" in result.output


def test_command_that_cannot_start_has_no_exit_code(input_file: Path) -> None:
    result = run_command("command", ["/no/such/shell"], input_file, os.environ, LONG_S)
    assert result.exit_code is None
    assert (
        result.problem == "cannot be started: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/shell'"
    )


def test_only_the_end_of_long_output_is_kept(input_file: Path) -> None:
    result = run_shell("head -c 10000000 /dev/zero; echo the end", input_file)
    assert result.exit_code == 0
    assert len(result.output) == OUTPUT_BYTES
    assert result.output.endswith("\0the end\n")


def test_time_limit_terminates_the_process_group(input_file: Path, tmp_path: Path) -> None:
    result = run_shell(f"sleep {LONG_S} & echo $! > {tmp_path}/pid; sleep {LONG_S}", input_file, timeout_s=0.3)
    assert result.problem == "exceeded timeout_s=0.3 seconds and was terminated"
    assert result.exit_code == -signal.SIGTERM
    child, pause = int((tmp_path / "pid").read_text()), threading.Event()
    # The process has received the signal, but may not have exited yet.
    while process_stat(child)[:1] not in ([], ["Z"]):
        pause.wait(0.01)


def test_background_process_does_not_delay_the_result(input_file: Path, tmp_path: Path) -> None:
    result = run_shell(f"sleep {LONG_S} & echo $! > {tmp_path}/pid", input_file)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert (result.exit_code, result.problem) == (0, None)


# Listeners.

LISTENERS = """
import asyncio, attrs, json, os
from profdeck import hookimpl

class Writer:
    @hookimpl
    def capture_finished(self, manifest):
        with open(os.path.join(manifest["directory"], "status"), "a") as file:
            file.write(manifest["status"])

class Labelled:
    Options = attrs.make_class("Options", {"label": attrs.field(default="none", type=str)}, frozen=True)

    def __init__(self, options):
        self.options = options

    @hookimpl
    def capture_finished(self, manifest, plugin_name):
        print(plugin_name, self.options.label)

class Later:
    @hookimpl
    async def capture_finished(self, manifest):
        await asyncio.sleep(0)
        print("later", flush=True)
        raise RuntimeError("no bucket")

class Wrong:
    @hookimpl
    def capture_finished(self, capture):
        pass
"""


@pytest.fixture
def listeners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install listeners in this process and its child processes."""
    dist_info = tmp_path / "site" / "finish_listeners-1.0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: finish-listeners\nVersion: 1.0\n")
    (dist_info / "entry_points.txt").write_text(
        "[profdeck.listeners]\nwriter = finish_listeners:Writer\nlater = finish_listeners:Later\n"
        "labelled = finish_listeners:Labelled\nwrong = finish_listeners:Wrong\n"
    )
    (tmp_path / "site" / "finish_listeners.py").write_text(LISTENERS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "site"))
    yield
    sys.modules.pop("finish_listeners", None)


@pytest.mark.usefixtures("listeners")
def test_listeners_are_notified_once_after_the_command(build: Build, tmp_path: Path, run: Path) -> None:
    for rank in (0, 1):
        with build(rank, 2, listeners=["writer", "later", "diary"], **{"finish.command": "false"}).capture(2):
            pass
    await_own_finishes()
    assert (run / "step_000002/status").read_text() == "complete"
    record = read_record(run / "step_000002/finish.step2.json")
    assert [(part.name, part.exit_code) for part in record.parts] == [
        ("command", 1),
        ("listener writer", 0),
        ("listener later", 1),
    ]
    assert record.parts[2].output.startswith("later\nTraceback")
    assert record.state is FinishState.FAILED
    assert record.failure_reason == (
        "the command failed with exit status 1; the listener later failed with exit status 1 (RuntimeError: no bucket)"
    )


@pytest.mark.usefixtures("listeners")
def test_listener_process_receives_the_listener_options(build: Build, run: Path) -> None:
    with build(listeners=["labelled"], **{"listener_options.labelled.label": "nightly"}).capture(2):
        pass
    await_own_finishes()
    (result,) = read_record(run / "step_000002/finish.step2.json").parts
    assert (result.exit_code, result.output) == (0, "labelled nightly\n")


@pytest.mark.usefixtures("listeners")
def test_listener_is_notified_unless_it_is_invalid_or_unknown(build: Build, tmp_path: Path) -> None:
    notify_listener("writer", {}, {"directory": str(tmp_path), "status": "partial"})
    assert (tmp_path / "status").read_text() == "partial"
    with pytest.raises(BrokenPluginError, match="wrong"):
        build(listeners=["wrong"])
    with pytest.raises(UnknownPluginError):
        notify_listener("nobody", {}, {})


# Finish records and their lines in `profdeck ls`.


def write_finish_record(run: Path, step: int = 2, **values: Any) -> Path:
    """Write the record of a finish task. Return its path."""
    limits = {"command": "true", "listeners": (), "timeout_s": 1.0, "wait_s": 1.0}
    path = run / f"step_{step:06d}/finish.step{step}.json"
    write_record(path, FinishRecord(**{"capture": f"step{step}", "first_step": step, **limits, **values}))
    return path


def test_ls_shows_the_state_of_finish_tasks(build: Build, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, result_fields = ProcessId(), {"name": "command", "started_ns": 1, "duration_s": 0.1, "exit_code": 7}
    dead_process, remote_process = attrs.evolve(process, process_started="0"), attrs.evolve(process, host="elsewhere")
    failed_result = CommandResult(**result_fields, output="a\nno space\n", problem="ended with 7")
    ranks = ("trainer rank 1", "trainer rank 2")
    cases: list[tuple[dict[str, Any], str, str | None]] = [
        ({"state": FinishState.DONE}, "done", None),
        ({"state": FinishState.DONE, "waits_for": ranks}, "done", ": done, without trainer rank 1, trainer rank 2."),
        ({"waits_for": ranks}, "waiting", f" ({process}): waiting for trainer rank 1, trainer rank 2."),
        ({"state": FinishState.RUNNING}, "running", f" ({process}): running."),
        ({"state": FinishState.RUNNING, "by": remote_process}, "running", f" ({remote_process}): running."),
        (
            {"state": FinishState.RUNNING, "by": dead_process, "waits_for": ("the role rollout",)},
            "interrupted",
            ": interrupted: its process was terminated; without the role rollout.",
        ),
        (
            {"state": FinishState.FAILED, "parts": (failed_result,)},
            "failed",
            ": failed: the command ended with 7 (no space).",
        ),
        (
            {"schema": 99},
            "failed",
            ": failed: {}: written by a later version of profdeck; update profdeck to read this file..",
        ),
    ]
    monkeypatch.chdir(run.parent)
    steps = [2 * (number + 1) for number in range(len(cases))]
    profiler, lines = build(steps=[*steps, 100]), []
    for step in [*steps, 100]:
        with profiler.capture(step):
            pass
    for step, (values, _, line) in zip(steps, cases, strict=True):
        record = write_finish_record(run, step, **values)
        if line is not None:
            reference = f"See run/step_{step:06d}/finish.step{step}.json"
            lines.append(f"Finish task for step{step}{line.format(record)} {reference}")
    result = CliRunner().invoke(app, ["ls", str(run)])
    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if line.startswith("Finish")] == lines
    assert "To run unfinished finish tasks: profdeck finish run\n" in result.output
    finishes = json.loads(CliRunner().invoke(app, ["ls", str(run), "--json"]).stdout)["finishes"]
    assert [task["state"] for task in finishes] == [state for _, state, _ in cases]
    assert finishes[5] == {
        "capture": "step12",
        "state": "interrupted",
        "status": None,
        "problem": None,
        "waits_for": ["the role rollout"],
        "by": str(process),
        "record": str(run / "step_000012/finish.step12.json"),
    }


def test_finish_task_that_did_not_run_is_reported(build: Build, run: Path) -> None:
    profiler = build(**{"finish.command": "true"})
    profiler.start(2)
    assert list(read_finishes(read_run(run))) == []
    update_json(manifest_path(run), process_started="0")
    (report,) = read_finishes(read_run(run))
    assert report == FinishReport(capture="step2", state=FinishState.NOT_RUN)
    assert describe_finish(report) == "Finish task for step2: not run: no process of the job ended the capture."
    profiler.stop()


def test_record_can_be_written_and_read_back(tmp_path: Path) -> None:
    result = CommandResult(name="command", started_ns=1, duration_s=0.5, exit_code=0, output="é", problem=None)
    record = FinishRecord(
        capture="step2",
        first_step=2,
        command="true",
        listeners=("writer",),
        timeout_s=1.5,
        wait_s=0.0,
        state=FinishState.DONE,
        parts=(result,),
    )
    write_record(tmp_path / "finish.json", record)
    assert read_record(tmp_path / "finish.json") == record
    assert msgspec.json.decode((tmp_path / "finish.json").read_bytes())["state"] == "done"
    assert record.max_duration_s == 2 * 1.5 + MARGIN_S


def test_await_finishes_waits_for_a_running_finish_task(build: Build, tmp_path: Path, run: Path) -> None:
    with build(**{"finish.command": f"read line < {tmp_path}/gate"}) as profiler:
        os.mkfifo(tmp_path / "gate")
        with profiler.capture(2):
            pass
        with (tmp_path / "gate").open("w") as gate:  # blocks until the command opens the pipe
            assert next(read_finishes(read_run(run))).state is FinishState.RUNNING
            gate.write("go on\n")
        await_finishes(read_run(run))
        assert next(read_finishes(read_run(run))).state is FinishState.DONE


def test_on_demand_capture_waits_for_its_finish_task(build: Build, run: Path) -> None:
    profiler, job_over = build(steps=[], **{"finish.command": "true"}), threading.Event()

    def run_job() -> None:
        step = 0
        while not job_over.wait(0.01):
            with profiler.capture(step):
                step += 1

    job_thread = threading.Thread(target=run_job)
    job_thread.start()
    try:
        result = CliRunner().invoke(app, ["capture", "job", str(run), "--json"])
    finally:
        job_over.set()
        job_thread.join()
    assert result.exit_code == 0, result.output
    (document,) = json.loads(result.stdout)["ls"]["finishes"]
    assert (document["state"], document["status"]) == ("done", "complete")


def test_server_capture_waits_for_its_finish_task(
    build: Build, tmp_path: Path, run: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finish task ignores configured roles that are not captured."""
    for path in install_backends(tmp_path_factory.mktemp("site")).split(os.pathsep):
        monkeypatch.syspath_prepend(path)
    with ServersInThread(2) as servers:
        for server in servers:
            server.iterations_after_start, server.engine = 5, RecordingEngine("tally-device")
        targets = [{"backend": "simulated", "targets": {"urls": [server.url]}} for server in servers]
        config = {
            "output": str(tmp_path),
            "run": "run",
            "roles": {"trainer": {"backend": "tally"}, "rollout": targets[0], "reward": targets[1]},
            "finish": {"command": APPEND_STATUS.format(tmp_path), "wait_s": LONG_S},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(config))
        options = ["--config", str(tmp_path / "job.yaml"), "--iterations", "5", "--json"]
        result = CliRunner().invoke(app, ["capture", "servers", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)["ls"]
    (document,) = report["finishes"]
    assert (document["state"], document["status"], document["waits_for"]) == ("done", "complete", [])
    assert report["problems"] == []
    assert (tmp_path / "finished").read_text() == "step0 complete\n"


def test_await_finishes_does_not_wait_for_a_lost_finish_task(build: Build, run: Path) -> None:
    with build().capture(2):
        pass
    write_finish_record(run, by=attrs.evolve(ProcessId(), process_started="0"), wait_s=float(LONG_S))
    await_finishes(read_run(run))
    write_finish_record(run, by=attrs.evolve(ProcessId(), host="elsewhere"), wait_s=-MARGIN_S, timeout_s=0.0)
    await_finishes(read_run(run))


def test_finish_process_that_cannot_start_fails_the_finish_task(
    build: Build, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = build(**{"finish.command": "true"})
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with profiler.capture(2):
        pass
    await_own_finishes()
    record = read_record(run / "step_000002/finish.step2.json")
    assert record.state is FinishState.FAILED
    assert record.problem is not None
    assert "/no/such/python" in record.problem
    assert "Finish task for step2: failed: its process could not be started" in caplog.text


def test_moved_run_directory_is_logged(
    build: Build, tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with build(0, 2, **{"finish.command": "true", "finish.wait_s": LONG_S}).capture(2):
        pass
    run.rename(tmp_path / "moved")
    await_own_finishes()
    assert "The outcome of a finish task is unknown" in caplog.text


def test_default_finish_config() -> None:
    assert FinishConfig() == FinishConfig(command=None, timeout_s=600.0, wait_s=300.0)
    assert Status.COMPLETE == "complete"


# `profdeck finish`.


def run_finish(run: Path, *options: str) -> tuple[int, list[str]]:
    """Run `profdeck finish`. Return its exit code and output lines."""
    result = CliRunner().invoke(app, ["finish", str(run), *options])
    return result.exit_code, result.output.splitlines()


@pytest.fixture
def unfinished_run(build: Build, tmp_path: Path, run: Path) -> Path:
    """A run with two captures whose finish tasks never ran, as if its processes had been killed."""
    profiler = build(steps=[2, 4])
    for step in (2, 4):
        with profiler.capture(step):
            pass
    config = json.loads((run / "run.json").read_text())["config"]
    update_json(run / "run.json", config=config | {"finish": {"command": APPEND_STATUS.format(tmp_path)}})
    return run


def test_pending_finish_tasks_run_once(unfinished_run: Path, tmp_path: Path) -> None:
    lines = ["Finish task for step2: done.", "Finish task for step4: done.", "2 of 2 run now; 2 done"]
    assert run_finish(unfinished_run) == (0, lines)
    assert run_finish(unfinished_run) == (0, ["0 of 2 run now; 2 done"])
    assert read_finished(tmp_path) == ["step2 complete", "step4 complete"]
    assert run_finish(unfinished_run, "--again") == (0, lines)
    assert read_finished(tmp_path) == ["step2 complete", "step4 complete"] * 2


def test_interrupted_finish_task_runs_again(unfinished_run: Path, tmp_path: Path) -> None:
    record, dead_process = (
        unfinished_run / "step_000002/finish.step2.json",
        attrs.evolve(ProcessId(), process_started="0"),
    )
    run_finish(unfinished_run)
    write_record(record, attrs.evolve(read_record(record), state=FinishState.RUNNING, by=dead_process))
    assert run_finish(unfinished_run) == (0, ["Finish task for step2: done.", "1 of 2 run now; 2 done"])
    write_record(record, attrs.evolve(read_record(record), state=FinishState.INTERRUPTED))
    assert run_finish(unfinished_run) == (0, ["Finish task for step2: done.", "1 of 2 run now; 2 done"])
    assert read_finished(tmp_path).count("step2 complete") == 3
    assert len(read_record(record).parts) == 1


def test_running_finish_task_does_not_run_again(unfinished_run: Path, tmp_path: Path) -> None:
    record = unfinished_run / "step_000002/finish.step2.json"
    run_finish(unfinished_run)
    remote_process = attrs.evolve(ProcessId(), host="elsewhere")
    for process in (ProcessId(), remote_process):
        write_record(record, attrs.evolve(read_record(record), state=FinishState.RUNNING, by=process))
        code, lines = run_finish(unfinished_run, "--again")
        assert (code, lines[0].partition(". See")[0]) == (1, f"Finish task for step2 ({process}): running")
        assert lines[-1] == "1 of 2 run now; 1 done, 1 running"
    assert read_finished(tmp_path).count("step2 complete") == 1
    os.utime(record, (0, 0))  # no update for longer than the maximum duration
    assert run_finish(unfinished_run)[0] == 0
    assert read_finished(tmp_path).count("step2 complete") == 2


def test_failed_finish_task_runs_again_only_with_the_option(unfinished_run: Path) -> None:
    record = unfinished_run / "step_000002/finish.step2.json"
    run_finish(unfinished_run)
    write_record(record, attrs.evolve(read_record(record), command="echo no space; exit 3"))
    line = f"Finish task for step2: failed: the command failed with exit status 3 (no space). See {record}"
    for options, runs in (["--again"], 2), ([], 0):
        code, lines = run_finish(unfinished_run, *options)
        assert (code, lines[0], lines[-1]) == (1, line, f"{runs} of 2 run now; 1 done, 1 failed")
    write_record(record, attrs.evolve(read_record(record), command="true"))
    assert run_finish(unfinished_run, "--again")[0] == 0


def test_unreadable_record_does_not_affect_other_finish_tasks(unfinished_run: Path, tmp_path: Path) -> None:
    (unfinished_run / "step_000002/finish.step2.json").write_text("{}")
    code, lines = run_finish(unfinished_run)
    assert code == 1
    assert "the record of a finish task cannot be read" in lines[0]
    assert read_finished(tmp_path) == ["step4 complete"]


def test_concurrent_calls_run_each_finish_task_once(unfinished_run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "profdeck", "finish", str(unfinished_run)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        process.communicate(timeout=60)
    # Each process may have run one of the tasks.
    assert sorted(read_finished(tmp_path)) == ["step2 complete", "step4 complete"]


def test_active_capture_has_no_finish_task(build: Build, tmp_path: Path, run: Path) -> None:
    profiler = build(**{"finish.command": APPEND_STATUS.format(tmp_path)})
    profiler.start(2)
    assert run_finish(run) == (0, ["This run has no finish task."])
    profiler.stop()
    assert read_finished(tmp_path) == ["step2 complete"]


@pytest.mark.usefixtures("listeners")
def test_profdeck_finish_notifies_the_configured_listeners(build: Build, run: Path) -> None:
    with build(listeners=["diary"]).capture(2):
        pass
    assert run_finish(run) == (0, ["This run has no finish task."])
    run_file = json.loads((run / "run.json").read_text())
    run_file["config"] |= {"listeners": ["diary", "labelled"], "listener_options": {"labelled": {"label": "nightly"}}}
    (run / "run.json").write_text(json.dumps(run_file))
    assert run_finish(run)[0] == 0
    (result,) = read_record(run / "step_000002/finish.step2.json").parts
    assert (result.name, result.output) == ("listener labelled", "labelled nightly\n")


@pytest.mark.parametrize("config", [3, {"finish": {"timeout_s": "soon"}}, {"finish": {"command": ["true"]}}])
def test_invalid_config_in_the_run_directory_is_reported(unfinished_run: Path, config: Any) -> None:
    update_json(unfinished_run / "run.json", config=config)
    code, lines = run_finish(unfinished_run)
    assert code == 4
    assert lines[0].startswith(f"error: {unfinished_run / 'run.json'} cannot be read: ")
