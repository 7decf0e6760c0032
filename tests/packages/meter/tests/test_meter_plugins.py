"""Tests of the meter plugins with the fixtures of `profdeck.testing`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from meter_plugins import MeterBackend, MeterLog, MeterLogOptions

from profdeck import Artifact, Capture, ProfdeckError, Profiler, hookimpl
from profdeck.testing import CaptureRun, FakeClock, HookEvents

pytest_plugins = ["profdeck.testing"]


def test_capture_is_complete(capture_run: CaptureRun) -> None:
    run = capture_run("meter", steps="1..3", options={"interval": 2})
    run.assert_complete()
    (artifact,) = run.artifacts
    events = [event["name"] for event in json.loads(artifact.path.read_text())["traceEvents"]]
    assert events == ["start", "global_step 2"]
    assert run.capture.id == "step1"
    run.hooks.assert_order("meter profile_start", "meter profile_step", "meter profile_step", "meter profile_stop")


def test_listener_receives_its_options(capture_run: CaptureRun, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    settings = {"listeners": ["meter-log"], "listener_options.meter-log": {"path": str(log), "prefix": "> "}}
    capture_run("meter", settings=settings).assert_complete()
    assert log.read_text().splitlines()[0] == "> step1 complete"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listeners": ["meter-log"]}, "listener_options.meter-log.path"),
        ({"listeners": ["meter-log"], "listener_options.meter-log": {"pth": "log"}}, "Did you mean 'path'"),
        ({"listeners": ["meter-gate"], "listener_options.meter-gate.path": "log"}, "this listener has no options"),
        ({"listeners": ["meter-log"], "listener_options.meter-lg.path": "log"}, "'meter-lg' is not in listeners"),
        ({"trainer.options.with_flops": True}, "the backend 'meter' does not support this common option"),
        ({"trainer.options.intervall": 2}, r"Allowed: (?!.*with_flops).*\bwith_stack\b"),
    ],
)
def test_invalid_options_are_rejected(capture_run: CaptureRun, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfdeckError, match=message):
        capture_run("meter", settings=settings)


def test_truncated_trace_is_not_complete(capture_run: CaptureRun, monkeypatch: pytest.MonkeyPatch) -> None:
    @hookimpl
    def profile_stop(self: object, capture: Capture) -> list[Artifact]:
        path = capture.artifact_path(".trace.json")
        path.write_text('{"traceEvents": [')
        return [Artifact(path=path, size_bytes=5)]

    monkeypatch.setattr(MeterBackend, "profile_stop", profile_stop)
    with pytest.raises(AssertionError, match="The JSON is not closed"):
        capture_run("meter").assert_complete()


def test_listener_name_is_rejected_as_listener_object(capture_run: CaptureRun) -> None:
    with pytest.raises(ProfdeckError, match="belong in the config key 'listeners'"):
        capture_run("meter", listeners=["meter-gate"])


def test_capture_finished_is_called_on_an_instance(tmp_path: Path) -> None:
    log = MeterLog(MeterLogOptions(path=tmp_path / "log.txt"))
    log.capture_finished({"capture": "step1", "status": "complete"})
    assert log.options.path.read_text() == "finished step1 complete\n"


def test_supported_common_option_is_accepted(capture_run: CaptureRun) -> None:
    capture_run("meter", options={"with_stack": True, "with_flops": False}).assert_complete()


def test_wrapper_measures_the_backend_start(capture_run: CaptureRun, fake_clock: FakeClock) -> None:
    class Slow:
        @hookimpl(wrapper=True, trylast=True)
        def profile_start(self) -> Any:
            fake_clock.advance(0.25)
            return (yield)

    run = capture_run("meter", settings={"listeners": ["meter-timer"]}, listeners=[Slow()])
    assert run.capture.notes == ["meter started in 0.250 s."]


def test_tryfirst_listener_precedes_the_backend(capture_run: CaptureRun) -> None:
    run = capture_run("meter", settings={"listeners": ["meter-gate"]})
    run.assert_complete()
    run.hooks.assert_order("meter-gate profile_start", "meter profile_start", "meter profile_stop")
    with pytest.raises(AssertionError, match="'meter-gate profile_start' was not called after 'meter profile_start'"):
        run.hooks.assert_order("meter profile_start", "meter-gate profile_start")
    run.hooks.assert_not_called("meter-gate profile_stop")


def test_failing_listener_does_not_prevent_the_backend_stop(capture_run: CaptureRun) -> None:
    class Broken:
        @hookimpl(tryfirst=True)
        def profile_stop(self, capture: Capture) -> None:
            raise RuntimeError(f"broken at {capture.id}")

    run = capture_run("meter", listeners=[Broken()])
    run.hooks.assert_order("Broken profile_stop", "meter profile_stop")
    (failure,) = [event for event in run.hooks.events if event.error is not None]
    assert (str(failure), str(failure.error)) == ("Broken profile_stop", "broken at step1")
    assert run.artifacts
    with pytest.raises(AssertionError, match="broken at step1"):
        run.assert_complete()


def test_registered_object_is_called_in_all_captures(capture_run: CaptureRun, hook_events: HookEvents) -> None:
    class StartListener:
        @hookimpl
        def profile_start(self) -> None: ...

    name = Profiler.register(StartListener())
    try:
        capture_run("meter", steps=["1", "3"])
    finally:
        Profiler.unregister(name)
    assert [event.capture for event in hook_events.events if event.plugin == "StartListener"] == ["step1", "step3"]
