"""Once per capture of the run: who is waited for, what is handed over, what is run, and what is said of it."""

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
from profdeck.after_run import commands, start
from profdeck.after_run.commands import OUTPUT_BYTES, run_part
from profdeck.after_run.record import (
    MARGIN_S,
    CommandResult,
    FinishRecord,
    FinishReport,
    FinishState,
    await_finishes,
    finish_id,
    read_finishes,
    read_record,
    write_record,
)
from profdeck.after_run.waiting import Participants, Unfinished
from profdeck.base.processes import ProcessId, process_stat
from profdeck.cli import app
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
    """Build a profiler of one rank; whatever it has had finished is over at the end."""

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
    start.await_own()


def finished(path: Path) -> list[str]:
    start.await_own()
    file = path / "finished"
    return file.read_text().splitlines() if file.exists() else []


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def manifest(path: Path, rank: int = 0, capture: str = "step2") -> Path:
    return path / f"step_000002/trainer/rank_{rank:04d}.{capture}.json"


def look(path: Path, *roles: str, name: str = "step2") -> Unfinished:
    return Participants(path / "step_000002", name, roles or ("trainer",)).look()[0]


# What it is of.


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
def test_all_captures_of_a_step_have_one_finish_and_those_of_its_repetition_another(capture: str, name: str) -> None:
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


