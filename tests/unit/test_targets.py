"""Captures of engines that a host requests: requests, failed starts, reports of `ls` and validation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from profdeck import Profiler, Status
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.cli import ls
from profdeck.config.structuring import structure
from profdeck.records.request import CaptureRequest, RequestState
from profdeck.verification.report_model import TargetReport
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ConfigError

BuildProfiler = Callable[..., Profiler]
ROLE = "rollout"

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "manifest.schema.json").read_text())


@pytest.fixture
def build_profiler(tally: ModuleType, tmp_path: Path) -> BuildProfiler:
    """Function that creates a profiler of an engine that writes to tmp_path/run.

    Settings that start with `device_` are options of the engine's ranks.
    """

    def build(target: object, *, replica: int | None = None, **settings: Any) -> Profiler:
        def pop_settings(names: tuple[str, ...], prefix: str = "") -> dict[str, Any]:
            return {name: settings.pop(prefix + name) for name in names if prefix + name in settings}

        role_settings = pop_settings(("ranks", "iterations", "batch_kinds"))
        options = pop_settings(("merge", "max_capture_s"))
        options["device_options"] = pop_settings(("fail_at", "device", "max_capture_s", "write_later"), "device_")
        defaults = {"output": str(tmp_path), "run": "run", "steps": [1], "on_error": "raise"}
        defaults |= {f"{ROLE}.backend": "tally-engine", f"{ROLE}.ranks": "all"}
        defaults |= {f"{ROLE}.{name}": value for name, value in role_settings.items()}
        defaults |= {f"{ROLE}.options.{name}": value for name, value in options.items()}
        return Profiler.from_config(
            identity=Identity(role=ROLE, replica=replica), settings=defaults | settings, target=target
        )

    return build


@pytest.fixture
def engine(tally: ModuleType) -> Any:
    """An engine with two ranks that is used without an event loop."""
    return tally.ToyEngine(blocking=True)


def read_manifests(path: Path, pattern: str = "rank_*") -> list[dict[str, Any]]:
    files = sorted(path.glob(f"run/step_*/**/{pattern}.json"))
    documents = [json.loads(file.read_text()) for file in files if not file.name.endswith(".trace.json")]
    for document in documents:
        jsonschema.validate(document, SCHEMA)
    return documents


def read_target(path: Path) -> TargetReport:
    (target,) = read_run(path / "run").targets
    return target


def edit_manifest(path: Path, pattern: str, **changes: Any) -> None:
    (file,) = path.glob(f"run/step_*/**/{pattern}")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# Requests of a host.


def test_host_step_is_captured_in_the_engine(build_profiler: BuildProfiler, engine: Any, tmp_path: Path) -> None:
    profiler = build_profiler(engine, replica=2, iterations={"count": 2, "skip": 1})
    with profiler.capture(1) as capture:
        engine.iterate("prefill", "decode", "decode", "decode")
    assert capture is not None
    assert (capture.status, capture.target, capture.expected_ranks) == (Status.COMPLETE, "toy", (0, 1))
    assert engine.commands == [("start", "step1"), ("stop", "step1")]
    request = capture.request
    assert request is not None
    assert (request.output, request.run, request.role, request.replica) == (tmp_path, "run", ROLE, 2)
    (target,) = read_manifests(tmp_path, "target.*")
    assert (target["target"], target["request"], target["expected_ranks"]) == ("toy", "step1", [0, 1])
    assert (target["backend"], target["iterations"]) == ("tally-engine", {"count": 2, "skip": 1, "first": None})
    ranks = read_manifests(tmp_path)
    assert [(rank["rank"], rank["backend"], rank["request"], rank["target"]) for rank in ranks] == [
        (0, "tally", "step1", None),
        (1, "tally", "step1", None),
    ]
    assert [rank["artifacts"][0]["iterations"] for rank in ranks] == [[1, 2], [1, 2]]
    assert {path.parent for path in tmp_path.glob("run/step_*/**/*.json")} == {
        tmp_path / "run" / "step_000001" / ROLE / "replica_002"
    }
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(target.id, target.role, target.replica, target.target) for target in report.targets] == [
        ("step1", ROLE, 2, "toy")
    ]


def test_steps_without_iterations_record_from_start_to_stop(
    build_profiler: BuildProfiler, engine: Any, tmp_path: Path
) -> None:
    profiler = build_profiler(engine, steps=["1..2", 4], batch_kinds=["decode"], ranks=[1])
    for step in range(6):
        with profiler.capture(step):
            engine.iterate("prefill", "decode")
    assert engine.commands == [("start", "step1"), ("stop", "step1"), ("start", "step4"), ("stop", "step4")]
    manifest_by_capture = {manifest["capture"]: manifest for manifest in read_manifests(tmp_path)}
    assert sorted(manifest_by_capture) == ["step1-decode", "step1-decode-2", "step4-decode"]
    assert {manifest["rank"] for manifest in manifest_by_capture.values()} == {1}
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(target.id, target.first_step) for target in report.targets] == [("step1", 1), ("step4", 4)]


def test_repeated_step_has_a_separate_request_id(build_profiler: BuildProfiler, engine: Any, tmp_path: Path) -> None:
    for _ in range(3):
        with build_profiler(engine).capture(1):
            engine.iterate("decode")
    assert [request for command, request in engine.commands if command == "start"] == [
        "step1",
        "step1-take2",
        "step1-take3",
    ]
    assert {(manifest["capture"], manifest["request"]) for manifest in read_manifests(tmp_path)} == {
        ("step1", "step1"),
        ("step1-take2", "step1-take2"),
        ("step1-take3", "step1-take3"),
    }
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems, len(report.targets)) == (Status.COMPLETE, (), 3)


def test_rank_with_an_earlier_capture_of_the_same_id_is_matched(
    build_profiler: BuildProfiler, engine: Any, tmp_path: Path
) -> None:
    """Another host may have requested a capture of the same ID; then the rank adds a suffix to its ID."""
    directory = tmp_path / "run" / "step_000001" / ROLE
    directory.mkdir(parents=True)
    with build_profiler(engine, ranks=[0]).capture(1):
        engine.iterate("decode")
    (directory / "target.step1.json").unlink()
    with build_profiler(engine, ranks=[0]).capture(1):
        engine.iterate("decode")
    assert [(manifest["capture"], manifest["request"]) for manifest in read_manifests(tmp_path)] == [
        ("step1-take2", "step1"),
        ("step1", "step1"),
    ]
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_await_window_detects_the_end_of_a_window(
    build_profiler: BuildProfiler, tally: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profdeck.lifecycle.role._POLL_S", 0)
    engine = tally.ToyEngine()
    profiler = build_profiler(engine, iterations={"count": 3})

    async def host() -> bool:
        async with profiler.capture(1):
            return await profiler.await_window(30, lambda _: engine.iterate("decode"))

    assert asyncio.run(host())


def test_await_window_returns_false_without_an_engine(tally: ModuleType, tmp_path: Path) -> None:
    async def host() -> bool:
        profiler = Profiler.from_config(settings={"output": str(tmp_path), "steps": [1], "trainer.backend": "tally"})
        async with profiler.capture(1):
            return await profiler.await_window(5) or await Profiler().await_window(5)

    assert not asyncio.run(host())


def test_host_exception_is_a_problem_of_every_rank(build_profiler: BuildProfiler, engine: Any, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), build_profiler(engine).capture(1):
        engine.iterate("decode")
        _ = 1 / 0
    reason = "An exception ended it: ZeroDivisionError: division by zero."
    assert [manifest["problems"] for manifest in read_manifests(tmp_path)] == [[reason]] * 2
    target = read_target(tmp_path)
    assert target.status is Status.PARTIAL
    assert target.problems[0] == reason


def test_incomplete_window_makes_the_target_partial(build_profiler: BuildProfiler, engine: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(CaptureError, match="is partial: Rank 0: Only 1 of 3"),
        build_profiler(engine, iterations={"count": 3}).capture(1),
    ):
        engine.iterate("decode")
    report = read_run(tmp_path / "run")
    assert (report.status, report.targets[0].status) == (Status.PARTIAL, Status.PARTIAL)
    assert "Rank 1: Only 1 of 3 iterations ran before the stop." in report.targets[0].problems


# Requests that are rejected before the start.


def test_engine_backend_requires_a_supported_target(build_profiler: BuildProfiler) -> None:
    with pytest.raises(ConfigError, match=r"'tally-engine' controls an engine, .*from_config\(\.\.\., target=llm\)"):
        build_profiler(None)
    with pytest.raises(ConfigError, match="target: 'http://127.0.0.1:1' is not a ToyEngine"):
        build_profiler("http://127.0.0.1:1")


def test_unselected_steps_send_no_command(build_profiler: BuildProfiler, engine: Any, tmp_path: Path) -> None:
    assert not build_profiler(engine, steps=[], on_demand=False).enabled
    profiler = build_profiler(engine, steps=[9], on_demand=False)
    with profiler.capture(1) as capture:
        assert capture is None
    assert engine.commands == []
    assert not (tmp_path / "run").exists()


def test_host_rank_does_not_select_engine_ranks(tally: ModuleType, engine: Any, tmp_path: Path) -> None:
    """The config key `ranks` selects ranks of the engine."""
    profiler = Profiler.from_config(
        identity=Identity(role=ROLE, rank=3, world_size=4),
        settings={
            "output": str(tmp_path),
            "run": "run",
            "steps": [1],
            f"{ROLE}.backend": "tally-engine",
            f"{ROLE}.ranks": [1],
        },
        target=engine,
    )
    with profiler.capture(1):
        engine.iterate("decode")
    assert [manifest["rank"] for manifest in read_manifests(tmp_path)] == [1]
    assert read_run(tmp_path / "run").status is Status.COMPLETE


# Failed starts and stops.


def test_rejected_start_is_reported_only_by_the_target(
    build_profiler: BuildProfiler, engine: Any, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=r"step1 did not start: Rank 0: options: unknown key 'fail_at_all'"):
        build_profiler(engine, **{f"{ROLE}.options.device_options": {"fail_at_all": "start"}}).start(1)
    assert engine.commands == [("start", "step1"), ("stop", "step1")]
    assert read_manifests(tmp_path) == []
    report = read_run(tmp_path / "run")
    assert (report.status, report.captures, report.problems) == (Status.FAILED, (), ())
    assert "Rank 1: options: unknown key" in report.targets[0].problems[0]
    with build_profiler(engine).capture(1):
        engine.iterate("decode")


def test_started_rank_is_stopped_if_another_rank_rejects_the_start(
    build_profiler: BuildProfiler, engine: Any, tally: ModuleType, tmp_path: Path
) -> None:
    engine.ranks[1] = type(engine.ranks[1])(engine.ranks[1].identity, "abacus", {})
    with pytest.raises(CaptureError, match="Rank 1: No installed backend records the device type 'abacus'"):
        build_profiler(engine).start(1)
    assert not engine.ranks[0].active
    (manifest,) = read_manifests(tmp_path)
    assert (manifest["status"], manifest["problems"]) == ("failed", ["The start was aborted."])


def test_cancelled_start_is_rolled_back(build_profiler: BuildProfiler, tally: ModuleType, tmp_path: Path) -> None:
    engine = tally.ToyEngine()
    profiler = build_profiler(engine)

    async def host() -> None:
        engine.may_reply.clear()
        task = asyncio.ensure_future(profiler.astart(1))
        await engine.command_received.wait()
        assert all(recorder.active for recorder in engine.ranks)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.commands == [("start", "step1"), ("stop", "step1")]
        assert not any(recorder.active for recorder in engine.ranks)
        assert profiler.active is None
        async with profiler.capture(1):
            engine.iterate("decode")

    asyncio.run(host())
    report = read_run(tmp_path / "run")
    targets = {target.id: target for target in report.targets}
    assert (targets["step1"].status, targets["step1-take2"].status) == (Status.FAILED, Status.COMPLETE)
    assert "CancelledError" in targets["step1"].problems[0]


@pytest.mark.parametrize("turns", range(0, 20, 2))
def test_cancelled_fleet_start_leaves_no_recording(
    build_profiler: BuildProfiler, tally: ModuleType, tmp_path: Path, turns: int
) -> None:
    profiler = build_profiler([tally.ToyEngine()], on_error="warn")

    async def host() -> None:
        starting = asyncio.ensure_future(profiler.astart(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        await profiler.astop()

    asyncio.run(host())
    assert "recording" not in {manifest["status"] for manifest in read_manifests(tmp_path, "*")}


@pytest.mark.parametrize("during", ["start", "stop"])
def test_close_from_another_thread_is_handled_by_the_running_operation(
    build_profiler: BuildProfiler, tally: ModuleType, tmp_path: Path, during: str
) -> None:
    errors: list[BaseException] = []

    def close() -> None:
        try:
            profiler.close("closed elsewhere")
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    class Engine(tally.ToyEngine):  # type: ignore[misc, name-defined]
        async def command(self, command: str, payload: dict[str, Any]) -> Any:
            if (command, threads) == (during, []):
                threads.append(thread := threading.Thread(target=close))
                thread.start()
                await asyncio.to_thread(thread.join)
            return await super().command(command, payload)

    threads: list[threading.Thread] = []
    engine = Engine()
    profiler = build_profiler(engine, on_error="warn", steps=[1, 3])
    profiler.start(1)
    engine.iterate("decode")
    profiler.stop()
    assert errors == []
    assert not any(recorder.active for recorder in engine.ranks)
    with profiler.capture(3):
        engine.iterate("decode")
    statuses = {target.id: target.status for target in read_run(tmp_path / "run").targets}
    assert statuses["step3"] is Status.COMPLETE
    profiler.close()


def test_stop_can_be_repeated_after_its_task_is_cancelled(
    build_profiler: BuildProfiler, tally: ModuleType, tmp_path: Path
) -> None:
    engine = tally.ToyEngine()
    profiler = build_profiler(engine)

    async def host() -> None:
        await profiler.astart(1)
        engine.iterate("decode")
        profiler.stop()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(host())
    assert all(recorder.active for recorder in engine.ranks)
    profiler.stop()
    profiler.close()
    assert read_target(tmp_path).status is Status.COMPLETE


@pytest.mark.parametrize("hook", ["start", "stop"])
def test_device_failure_is_reported_by_the_host(
    build_profiler: BuildProfiler, engine: Any, tmp_path: Path, hook: str
) -> None:
    with (
        pytest.raises(CaptureError, match=f"{hook} does not work"),
        build_profiler(engine, device_fail_at=hook).capture(1),
    ):
        engine.iterate("decode", "decode")
    report = read_run(tmp_path / "run")
    assert report.status is Status.FAILED
    assert [rank.status for rank in report.captures[0].ranks] == [Status.FAILED] * 2
    assert report.targets[0].status is not Status.COMPLETE


def test_profiler_can_be_closed_while_the_engine_writes(
    build_profiler: BuildProfiler, engine: Any, tally: ModuleType, tmp_path: Path
) -> None:
    tally.TallyBackend.may_write.clear()
    profiler = build_profiler(engine, iterations={"count": 1}, ranks=[0], device_write_later=True)
    profiler.start(1)
    engine.iterate("decode")
    assert engine.ranks[0].reply().state is RequestState.WRITING
    tally.TallyBackend.may_write.set()
    profiler.close()
    assert read_target(tmp_path).problems == ("The profiler was closed in mid-capture.",)


# Reports of `ls`.


def test_captures_by_kind_do_not_hide_a_missing_rank(
    build_profiler: BuildProfiler, engine: Any, tmp_path: Path
) -> None:
    with build_profiler(engine, batch_kinds=["decode"]).capture(1):
        engine.iterate("decode", "prefill", "decode")
    assert read_run(tmp_path / "run").status is Status.COMPLETE
    for file in tmp_path.glob("run/step_*/**/rank_0001*"):
        file.unlink()
    report = read_run(tmp_path / "run")
    assert (report.status, report.targets[0].problems) == (
        Status.MISSING,
        ("Rank 1 was expected to record, but wrote no files.",),
    )


def test_rank_of_another_replica_or_request_is_not_matched(
    build_profiler: BuildProfiler, tally: ModuleType, tmp_path: Path
) -> None:
    for replica in (0, 1):
        engine = tally.ToyEngine(blocking=True)
        with build_profiler(engine, replica=replica).capture(1):
            engine.iterate("decode")
    assert read_run(tmp_path / "run").status is Status.COMPLETE
    for file in tmp_path.glob("run/step_*/**/replica_001/rank_*"):
        file.unlink()
    edit_manifest(tmp_path, "replica_000/rank_0001_tp1.step1.json", request="step1-take2")
    assert {(target.replica, target.problems) for target in read_run(tmp_path / "run").targets} == {
        (0, ("Rank 1 was expected to record, but wrote no files.",)),
        (1, tuple(f"Rank {rank} was expected to record, but wrote no files." for rank in (0, 1))),
    }


def test_target_of_an_exited_host_is_missing(build_profiler: BuildProfiler, engine: Any, tmp_path: Path) -> None:
    profiler = build_profiler(engine)
    profiler.start(1)
    engine.iterate("decode")
    assert read_target(tmp_path).status is Status.RECORDING
    edit_manifest(tmp_path, "target.step1.json", process_started="1")
    assert read_target(tmp_path).status is Status.MISSING
    profiler.stop()
    assert read_target(tmp_path).status is Status.COMPLETE


def test_partial_target_makes_the_run_partial(build_profiler: BuildProfiler, engine: Any, tmp_path: Path) -> None:
    with build_profiler(engine).capture(1):
        engine.iterate("decode")
    edit_manifest(tmp_path, "target.step1.json", status="partial", problems=["The frontend: it was slow."])
    report = read_run(tmp_path / "run")
    assert (report.captures[0].status, report.status) == (Status.COMPLETE, Status.PARTIAL)


def test_artifacts_of_a_target_are_checked(build_profiler: BuildProfiler, engine: Any, tmp_path: Path) -> None:
    with build_profiler(engine, merge="both").capture(1):
        engine.iterate("decode")
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    (artifact,) = report.targets[0].artifacts
    assert (artifact.path.name, artifact.kind, artifact.size_bytes) == ("target.step1.merged.txt", "merged_trace", 4)
    artifact.path.write_text("b")
    assert (read_target(tmp_path).status, read_target(tmp_path).artifacts[0].whole) == (Status.PARTIAL, False)
    artifact.path.with_name("target.step1.other.txt").touch()
    assert "target.step1.other.txt is not listed in any manifest." in read_run(tmp_path / "run").problems[0]


@pytest.mark.parametrize("damage", ["gone", "empty", "never written"])
def test_target_without_its_merged_file_is_partial(
    build_profiler: BuildProfiler, engine: Any, tmp_path: Path, damage: str
) -> None:
    with build_profiler(engine, merge="both").capture(1):
        engine.iterate("decode")
    (file,) = tmp_path.rglob("*.merged.txt")
    file.unlink() if damage != "empty" else file.write_text("")
    if damage == "never written":
        manifest = read_manifests(tmp_path, "target.*")[0]
        artifact = manifest["artifacts"][0] | {
            "size_bytes": 0,
            "whole": False,
            "problem": "The traces of the ranks were not merged: no",
        }
        edit_manifest(tmp_path, "target.step1.json", artifacts=[artifact], status="partial")
    assert read_target(tmp_path).status is Status.PARTIAL


def test_role_with_only_a_target_has_recorded(build_profiler: BuildProfiler, engine: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError):
        build_profiler(engine, **{f"{ROLE}.options.device_options": {"x": 1}, "critic.backend": "tally"}).start(1)
    report = read_run(tmp_path / "run")
    assert report.problems == ("The role 'critic' recorded nothing.",)


def test_json_output_contains_the_targets(build_profiler: BuildProfiler, engine: Any, tmp_path: Path) -> None:
    with build_profiler(engine, merge="both", replica=3).capture(1):
        engine.iterate("decode")
    document = json.loads(json.dumps(ls.plain(read_run(tmp_path / "run"))))
    (target,) = document["targets"]
    directory = tmp_path / "run" / "step_000001" / ROLE / "replica_003"
    assert target == {
        "id": "step1",
        "role": ROLE,
        "replica": 3,
        "target": "toy",
        "policy": None,
        "needed": None,
        "start_skew_ms": None,
        "targets": [],
        "first_step": 1,
        "status": "complete",
        "problems": [],
        "notes": [],
        "artifacts": [
            {
                "path": str(directory / "target.step1.merged.txt"),
                "kind": "merged_trace",
                "size_bytes": 4,
                "events": None,
                "whole": True,
                "problem": None,
                "iterations": None,
                "notes": [],
                "kept": False,
            }
        ],
        "manifest": str(directory / "target.step1.json"),
    }
    (capture,) = document["captures"]
    assert capture["ranks"][0]["artifacts"][0]["iterations"] == [0, 0]


def test_problems_of_a_target_are_printed(
    build_profiler: BuildProfiler, engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError):
        build_profiler(engine, replica=1, **{f"{ROLE}.options.device_options": {"x": 1}}).start(1)
    ls.show(read_run(tmp_path / "run"))
    output = " ".join(capsys.readouterr().out.split())
    assert "Step 1, rollout/1, toy: Rank 0: options: unknown key 'x'." in output
    assert "0 captures; ranks: none" in output


def test_repeated_captures_by_kind_have_separate_rows(
    build_profiler: BuildProfiler, engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with build_profiler(engine, batch_kinds=["decode"]).capture(1):
            engine.iterate("decode", "prefill", "decode")
    ls.show(read_run(tmp_path / "run"))
    rows = {tuple(line.split()[:4]) for line in capsys.readouterr().out.splitlines()}
    assert {("1", ROLE, "decode", "0"), ("1", ROLE, "decode-2", "0")} <= rows
    assert {("1", "take2", ROLE, "decode"), ("1", "take2", ROLE, "decode-2")} <= rows


# Stages and sync calls.


def test_host_stage_is_one_capture_for_all_batch_kinds(build_profiler: BuildProfiler, engine: Any) -> None:
    profiler = build_profiler(engine, mode="discrete", batch_kinds=["decode"])
    with profiler.capture(1), profiler.stage("generate"):
        engine.iterate("decode")
    assert engine.commands == [("start", "step1-generate"), ("stop", "step1-generate")]


@pytest.mark.parametrize("end", ["stop", "close"])
def test_sync_stop_in_an_event_loop_ends_the_recording_later(
    build_profiler: BuildProfiler, tally: ModuleType, tmp_path: Path, end: str
) -> None:
    engine = tally.ToyEngine()

    async def host() -> None:
        profiler = build_profiler(engine)
        await profiler.astart(1)
        engine.iterate("decode")
        getattr(profiler, end)()
        while profiler.active is not None:  # noqa: ASYNC110  # the host is not notified
            await asyncio.sleep(0)

    asyncio.run(host())
    assert engine.commands[-1][0] == "stop"
    assert read_target(tmp_path).status is (Status.COMPLETE if end == "stop" else Status.PARTIAL)


# Validation of requests.


@pytest.mark.parametrize(
    "fields",
    [{"id": "../x"}, {"id": ""}, {"run": "a/b"}, {"run": ".."}, {"role": "../x"}, {"replica": -1}, {"first_step": -1},
     {"batch_kinds": ["sort"]}, {"iterations": {"count": 0}}, {"nonsense": 1}, {"ranks": "some"}, {"ranks": []},
     {"ranks": [0, -1]}],
)  # fmt: skip
def test_invalid_request_is_rejected(fields: dict[str, Any]) -> None:
    request = {"id": "step1", "output": "/tmp", "run": "run", "role": ROLE}
    assert structure(request, CaptureRequest, where="").ranks == (0,)
    with pytest.raises(ConfigError):
        structure(request | fields, CaptureRequest, where="")
