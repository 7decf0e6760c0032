"""Tests of the capture lifecycle through the sync and the async façade, with the backend `tally`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
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
    """Function that builds a profiler with the backend `tally`. The profiler writes to tmp_path/run."""

    def create(*, identity: Identity | None = None, **settings: Any) -> Profiler:
        option_settings = {f"trainer.options.{key}": settings.pop(key) for key in option_names & settings.keys()}
        return Profiler.from_config(
            identity=identity,
            settings={"output": str(tmp_path), "run": "run", "trainer.backend": "tally", **settings, **option_settings},
        )

    option_names = {
        "fail_at",
        "device",
        "wait_s",
        "thread_bound",
        "max_capture_s",
        "max_capture_steps",
        "max_memory_share",
    }
    return create


def read_manifests(path: Path) -> dict[str, dict[str, Any]]:
    documents = [
        json.loads(file.read_text())
        for file in path.glob("run/step_*/**/rank_*.json")
        if not file.name.endswith(".trace.json")
    ]
    return {manifest["capture"]: manifest for manifest in documents}


@pytest.mark.parametrize("error", [SystemExit(3), TimeoutError("preempted")])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_signal_handler_exception_in_a_hook_propagates(
    build: Build,
    tally: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    number: signal.Signals,
    error: BaseException,
) -> None:
    """The exception of the host's signal handler reaches the host. The capture ends, and the job can continue."""

    def raise_exit(*_: object) -> None:
        raise error

    previous_handler = signal.signal(number, raise_exit)
    perform = tally.TallyBackend.perform

    def perform_and_signal(self: Any, name: str, call: str) -> None:
        if name == hook and "step2" in call:
            signal.raise_signal(number)
        perform(self, name, call)

    monkeypatch.setattr(tally.TallyBackend, "perform", perform_and_signal)
    profiler = build(steps=[0, 2, 4])
    try:
        for step in range(6):
            if step == 2:
                with pytest.raises(type(error)), profiler.capture(step):
                    profiler.step(0, "mini_batch")
            else:
                with profiler.capture(step):
                    pass
    finally:
        signal.signal(number, previous_handler)
    profiler.close()
    statuses = {name: manifest["status"] for name, manifest in read_manifests(tmp_path).items()}
    assert {statuses.pop("step0"), statuses.pop("step4")} == {"complete"}
    if number is signal.SIGUSR1:
        assert statuses == {"step2": "partial" if hook == "step" else "failed"}


def test_start_guarded_by_active_loses_no_step(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["2..3", 5])
    for step in range(8):
        if profiler.active is None:
            profiler.start(step)
        assert (profiler.active is not None) == (step in (2, 3, 5))
        profiler.stop()
        assert profiler.active is None
    captures = {name: (entry["first_step"], entry["status"]) for name, entry in read_manifests(tmp_path).items()}
    assert captures == {"step2": (2, "complete"), "step5": (5, "complete")}
    assert calls_of(profiler) == ["start step2", "step step2 global_step 2", "stop step2", "start step5", "stop step5"]


