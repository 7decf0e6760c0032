"""The lifecycle: what start, step and stop do in every state, through both façades, with a real backend."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, strategies as st

from open_captures import calls_of
from profdeck import ProfdeckError, Profiler, Status
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ConfigError

Build = Callable[..., Profiler]


@pytest.fixture
def build(tally: ModuleType, tmp_path: Path) -> Build:
    """Build a profiler with the backend `tally` that writes to tmp_path/run."""

    def make(*, identity: Identity | None = None, **settings: Any) -> Profiler:
        given_options = {f"trainer.options.{key}": settings.pop(key) for key in tally_options & settings.keys()}
        return Profiler.from_config(
            identity=identity,
            settings={"output": str(tmp_path), "run": "run", "trainer.backend": "tally", **settings, **given_options},
        )

    tally_options = {"fail_at", "device", "wait_s", "thread_bound", "max_capture_s"}
    return make


def manifests(path: Path) -> dict[str, dict[str, Any]]:
    found = [
        json.loads(file.read_text())
        for file in path.glob("run/step_*/**/rank_*.json")
        if not file.name.endswith(".trace.json")
    ]
    return {manifest["capture"]: manifest for manifest in found}


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_signal_handler_exception_in_a_hook_propagates(
    build: Build, tally: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """The exception of the host's signal handler reaches the host. The capture ends, and the job can continue."""

    def handle(*_: object) -> None:
        raise SystemExit(3)

    before = signal.signal(signal.SIGUSR1, handle)
    passed = tally.TallyBackend.perform

    def ring(self: Any, name: str, call: str) -> None:
        if name == hook and "step2" in call:
            signal.raise_signal(signal.SIGUSR1)
        passed(self, name, call)

    monkeypatch.setattr(tally.TallyBackend, "perform", ring)
    profiler = build(steps=[0, 2, 4])
    try:
        for step in range(6):
            if step == 2:
                with pytest.raises(SystemExit), profiler.capture(step):
                    profiler.step(0, "mini_batch")
            else:
                with profiler.capture(step):
                    pass
    finally:
        signal.signal(signal.SIGUSR1, before)
    profiler.close()
    statuses = {name: manifest["status"] for name, manifest in manifests(tmp_path).items()}
    assert statuses == {"step0": "complete", "step2": "partial" if hook == "step" else "failed", "step4": "complete"}


def test_a_start_that_active_guards_loses_no_step(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["2..3", 5])
    for step in range(8):
        if profiler.active is None:
            profiler.start(step)
        assert (profiler.active is not None) == (step in (2, 3, 5))
        profiler.stop()
        assert profiler.active is None
    found = {name: (entry["first_step"], entry["status"]) for name, entry in manifests(tmp_path).items()}
    assert found == {"step2": (2, "complete"), "step5": (5, "complete")}
    assert calls_of(profiler) == ["start step2", "step step2 global_step 2", "stop step2", "start step5", "stop step5"]


def test_adjacent_steps_are_captures_of_their_own_where_the_config_says_so(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[2, "4..6"], join_steps=False)
    for step in range(9):
        with profiler.capture(step) as capture:
            assert (capture is not None) == (step in (2, 4, 5, 6))
            assert capture is None or capture.id == f"step{step}"
    assert {name: entry["status"] for name, entry in manifests(tmp_path).items()} == dict.fromkeys(
        ["step2", "step4", "step5", "step6"], "complete"
    )


def test_adjacent_steps_share_a_capture(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[2, "4..6"])
    for step in range(9):
        with profiler.capture(step) as capture:
            assert (capture is not None) == (step in (2, 4, 5, 6))
    assert calls_of(profiler) == [
        "start step2", "stop step2",
        "start step4", "step step4 global_step 4", "step step4 global_step 5", "stop step4",
    ]  # fmt: skip
    report = read_run(tmp_path / "run")
    assert report.status is Status.COMPLETE
    assert [(capture.id, capture.first_step, capture.last_step) for capture in report.captures] == [
        ("step2", 2, 2),
        ("step4", 4, 6),
    ]


def test_explicit_steps_and_implied_ones_say_the_same(build: Build) -> None:
    implied, explicit = build(steps=["1..3"], run="a"), build(steps=["1..3"], run="b")
    for step in range(5):
        implied.start(step)
        implied.stop()
        explicit.start(step)
        explicit.step(step)
        explicit.stop()
    assert calls_of(implied) == calls_of(explicit)


