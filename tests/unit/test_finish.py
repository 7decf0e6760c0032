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
from simulated_servers import RecordingEngine, ServersInThread, offer

Build = Callable[..., Profiler]
COUNT = 'echo "$PROFDECK_FINISH_CAPTURE $PROFDECK_FINISH_STATUS" >> {}/finished'
AGES_S = 600


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def build(tally: ModuleType, tmp_path: Path) -> Iterator[Build]:
    """Create a profiler of one rank. At the end of the test, wait for its finish tasks."""

    def make(rank: int = 0, world_size: int = 1, role: str = "trainer", **given: Any) -> Profiler:
        return Profiler.from_config(
            identity=Identity(role=role, rank=rank, world_size=world_size),
            settings={
                "output": str(tmp_path),
                "run": "run",
                "steps": [2],
                f"{role}.backend": "tally",
                f"{role}.ranks": "all",
                **given,
            },
        )

    yield make
    await_own_finishes()


def finished(path: Path) -> list[str]:
    await_own_finishes()
    file = path / "finished"
    return file.read_text().splitlines() if file.exists() else []


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def manifest(path: Path, rank: int = 0, capture: str = "step2") -> Path:
    return path / f"step_000002/trainer/rank_{rank:04d}.{capture}.json"


def missing(path: Path, *roles: str, name: str = "step2") -> dict[str, bool | None]:
    return Participants(path / "step_000002", name, roles or ("trainer",)).missing()[0]


# Captures with one finish.


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
def test_captures_of_a_step_share_a_finish_and_repetitions_have_their_own(capture: str, name: str) -> None:
    assert finish_id(2, capture) == name


def test_one_command_per_captured_step(build: Build, tmp_path: Path, run: Path) -> None:
    profiler = build(steps=[2, "4..6"], **{"finish.command": COUNT.format(tmp_path)})
    for step in range(8):
        with profiler.capture(step):
            pass
        if step == 6:
            assert sorted(finished(tmp_path)) == ["step2 complete", "step4 complete"]
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


def test_a_repeated_step_is_finished_again(build: Build, tmp_path: Path) -> None:
    for _ in range(2):
        with build(**{"finish.command": COUNT.format(tmp_path)}) as profiler, profiler.capture(2):
            pass
        finished(tmp_path)
    assert finished(tmp_path) == ["step2 complete", "step2-take2 complete"]


def test_the_stages_of_a_step_are_finished_together_at_its_end(build: Build, tmp_path: Path, run: Path) -> None:
    profiler = build(mode="discrete", **{"finish.command": COUNT.format(tmp_path)})
    with profiler.capture(2):
        for name in ("generate", "update", "update"):
            with profiler.stage(name):
                pass
        files = sorted(filter(is_manifest, run.glob("step_000002/trainer/*.json")))
        assert [json.loads(file.read_text())["more_follow"] for file in files] == [True] * 3
        assert finished(tmp_path) == []
    assert [json.loads(file.read_text())["more_follow"] for file in files] == [
        True,
        False,
        True,
    ]  # step2-update-2 is the last
    assert finished(tmp_path) == ["step2 complete"]
    given = json.loads((run / "step_000002/finish.step2.input.json").read_text())
    assert [capture["id"] for capture in given["ls"]["captures"]] == [
        "step2-generate",
        "step2-update",
        "step2-update-2",
    ]


def test_a_capture_that_fails_or_ends_early_is_finished_as_well(build: Build, tmp_path: Path, run: Path) -> None:
    profiler = build(**{"finish.command": COUNT.format(tmp_path), "trainer.options.fail_at": "start"})
    with profiler.capture(2) as capture:
        assert capture is None
    assert finished(tmp_path) == ["step2 partial"]
    with (
        pytest.raises(ValueError, match="boom"),
        build(run="second", **{"finish.command": COUNT.format(tmp_path)}).capture(2),
    ):
        raise ValueError("boom")
    assert finished(tmp_path) == ["step2 partial", "step2 partial"]