def test_what_cannot_be_claimed_is_not_finished(
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
        "unused = {'profdeck.after_run.start', 'profdeck.after_run.worker', 'profdeck.verification.run_report'}\n"
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
    with pytest.raises(ConfigError, match="finish: command: it is empty"):
        build(**{"finish.command": " "})
    with pytest.raises(ConfigError, match="finish: 'timeout_s'"):
        build(**{"finish.timeout_s": 0})
    with pytest.raises(ConfigError, match="finish: 'wait_s'"):
        build(**{"finish.wait_s": -1})
    with pytest.raises(ConfigError, match="timeout_s"):
        build(**{"finish.timeout": 5})


# Who is waited for.


def test_ranks_that_have_not_begun_are_waited_for(build: Build, run: Path) -> None:
    with build(0, 3).capture(2):
        pass
    assert look(run).open == ("trainer rank 1, which has not begun", "trainer rank 2, which has not begun")
    for rank in (1, 2):
        with build(rank, 3).capture(2):
            pass
    assert look(run) == Unfinished()


def test_a_rank_that_records_is_waited_for_as_long_as_it_may(build: Build, run: Path) -> None:
    profiler = build()
    profiler.start(2)
    who = f"trainer rank 0 (process {os.getpid()} on {ProcessId().host})"
    assert look(run) == Unfinished(open=(who,), at_work=True)
    change(manifest(run), options={"max_capture_s": 0.0})
    assert look(run) == Unfinished(open=(who,))
    change(manifest(run), host="elsewhere")
    assert look(run) == Unfinished(open=(f"trainer rank 0 (process {os.getpid()} on elsewhere)",))
    profiler.stop()
    assert look(run) == Unfinished()


def test_a_rank_whose_process_is_gone_is_not_waited_for(build: Build, run: Path) -> None:
    profiler = build()
    profiler.start(2)
    change(manifest(run), process_started="0")
    assert look(run) == Unfinished(lost=(f"trainer rank 0 (process {os.getpid()} on {ProcessId().host})",))
    profiler.stop()


def test_a_role_without_any_capture_is_waited_for(build: Build, run: Path) -> None:
    with build().capture(2):
        pass
    assert look(run, "trainer", "rollout").open == ("the role rollout, which has not begun",)
    with build(role="rollout").capture(2):
        pass
    assert look(run, "trainer", "rollout") == Unfinished()


def test_a_rank_between_two_stages_is_waited_for(build: Build, run: Path) -> None:
    profiler = build(mode="discrete", **{"finish.command": "true"})
    profiler.start(2)
    for name in ("generate", "update"):
        with profiler.stage(name):
            pass
        assert len(look(run).open) == 1
    profiler.stop()
    assert look(run) == Unfinished()


def test_captures_of_another_take_do_not_count(build: Build, run: Path) -> None:
    with build().capture(2):
        pass
    profiler = build()
    profiler.start(2)
    assert look(run) == Unfinished()
    assert len(look(run, name="step2-take2").open) == 1
    profiler.close()


def test_an_analysis_that_is_still_to_come_is_waited_for(build: Build, run: Path) -> None:
    from profdeck_npu.traces.analysis_state import AnalysisState, write_state

    with build().capture(2):
        pass
    raw = run / "step_000002/trainer/rank_0000.step2_ascend_pt"
    raw.mkdir()
    record = {"name": raw.name, "kind": "ascend_pt", "size_bytes": 0, "whole": True}
    change(manifest(run), artifacts=[record])
    assert look(run) == Unfinished()
    here = ProcessId()
    state = AnalysisState(
        state="pending", host=here.host, pid=here.pid, process_started=here.process_started, started_ns=1
    )
    write_state(raw, state)
    who = f"the analysis of {raw.name} (process {here.pid} on {here.host})"
    assert look(run) == Unfinished(open=(who,), at_work=True)
    write_state(raw, attrs.evolve(state, process_started="0"))
    assert look(run) == Unfinished(lost=(who,))
    write_state(raw, attrs.evolve(state, state="done"))
    assert look(run) == Unfinished()


def test_who_is_missing_is_named_and_the_rest_goes_on(build: Build, tmp_path: Path, run: Path) -> None:
    with build(0, 30, **{"finish.command": COUNT.format(tmp_path), "finish.wait_s": 0}).capture(2):
        pass
    assert finished(tmp_path) == ["step2 partial"]
    given = json.loads((run / "step_000002/finish.step2.input.json").read_text())
    assert given["missing"][0] == "trainer rank 1, which has not begun"
    assert given["missing"][-1] == "9 more"
    assert len(given["missing"]) == 21


def test_who_is_known_to_record_is_waited_for_in_any_case(build: Build, tmp_path: Path, run: Path) -> None:
    given = {"finish.command": COUNT.format(tmp_path), "finish.wait_s": 0}
    other, pause = build(1, 2, **given), threading.Event()
    other.start(2)
    with build(0, 2, **given).capture(2):
        pass
    while not read_record(run / "step_000002/finish.step2.json").waits_for:
        pause.wait(0.01)
    other.stop()
    assert finished(tmp_path) == ["step2 complete"]


def test_a_rank_that_comes_too_late_says_so(build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"finish.command": COUNT.format(tmp_path), "finish.wait_s": 0}
    for rank in (0, 1):
        with build(rank, 2, **given).capture(2):
            pass
        assert finished(tmp_path) == ["step2 partial"]
    assert "The finish of step2 went without this process" in caplog.text


# What is handed over.


def test_the_document_says_all_of_the_capture(build: Build, run: Path) -> None:
    profiler = build(steps=[2, 3], **{"finish.command": "cat > $PROFDECK_FINISH_DIRECTORY/stdin"})
    for step in (2, 3):
        with profiler.capture(step):
            pass
    start.await_own()
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


# What is run.


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "given.json"
    path.write_text("{}")
    return path


def sh(command: str, given: Path, timeout_s: float = AGES_S) -> CommandResult:
    return run_part("command", ["/bin/sh", "-c", command], given, os.environ, timeout_s)


@pytest.mark.parametrize(
    ("command", "exit_code", "output", "problem"),
    [
        ("cat; echo done >&2", 0, "{}done\n", None),
        ("echo refused; exit 3", 3, "refused\n", "ended with exit status 3"),
        ("kill -9 $$", -signal.SIGKILL, "", "was ended by SIGKILL"),
    ],
)
def test_how_a_command_ends(given: Path, command: str, exit_code: int, output: str, problem: str | None) -> None:
    part = sh(command, given)
    assert (part.exit_code, part.output, part.problem) == (exit_code, output, problem)


def test_a_command_that_is_not_there(given: Path) -> None:
    part = sh("no-such-program --now", given)
    assert part.exit_code == 127
    assert "no-such-program" in part.output


def test_what_cannot_be_started(given: Path) -> None:
    part = run_part("command", ["/no/such/shell"], given, os.environ, AGES_S)
    assert part.exit_code is None
    assert part.problem == "cannot be started: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/shell'"


def test_of_endless_output_the_end_is_kept(given: Path) -> None:
    part = sh("head -c 100000000 /dev/zero; echo the end", given)
    assert part.exit_code == 0
    assert len(part.output) == OUTPUT_BYTES
    assert part.output.endswith("\0the end\n")


def test_at_the_deadline_the_whole_group_is_ended(given: Path, tmp_path: Path) -> None:
    part = sh(f"sleep {AGES_S} & echo $! > {tmp_path}/pid; sleep {AGES_S}", given, timeout_s=1.0)
    assert part.problem == "had not ended after timeout_s=1 seconds, and was ended"
    assert part.exit_code == -signal.SIGTERM
    child, pause = int((tmp_path / "pid").read_text()), threading.Event()
    while process_stat(child)[:1] not in ([], ["Z"]):  # it has got its signal, and ends when it is scheduled
        pause.wait(0.01)


def test_what_a_command_leaves_in_the_background_does_not_hold_it_up(given: Path, tmp_path: Path) -> None:
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
def test_listeners_are_told_once_after_the_command(build: Build, tmp_path: Path, run: Path) -> None:
    for rank in (0, 1):
        with build(rank, 2, listeners=["told", "later", "diary"], **{"finish.command": "false"}).capture(2):
            pass
    start.await_own()
    assert (run / "step_000002/told").read_text() == "complete"
    record = read_record(run / "step_000002/finish.step2.json")
    assert [(part.name, part.exit_code) for part in record.parts] == [
        ("command", 1),
        ("listener told", 0),
        ("listener later", 1),
    ]
    assert record.parts[2].output.startswith("later\nTraceback")
    assert record.state is FinishState.FAILED
    assert record.why == (
        "the command ended with exit status 1; the listener later ended with exit status 1 (RuntimeError: no bucket)"
    )


@pytest.mark.usefixtures("listeners")
def test_a_listener_alone_is_enough(build: Build, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build(listeners=["told"]).capture(2):
        pass
    start.await_own()
    assert read_record(run / "step_000002/finish.step2.json").state is FinishState.DONE


@pytest.mark.usefixtures("listeners")
def test_a_listener_has_its_options_in_the_other_process(build: Build, run: Path) -> None:
    with build(listeners=["labelled"], **{"listener_options.labelled.label": "nightly"}).capture(2):
        pass
    start.await_own()
    (part,) = read_record(run / "step_000002/finish.step2.json").parts
    assert (part.exit_code, part.output) == (0, "labelled nightly\n")


@pytest.mark.usefixtures("listeners")
def test_a_listener_is_told_what_it_asks_for_or_refused(build: Build, tmp_path: Path) -> None:
    commands.notify_listener("told", {}, {"directory": str(tmp_path), "status": "partial"})
    assert (tmp_path / "told").read_text() == "partial"
    with pytest.raises(BrokenPluginError, match="wrong"):
        build(listeners=["wrong"])
    with pytest.raises(UnknownPluginError):
        commands.notify_listener("nobody", {}, {})


# What is said of it.


def said(run: Path, **values: Any) -> tuple[int, list[str], list[dict[str, Any]]]:
    """Return the exit code of ``ls``, what it says of finishes, and its JSON of them."""
    if values:
        record = FinishRecord(
            **{
                "capture": "step2",
                "first_step": 2,
                "command": "true",
                "listeners": (),
                "timeout_s": 1.0,
                "wait_s": 1.0,
                **values,
            }
        )
        write_record(run / "step_000002/finish.step2.json", record)
    runner = CliRunner()
    result, document = runner.invoke(app, ["ls", str(run)]), runner.invoke(app, ["ls", str(run), "--json"])
    lines = [line for line in result.output.splitlines() if line.startswith("Finish")]
    return result.exit_code, lines, json.loads(document.stdout)["finishes"]


def test_what_ls_says(build: Build, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with build().capture(2):
        pass
    monkeypatch.chdir(run.parent)
    here, see = ProcessId(), "See run/step_000002/finish.step2.json"
    gone = attrs.evolve(here, process_started="0")
    assert said(run) == (0, [], [])
    assert said(run, state=FinishState.DONE)[:2] == (0, [])
    assert said(run, state=FinishState.DONE, waits_for=("trainer rank 1",))[:2] == (
        0,
        [f"Finish of step2: done, without trainer rank 1. {see}"],
    )
    assert said(run, waits_for=("trainer rank 1", "trainer rank 2"))[1] == [
        f"Finish of step2 ({here}): waiting for trainer rank 1, trainer rank 2. {see}"
    ]
    assert said(run, state=FinishState.RUNNING)[1] == [f"Finish of step2 ({here}): running. {see}"]
    code, lines, (document,) = said(run, state=FinishState.RUNNING, by=gone, waits_for=("the role rollout",))
    assert (code, lines) == (
        0,
        [f"Finish of step2: interrupted: its process was ended; without the role rollout. {see}"],
    )
    assert document == {
        "capture": "step2",
        "state": "interrupted",
        "status": None,
        "problem": None,
        "waits_for": ["the role rollout"],
        "by": str(here),
        "record": str(run / "step_000002/finish.step2.json"),
    }
    elsewhere = attrs.evolve(here, host="elsewhere")
    assert said(run, state=FinishState.RUNNING, by=elsewhere)[2][0]["state"] == "running"
    part = CommandResult(
        name="command", started_ns=1, duration_s=0.1, exit_code=7, output="a\nno space\n", problem="ended with 7"
    )
    assert said(run, state=FinishState.FAILED, parts=(part,))[:2] == (
        0,
        [f"Finish of step2: failed: the command ended with 7 (no space). {see}"],
    )


def test_a_finish_that_never_began_is_told(build: Build, run: Path) -> None:
    profiler = build(**{"finish.command": "true"})
    profiler.start(2)
    assert said(run)[1] == []
    change(manifest(run), process_started="0")
    code, lines, (document,) = said(run)
    assert (code, lines) == (1, ["Finish of step2: not run: no host came to the end of the capture."])
    assert (document["state"], document["record"]) == ("not_run", None)
    profiler.stop()


def test_a_record_that_cannot_be_read_is_told(build: Build, run: Path) -> None:
    with build().capture(2):
        pass
    record = run / "step_000002/finish.step2.json"
    record.write_text("{}")
    assert "not a readable record of a finish" in said(run)[1][0]
    said(run, schema=99)
    assert "written by a later version" in said(run, schema=99)[1][0]


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
    assert record.longest_s == 2 * 1.5 + MARGIN_S


def test_those_who_read_a_run_can_wait_for_it(build: Build, tmp_path: Path, run: Path) -> None:
    with build(**{"finish.command": f"read line < {tmp_path}/gate"}) as profiler:
        os.mkfifo(tmp_path / "gate")
        with profiler.capture(2):
            pass
        with (tmp_path / "gate").open("w") as gate:  # opens when the command reads
            assert next(read_finishes(read_run(run))).state is FinishState.RUNNING
            gate.write("go on\n")
        await_finishes(read_run(run))
        assert next(read_finishes(read_run(run))).state is FinishState.DONE


def test_a_capture_that_is_asked_for_is_over_when_its_finish_is(build: Build, run: Path) -> None:
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


def test_a_capture_of_servers_is_over_when_its_finish_is(
    build: Build, tmp_path: Path, run: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody misses or awaits a role of the config that it does not capture."""
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


def test_nobody_waits_for_a_finish_whose_process_is_gone(build: Build, run: Path) -> None:
    with build().capture(2):
        pass
    said(run, by=attrs.evolve(ProcessId(), process_started="0"), wait_s=float(AGES_S))
    await_finishes(read_run(run))
    said(run, by=attrs.evolve(ProcessId(), host="elsewhere"), wait_s=-MARGIN_S, timeout_s=0.0)
    await_finishes(read_run(run))


def test_the_process_of_a_finish_that_cannot_be_started_is_a_failure(
    build: Build, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = build(**{"finish.command": "true"})
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with profiler.capture(2):
        pass
    start.await_own()
    record = read_record(run / "step_000002/finish.step2.json")
    assert record.state is FinishState.FAILED
    assert record.problem is not None
    assert "/no/such/python" in record.problem
    assert "Finish of step2: failed: its process could not go on" in caplog.text


def test_a_run_directory_that_is_gone_costs_nothing(
    build: Build, tmp_path: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with build(0, 2, **{"finish.command": "true", "finish.wait_s": AGES_S}).capture(2):
        pass
    run.rename(tmp_path / "moved")
    start.await_own()
    assert "The outcome of a finish is unknown" in caplog.text


def test_defaults() -> None:
    assert FinishConfig() == FinishConfig(command=None, timeout_s=600.0, wait_s=300.0)
    assert Status.COMPLETE == "complete"