def test_a_repeated_boundary_and_a_wrong_one_are_noted(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..3"])
    profiler.start(1)
    profiler.step(7)
    profiler.step(1)
    profiler.step(1)
    profiler.close()
    (manifest,) = manifests(tmp_path).values()
    assert calls_of(profiler).count("step step1 global_step 1") == 1
    assert any("step(7) was ignored: step 1 was in progress." in note for note in manifest["notes"])


def test_a_step_that_the_host_took_before_its_loop_still_reports(build: Build) -> None:
    profiler = build(steps=["1..2"])
    step = profiler.step
    step(0)
    profiler.start(1)
    step(1)
    profiler.close()
    step(2)
    assert calls_of(profiler) == ["start step1", "step step1 global_step 1", "stop step1"]


def test_stages_are_marked_in_continuous_mode(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1])

    @profiler.stage("update")
    def update(value: int) -> int:
        """Doc."""
        return value + 1

    assert update.__name__ == "update"
    assert update(1) == 2
    with profiler.capture(1):
        assert update(2) == 3
        with profiler.stage("inner"):
            pass
    (trace,) = tmp_path.glob("run/step_*/trainer/*.trace.json")
    assert [event["name"] for event in json.loads(trace.read_text())["traceEvents"]] == ["start", "update", "inner"]