def test_adjacent_steps_are_separate_captures_without_join_steps(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[2, "4..6"], join_steps=False)
    for step in range(9):
        with profiler.capture(step) as capture:
            assert (capture is not None) == (step in (2, 4, 5, 6))
            assert capture is None or capture.id == f"step{step}"
    assert {name: entry["status"] for name, entry in read_manifests(tmp_path).items()} == dict.fromkeys(
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


def test_explicit_and_implied_steps_are_equivalent(build: Build) -> None:
    implied, explicit = build(steps=["1..3"], run="a"), build(steps=["1..3"], run="b")
    for step in range(5):
        implied.start(step)
        implied.stop()
        explicit.start(step)
        explicit.step(step)
        explicit.stop()
    assert calls_of(implied) == calls_of(explicit)


def test_repeated_and_wrong_boundaries_are_noted(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..3"])
    profiler.start(1)
    profiler.step(7)
    profiler.step(1)
    profiler.step(1)
    profiler.close()
    (manifest,) = read_manifests(tmp_path).values()
    assert calls_of(profiler).count("step step1 global_step 1") == 1
    assert any("step(7) was ignored: step 1 was in progress." in note for note in manifest["notes"])


def test_step_method_cached_before_the_loop_still_works(build: Build) -> None:
    profiler = build(steps=["1..2"])
    step = profiler.step
    step(0)
    profiler.start(1)
    step(1)
    profiler.close()
    step(2)
    assert calls_of(profiler) == ["start step1", "step step1 global_step 1", "stop step1"]


def test_stages_are_annotated_in_continuous_mode(build: Build, tmp_path: Path) -> None:
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
    assert sorted(read_manifests(tmp_path)) == [
        "step1-score", "step1-update", "step1-update-2", "step2-score", "step2-update", "step2-update-2",
    ]  # fmt: skip
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_steps_that_never_start_are_reported_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    profiler = build(steps=[1])
    for step in range(5):
        profiler.step(step)
    (message,) = (record.getMessage() for record in caplog.records)
    assert "the host has called neither start(n) nor capture(n)" in message


class BrokenIndex:
    def __index__(self) -> int:
        raise RuntimeError("broken")


class ExitingIndex:
    def __index__(self) -> int:
        raise SystemExit(3)


class ExitingComparison(ExitingIndex):
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise SystemExit(3)


class BrokenComparison(BrokenIndex):
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("broken")


class BrokenText(str):
    __slots__ = ()

    def __repr__(self) -> str:
        raise RuntimeError("broken")

    __str__ = __repr__


class LazyProxy:
    @property
    def __class__(self) -> type:
        raise RuntimeError("working outside of the context")


class Stage(str, Enum):  # noqa: UP042  # unlike StrEnum, its members are formatted with the class name
    UPDATE = "update"


INVALID_STEPS = [997.5, "3", None, -1, 2**53, 10**18, BrokenIndex(), ExitingIndex(), np.array([1, 2])]
INVALID_STEPS += [BrokenText("3"), pytest.param(LazyProxy(), id="proxy")]
INVALID_UNITS = ["epoch", None, 3, [], np.array(["mini_batch", "epoch"]), BrokenComparison(), ExitingComparison()]
INVALID_UNITS += [BrokenText("epoch"), pytest.param(LazyProxy(), id="proxy")]


@pytest.mark.parametrize("step", [np.int64(1), np.array(1), True])
def test_any_integer_is_a_step(build: Build, tmp_path: Path, step: Any) -> None:
    profiler = build(steps=[1], **{"trainer.window": {"warmup": 0, "active": 2}})
    with profiler.capture(step):
        for index in np.arange(2):
            profiler.step(index, "mini_batch")
    assert read_run(tmp_path / "run").status is Status.COMPLETE
    assert read_manifests(tmp_path)["step1"]["last_step"] == 1


@pytest.mark.parametrize("step", INVALID_STEPS)
def test_invalid_step_is_logged_once(build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, step: Any) -> None:
    profiler = build(steps=[1, 2])

    async def run_async() -> None:
        async with profiler.capture(step):
            await profiler.astep(step)
        assert await profiler.astart(step) is None
        await profiler.astop()

    for valid_step in (1, 2):
        with profiler.capture(step) as capture:
            assert capture is None
        assert profiler.start(step) is None
        profiler.stop()
        with profiler.capture(valid_step):
            profiler.step(step)
            profiler.step(0, "epoch")
        asyncio.run(run_async())
    messages = [record.getMessage().partition(",")[0] for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(message.partition(":")[0] for message in messages) == ["global_step", "index", "unit"]
    assert read_run(tmp_path / "run").status is Status.COMPLETE


@pytest.mark.parametrize("unit", INVALID_UNITS)
def test_reports_of_the_first_step_are_checked_without_a_capture(
    build: Build, caplog: pytest.LogCaptureFixture, unit: Any
) -> None:
    profiler = build(steps=[100])
    for step in range(3):
        with profiler.capture(step):
            profiler.step(0, "mini_batch")
            profiler.step(0, unit)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("unit: expected global_step, mini_batch or engine_iteration, got ")


def test_missing_step_number_is_named(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    profiler = build(steps=[1])
    with profiler.capture(None):
        profiler.step()
    assert [record.getMessage() for record in caplog.records if record.name == "profdeck"] == [
        "global_step: expected the number of the global step, got None. The call is ignored.",
        "index: expected the number of the global step, or the index of the mini-batch, got None. The call is ignored.",
    ]


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
def test_step_without_a_batch_names_the_remedy(build: Build, tmp_path: Path, error: type[Exception]) -> None:
    profiler = build(steps=[1])
    with pytest.raises(error), profiler.capture(1):
        raise error
    (problem,) = read_manifests(tmp_path)["step1"]["problems"]
    assert problem.endswith("If the data loader ran out of batches, call next(loader) before the step begins.")


def test_unexpected_arguments_are_logged_once(build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler: Any = build(steps=[1])

    async def run_async() -> None:
        assert await profiler.astart(step=1) is None
        await profiler.astep(1, "mini_batch", 2)
        await profiler.astop(1)

    for _ in range(2):
        with profiler.capture(step=1), profiler.stage(label="update"):
            pass
        with profiler.capture(), profiler.stage():
            pass
        assert profiler.start(0, epoch=1) is None
        profiler.step(index=0, units="mini_batch")
        asyncio.run(run_async())
    assert [record.getMessage() for record in caplog.records] == [
        "global_step: unexpected argument 'step'. The call is ignored.",
        "stage: unexpected argument 'label'. The call is ignored.",
        "index: unexpected argument 'units'. The call is ignored.",
    ]
    profiler.start(1)
    profiler.stop(1)
    profiler.close(ValueError("stopped"))
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_identity_of_numpy_integers_is_readable(tally: ModuleType, tmp_path: Path) -> None:
    one, two = np.int64(1), np.int64(2)
    identity = Identity(rank=one, world_size=two, local_rank=one, replica=one, parallel={"tp": one})  # type: ignore[arg-type]
    settings = {"output": str(tmp_path), "run": "run", "steps": [1], "trainer.backend": "tally", "trainer.ranks": "all"}
    with Profiler.from_config(identity=identity, settings=settings) as profiler, profiler.capture(1):
        pass
    (document,) = read_manifests(tmp_path).values()
    assert (document["rank"], document["replica"], document["parallel"]) == (1, 1, {"tp": 1})


def test_stage_can_be_a_member_of_an_enum(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1], mode="discrete")
    with profiler.capture(1), profiler.stage(Stage.UPDATE):
        pass
    assert list(read_manifests(tmp_path)) == ["step1-update"]


@pytest.mark.parametrize("mode", ["continuous", "discrete"])
def test_steps_that_begin_again_are_captured_once(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    profiler = build(steps=["2..3", "6..7", 9], mode=mode)
    for epoch in range(4):
        for step in range(8 + 2 * epoch):
            with profiler.capture(step), profiler.stage("update"):
                pass
    suffix = "-update" if mode == "discrete" else ""
    steps = (2, 3, 6, 7, 9) if mode == "discrete" else (2, 6, 9)
    assert sorted(read_manifests(tmp_path)) == [f"step{step}{suffix}" for step in steps]
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message == (
        "Global step 2 was started again and will not be captured twice. If the host's step numbers restart each "
        "epoch, use a step count that continues across epochs."
    )


def test_step_that_is_retried_after_an_exception_is_captured_again(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1])
    with contextlib.suppress(ValueError), profiler.capture(1):
        raise ValueError("out of memory \udcff")
    with profiler.capture(1):
        pass
    statuses = {name: entry["status"] for name, entry in read_manifests(tmp_path).items()}
    assert statuses == {"step1": "partial", "step1-take2": "complete"}
    (rank, _) = [rank for capture in read_run(tmp_path / "run").captures for rank in capture.ranks]
    assert rank.problems == ("An exception ended it: ValueError: out of memory \\udcff.",)


@pytest.mark.parametrize(
    "name", ["a/b", "", "x" * 65, None, 3, BrokenText("a/b"), pytest.param(LazyProxy(), id="proxy")]
)
def test_invalid_stage_name_is_logged_once(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: Any
) -> None:
    profiler = build(steps=[1])
    for _ in range(2):
        with profiler.capture(1), profiler.stage(name), profiler.stage("update"):
            pass
    assert sum("stage: expected a letter" in record.getMessage() for record in caplog.records) == 1
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_invalid_arguments_are_raised_if_configured(build: Build) -> None:
    profiler = build(steps=[1], on_error="raise")
    for call in (
        lambda: profiler.start(0.5),
        lambda: profiler.step(0, "epoch"),
        lambda: profiler.stage("a/b"),
    ):
        with pytest.raises(ConfigError, match="expected"):
            call()


def test_generator_cannot_be_decorated(build: Build) -> None:
    profiler = build(steps=[1])
    with pytest.raises(ConfigError, match="cannot decorate the generator"):

        @profiler.stage("a")
        def generator() -> Any:
            yield 1


@pytest.mark.parametrize("enabled", [True, False])
def test_static_and_class_methods_can_be_decorated(build: Build, *, enabled: bool) -> None:
    profiler = build(steps=[1]) if enabled else Profiler()

    class Model:
        @profiler.stage("a")
        @staticmethod
        def double(value: int) -> int:
            return 2 * value

        @profiler.stage("b")
        @classmethod
        def name(cls) -> str:
            return cls.__name__

    assert (Model().double(2), Model.double(2), Model.name()) == (4, 4, "Model")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("decorated", [Stage, property(str), 3])
def test_only_functions_can_be_decorated(build: Build, decorated: Any, *, enabled: bool) -> None:
    profiler = build(steps=[1]) if enabled else Profiler()
    with pytest.raises(ConfigError, match="expected a function or method"):
        profiler.stage("a")(decorated)


def test_stage_that_was_not_entered_can_be_exited(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1])
    with profiler.capture(1):
        stage = profiler.stage("a")
        stage.__exit__(None, None, None)
        with stage:
            pass
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_warm_up_begins_before_the_capture(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[5], **{"trainer.warmup_steps": 2})
    for step in range(8):
        with profiler.capture(step):
            pass
    assert calls_of(profiler) == ["start step5", "step step5 global_step 3", "step step5 global_step 4", "stop step5"]
    (capture,) = read_run(tmp_path / "run").captures
    assert (capture.first_step, capture.last_step, capture.status) == (5, 5, Status.COMPLETE)


@pytest.fixture
def build_cold(tally: ModuleType, monkeypatch: pytest.MonkeyPatch, build: Build) -> Build:
    """Function that builds a profiler whose backend has a cold first step."""
    monkeypatch.setattr(tally.TallyBackend, "cold_first_step", True)
    return build


def run_steps(profiler: Profiler, steps: range) -> None:
    for step in steps:
        with profiler.capture(step), profiler.stage("update"):
            profiler.step(0, "mini_batch")


@pytest.mark.parametrize(
    ("steps", "host_steps", "settings", "is_cold"),
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
def test_manifest_contains_whether_the_first_step_is_cold(
    build_cold: Build,
    tmp_path: Path,
    steps: list[Any],
    host_steps: range,
    settings: dict[str, Any],
    is_cold: dict[str, bool],
) -> None:
    with build_cold(steps=steps, **settings) as profiler:
        run_steps(profiler, host_steps)
    assert {name: manifest["cold_first_step"] for name, manifest in read_manifests(tmp_path).items()} == is_cold
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_backend_without_a_cold_first_step_does_not_warm_up(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[5])
    run_steps(profiler, range(8))
    assert calls_of(profiler)[0] == "start step5"
    assert calls_of(profiler)[1] == "step step5 mini_batch 0"
    assert read_manifests(tmp_path)["step5"]["cold_first_step"] is None


def test_default_warm_up_takes_one_step(build_cold: Build) -> None:
    profiler = build_cold(steps=["5..6"])
    for step in range(8):
        with profiler.capture(step):
            pass
    assert calls_of(profiler) == ["start step5", "step step5 global_step 4", "step step5 global_step 5", "stop step5"]


def test_default_warm_up_without_its_step_leaves_no_manifest(build_cold: Build, tmp_path: Path) -> None:
    profiler = build_cold(steps=[3, 6, 9, 12])
    run_steps(profiler, range(3))
    run_steps(profiler, range(4, 5))  # the host skips step 3
    with pytest.raises(ZeroDivisionError), profiler.capture(5):
        _ = 1 / 0
    run_steps(profiler, range(6, 9))  # the host continues without warm-up
    with profiler:
        run_steps(profiler, range(11, 12))  # the job ends before step 12
    assert {name: manifest["cold_first_step"] for name, manifest in read_manifests(tmp_path).items()} == {"step6": True}
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_000006"]


@pytest.mark.parametrize("starts_each_step", [True, False])
def test_problem_in_the_default_warm_up_loses_no_step(
    build_cold: Build, tmp_path: Path, *, starts_each_step: bool
) -> None:
    profiler = build_cold(steps=["5..6"], on_error="raise")
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
    assert {name: manifest["cold_first_step"] for name, manifest in read_manifests(tmp_path).items()} == {"step5": True}
    report = read_run(tmp_path / "run")
    assert (report.status, report.captures[0].last_step) == (Status.COMPLETE, 6)


def test_default_warm_up_that_cannot_start_loses_no_step(
    build_cold: Build, tally: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    perform = tally.TallyBackend.perform
    rivals = ["another profiler"]

    def fail_once(self: Any, name: str, call: str) -> None:
        if name == "start" and rivals:
            raise CaptureError(f"{rivals.pop()} is active")
        perform(self, name, call)

    monkeypatch.setattr(tally.TallyBackend, "perform", fail_once)
    run_steps(build_cold(steps=[5], on_error="raise"), range(8))
    assert not rivals
    assert {name: manifest["cold_first_step"] for name, manifest in read_manifests(tmp_path).items()} == {"step5": True}
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_mini_batches_reach_the_backend(build: Build) -> None:
    profiler = build(steps=[1], **{"trainer.window": {"active": 1}})
    profiler.step(0, "mini_batch")
    with profiler.capture(1):
        profiler.step(0, "mini_batch")
    assert calls_of(profiler) == ["start step1", "step step1 mini_batch 0", "stop step1"]


@pytest.mark.parametrize(
    ("indexes", "noted"), [([0, 1, 2, 0, 1], []), ([4, 5, 0], []), ([3, 1, 0, 7], ["Mini-batch 1 was reported after"])]
)
def test_mini_batches_out_of_order_are_noted(
    build: Build, tmp_path: Path, indexes: list[int], noted: list[str]
) -> None:
    with (profiler := build(steps=[1], **{"trainer.window": {"active": 1}})).capture(1):
        for index in indexes:
            profiler.step(index, "mini_batch")
    (manifest,) = read_manifests(tmp_path).values()
    assert [note[: len(start)] for note, start in zip(manifest["notes"], noted, strict=True)] == noted


def test_repeated_start_and_stop_have_no_effect(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1])
    profiler.stop()
    profiler.close()
    first = profiler.start(1)
    assert profiler.start(1) is first
    profiler.stop()
    profiler.stop()
    (manifest,) = read_manifests(tmp_path).values()
    assert (manifest["status"], len(manifest["notes"])) == ("complete", 1)
    assert "start(1) was ignored: step1 was already recording." in manifest["notes"][0]


def test_nested_scope_does_not_end_the_step(build: Build) -> None:
    profiler = build(steps=[1])
    with profiler.capture(1):
        with profiler.capture(1):
            pass
        assert profiler.active is not None
    assert profiler.active is None


def test_captures_are_complete_without_stop_calls(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1, 3])
    for step in range(5):
        profiler.start(step)
    assert {name: manifest["status"] for name, manifest in read_manifests(tmp_path).items()} == {
        "step1": "complete",
        "step3": "complete",
    }


def test_skipped_steps_make_a_capture_partial(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..5"])
    profiler.start(1)
    profiler.start(4)
    profiler.close()
    documents = read_manifests(tmp_path)
    assert documents["step1"]["status"] == "partial"
    assert "went from step 1 to step 4" in documents["step1"]["problems"][0]


def test_exception_keeps_the_trace_and_propagates(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..3"])
    with pytest.raises(ZeroDivisionError), profiler.capture(1):
        _ = 1 / 0
    (manifest,) = read_manifests(tmp_path).values()
    assert manifest["status"] == "partial"
    assert "ZeroDivisionError" in manifest["problems"][0]
    assert manifest["artifacts"][0]["whole"]


def test_job_can_end_before_the_schedule(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..3"])
    with profiler, profiler.capture(1):
        pass
    assert read_manifests(tmp_path)["step1"]["status"] == "partial"
    profiler = build(steps=["1..3"], final_step=1, run="known")
    with profiler, profiler.capture(1):
        pass
    assert read_run(tmp_path / "known").status is Status.COMPLETE


def run_until_warm_up(profiler: Profiler) -> None:
    """Run a job that ends while the capture of step 6 warms up."""
    with profiler:
        for step in range(6):
            with profiler.capture(step):
                pass


def test_endless_schedule_misses_nothing_if_the_job_ends_during_warm_up(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["every 3"], device="d", **{"trainer.warmup_steps": 1})
    run_until_warm_up(profiler)
    assert calls_of(profiler)[-1] == "stop step6"
    assert list(read_manifests(tmp_path)) == ["step3"]
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_000003"]
    assert read_run(tmp_path / "run").status is Status.COMPLETE
    with build(steps=[0], device="d", run="next").capture(0):
        pass
    assert read_run(tmp_path / "next").status is Status.COMPLETE


@pytest.mark.parametrize("steps", [[6], ["3..6"], ["every 3 to 6"], ["every 3", 6]])
def test_finite_schedule_is_incomplete_if_the_job_ends_during_warm_up(
    build: Build, tmp_path: Path, steps: list[Any]
) -> None:
    run_until_warm_up(build(steps=steps, **{"trainer.warmup_steps": 3}))
    assert {manifest["status"] for manifest in read_manifests(tmp_path).values()} & {"failed", "partial"}


def test_exception_during_the_warm_up_of_an_endless_schedule_is_reported(build: Build, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), build(steps=["every 3"], **{"trainer.warmup_steps": 1}) as profiler:
        profiler.start(2)
        _ = 1 / 0
    assert "ZeroDivisionError" in " ".join(read_manifests(tmp_path)["step3"]["problems"])


def test_warm_up_with_artifacts_is_not_withdrawn(build: Build, tmp_path: Path) -> None:
    run_until_warm_up(build(steps=["every 3"], wait_s=0, **{"trainer.warmup_steps": 1}))
    manifest = read_manifests(tmp_path)["step6"]
    assert (manifest["status"], manifest["problems"]) == ("partial", ["The profiler was closed in mid-capture."])


def test_warm_up_that_fails_to_stop_is_withdrawn(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["every 3"], fail_at="stop", **{"trainer.warmup_steps": 1})
    run_until_warm_up(profiler)
    assert profiler.active is None
    assert "step6" not in read_manifests(tmp_path)


def test_waiting_warm_up_is_withdrawn(build: Build, tmp_path: Path) -> None:
    with build(steps=[0], device="d", run="other").capture(0):
        profiler = build(steps=["every 3"], device="d", **{"trainer.warmup_steps": 1})
        profiler.start(2)
        profiler.close()
        assert not list((tmp_path / "run").glob("step_*"))


def test_withdrawal_by_one_rank_does_not_affect_other_ranks(build: Build, tmp_path: Path) -> None:
    """Both ranks end at the same step, but at different times."""
    rank_settings = {"trainer.ranks": "all", "trainer.warmup_steps": 1}
    first, second = (
        build(steps=["every 3"], identity=Identity(rank=rank, world_size=2), **rank_settings) for rank in range(2)
    )
    second.start(2)
    first.start(2)
    first.close()
    second.stop()
    with second.capture(3):
        pass
    assert list(read_manifests(tmp_path)) == ["step3"]
    assert read_manifests(tmp_path)["step3"]["rank"] == 1


def test_step_can_be_captured_after_a_withdrawal(build: Build, tmp_path: Path) -> None:
    with build(steps=["every 3"], **{"trainer.warmup_steps": 1}) as profiler:
        profiler.start(2)
        profiler.close()
        for step in (2, 3):
            with profiler.capture(step):
                pass
    assert read_manifests(tmp_path)["step3"]["status"] == "complete"


def test_repeated_step_does_not_overwrite_captures(build: Build, tmp_path: Path) -> None:
    for _ in range(3):
        with build(steps=[1]).capture(1):
            pass
    assert sorted(read_manifests(tmp_path)) == ["step1", "step1-take2", "step1-take3"]
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_replicas_and_ranks_have_separate_file_names(build: Build, tmp_path: Path) -> None:
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
def test_hook_error_does_not_reach_the_host(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, hook: str, status: str
) -> None:
    profiler = build(steps=["1..2"], fail_at=hook)
    with caplog.at_level(logging.WARNING, "profdeck"):
        for step in range(4):
            with profiler.capture(step):
                pass
    documents = read_manifests(tmp_path)
    assert documents["step1"]["status"] == status
    assert f"RuntimeError: {hook} does not work" in " ".join(documents["step1"]["problems"])
    assert caplog.messages


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_hook_error_is_raised_with_on_error_raise(build: Build, hook: str) -> None:
    profiler = build(steps=["1..2"], fail_at=hook, on_error="raise")
    with pytest.raises(CaptureError, match=f"{hook} does not work"):
        for step in range(4):
            with profiler.capture(step):
                pass
    assert profiler.active is None


def test_host_exception_takes_precedence_over_hook_errors(build: Build) -> None:
    profiler = build(steps=[1], fail_at="stop", on_error="raise")
    with pytest.raises(ZeroDivisionError), profiler.capture(1):
        _ = 1 / 0


def test_listener_is_called_for_every_capture(build: Build, tally: ModuleType) -> None:
    profiler = build(steps=[1, 3], listeners=["diary"])
    for step in range(4):
        with profiler.capture(step):
            pass
    (diary,) = tally.Diary.instances
    assert diary.lines == ["start step1", "stop step1 complete 1", "start step3", "stop step3 complete 1"]


@pytest.mark.parametrize("hook", ["start", "step", "stop"])
def test_listener_error_does_not_affect_the_capture(
    build: Build, tally: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    tally.Diary.fail_at = hook
    profiler = build(steps=["1..2"], listeners=["diary"], on_error="raise")
    for step in range(4):
        with profiler.capture(step):
            pass
    (manifest,) = read_manifests(tmp_path).values()
    assert (manifest["status"], manifest["problems"]) == ("complete", [])
    assert f"RuntimeError: {hook} is not heard" in manifest["notes"][0]
    assert f"{hook} is not heard" in caplog.text


def test_cancellation_inside_a_listener_stops_the_backend(build: Build, tally: ModuleType, tmp_path: Path) -> None:
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


def test_stop_from_another_thread_is_deferred(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["1..9"])
    profiler.start(1)
    thread = threading.Thread(target=profiler.close)
    thread.start()
    thread.join()
    assert profiler.active is not None
    pending = read_manifests(tmp_path)["step1"]
    assert pending["status"] == "recording"
    (note,) = pending["notes"]
    assert note.startswith("stop from a thread that did not start the capture")
    assert note.endswith("was deferred to the owner's next boundary.")
    profiler.step(1)
    assert profiler.active is None
    manifest = read_manifests(tmp_path)["step1"]
    assert (manifest["status"], manifest["notes"]) == ("partial", [note])


def test_late_publish_does_not_overwrite_the_final_manifest(build: Build, tmp_path: Path) -> None:
    """Another thread can publish after the end, and a signal handler can publish during a write."""
    profiler = build(steps=["1..9"])
    profiler.start(1)
    (role,) = profiler._roles
    recording = role.recording
    assert recording is not None
    recording.capture.notes.append("first")
    recording.publish()
    assert read_manifests(tmp_path)["step1"]["notes"] == ["first"]
    write, publish_results = recording._write, []

    def publish_and_write() -> None:
        publish_results.append(recording.publish())
        write()

    recording._write = publish_and_write  # type: ignore[method-assign]
    recording.publish()
    assert publish_results == [None]
    recording._write = write  # type: ignore[method-assign]
    profiler.close()
    recording.publish()
    assert read_manifests(tmp_path)["step1"]["status"] == "partial"


def test_backend_that_is_not_thread_bound_can_be_stopped_from_any_thread(build: Build) -> None:
    profiler = build(steps=["1..9"], thread_bound=False)
    profiler.start(1)
    thread = threading.Thread(target=profiler.close)
    thread.start()
    thread.join()
    assert profiler.active is None


def test_forked_child_does_not_end_the_capture_of_its_parent(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1], device="gpu-1")
    profiler.start(1)
    pid = os.fork()
    if pid == 0:
        profiler.stop()
        os._exit(0 if profiler.active is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert read_manifests(tmp_path)["step1"]["status"] == "recording"
    profiler.stop()
    assert read_manifests(tmp_path)["step1"]["status"] == "complete"


def test_time_limit_ends_a_capture_inside_a_step(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1], max_capture_s=0.05)
    profiler.start(1)
    deadline = threading.Event()
    for _ in range(1000):
        deadline.wait(0.005)  # the host is busy and does not call the profiler
        if profiler.active is None:
            break
    manifest = read_manifests(tmp_path)["step1"]
    assert manifest["status"] == "partial"
    assert manifest["problems"] == ["It was not stopped within max_capture_s=0.05 seconds."]


def test_memory_limit_ends_a_capture_and_skips_the_adjacent_steps(build: Build, tmp_path: Path) -> None:
    """After a limit, the remaining steps of a range are skipped. The next range is captured."""
    profiler = build(steps=["1..6", "9..10"], max_memory_share=1e-6)
    held = []
    for step in range(12):
        profiler.start(step)
        if step == 3:
            held.append(b"x" * (64 << 20))
            await_end(profiler)
        profiler.stop()
    manifests = read_manifests(tmp_path)
    assert manifests.keys() == {"step1", "step9"}
    assert (manifests["step1"]["status"], manifests["step1"]["last_step"]) == ("partial", 3)
    assert "more than max_memory_share=1e-06 of the" in manifests["step1"]["problems"][0]
    assert manifests["step9"]["last_step"] == 10


def await_end(profiler: Profiler) -> None:
    """Wait until a limit has ended the capture."""
    waiting = threading.Event()
    for _ in range(1000):
        if profiler.active is None:
            return
        waiting.wait(0.01)


@pytest.mark.parametrize("calls", ["start_stop", "steps"])
def test_step_limit_ends_a_capture_and_skips_the_adjacent_steps(build: Build, tmp_path: Path, calls: str) -> None:
    profiler = build(steps=["2..9", "11..13", "20..25"], max_capture_steps=3)
    profiler.start(0)
    for step in range(30):
        if calls == "start_stop":
            profiler.start(step)
            profiler.stop()
        else:
            profiler.start(step)
            profiler.step(step)
    profiler.close()
    manifests = read_manifests(tmp_path)
    assert {name: (item["status"], item["last_step"]) for name, item in manifests.items()} == {
        "step2": ("partial", 4),
        "step11": ("complete", 13),
        "step20": ("partial", 22),
    }
    assert manifests["step2"]["problems"] == ["It reached max_capture_steps=3."]


def test_step_limit_ignores_separate_captures(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=["2..9"], max_capture_steps=3, join_steps=False)
    for step in range(12):
        with profiler.capture(step):
            pass
    assert [item["status"] for item in read_manifests(tmp_path).values()] == ["complete"] * 8


def test_disabled_profiler_writes_nothing(build: Build, tmp_path: Path) -> None:
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


def test_ranks_outside_of_the_job_are_rejected(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"this job has none of the ranks \[8\]\. It has 1 rank"):
        build(steps=[1], **{"trainer.ranks": [8]})


def test_signal_handler_does_not_deadlock(build: Build) -> None:
    profiler = build(steps=["1..9"])
    profiler.start(1)
    (role,) = profiler._roles
    with role.machine.mutex:  # simulate a signal handler that interrupts the thread holding the mutex
        assert role._end_at_exit("SIGTERM")
    assert profiler.active is None


# The async façade.


def test_async_facade_awaits_the_hooks(build: Build, tmp_path: Path) -> None:
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


def test_waiting_backend_does_not_block_the_event_loop(build: Build) -> None:
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


def test_sync_facade_runs_coroutines_outside_of_a_loop(build: Build, tmp_path: Path) -> None:
    with build(steps=[1], wait_s=0.001) as profiler, profiler.capture(1):
        pass
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_sync_facade_inside_a_loop_suggests_the_async_facade(build: Build) -> None:
    profiler = build(steps=[1], wait_s=0.001, on_error="raise")

    async def loop() -> None:
        profiler.start(1)

    with pytest.raises(CaptureError, match="Use 'await profiler.astart"):
        asyncio.run(loop())


def test_sync_facade_runs_sync_hooks_inside_a_loop(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1])

    async def loop() -> None:
        with profiler.capture(1):
            await asyncio.sleep(0)

    asyncio.run(loop())
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_concurrent_starts_and_stops_make_one_capture(build: Build, tmp_path: Path) -> None:
    profiler = build(steps=[1], wait_s=0.01)

    async def loop() -> None:
        await asyncio.gather(*(profiler.astart(1) for _ in range(5)))
        await asyncio.gather(*(profiler.astop() for _ in range(5)))

    asyncio.run(loop())
    assert calls_of(profiler) == ["start step1", "stop step1"]
    assert read_run(tmp_path / "run").status is Status.COMPLETE


def test_close_during_the_start_is_deferred(build: Build) -> None:
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
def test_cancelled_task_ends_its_capture(build: Build, tmp_path: Path, during: str) -> None:
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
    assert read_manifests(tmp_path)["step1"]["status"] == "failed"
    with build(steps=[1], device="gpu-2", run="next").capture(1):  # the lease was released
        pass
    assert read_run(tmp_path / "next").status is Status.COMPLETE


operations = st.lists(
    st.tuples(st.sampled_from(["start", "step", "stop", "close", "scope", "mini"]), st.integers(0, 6)), max_size=25
)


@given(operations=operations, mode=st.sampled_from(["continuous", "discrete"]))
def test_any_order_of_calls_is_valid(tmp_path_factory: Any, operations: list[tuple[str, int]], mode: str) -> None:
    """No call raises an error, every capture ends, and starts and stops alternate."""
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
    boundaries = [call.split()[0] for call in calls_of(profiler) if not call.startswith("step")]
    assert boundaries == ["start", "stop"] * (len(boundaries) // 2)
    for manifest in read_manifests(directory).values():
        assert manifest["status"] in ("complete", "partial")
    if boundaries:
        assert all(isinstance(error, str) for error in read_run(directory / "run").problems)


test_any_order_of_calls_is_valid = pytest.mark.usefixtures("tally")(test_any_order_of_calls_is_valid)


def test_errors_have_a_common_base_class() -> None:
    assert issubclass(CaptureError, ProfdeckError)
    assert issubclass(ConfigError, ProfdeckError)