def test_a_finish_that_cannot_be_claimed_is_not_run(
    build: Build, tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = build(**{"finish.command": "true"})
    (run / "step_000002").write_text("in the way")
    with profiler.capture(2) as capture:
        assert capture is None
    assert "cannot write to" in caplog.text


def test_without_anything_to_run_nothing_is_imported_or_written(build: Build, run: Path) -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_the_config_is_checked(build: Build) -> None:
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
    assert missing(run) == {f"trainer rank {rank}, which has not started": None for rank in (1, 2)}
    for rank in (1, 2):
        with build(rank, 3).capture(2):
            pass
    assert missing(run) == {}


def test_a_rank_is_recording_until_its_time_limit_or_the_end_of_its_process(build: Build, run: Path) -> None:
    profiler = build()
    profiler.start(2)
    name = f"trainer rank 0 (process {os.getpid()} on {ProcessId().host})"
    assert missing(run) == {name: True}
    change(manifest(run), options={"max_capture_s": 0.0})
    assert missing(run) == {name: None}
    change(manifest(run), process_started="0")
    assert missing(run) == {name: False}
    change(manifest(run), host="elsewhere")
    assert missing(run) == {f"trainer rank 0 (process {os.getpid()} on elsewhere)": None}
    profiler.stop()
    assert missing(run) == {}


def test_a_role_without_captures_is_missing(build: Build, run: Path) -> None:
    with build().capture(2):
        pass
    assert missing(run, "trainer", "rollout") == {"the role rollout, which has not started": None}
    with build(role="rollout").capture(2):
        pass
    assert missing(run, "trainer", "rollout") == {}


def test_a_rank_between_two_stages_is_missing(build: Build, run: Path) -> None:
    profiler = build(mode="discrete", **{"finish.command": "true"})
    profiler.start(2)
    for name in ("generate", "update"):
        with profiler.stage(name):
            pass
        assert len(missing(run)) == 1
    profiler.stop()
    assert missing(run) == {}


def test_captures_of_a_repeated_step_have_other_participants(build: Build, run: Path) -> None:
    with build().capture(2):
        pass
    profiler = build()
    profiler.start(2)
    assert missing(run) == {}
    assert len(missing(run, name="step2-take2")) == 1
    profiler.close()


def test_an_analysis_in_progress_is_missing(build: Build, run: Path) -> None:
    from profdeck_npu.traces.analysis_state import AnalysisState, write_state

    with build().capture(2):
        pass
    raw = run / "step_000002/trainer/rank_0000.step2_ascend_pt"
    raw.mkdir()
    record = {"name": raw.name, "kind": "ascend_pt", "size_bytes": 0, "whole": True}
    change(manifest(run), artifacts=[record])
    assert missing(run) == {}
    here = ProcessId()
    state = AnalysisState(
        state="pending", host=here.host, pid=here.pid, process_started=here.process_started, started_ns=1
    )
    write_state(raw, state)
    name = f"the analysis of {raw.name} (process {here.pid} on {here.host})"
    assert missing(run) == {name: True}
    write_state(raw, attrs.evolve(state, process_started="0"))
    assert missing(run) == {name: False}
    write_state(raw, attrs.evolve(state, state="done"))
    assert missing(run) == {}


def test_the_document_names_the_missing_participants(build: Build, tmp_path: Path, run: Path) -> None:
    with build(0, 30, **{"finish.command": COUNT.format(tmp_path), "finish.wait_s": 0}).capture(2):
        pass
    assert finished(tmp_path) == ["step2 partial"]
    given = json.loads((run / "step_000002/finish.step2.input.json").read_text())
    assert given["missing"][0] == "trainer rank 1, which has not started"
    assert given["missing"][-1] == "9 more"
    assert len(given["missing"]) == 21


def test_a_rank_that_is_recording_is_awaited_beyond_wait_s(build: Build, tmp_path: Path, run: Path) -> None:
    given = {"finish.command": COUNT.format(tmp_path), "finish.wait_s": 0}
    other, pause = build(1, 2, **given), threading.Event()
    other.start(2)
    with build(0, 2, **given).capture(2):
        pass
    while not read_record(run / "step_000002/finish.step2.json").waits_for:
        pause.wait(0.01)
    other.stop()
    assert finished(tmp_path) == ["step2 complete"]


def test_a_rank_that_ends_after_the_finish_logs_a_warning(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"finish.command": COUNT.format(tmp_path), "finish.wait_s": 0}
    for rank in (0, 1):
        with build(rank, 2, **given).capture(2):
            pass
        assert finished(tmp_path) == ["step2 partial"]
    assert "The finish task for step2 continued without this process" in caplog.text


# The document.


def test_the_document_lists_the_files_and_the_report_of_the_capture(build: Build, run: Path) -> None:
    profiler = build(steps=[2, 3], **{"finish.command": "cat > $PROFDECK_FINISH_DIRECTORY/stdin"})
    for step in (2, 3):
        with profiler.capture(step):
            pass
    await_own_finishes()
    directory = run / "step_000002"
    given = json.loads((directory / "stdin").read_text())
    assert given == json.loads((directory / "finish.step2.input.json").read_text())
    assert given.pop("ls") == json.loads(json.dumps(plain(read_run(run, only=lambda one: one.capture == "step2"))))
    assert given == {
        "schema": 1,
        "capture": "step2",
        "status": "complete",
        "directory": str(directory),
        "missing": [],
        "files": [str(manifest(run)), str(manifest(run).with_suffix(".trace.json"))],
    }


def test_a_capture_with_a_broken_file_is_partial(build: Build, tmp_path: Path, run: Path) -> None:
    with build(1, 2).capture(2):
        pass
    manifest(run, 1).with_suffix(".trace.json").write_text("{")
    with build(0, 2, **{"finish.command": COUNT.format(tmp_path)}).capture(2):
        pass
    assert finished(tmp_path) == ["step2 partial"]


# The command.


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "given.json"
    path.write_text("{}")
    return path


def sh(command: str, given: Path, timeout_s: float = AGES_S) -> CommandResult:
    return run_command("command", ["/bin/sh", "-c", command], given, os.environ, timeout_s)


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
def test_the_result_of_a_command(
    given: Path, command: str, exit_code: int, output: str | None, problem: str | None
) -> None:
    part = sh(command, given)
    assert (part.exit_code, part.problem) == (exit_code, problem)
    assert part.output == output if output is not None else "no-such-program" in part.output


def test_a_command_that_cannot_be_started(given: Path) -> None:
    part = run_command("command", ["/no/such/shell"], given, os.environ, AGES_S)
    assert part.exit_code is None
    assert part.problem == "cannot be started: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/shell'"


def test_the_end_of_long_output_is_kept(given: Path) -> None:
    part = sh("head -c 10000000 /dev/zero; echo the end", given)
    assert part.exit_code == 0
    assert len(part.output) == OUTPUT_BYTES
    assert part.output.endswith("\0the end\n")


def test_the_process_group_is_ended_at_the_time_limit(given: Path, tmp_path: Path) -> None:
    part = sh(f"sleep {AGES_S} & echo $! > {tmp_path}/pid; sleep {AGES_S}", given, timeout_s=0.3)
    assert part.problem == "exceeded timeout_s=0.3 seconds and was terminated"
    assert part.exit_code == -signal.SIGTERM
    child, pause = int((tmp_path / "pid").read_text()), threading.Event()
    while process_stat(child)[:1] not in (
        [],
        ["Z"],
    ):  # the process has received the signal, but may not have exited yet
        pause.wait(0.01)


def test_a_background_process_does_not_delay_the_result(given: Path, tmp_path: Path) -> None:
    part = sh(f"sleep {AGES_S} & echo $! > {tmp_path}/pid", given)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert (part.exit_code, part.problem) == (0, None)


# Listeners.

LISTENERS = """
import asyncio, attrs, json, os
from profdeck import hookimpl

class Told:
    @hookimpl
    def capture_finished(self, manifest):
        with open(os.path.join(manifest["directory"], "told"), "a") as file:
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
    """Install listeners here and in the processes that are started."""
    about = tmp_path / "site" / "told-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: told\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[profdeck.listeners]\ntold = told:Told\nlater = told:Later\nlabelled = told:Labelled\nwrong = told:Wrong\n"
    )
    (tmp_path / "site" / "told.py").write_text(LISTENERS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "site"))
    yield
    sys.modules.pop("told", None)


@pytest.mark.usefixtures("listeners")
def test_listeners_are_notified_once_after_the_command(build: Build, tmp_path: Path, run: Path) -> None:
    for rank in (0, 1):
        with build(rank, 2, listeners=["told", "later", "diary"], **{"finish.command": "false"}).capture(2):
            pass
    await_own_finishes()
    assert (run / "step_000002/told").read_text() == "complete"
    record = read_record(run / "step_000002/finish.step2.json")
    assert [(part.name, part.exit_code) for part in record.parts] == [
        ("command", 1),
        ("listener told", 0),
        ("listener later", 1),
    ]
    assert record.parts[2].output.startswith("later\nTraceback")
    assert record.state is FinishState.FAILED
    assert record.failure_reason == (
        "the command failed with exit status 1; the listener later failed with exit status 1 (RuntimeError: no bucket)"
    )


@pytest.mark.usefixtures("listeners")
def test_a_listener_has_its_options_in_its_process(build: Build, run: Path) -> None:
    with build(listeners=["labelled"], **{"listener_options.labelled.label": "nightly"}).capture(2):
        pass
    await_own_finishes()
    (part,) = read_record(run / "step_000002/finish.step2.json").parts
    assert (part.exit_code, part.output) == (0, "labelled nightly\n")


@pytest.mark.usefixtures("listeners")
def test_a_listener_receives_the_arguments_of_its_hook_or_is_rejected(build: Build, tmp_path: Path) -> None:
    notify_listener("told", {}, {"directory": str(tmp_path), "status": "partial"})
    assert (tmp_path / "told").read_text() == "partial"
    with pytest.raises(BrokenPluginError, match="wrong"):
        build(listeners=["wrong"])
    with pytest.raises(UnknownPluginError):
        notify_listener("nobody", {}, {})


# Tests for finish records and their lines in `profdeck ls`.


def write(run: Path, step: int = 2, **values: Any) -> Path:
    """Write a finish task's record and return its path."""
    limits = {"command": "true", "listeners": (), "timeout_s": 1.0, "wait_s": 1.0}
    path = run / f"step_{step:06d}/finish.step{step}.json"
    write_record(path, FinishRecord(**{"capture": f"step{step}", "first_step": step, **limits, **values}))
    return path


def test_ls_shows_the_state_of_finishes(build: Build, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, part = ProcessId(), {"name": "command", "started_ns": 1, "duration_s": 0.1, "exit_code": 7}
    gone, elsewhere = attrs.evolve(here, process_started="0"), attrs.evolve(here, host="elsewhere")
    failed = CommandResult(**part, output="a\nno space\n", problem="ended with 7")
    ranks = ("trainer rank 1", "trainer rank 2")
    cases: list[tuple[dict[str, Any], str, str | None]] = [
        ({"state": FinishState.DONE}, "done", None),
        ({"state": FinishState.DONE, "waits_for": ranks}, "done", ": done, without trainer rank 1, trainer rank 2."),
        ({"waits_for": ranks}, "waiting", f" ({here}): waiting for trainer rank 1, trainer rank 2."),
        ({"state": FinishState.RUNNING}, "running", f" ({here}): running."),
        ({"state": FinishState.RUNNING, "by": elsewhere}, "running", f" ({elsewhere}): running."),
        (
            {"state": FinishState.RUNNING, "by": gone, "waits_for": ("the role rollout",)},
            "interrupted",
            ": interrupted: its process was terminated; without the role rollout.",
        ),
        ({"state": FinishState.FAILED, "parts": (failed,)}, "failed", ": failed: the command ended with 7 (no space)."),
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
        record = write(run, step, **values)
        if line is not None:
            see = f"See run/step_{step:06d}/finish.step{step}.json"
            lines.append(f"Finish task for step{step}{line.format(record)} {see}")
    result = CliRunner().invoke(app, ["ls", str(run)])
    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if line.startswith("Finish")] == lines
    assert "To run unfinished finish tasks: profdeck finish run\n" in result.output
    finishes = json.loads(CliRunner().invoke(app, ["ls", str(run), "--json"]).stdout)["finishes"]
    assert [finish["state"] for finish in finishes] == [state for _, state, _ in cases]
    assert finishes[5] == {
        "capture": "step12",
        "state": "interrupted",
        "status": None,
        "problem": None,
        "waits_for": ["the role rollout"],
        "by": str(here),
        "record": str(run / "step_000012/finish.step12.json"),
    }


def test_a_finish_that_was_not_run(build: Build, run: Path) -> None:
    profiler = build(**{"finish.command": "true"})
    profiler.start(2)
    assert list(read_finishes(read_run(run))) == []
    change(manifest(run), process_started="0")
    (found,) = read_finishes(read_run(run))
    assert found == FinishReport(capture="step2", state=FinishState.NOT_RUN)
    assert describe_finish(found) == "Finish task for step2: not run: no process of the job ended the capture."
    profiler.stop()


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    part = CommandResult(name="command", started_ns=1, duration_s=0.5, exit_code=0, output="é", problem=None)
    record = FinishRecord(
        capture="step2",
        first_step=2,
        command="true",
        listeners=("told",),
        timeout_s=1.5,
        wait_s=0.0,
        state=FinishState.DONE,
        parts=(part,),
    )
    write_record(tmp_path / "finish.json", record)
    assert read_record(tmp_path / "finish.json") == record
    assert msgspec.json.decode((tmp_path / "finish.json").read_bytes())["state"] == "done"
    assert record.max_duration_s == 2 * 1.5 + MARGIN_S


def test_a_reader_can_wait_for_a_finish(build: Build, tmp_path: Path, run: Path) -> None:
    with build(**{"finish.command": f"read line < {tmp_path}/gate"}) as profiler:
        os.mkfifo(tmp_path / "gate")
        with profiler.capture(2):
            pass
        with (tmp_path / "gate").open("w") as gate:  # opens when the command reads
            assert next(read_finishes(read_run(run))).state is FinishState.RUNNING
            gate.write("go on\n")
        await_finishes(read_run(run))
        assert next(read_finishes(read_run(run))).state is FinishState.DONE


def test_an_on_demand_capture_waits_for_its_finish(build: Build, run: Path) -> None:
    profiler, over = build(steps=[], **{"finish.command": "true"}), threading.Event()

    def job() -> None:
        step = 0
        while not over.wait(0.01):
            with profiler.capture(step):
                step += 1

    working = threading.Thread(target=job)
    working.start()
    try:
        result = CliRunner().invoke(app, ["capture", "job", str(run), "--json"])
    finally:
        over.set()
        working.join()
    assert result.exit_code == 0, result.output
    (document,) = json.loads(result.stdout)["ls"]["finishes"]
    assert (document["state"], document["status"]) == ("done", "complete")


def test_a_capture_of_servers_waits_for_its_finish(
    build: Build, tmp_path: Path, run: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finish task ignores configured roles that are not captured."""
    for path in offer(tmp_path_factory.mktemp("site")).split(os.pathsep):
        monkeypatch.syspath_prepend(path)
    with ServersInThread(2) as servers:
        for server in servers:
            server.traffic, server.engine = 5, RecordingEngine("tally-device")
        targets = [{"backend": "simulated", "targets": {"urls": [server.url]}} for server in servers]
        config = {
            "output": str(tmp_path),
            "run": "run",
            "roles": {"trainer": {"backend": "tally"}, "rollout": targets[0], "reward": targets[1]},
            "finish": {"command": COUNT.format(tmp_path), "wait_s": AGES_S},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(config))
        options = ["--config", str(tmp_path / "job.yaml"), "--iterations", "5", "--json"]
        result = CliRunner().invoke(app, ["capture", "servers", *options])
    assert result.exit_code == 0, result.output
    listed = json.loads(result.stdout)["ls"]
    (document,) = listed["finishes"]
    assert (document["state"], document["status"], document["waits_for"]) == ("done", "complete", [])
    assert listed["problems"] == []
    assert (tmp_path / "finished").read_text() == "step0 complete\n"


def test_a_reader_does_not_wait_for_a_lost_finish(build: Build, run: Path) -> None:
    with build().capture(2):
        pass
    write(run, by=attrs.evolve(ProcessId(), process_started="0"), wait_s=float(AGES_S))
    await_finishes(read_run(run))
    write(run, by=attrs.evolve(ProcessId(), host="elsewhere"), wait_s=-MARGIN_S, timeout_s=0.0)
    await_finishes(read_run(run))


def test_a_child_that_cannot_be_started_is_a_failure(
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


def test_a_run_directory_that_was_moved_is_logged(
    build: Build, tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with build(0, 2, **{"finish.command": "true", "finish.wait_s": AGES_S}).capture(2):
        pass
    run.rename(tmp_path / "moved")
    await_own_finishes()
    assert "The outcome of a finish task is unknown" in caplog.text


def test_defaults() -> None:
    assert FinishConfig() == FinishConfig(command=None, timeout_s=600.0, wait_s=300.0)
    assert Status.COMPLETE == "complete"


# `profdeck finish`.


def finish(run: Path, *options: str) -> tuple[int, list[str]]:
    """Run `profdeck finish`. Return its exit code and output lines."""
    result = CliRunner().invoke(app, ["finish", str(run), *options])
    return result.exit_code, result.output.splitlines()


@pytest.fixture
def captured(build: Build, tmp_path: Path, run: Path) -> Path:
    """A run with two captures whose finish tasks never ran, as if its processes had been killed."""
    profiler = build(steps=[2, 4])
    for step in (2, 4):
        with profiler.capture(step):
            pass
    config = json.loads((run / "run.json").read_text())["config"]
    change(run / "run.json", config=config | {"finish": {"command": COUNT.format(tmp_path)}})
    return run


def test_finishes_that_were_not_run_are_run_once(captured: Path, tmp_path: Path) -> None:
    lines = ["Finish task for step2: done.", "Finish task for step4: done.", "2 of 2 run now; 2 done"]
    assert finish(captured) == (0, lines)
    assert finish(captured) == (0, ["0 of 2 run now; 2 done"])
    assert finished(tmp_path) == ["step2 complete", "step4 complete"]
    assert finish(captured, "--again") == (0, lines)
    assert finished(tmp_path) == ["step2 complete", "step4 complete"] * 2


def test_a_finish_whose_process_was_killed_is_run_again(captured: Path, tmp_path: Path) -> None:
    record, gone = captured / "step_000002/finish.step2.json", attrs.evolve(ProcessId(), process_started="0")
    finish(captured)
    write_record(record, attrs.evolve(read_record(record), state=FinishState.RUNNING, by=gone))
    assert finish(captured) == (0, ["Finish task for step2: done.", "1 of 2 run now; 2 done"])
    write_record(record, attrs.evolve(read_record(record), state=FinishState.INTERRUPTED))
    assert finish(captured) == (0, ["Finish task for step2: done.", "1 of 2 run now; 2 done"])
    assert finished(tmp_path).count("step2 complete") == 3
    assert len(read_record(record).parts) == 1


def test_a_running_finish_is_not_run_again(captured: Path, tmp_path: Path) -> None:
    record = captured / "step_000002/finish.step2.json"
    finish(captured)
    elsewhere = attrs.evolve(ProcessId(), host="elsewhere")
    for by in (ProcessId(), elsewhere):
        write_record(record, attrs.evolve(read_record(record), state=FinishState.RUNNING, by=by))
        code, lines = finish(captured, "--again")
        assert (code, lines[0].partition(". See")[0]) == (1, f"Finish task for step2 ({by}): running")
        assert lines[-1] == "1 of 2 run now; 1 done, 1 running"
    assert finished(tmp_path).count("step2 complete") == 1
    os.utime(record, (0, 0))  # no update for longer than the maximum duration
    assert finish(captured)[0] == 0
    assert finished(tmp_path).count("step2 complete") == 2


def test_a_failed_finish_is_run_again_on_request(captured: Path) -> None:
    record = captured / "step_000002/finish.step2.json"
    finish(captured)
    write_record(record, attrs.evolve(read_record(record), command="echo no space; exit 3"))
    line = f"Finish task for step2: failed: the command failed with exit status 3 (no space). See {record}"
    for options, runs in (["--again"], 2), ([], 0):
        code, lines = finish(captured, *options)
        assert (code, lines[0], lines[-1]) == (1, line, f"{runs} of 2 run now; 1 done, 1 failed")
    write_record(record, attrs.evolve(read_record(record), command="true"))
    assert finish(captured, "--again")[0] == 0


def test_an_unreadable_record_stops_no_other_finish(captured: Path, tmp_path: Path) -> None:
    (captured / "step_000002/finish.step2.json").write_text("{}")
    code, lines = finish(captured)
    assert code == 1
    assert "the record of a finish task cannot be read" in lines[0]
    assert finished(tmp_path) == ["step4 complete"]


def test_two_calls_run_a_finish_once(captured: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "profdeck", "finish", str(captured)]
    calls = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for call in calls:
        call.communicate(timeout=60)
    assert sorted(finished(tmp_path)) == ["step2 complete", "step4 complete"]  # each call may have run one of them


def test_a_capture_that_is_being_recorded_is_left_to_its_job(build: Build, tmp_path: Path, run: Path) -> None:
    profiler = build(**{"finish.command": COUNT.format(tmp_path)})
    profiler.start(2)
    assert finish(run) == (0, ["This run has no finish task."])
    profiler.stop()
    assert finished(tmp_path) == ["step2 complete"]


@pytest.mark.usefixtures("listeners")
def test_listeners_are_notified_by_the_command(build: Build, run: Path) -> None:
    with build(listeners=["diary"]).capture(2):
        pass
    assert finish(run) == (0, ["This run has no finish task."])
    about = json.loads((run / "run.json").read_text())
    about["config"] |= {"listeners": ["diary", "labelled"], "listener_options": {"labelled": {"label": "nightly"}}}
    (run / "run.json").write_text(json.dumps(about))
    assert finish(run)[0] == 0
    (part,) = read_record(run / "step_000002/finish.step2.json").parts
    assert (part.name, part.output) == ("listener labelled", "labelled nightly\n")


@pytest.mark.parametrize("config", [3, {"finish": {"timeout_s": "soon"}}, {"finish": {"command": ["true"]}}])
def test_a_damaged_config_is_reported(captured: Path, config: Any) -> None:
    change(captured / "run.json", config=config)
    code, lines = finish(captured)
    assert code == 4
    assert lines[0].startswith(f"error: {captured / 'run.json'} cannot be read: ")