def test_stages_are_captures_in_discrete_mode(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..2"], mode="discrete", **{"trainer.stages": ["update", "score"]})
    for step in range(4):
        with profiler.capture(step):
            for stage in ("update", "other", "update", "score"):
                with profiler.stage(stage), profiler.stage("nested"):
                    pass
    assert sorted(manifests(tmp_path)) == [
        "step1-score", "step1-update", "step1-update-2", "step2-score", "step2-update", "step2-update-2",
    ]  # fmt: skip
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_a_stage_with_a_bad_name_or_a_generator_is_refused(build: Build) -> None:
    profiler = build(steps=[1])
    with pytest.raises(ConfigError, match="stage 'a/b'"):
        profiler.stage("a/b")
    with pytest.raises(ConfigError, match="cannot decorate the generator"):

        @profiler.stage("a")
        def generator() -> Any:
            yield 1


def test_warm_up_begins_before_the_capture(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[5], **{"trainer.warmup_steps": 2})
    for step in range(8):
        with profiler.capture(step):
            pass
    assert calls_of(profiler) == ["start step5", "step step5 global_step 3", "step step5 global_step 4", "stop step5"]
    (capture,) = read_run(tmp_path / "run").captures
    assert (capture.first_step, capture.last_step, capture.status) == (5, 5, Status.COMPLETE)


@pytest.fixture
def cold(tally: ModuleType, monkeypatch: pytest.MonkeyPatch, build: Build) -> Build:
    """Return a function that builds profilers whose backend has a cold first step."""
    monkeypatch.setattr(tally.TallyBackend, "cold_first_step", True)
    return build


def pass_steps(profiler: Profiler, steps: range) -> None:
    for step in steps:
        with profiler.capture(step), profiler.stage("update"):
            profiler.step(0, "mini_batch")


@pytest.mark.parametrize(
    ("steps", "passed", "settings", "is_cold"),
    [
        pytest.param([5], range(8), {}, {"step5": False}, id="a step precedes"),
        pytest.param([0, 3], range(8), {}, {"step0": True, "step3": False}, id="first step of the job"),
        pytest.param(["11..12"], range(11, 14), {}, {"step11": True}, id="resumed at the capture"),
        pytest.param(["10..12"], range(11, 14), {}, {"step11": True}, id="resumed inside the capture"),
        pytest.param(["every 2"], range(1, 6), {}, {"step2": False, "step4": False}, id="every second step"),
        pytest.param(
            ["2..3"], range(5), {"join_steps": False}, {"step2": False, "step3": True}, id="after another capture"
        ),
        pytest.param([5], range(8), {"trainer.warmup_steps": 0}, {"step5": True}, id="warm-up disabled"),
        pytest.param([5], range(8), {"trainer.warmup_steps": 2}, {"step5": False}, id="configured warm-up"),
        pytest.param([5], range(8), {"mode": "discrete"}, {"step5-update": True}, id="stage"),
        pytest.param([5], range(8), {"trainer.window": {"active": 1}}, {"step5": True}, id="window"),
        pytest.param(
            [5], range(8), {"trainer.window": {"warmup": 1, "active": 1}}, {"step5": False}, id="window with warm-up"
        ),
    ],
)
def test_a_manifest_says_whether_the_first_step_is_cold(
    cold: Build, tmp_path: Path, steps: list[Any], passed: range, settings: dict[str, Any], is_cold: dict[str, bool]
) -> None:
    with cold(steps=steps, **settings) as profiler:
        pass_steps(profiler, passed)
    assert {name: manifest["cold_first_step"] for name, manifest in manifests(tmp_path).items()} == is_cold
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_a_backend_without_a_cold_first_step_does_not_warm_up(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[5])
    pass_steps(profiler, range(8))
    assert calls_of(profiler)[0] == "start step5"
    assert calls_of(profiler)[1] == "step step5 mini_batch 0"
    assert manifests(tmp_path)["step5"]["cold_first_step"] is None


def test_the_default_warm_up_takes_one_step(cold: Build) -> None:
    profiler = cold(steps=["5..6"])
    for step in range(8):
        with profiler.capture(step):
            pass
    assert calls_of(profiler) == ["start step5", "step step5 global_step 4", "step step5 global_step 5", "stop step5"]


def test_a_step_that_does_not_follow_its_default_warm_up_leaves_no_manifest(cold: Build, tmp_path: Path) -> None:
    profiler = cold(steps=[3, 6, 9, 12])
    pass_steps(profiler, range(3))
    pass_steps(profiler, range(4, 5))  # the host skips step 3
    with pytest.raises(ZeroDivisionError), profiler.capture(5):
        _ = 1 / 0
    pass_steps(profiler, range(6, 9))  # the host continues without warm-up
    with profiler:
        pass_steps(profiler, range(11, 12))  # the job ends before step 12
    assert {name: manifest["cold_first_step"] for name, manifest in manifests(tmp_path).items()} == {"step6": True}
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_000006"]


@pytest.mark.parametrize("starts_each_step", [True, False])
def test_a_problem_in_the_default_warm_up_costs_no_step(cold: Build, tmp_path: Path, *, starts_each_step: bool) -> None:
    profiler = cold(steps=["5..6"], on_error="raise")
    profiler.start(4)
    assert profiler.active is not None
    profiler.active.problems.append("Another profiler began.")
    for step in (4, 5):
        profiler.step(step)
        if starts_each_step:
            profiler.stop()
            profiler.start(step + 1)
    profiler.start(6)
    profiler.stop()
    assert {name: manifest["cold_first_step"] for name, manifest in manifests(tmp_path).items()} == {"step5": True}
    report = read_run(tmp_path / "run")
    assert (report.status, report.captures[0].last_step) == (Status.COMPLETE, 6)


def test_a_default_warm_up_that_cannot_start_costs_no_step(
    cold: Build, tally: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passed = tally.TallyBackend.perform
    rivals = ["another profiler"]

    def refuse_once(self: Any, name: str, call: str) -> None:
        if name == "start" and rivals:
            raise CaptureError(f"{rivals.pop()} is active")
        passed(self, name, call)

    monkeypatch.setattr(tally.TallyBackend, "perform", refuse_once)
    pass_steps(cold(steps=[5], on_error="raise"), range(8))
    assert not rivals
    assert {name: manifest["cold_first_step"] for name, manifest in manifests(tmp_path).items()} == {"step5": True}
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_mini_batches_reach_the_backend(build: Build) -> None:
    profiler = build(steps=[1], **{"trainer.window": {"active": 1}})
    profiler.step(0, "mini_batch")
    with profiler.capture(1):
        profiler.step(0, "mini_batch")
    assert calls_of(profiler) == ["start step1", "step step1 mini_batch 0", "stop step1"]


def test_stopping_what_does_not_run_and_starting_twice_are_harmless(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1])
    profiler.stop()
    profiler.close()
    first = profiler.start(1)
    assert profiler.start(1) is first
    profiler.stop()
    profiler.stop()
    (manifest,) = manifests(tmp_path).values()
    assert (manifest["status"], len(manifest["notes"])) == ("complete", 1)
    assert "start(1) was ignored: step1 was already recording." in manifest["notes"][0]


def test_only_who_began_a_step_ends_it(build: Build) -> None:
    profiler = build(steps=[1])
    with profiler.capture(1):
        with profiler.capture(1):
            pass
        assert profiler.active is not None
    assert profiler.active is None


def test_a_host_that_skips_stop_gets_whole_captures(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1, 3])
    for step in range(5):
        profiler.start(step)
    assert {name: manifest["status"] for name, manifest in manifests(tmp_path).items()} == {
        "step1": "complete",
        "step3": "complete",
    }


def test_a_gap_in_the_steps_of_a_capture_makes_it_partial(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..5"])
    profiler.start(1)
    profiler.start(4)
    profiler.close()
    found = manifests(tmp_path)
    assert found["step1"]["status"] == "partial"
    assert "went from step 1 to step 4" in found["step1"]["problems"][0]


def test_an_exception_keeps_the_trace_and_goes_on(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..3"])
    with pytest.raises(ZeroDivisionError), profiler.capture(1):
        _ = 1 / 0
    (manifest,) = manifests(tmp_path).values()
    assert manifest["status"] == "partial"
    assert "ZeroDivisionError" in manifest["problems"][0]
    assert manifest["artifacts"][0]["whole"]


def test_the_job_may_end_before_the_schedule(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..3"])
    with profiler, profiler.capture(1):
        pass
    assert manifests(tmp_path)["step1"]["status"] == "partial"
    profiler = build(steps=["1..3"], final_step=1, run="known")
    with profiler, profiler.capture(1):
        pass
    assert read_run(tmp_path / "known").status is Status.COMPLETE


def warmed_up(profiler: Profiler) -> None:
    """Run a job that ends as the capture of step 6 warms up."""
    with profiler:
        for step in range(6):
            with profiler.capture(step):
                pass


def test_a_job_that_ends_as_a_standing_capture_warms_up_misses_nothing(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["every 3"], device="d", **{"trainer.warmup_steps": 1})
    warmed_up(profiler)
    assert calls_of(profiler)[-1] == "stop step6"
    assert list(manifests(tmp_path)) == ["step3"]
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_000003"]
    assert read_run(tmp_path / "run").status is Status.COMPLETE
    with build(steps=[0], device="d", run="next").capture(0):
        pass
    assert read_run(tmp_path / "next").status is Status.COMPLETE


@pytest.mark.parametrize("steps", [[6], ["3..6"], ["every 3 to 6"], ["every 3", 6]])
def test_a_job_that_ends_as_a_capture_warms_up_misses_what_has_an_end(
    build: Build, tmp_path: Path, steps: list[Any]
) -> None:
    warmed_up(build(steps=steps, **{"trainer.warmup_steps": 3}))
    assert {one["status"] for one in manifests(tmp_path).values()} & {"failed", "partial"}


def test_a_job_that_fails_as_a_standing_capture_warms_up_says_so(build: Build, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), build(steps=["every 3"], **{"trainer.warmup_steps": 1}) as profiler:
        profiler.start(2)
        _ = 1 / 0
    assert "ZeroDivisionError" in " ".join(manifests(tmp_path)["step3"]["problems"])


def test_a_standing_capture_whose_warm_up_left_a_file_is_not_withdrawn(build: Build, tmp_path: Path) -> None:
    warmed_up(build(steps=["every 3"], wait_s=0, **{"trainer.warmup_steps": 1}))
    left = manifests(tmp_path)["step6"]
    assert (left["status"], left["problems"]) == ("partial", ["The profiler was closed in mid-capture."])


def test_a_standing_capture_whose_warm_up_cannot_be_stopped_is_over(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["every 3"], fail_at="stop", **{"trainer.warmup_steps": 1})
    warmed_up(profiler)
    assert profiler.active is None
    assert "step6" not in manifests(tmp_path)


def test_a_standing_capture_that_waits_is_withdrawn_as_well(build: Build, tmp_path: Path) -> None:
    with build(steps=[0], device="d", run="other").capture(0):
        profiler = build(steps=["every 3"], device="d", **{"trainer.warmup_steps": 1})
        profiler.start(2)
        profiler.close()
        assert not list((tmp_path / "run").glob("step_*"))


def test_a_standing_capture_that_one_rank_withdraws_stays_with_the_others(build: Build, tmp_path: Path) -> None:
    """They end at the same step, but not at the same moment."""
    of_rank = {"trainer.ranks": "all", "trainer.warmup_steps": 1}
    first, second = (
        build(steps=["every 3"], identity=Identity(rank=rank, world_size=2), **of_rank) for rank in range(2)
    )
    second.start(2)
    first.start(2)
    first.close()
    second.stop()
    with second.capture(3):
        pass
    assert list(manifests(tmp_path)) == ["step3"]
    assert manifests(tmp_path)["step3"]["rank"] == 1


def test_a_step_whose_standing_capture_was_withdrawn_can_be_captured(build: Build, tmp_path: Path) -> None:
    with build(steps=["every 3"], **{"trainer.warmup_steps": 1}) as profiler:
        profiler.start(2)
        profiler.close()
        for step in (2, 3):
            with profiler.capture(step):
                pass
    assert manifests(tmp_path)["step3"]["status"] == "complete"


def test_a_repeated_step_overwrites_nothing(build: Build, tmp_path: Path) -> None:
    for _ in range(3):
        with build(steps=[1]).capture(1):
            pass
    assert sorted(manifests(tmp_path)) == ["step1", "step1-take2", "step1-take3"]
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_replicas_and_ranks_have_names_of_their_own(build: Build, tmp_path: Path) -> None:
    for rank in (0, 1):
        for replica in (0, 2):
            identity = Identity(rank=rank, world_size=2, replica=replica, parallel={"tp": rank})
            with build(steps=[1], identity=identity, **{"trainer.ranks": "all"}).capture(1):
                pass
    assert sorted(str(path.relative_to(tmp_path / "run")) for path in tmp_path.glob("run/**/*.trace.json")) == [
        f"step_000001/trainer/replica_{replica:03d}/rank_{rank:04d}_tp{rank}.step1.trace.json"
        for replica in (0, 2)
        for rank in (0, 1)
    ]
    assert read_run(tmp_path / "run").status is Status.COMPLETE


@pytest.mark.parametrize(("hook", "status"), [("start", "failed"), ("step", "partial"), ("stop", "failed")])
def test_a_hook_that_fails_never_reaches_the_host(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, hook: str, status: str
) -> None:
    profiler = build(steps=["1..2"], fail_at=hook)
    with caplog.at_level(logging.WARNING, "profdeck"):
        for step in range(4):
            with profiler.capture(step):
                pass
    found = manifests(tmp_path)
    assert found["step1"]["status"] == status
    assert f"RuntimeError: {hook} does not work" in " ".join(found["step1"]["problems"])
    assert caplog.messages


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_on_error_raise_raises_it(build: Build, hook: str) -> None:
    profiler = build(steps=["1..2"], fail_at=hook, on_error="raise")
    with pytest.raises(CaptureError, match=f"{hook} does not work"):
        for step in range(4):
            with profiler.capture(step):
                pass
    assert profiler.active is None


def test_the_exception_of_the_host_is_not_hidden_by_ours(build: Build) -> None:
    profiler = build(steps=[1], fail_at="stop", on_error="raise")
    with pytest.raises(ZeroDivisionError), profiler.capture(1):
        _ = 1 / 0


def test_a_listener_hears_of_every_capture(build: Build, tally: ModuleType) -> None:
    profiler = build(steps=[1, 3], listeners=["diary"])
    for step in range(4):
        with profiler.capture(step):
            pass
    (diary,) = tally.Diary.instances
    assert diary.lines == ["start step1", "stop step1 complete 1", "start step3", "stop step3 complete 1"]


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_a_listener_that_fails_costs_nothing(
    build: Build, tally: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    tally.Diary.fail_at = hook
    profiler = build(steps=["1..2"], listeners=["diary"], on_error="raise")
    for step in range(4):
        with profiler.capture(step):
            pass
    (manifest,) = manifests(tmp_path).values()
    assert (manifest["status"], manifest["problems"]) == ("complete", [])
    assert f"RuntimeError: {hook} is not heard" in manifest["notes"][0]
    assert f"{hook} is not heard" in caplog.text


def test_a_start_that_is_cancelled_among_the_listeners_ends_the_backend(
    build: Build, tally: ModuleType, tmp_path: Path
) -> None:
    tally.Diary.wait_s = 5
    profiler = build(steps=[1], listeners=["diary"])

    async def loop() -> None:
        task = asyncio.ensure_future(profiler.astart(1))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(loop())
    assert calls_of(profiler) == ["start step1", "stop step1"]
    report = read_run(tmp_path / "run")
    assert (report.captures[0].status, report.problems) == (Status.PARTIAL, ())


def test_another_thread_cannot_stop_but_is_heard(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..9"])
    profiler.start(1)
    thread = threading.Thread(target=profiler.close)
    thread.start()
    thread.join()
    assert profiler.active is not None
    pending = manifests(tmp_path)["step1"]
    assert pending["status"] == "recording"
    (note,) = pending["notes"]
    assert note.startswith("stop from a thread that did not start the capture")
    assert note.endswith("was deferred to the owner's next boundary.")
    profiler.step(1)
    assert profiler.active is None
    manifest = manifests(tmp_path)["step1"]
    assert (manifest["status"], manifest["notes"]) == ("partial", [note])


def test_a_pending_end_is_never_written_over_the_end(build: Build, tmp_path: Path) -> None:
    """The other thread may come late, and what writes for it may be interrupted by a signal that is noted as well."""
    profiler = build(steps=["1..9"])
    profiler.start(1)
    (role,) = profiler._roles
    recording = role.recording
    assert recording is not None
    recording.capture.notes.append("first")
    recording.publish()
    assert manifests(tmp_path)["step1"]["notes"] == ["first"]
    write, during = recording._write, []

    def interrupted() -> None:
        during.append(recording.publish())
        write()

    recording._write = interrupted  # type: ignore[method-assign]
    recording.publish()
    assert during == [None]
    recording._write = write  # type: ignore[method-assign]
    profiler.close()
    recording.publish()
    assert manifests(tmp_path)["step1"]["status"] == "partial"


def test_a_backend_without_a_thread_of_its_own_is_stopped_from_any(build: Build) -> None:
    profiler = build(steps=["1..9"], thread_bound=False)
    profiler.start(1)
    thread = threading.Thread(target=profiler.close)
    thread.start()
    thread.join()
    assert profiler.active is None


def test_a_forked_child_leaves_the_capture_to_its_parent(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1], device="gpu-1")
    profiler.start(1)
    pid = os.fork()
    if pid == 0:
        profiler.stop()
        os._exit(0 if profiler.active is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert manifests(tmp_path)["step1"]["status"] == "recording"
    profiler.stop()
    assert manifests(tmp_path)["step1"]["status"] == "complete"


def test_too_long_a_capture_is_ended_in_mid_step(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1], max_capture_s=0.05)
    profiler.start(1)
    deadline = threading.Event()
    for _ in range(1000):
        deadline.wait(0.005)  # the host works; nobody calls the profiler
        if profiler.active is None:
            break
    manifest = manifests(tmp_path)["step1"]
    assert manifest["status"] == "partial"
    assert manifest["problems"] == ["It was not stopped within max_capture_s=0.05 seconds."]


def test_what_the_config_does_not_select_costs_and_writes_nothing(build: Build, tmp_path: Path) -> None:
    for profiler in (
        Profiler.from_config(),
        build(steps=[], on_demand=False),
        build(steps=[1], identity=Identity(rank=1, world_size=2)),
        Profiler.from_config(role="critic", settings={"trainer.backend": "tally", "steps": [1]}),
    ):
        assert not profiler.enabled
        with profiler, profiler.capture(1) as capture, profiler.stage("x"):
            assert capture is None
        function = object.__init__
        assert profiler.stage("x")(function) is function
    assert list(tmp_path.glob("run*")) == []


def test_ranks_outside_of_the_job_are_an_error(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"this job has none of the ranks \[8\]\. It has 1 rank"):
        build(steps=[1], **{"trainer.ranks": [8]})


def test_a_signal_that_comes_between_any_two_lines_does_not_hang(build: Build) -> None:
    profiler = build(steps=["1..9"])
    profiler.start(1)
    (role,) = profiler._roles
    with role.machine.mutex:  # simulate a signal handler that interrupts the thread holding the mutex
        assert role._end_at_exit("SIGTERM")
    assert profiler.active is None


# The async façade.


def test_the_async_facade_awaits_the_hooks(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..2"], wait_s=0.001)

    async def loop() -> None:
        @profiler.stage("update")
        async def update() -> None:
            await asyncio.sleep(0)

        for step in range(4):
            async with profiler.capture(step):
                await update()
                async with profiler.stage("other"):
                    await profiler.astep(0, "mini_batch")

    asyncio.run(loop())
    assert calls_of(profiler) == [
        "start step1", "step step1 mini_batch 0", "step step1 global_step 1", "step step1 mini_batch 0", "stop step1",
    ]  # fmt: skip
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_the_event_loop_goes_on_while_a_backend_waits(build: Build) -> None:
    profiler = build(steps=[1], wait_s=0.05)

    async def loop() -> int:
        ticks = 0
        task = asyncio.ensure_future(profiler.astart(1))
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
        await profiler.astop()
        return ticks

    assert asyncio.run(loop()) > 3


def test_the_sync_facade_runs_coroutines_outside_of_a_loop(build: Build, tmp_path: Path) -> None:
    with build(steps=[1], wait_s=0.001) as profiler, profiler.capture(1):
        pass
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_the_sync_facade_inside_a_loop_names_the_async_one(build: Build) -> None:
    profiler = build(steps=[1], wait_s=0.001, on_error="raise")

    async def loop() -> None:
        profiler.start(1)

    with pytest.raises(CaptureError, match="Use 'await profiler.astart"):
        asyncio.run(loop())


def test_plain_hooks_work_in_a_loop_through_the_sync_facade(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1])

    async def loop() -> None:
        with profiler.capture(1):
            await asyncio.sleep(0)

    asyncio.run(loop())
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_concurrent_starts_and_stops_give_one_capture(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1], wait_s=0.01)

    async def loop() -> None:
        await asyncio.gather(*(profiler.astart(1) for _ in range(5)))
        await asyncio.gather(*(profiler.astop() for _ in range(5)))

    asyncio.run(loop())
    assert calls_of(profiler) == ["start step1", "stop step1"]
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_a_stop_that_comes_while_starting_is_carried_out_after_it(build: Build) -> None:
    profiler = build(steps=[1], wait_s=0.01)

    async def loop() -> None:
        starting = asyncio.ensure_future(profiler.astart(1))
        await asyncio.sleep(0)
        await profiler.aclose()
        await starting

    asyncio.run(loop())
    assert profiler.active is None
    assert calls_of(profiler) in ([], ["start step1", "stop step1"])


@pytest.mark.parametrize("during", ["start", "stop"])
def test_a_cancelled_task_leaves_no_recording_behind(build: Build, tmp_path: Path, during: str) -> None:
    profiler = build(steps=[1], wait_s=0.05, device="gpu-2")

    async def loop() -> None:
        if during == "stop":
            await profiler.astart(1)
        task = asyncio.ensure_future(profiler.astart(1) if during == "start" else profiler.astop())
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(loop())
    assert profiler.active is None
    assert manifests(tmp_path)["step1"]["status"] == "failed"
    with build(steps=[1], device="gpu-2", run="next").capture(1):  # the lease was given back
        pass
    assert read_run(tmp_path / "next").status is Status.COMPLETE


operations = st.lists(
    st.tuples(st.sampled_from(["start", "step", "stop", "close", "scope", "mini"]), st.integers(0, 6)), max_size=25
)


@given(operations=operations, mode=st.sampled_from(["continuous", "discrete"]))
def test_any_order_of_calls_is_harmless(tmp_path_factory: Any, operations: list[tuple[str, int]], mode: str) -> None:
    """Whatever a host calls: nothing is raised, every capture ends, and starts and stops alternate."""
    directory = tmp_path_factory.mktemp("run")
    profiler = Profiler.from_config(
        settings={
            "output": str(directory),
            "run": "run",
            "trainer.backend": "tally",
            "mode": mode,
            "steps": [1, "3..4"],
        }
    )
    for name, step in operations:
        match name:
            case "start":
                profiler.start(step)
            case "step":
                profiler.step(step)
            case "stop":
                profiler.stop()
            case "close":
                profiler.close()
            case "scope":
                with profiler.capture(step), profiler.stage("work"):
                    pass
            case "mini":
                profiler.step(step, "mini_batch")
    profiler.close()
    edges = [call.split()[0] for call in calls_of(profiler) if not call.startswith("step")]
    assert edges == ["start", "stop"] * (len(edges) // 2)
    for manifest in manifests(directory).values():
        assert manifest["status"] in ("complete", "partial")
    if edges:
        assert all(isinstance(error, str) for error in read_run(directory / "run").problems)


test_any_order_of_calls_is_harmless = pytest.mark.usefixtures("tally")(test_any_order_of_calls_is_harmless)


def test_errors_have_one_root() -> None:
    assert issubclass(CaptureError, ProfdeckError)
    assert issubclass(ConfigError, ProfdeckError)
