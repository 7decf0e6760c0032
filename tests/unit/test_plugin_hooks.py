"""Semantics of pluggy hooks in captures: wrappers, order, isolation, historic calls and awaitables."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pluggy
import pytest

from open_captures import calls_of
from profdeck import Artifact, Capture, Profiler, Step, Unit, hookimpl
from profdeck.backends.plugin_manager import plugin_manager
from profdeck.base.errors import CaptureError, LeaseError
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import BrokenPluginError, PluginError

BuildProfiler = Callable[..., Profiler]
Wrapper = Generator[None, Any, Any]


@pytest.fixture
def build_profiler(tally: ModuleType, tmp_path: Path) -> BuildProfiler:
    """Function that creates a profiler with the backend `tally`. It captures step 1 to tmp_path/run."""

    def build(*, listeners: Any = (), target: Any = None, **settings: Any) -> Profiler:
        base = {"output": str(tmp_path), "run": "run", "trainer.backend": "tally", "steps": [1]}
        return Profiler.from_config(settings={**base, **settings}, listeners=listeners, target=target)

    return build


@pytest.fixture
def build_engine_profiler(tally: ModuleType, tmp_path: Path) -> BuildProfiler:
    """Function that creates a profiler that captures step 1 of one or more toy engines."""

    def build(target: Any, *, listeners: Any = (), **settings: Any) -> Profiler:
        base = {"output": str(tmp_path), "run": "run", "rollout.backend": "tally-engine", "steps": [1]}
        return Profiler.from_config(role="rollout", settings={**base, **settings}, listeners=listeners, target=target)

    return build


def read_manifest(path: Path, name: str = "rank_*.step1.json") -> dict[str, Any]:
    (file,) = path.glob(f"run/step_*/*/{name}")
    content: dict[str, Any] = json.loads(file.read_text())
    return content


class Log:
    """A listener that appends a line to `lines` for each call."""

    def __init__(self, lines: list[str], name: str = "log") -> None:
        self.lines, self.name = lines, name

    @hookimpl
    def profile_start(self) -> None:
        self.lines.append(f"{self.name} start")

    @hookimpl
    def profile_step(self, step: Step) -> None:
        self.lines.append(f"{self.name} step {step.index}")

    @hookimpl
    def profile_stop(self, capture: Capture) -> None:
        self.lines.append(f"{self.name} stop {capture.status}")


class First(Log):
    """A listener that is called before the backend."""

    @hookimpl(tryfirst=True)
    def profile_start(self) -> None:
        self.lines.append(f"{self.name} start")


class Names:
    """A wrapper that appends the name of each plugin that is started."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    @hookimpl(wrapper=True)
    def profile_start(self, plugin_name: str) -> Wrapper:
        self.names.append(plugin_name)
        return (yield)


# Wrappers.


def test_wrapper_measures_the_start_of_each_plugin(build_profiler: BuildProfiler) -> None:
    spent_ns: dict[str, int] = {}

    class Timer:
        @hookimpl(wrapper=True)
        def profile_start(self, plugin_name: str) -> Wrapper:
            begin = time.perf_counter_ns()
            results = yield
            spent_ns[plugin_name] = time.perf_counter_ns() - begin
            return results

    profiler = build_profiler(listeners=[Log([])])
    name = Profiler.register(Timer())
    with profiler.capture(1) as capture:
        assert capture is not None
    Profiler.unregister(name)
    assert spent_ns.keys() == {"tally", "Log"}
    assert all(spent > 0 for spent in spent_ns.values())


@pytest.mark.parametrize("old_style", [False, True])
def test_wrappers_run_around_all_hooks_of_a_capture(
    build_profiler: BuildProfiler, tmp_path: Path, old_style: bool
) -> None:
    lines: list[str] = []

    def create_wrapper(hook: str) -> Any:
        def wrap() -> Wrapper:
            lines.append(f"before {hook}")
            result = yield
            lines.append(f"after {hook}")
            return None if old_style else result

        return staticmethod(hookimpl(wrapper=not old_style, hookwrapper=old_style, specname=hook)(wrap))

    hooks = ("profile_start", "profile_step", "profile_stop")
    plugin = type("Around", (), {f"wrap_{hook}": create_wrapper(hook) for hook in hooks})()
    with build_profiler(listeners=[plugin], steps=["1..2"]) as profiler:
        for step in (1, 2):
            with profiler.capture(step):
                pass
    assert lines == [line for hook in hooks for line in (f"before {hook}", f"after {hook}")]
    assert read_manifest(tmp_path)["status"] == "complete"


def test_wrapper_can_replace_the_artifacts(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    class Drop:
        @hookimpl(wrapper=True)
        def profile_stop(self) -> Wrapper:
            yield
            return []

    with build_profiler(listeners=[Drop()]) as profiler, profiler.capture(1):
        pass
    assert read_manifest(tmp_path)["problems"] == ["The backend wrote no file."]


def test_plugin_can_implement_and_wrap_the_same_hook(build_profiler: BuildProfiler) -> None:
    lines: list[str] = []

    class Both:
        @hookimpl(specname="profile_start")
        def note(self, capture: Capture) -> None:
            lines.append(f"note {capture.id}")

        @hookimpl(wrapper=True, specname="profile_start")
        def wrap(self, plugin_name: str) -> Wrapper:
            lines.append(f"wrap {plugin_name}")
            return (yield)

    with build_profiler(listeners=[Both()]) as profiler, profiler.capture(1):
        pass
    assert lines == ["wrap tally", "wrap Both", "note step1"]


def test_backend_can_wrap_its_own_hooks(
    build_profiler: BuildProfiler, tally: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    @hookimpl(wrapper=True, specname="profile_step")
    def around_steps(self: Any, step: Step, plugin_name: str) -> Wrapper:  # becomes a method of the backend
        lines.append(f"{plugin_name} {step.index}")
        return (yield)

    monkeypatch.setattr(tally.TallyBackend, "around_steps", around_steps, raising=False)
    with build_profiler(steps=["1..2"], listeners=[Log([])]) as profiler:
        for step in (1, 2):
            with profiler.capture(step):
                pass
    assert lines == ["tally 1", "Log 1"]


@pytest.mark.parametrize("hook", ["profile_start", "profile_step", "profile_stop"])
def test_wrapper_that_does_not_return_the_results_is_reported(
    build_profiler: BuildProfiler, tmp_path: Path, hook: str
) -> None:
    @hookimpl(wrapper=True, specname=hook)
    def return_nothing() -> Wrapper:
        yield

    plugin = type("Forgetful", (), {"wrap": staticmethod(return_nothing)})()
    with build_profiler(listeners=[plugin], steps=["1..2"]) as profiler:
        for step in (1, 2):
            with profiler.capture(step):
                pass
    document = read_manifest(tmp_path)
    assert document["status"] == "partial"
    assert f"A wrapper around {hook} of tally returned None instead of the results" in document["problems"][0]
    assert document["artifacts"]
    assert "stop step1" in calls_of(profiler)


@pytest.mark.parametrize("error", [RuntimeError("late"), KeyboardInterrupt()])
def test_recording_is_stopped_if_a_wrapper_fails_after_the_start(
    build_profiler: BuildProfiler, tmp_path: Path, error: BaseException
) -> None:
    lines: list[str] = []

    class Late:
        @hookimpl(wrapper=True)
        def profile_start(self, plugin_name: str) -> Wrapper:
            results = yield
            if plugin_name == "tally":
                raise error
            return results

    profiler = build_profiler(listeners=[Late(), Log(lines)])
    if isinstance(error, Exception):
        assert profiler.start(1) is None
    else:
        with pytest.raises(KeyboardInterrupt):
            profiler.start(1)
    assert (profiler.active, calls_of(profiler), lines) == (None, ["start step1", "stop step1"], [])
    assert read_manifest(tmp_path)["status"] == "partial"


@pytest.mark.parametrize("trylast", [True, False])
@pytest.mark.parametrize("raises_before", [True, False])
def test_capture_with_a_suppressed_start_is_failed(
    build_profiler: BuildProfiler, tmp_path: Path, raises_before: bool, trylast: bool
) -> None:
    class Suppress:
        @hookimpl(wrapper=True, trylast=trylast)
        def profile_start(self) -> Wrapper:
            if raises_before:
                raise RuntimeError("denied")
            try:
                return (yield)
            except RuntimeError:
                return []

    profiler = build_profiler(listeners=[Suppress()], **{"trainer.options.fail_at": "start"})
    assert profiler.start(1) is None
    document = read_manifest(tmp_path)
    assert document["status"] == "failed"
    assert ("denied" if raises_before else "a wrapper suppressed its error") in document["problems"][0]


@pytest.mark.parametrize("returned", ["one artifact", "outside", "parent", "directory", "text"])
def test_invalid_return_value_of_profile_stop_is_reported(
    build_profiler: BuildProfiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: ModuleType, returned: str
) -> None:
    @hookimpl
    def stop(self: object, capture: Capture) -> object:
        names = {"outside": tmp_path / "a", "parent": capture.directory / ".." / "a", "directory": capture.directory}
        artifact = Artifact(path=names.get(returned, capture.directory / "a"), size_bytes=1)
        return {"one artifact": artifact, "text": ["a"]}.get(returned, [artifact])

    monkeypatch.setattr(tally.TallyBackend, "profile_stop", stop)
    with build_profiler() as profiler, profiler.capture(1):
        pass
    (problem, *_) = read_manifest(tmp_path)["problems"]
    expected = {
        "one artifact": "profile_stop of tally must return a list of artifacts or of functions that write them, not ",
        "outside": f"profile_stop returned an invalid artifact: {tmp_path / 'a'} is outside of {tmp_path}",
        "parent": "profile_stop returned an invalid artifact: ",
        "directory": "profile_stop returned an invalid artifact: ",
        "text": "profile_stop must return artifacts or functions that write them, not 'a'.",
    }
    assert problem.startswith(expected[returned])


@pytest.mark.parametrize("hook", ["step", "stop", "write"])
def test_backend_error_is_chained_and_logged(
    build_profiler: BuildProfiler, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    profiler = build_profiler(on_error="raise", steps=["1..2"], **{"trainer.options.fail_at": hook})
    with caplog.at_level(logging.DEBUG, "profdeck"), pytest.raises(CaptureError) as raised:
        for step in (1, 2):
            with profiler.capture(step):
                pass
    assert isinstance(raised.value.__cause__, RuntimeError)
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.exc_info is not None
    assert record.exc_info[1] is raised.value.__cause__


@pytest.mark.parametrize("registered_first", [False, True])
def test_listener_that_is_also_registered_is_called_once(build_profiler: BuildProfiler, registered_first: bool) -> None:
    listener = Log(lines := [])
    name = Profiler.register(listener) if registered_first else ""
    profiler = build_profiler(listeners=[listener], steps=[1, 3])
    name = name or Profiler.register(listener)
    with profiler.capture(1):
        pass
    Profiler.unregister(name)
    assert lines.count("log start") == 1
    with profiler.capture(3):
        pass
    assert lines.count("log start") == 2


def test_suppressed_step_error_makes_the_capture_partial(
    build_profiler: BuildProfiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: ModuleType
) -> None:
    class Suppress:
        @hookimpl(wrapper=True)
        def profile_step(self) -> Wrapper:
            try:
                return (yield)
            except OSError:
                return []

    @hookimpl
    def fail(self: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tally.TallyBackend, "profile_step", fail)
    with build_profiler(listeners=[Suppress()], steps=["1..2"]) as profiler:
        for step in (1, 2):
            with profiler.capture(step):
                pass
    document = read_manifest(tmp_path)
    assert (document["status"], document["problems"]) == (
        "partial",
        ["tally at global_step 1: OSError: disk full. A wrapper suppressed this error."],
    )


def test_capture_with_a_suppressed_stop_error_is_failed(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    class Suppress:
        @hookimpl(wrapper=True)
        def profile_stop(self) -> Wrapper:
            try:
                return (yield)
            except RuntimeError:
                return []

    with build_profiler(listeners=[Suppress()], **{"trainer.options.fail_at": "stop"}) as profiler, profiler.capture(1):
        pass
    document = read_manifest(tmp_path)
    assert document["status"] == "failed"
    assert "profile_stop of tally did not return; a wrapper suppressed its error" in document["problems"][0]


# Order.


def test_backend_is_called_before_listeners_in_pluggy_order(build_profiler: BuildProfiler) -> None:
    lines: list[str] = []

    class Last(Log):
        @hookimpl(trylast=True)
        def profile_start(self) -> None:
            lines.append("last start")

    class BackendStart:
        @hookimpl(wrapper=True)
        def profile_start(self, plugin_name: str) -> Wrapper:
            if plugin_name == "tally":
                lines.append("backend start")
            return (yield)

    profiler = build_profiler(listeners=[Last(lines, "last"), Log(lines), First(lines, "first"), BackendStart()])
    with profiler.capture(1):
        assert lines == ["first start", "backend start", "log start", "last start"]
    assert set(lines[4:]) == {f"{name} stop complete" for name in ("first", "log", "last")}


def test_backend_precedes_listeners_registered_later(build_profiler: BuildProfiler) -> None:
    names: list[str] = []
    profiler = build_profiler(listeners=[Names(names)])
    Profiler.register(Log([]), "late")
    with profiler.capture(1):
        pass
    Profiler.unregister("late")
    assert names == ["tally", "late"]


def test_listener_is_started_once_while_the_backend_waits(
    build_profiler: BuildProfiler, tally: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    perform, is_busy = tally.TallyBackend.perform, [True]

    def start_when_free(self: Any, name: str, call: str) -> None:
        if name == "start" and is_busy[0]:
            raise LeaseError("It is busy.", "recorder, held by this process (ref, step1)")
        perform(self, name, call)

    monkeypatch.setattr(tally.TallyBackend, "perform", start_when_free)
    with build_profiler(listeners=[First(lines, "first")]) as profiler, profiler.capture(1):
        profiler.step(0, "mini_batch")
        is_busy[0] = False
        profiler.step(1, "mini_batch")
    assert lines == ["first start", "first stop complete"]
    assert calls_of(profiler) == ["start step1", "stop step1"]


def test_started_listener_is_stopped_if_the_device_stays_busy(
    build_profiler: BuildProfiler, tally: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def raise_lease_error(*_: object) -> None:
        raise LeaseError("It is busy.", "recorder, held by this process (ref, step1)")

    monkeypatch.setattr(tally.TallyBackend, "perform", raise_lease_error)
    with build_profiler(listeners=[First(lines, "first")]) as profiler, profiler.capture(1):
        pass
    assert lines == ["first start", "first stop missing"]


def test_deferred_stop_precedes_the_step_hook_of_its_boundary(build_profiler: BuildProfiler) -> None:
    profiler = build_profiler(steps=["1..9"])
    profiler.start(1)
    thread = threading.Thread(target=profiler.close)
    thread.start()
    thread.join()
    profiler.step(1)
    assert calls_of(profiler) == ["start step1", "stop step1"]


# Isolation.


def test_failing_plugin_does_not_prevent_other_stops(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    lines: list[str] = []

    class Broken(Log):
        @hookimpl(tryfirst=True)
        def profile_stop(self, capture: Capture) -> None:
            raise RuntimeError(f"{self.name} is broken at {capture.id}")

    listeners = [Broken(lines, "a"), Log(lines, "b"), Broken(lines, "c"), Log(lines, "d")]
    with build_profiler(listeners=listeners, on_error="raise") as profiler, profiler.capture(1):
        pass
    assert calls_of(profiler) == ["start step1", "stop step1"]
    assert {line for line in lines if "stop" in line} == {"b stop complete", "d stop complete"}
    document = read_manifest(tmp_path)
    assert document["status"] == "complete"
    assert sum("RuntimeError: " in note for note in document["notes"]) == 2


def test_interrupted_listener_does_not_prevent_the_backend_stop(build_profiler: BuildProfiler) -> None:
    class Interrupted:
        @hookimpl(tryfirst=True)
        def profile_stop(self) -> None:
            raise KeyboardInterrupt

    profiler = build_profiler(listeners=[Interrupted()])
    profiler.start(1)
    with pytest.raises(KeyboardInterrupt):
        profiler.stop()
    assert calls_of(profiler) == ["start step1", "stop step1"]


def test_wrapper_that_fails_after_the_stop_loses_no_trace(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    lines: list[str] = []

    class Broken:
        @hookimpl(wrapper=True)
        def profile_stop(self) -> Wrapper:
            yield
            raise RuntimeError("broken wrapper")

    with build_profiler(listeners=[Broken(), Log(lines, "b"), Log(lines, "d")]) as profiler, profiler.capture(1):
        pass
    assert calls_of(profiler) == ["start step1", "stop step1"]
    assert {"b stop partial", "d stop partial"} <= set(lines)
    document = read_manifest(tmp_path)
    assert document["artifacts"]
    assert "broken wrapper" in " ".join(document["problems"])


def fail_before_the_yield() -> Wrapper:
    raise OSError("metrics server is down")
    yield


def return_without_a_yield() -> Wrapper:
    return []
    yield


@pytest.mark.parametrize("wrap", [fail_before_the_yield, return_without_a_yield])
@pytest.mark.parametrize("wait_s", [0, 0.001])
def test_recording_is_stopped_if_a_wrapper_skips_the_stop(
    build_profiler: BuildProfiler, tmp_path: Path, wrap: Callable[[], Wrapper], wait_s: float
) -> None:
    lines: list[str] = []
    metrics = type("Metrics", (), {"wrap": staticmethod(hookimpl(wrapper=True, specname="profile_stop")(wrap))})()
    with (
        build_profiler(listeners=[metrics, Log(lines)], **{"trainer.options.wait_s": wait_s}) as profiler,
        profiler.capture(1),
    ):
        pass
    assert calls_of(profiler)[-1] == "stop step1"
    assert lines == ["log start", "log stop partial"]
    document = read_manifest(tmp_path)
    assert (document["status"], len(document["artifacts"])) == ("partial", 1)
    assert "failed around profile_stop of tally: " in document["problems"][0]


def test_stop_problem_names_wrapper_and_implementation(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    class Metrics:
        @hookimpl(wrapper=True)
        def profile_stop(self) -> Wrapper:
            raise OSError("metrics server is down")
            yield

    options = {"trainer.options.fail_at": "stop"}
    with build_profiler(listeners=[Metrics()], **options) as profiler, profiler.capture(1):
        pass
    (problem,) = read_manifest(tmp_path)["problems"]
    assert problem.startswith(
        "The wrapper of Metrics failed around profile_stop of tally: OSError: metrics server is down. profile_stop of "
        "tally failed: RuntimeError: "
    )


def test_step_problem_names_the_wrapper_that_raised(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    class Outer:
        @hookimpl(wrapper=True, tryfirst=True)
        def profile_step(self) -> Wrapper:
            return (yield)

    class Inner:
        @hookimpl(wrapper=True)
        def profile_step(self) -> Wrapper:
            yield
            raise OSError("metrics server is down")

    with build_profiler(listeners=[Inner(), Outer()], steps=["1..2"]) as profiler:
        for step in (1, 2):
            with profiler.capture(step):
                pass
    assert read_manifest(tmp_path)["problems"] == [
        "The wrapper of Inner failed around profile_step of tally at global_step 1: OSError: metrics server is down"
    ]


def test_wrapper_error_around_a_listener_is_recorded_as_a_note(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    class Metrics:
        @hookimpl(wrapper=True)
        def profile_start(self, plugin_name: str) -> Wrapper:
            results = yield
            if plugin_name == "log":
                raise OSError("metrics server is down")
            return results

    lines: list[str] = []
    name = Profiler.register(Log(lines), "log")
    with build_profiler(listeners=[Metrics()]) as profiler, profiler.capture(1):
        pass
    Profiler.unregister(name)
    document = read_manifest(tmp_path)
    assert lines == ["log start", "log stop complete"]
    assert document["status"] == "complete"
    assert document["notes"] == [
        "A listener failed: The wrapper of Metrics failed around profile_start of log: OSError: metrics server is down"
    ]


def test_start_error_of_a_wrapper_is_logged(build_profiler: BuildProfiler, caplog: pytest.LogCaptureFixture) -> None:
    class Late:
        @hookimpl(wrapper=True)
        def profile_start(self) -> Wrapper:
            yield
            raise ValueError("late")

    assert build_profiler(listeners=[Late()]).start(1) is None
    assert (
        "Capture step1 was stopped at its start: The wrapper of Late failed around profile_start of tally: "
        "ValueError: late"
    ) in caplog.text


def test_listener_with_a_failed_start_is_not_stopped(build_profiler: BuildProfiler) -> None:
    lines: list[str] = []

    class Broken(Log):
        @hookimpl
        def profile_start(self) -> None:
            raise RuntimeError("broken")

    with build_profiler(listeners=[Broken(lines, "a"), Log(lines, "b")]) as profiler, profiler.capture(1):
        pass
    assert lines == ["b start", "b stop complete"]


def test_enum_error_of_a_listener_is_recorded_as_a_note(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    class Broken:
        @hookimpl
        def profile_start(self) -> None:
            Unit("lightyear")

    with build_profiler(listeners=[Broken()]) as profiler, profiler.capture(1):
        pass
    assert "'lightyear' is not a valid Unit" in read_manifest(tmp_path)["notes"][0]


class OwnInterrupt(KeyboardInterrupt):
    pass


class OwnBaseError(BaseException):
    pass


class BrokenTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("broken")

    __repr__ = __str__


PLUGIN_ERRORS = [
    SystemExit(2),
    GeneratorExit(),
    OwnInterrupt(),
    OwnBaseError("own"),
    StopIteration(1),
    asyncio.CancelledError(),
    BrokenTextError(),
    ValueError("a \ud800 surrogate"),
    OSError(2, "\udcff"),
]
HOOKS = ["profile_start", "profile_step", "profile_stop"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", PLUGIN_ERRORS, ids=lambda error: type(error).__name__)
def test_any_error_of_a_listener_is_recorded(
    build_profiler: BuildProfiler, tmp_path: Path, error: BaseException, hook: str, wraps: bool, is_async: bool
) -> None:
    def fail(self: object) -> None:
        raise error

    async def fail_async(self: object) -> None:
        raise error

    def wrap(self: object) -> Wrapper:
        yield
        raise error

    function: Any = wrap if wraps else fail_async if is_async else fail
    listener = type("Broken", (), {hook: hookimpl(wrapper=wraps)(function)})()
    profiler = build_profiler(listeners=[listener], steps=["1..2"])
    for step in (1, 2):
        with profiler.capture(step):
            pass
    profiler.close()
    document = read_manifest(tmp_path)
    assert document["status"] == ("partial" if wraps else "complete")
    assert document["notes" if not wraps else "problems"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", PLUGIN_ERRORS, ids=lambda error: type(error).__name__)
def test_any_error_of_a_backend_is_recorded(
    build_profiler: BuildProfiler,
    tmp_path: Path,
    tally: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    hook: str,
) -> None:
    @hookimpl(specname=hook)
    def fail(self: object) -> None:
        raise error

    monkeypatch.setattr(tally.TallyBackend, hook, fail)
    profiler = build_profiler(steps=["1..2"])
    for step in (1, 2):
        with profiler.capture(step):
            pass
    profiler.close()
    document = read_manifest(tmp_path)
    assert document["status"] == ("partial" if hook == "profile_step" else "failed")
    assert document["problems"]


class BrokenTruth:
    def __bool__(self) -> bool:
        raise RuntimeError("broken")

    def __repr__(self) -> str:
        raise RuntimeError("broken")

    def __iter__(self) -> Any:
        raise SystemExit("broken")


GARBAGE = [
    BrokenTruth(),
    [BrokenTruth()],
    [None],
    [3.5],
    "text",
    {"a": 1},
    object(),
    [Artifact(path="text")],  # type: ignore[arg-type]
    ["size"],
    ["surrogate"],
    ["parent"],
]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("returned", GARBAGE, ids=range(len(GARBAGE)))
def test_invalid_return_values_do_not_end_the_job(
    build_profiler: BuildProfiler,
    tmp_path: Path,
    tally: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    returned: Any,
) -> None:
    @hookimpl(specname=hook)
    def return_garbage(self: object, capture: Capture) -> object:
        artifacts = {
            "size": Artifact(path=capture.directory / "a", size_bytes=1.5),  # type: ignore[arg-type]
            "surrogate": Artifact(path=capture.directory / "\udcff", size_bytes=1),
            "parent": Artifact(path=capture.directory / ".." / "a", size_bytes=1),
        }
        if isinstance(returned, list) and isinstance(returned[0], str):
            return [artifacts[returned[0]]]
        return returned

    monkeypatch.setattr(tally.TallyBackend, hook, return_garbage)
    profiler = build_profiler(steps=["1..2"])
    for step in (1, 2):
        with profiler.capture(step):
            pass
    profiler.close()
    document = read_manifest(tmp_path)
    assert document["status"] in ({"failed"} if hook == "profile_stop" else {"complete", "partial", "failed"})
    assert read_run(tmp_path / "run").problems == () or document["problems"]


def test_values_that_a_listener_adds_are_readable(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    class Reporter:
        @hookimpl
        def profile_start(self, capture: Any) -> None:
            capture.notes.append(BrokenTextError())
            capture.problems.append(ValueError("\udcff"))
            capture.report_problem(3)

    with build_profiler(listeners=[Reporter()]) as profiler, profiler.capture(1):
        pass
    assert read_manifest(tmp_path)["problems"] == ["\\udcff", "3"]


@pytest.mark.parametrize("fails", ["create", "enter", "exit"])
def test_failed_annotation_does_not_end_the_job(build_profiler: BuildProfiler, tmp_path: Path, fails: str) -> None:
    class Annotation:
        def __enter__(self) -> None:
            if fails == "enter":
                raise SystemExit(1)

        def __exit__(self, *_: object) -> None:
            raise SystemExit(1)

    def annotate(_: str) -> Any:
        if fails == "create":
            raise SystemExit(1)
        return Annotation()

    class Annotator:
        @hookimpl
        def profile_start(self, capture: Any) -> None:
            capture.annotate = annotate

    with build_profiler(listeners=[Annotator()]) as profiler, profiler.capture(1), profiler.stage("update"):
        pass
    assert read_manifest(tmp_path)["notes"] == ["Stage update could not be annotated: SystemExit: 1"]


def test_error_of_profiler_opened_does_not_end_the_job(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    class Opened:
        @hookimpl
        def profiler_opened(self) -> None:
            raise SystemExit(1)

    with build_profiler(listeners=[Opened()]) as profiler, profiler.capture(1):
        pass
    assert read_manifest(tmp_path)["status"] == "complete"


def test_interrupted_listener_does_not_prevent_other_stops(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    lines: list[str] = []

    class Interrupted:
        @hookimpl
        def profile_stop(self) -> None:
            raise KeyboardInterrupt

    profiler = build_profiler(listeners=[Log(lines, "a"), Interrupted(), Log(lines, "b")])
    profiler.start(1)
    with pytest.raises(KeyboardInterrupt):
        profiler.stop()
    assert {"a stop complete", "b stop complete"} <= set(lines)
    assert read_manifest(tmp_path)["status"] == "complete"
    profiler.close()


@pytest.mark.parametrize("hook", ["profile_start", "profile_step", "profile_stop"])
def test_cancelled_future_of_a_listener_is_recorded_as_a_note(
    build_profiler: BuildProfiler, tmp_path: Path, hook: str
) -> None:
    async def fail() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    listener = type("Cancelled", (), {"fail": staticmethod(hookimpl(specname=hook)(fail))})()

    async def run() -> None:
        async with build_profiler(listeners=[listener], steps=["1..2"]) as profiler:
            for step in (1, 2):
                async with profiler.capture(step):
                    pass

    asyncio.run(run())
    document = read_manifest(tmp_path)
    assert document["status"] == "complete"
    assert "CancelledError" in document["notes"][0]


def test_cancelled_task_completes_all_stops_first(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    lines: list[str] = []

    class Slow:
        @hookimpl
        async def profile_stop(self) -> None:
            entered.set()
            await asyncio.Event().wait()

    async def stop() -> None:
        profiler = build_profiler(listeners=[Log(lines, "a"), Slow(), Log(lines, "b")])
        async with profiler.capture(1):
            pass

    async def run() -> None:
        task = asyncio.create_task(stop())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    entered = asyncio.Event()
    asyncio.run(run())
    assert {"a stop complete", "b stop complete"} <= set(lines)


def test_listener_without_a_start_hook_is_called(build_profiler: BuildProfiler) -> None:
    lines: list[str] = []

    class StopOnly:
        @hookimpl
        def profile_stop(self, capture: Capture) -> None:
            lines.append(f"stop {capture.status}")

        @hookimpl
        def profile_step(self, step: Step) -> None:
            lines.append(f"step {step.index}")

    with build_profiler(listeners=[StopOnly()], steps=["1..2"]) as profiler:
        for step in range(4):
            with profiler.capture(step):
                pass
    assert lines == ["step 1", "stop complete"]
    assert build_profiler(listeners=[StopOnly()], run="two", **{"trainer.options.fail_at": "start"}).start(1) is None
    assert lines == ["step 1", "stop complete"]


def raise_disk_full() -> Any:
    raise OSError("disk full")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (raise_disk_full, "A file could not be written: OSError: disk full"),
        ("no artifact", "profile_stop must return artifacts or functions that write them, not 'no artifact'."),
    ],
)
def test_failed_start_is_stopped_despite_invalid_output(
    build_profiler: BuildProfiler, tmp_path: Path, output: Any, expected: str
) -> None:
    lines: list[str] = []

    class Late:
        @hookimpl(wrapper=True)
        def profile_start(self, plugin_name: str) -> Wrapper:
            results = yield
            if plugin_name == "tally":
                raise RuntimeError("late")
            return results

        @hookimpl(wrapper=True)
        def profile_stop(self) -> Wrapper:
            results = yield
            return [[*(outputs or ()), output] for outputs in results]

    profiler = build_profiler(listeners=[Late(), First(lines, "first")], steps=[1, 3])
    assert profiler.start(1) is None
    assert lines == ["first start", "first stop partial"]
    document = read_manifest(tmp_path)
    assert (document["status"], len(document["artifacts"])) == ("partial", 1)
    assert expected in document["problems"]


def test_started_listener_is_stopped_if_the_backend_start_fails(build_profiler: BuildProfiler) -> None:
    lines: list[str] = []
    listeners = [First(lines, "first"), Log(lines)]
    assert build_profiler(listeners=listeners, **{"trainer.options.fail_at": "start"}).start(1) is None
    assert lines == ["first start", "first stop failed"]


# Registration.


def test_unknown_hook_requires_optionalhook(build_profiler: BuildProfiler) -> None:
    class OptionalHook:
        @hookimpl
        def profile_start(self) -> None: ...

        @hookimpl(optionalhook=True)
        def profile_pause(self, capture: Capture) -> None: ...

    class UnknownHook:
        @hookimpl
        def profile_pause(self, capture: Capture) -> None: ...

    Profiler.unregister(Profiler.register(OptionalHook()))
    with pytest.raises(
        BrokenPluginError, match="'UnknownHook' implements 'profile_pause', which is not a hook of profdeck"
    ):
        Profiler.register(UnknownHook())
    with build_profiler() as profiler, profiler.capture(1) as capture:  # the rejected plugin is not registered
        assert capture is not None


def test_historic_calls_reach_plugins_registered_later(
    build_profiler: BuildProfiler, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []

    class Late:
        @hookimpl
        def profiler_opened(self, role: str, backend_name: str) -> None:
            lines.append(f"{role} {backend_name}")

    class Wraps:
        @hookimpl(wrapper=True)
        def profiler_opened(self) -> Wrapper:
            return (yield)

    build_profiler()
    name = Profiler.register(Late())
    assert lines == ["trainer tally"]
    with pytest.raises(BrokenPluginError, match="profiler_opened is historic, and historic hooks have no wrappers"):
        Profiler.register(Wraps())
    assert build_profiler(run="other").enabled
    assert lines == ["trainer tally"] * 2
    Profiler.unregister(name)
    assert "profiler_opened" not in caplog.text


def test_failed_profiler_opened_hook_is_logged(build_profiler: BuildProfiler, caplog: pytest.LogCaptureFixture) -> None:
    roles: list[str] = []

    class Good:
        @hookimpl
        def profiler_opened(self, role: str) -> None:
            roles.append(role)

    class Broken:
        @hookimpl
        def profiler_opened(self) -> None:
            raise RuntimeError("not now")

    profilers = [build_profiler(listeners=[Good(), Broken(), Good()], run="one")]
    assert roles == ["trainer"] * 2
    assert caplog.messages == ["The plugin Broken failed at profiler_opened: RuntimeError: not now"]
    profilers.append(build_profiler(listeners=[Broken(), Good()], run="two"))  # history is replayed
    assert all(profiler.enabled for profiler in profilers)


def test_plugin_joins_captures_only_after_its_registration(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    entered, proceed = threading.Event(), threading.Event()
    lines: list[str] = []

    class Late(Log):
        @hookimpl
        def profiler_opened(self) -> None:
            entered.set()
            proceed.wait(10)

    profiler = build_profiler(listeners=[Log(lines)], steps=["1..2", 4])
    profiler.start(1)
    thread = threading.Thread(target=Profiler.register, args=(Late(lines, "late"), "late"))
    thread.start()
    assert entered.wait(10)
    profiler.step(1)
    profiler.start(2)
    profiler.stop()
    assert lines == ["log start", "log step 1", "log stop complete"]
    proceed.set()
    thread.join()
    with profiler.capture(4):
        pass
    Profiler.unregister("late")
    assert {line for line in lines if "late" in line} == {"late start", "late stop complete"}
    assert read_manifest(tmp_path)["status"] == "complete"


def test_profilers_share_the_manager_but_not_their_listeners(build_profiler: BuildProfiler) -> None:
    lines: list[str] = []
    first, second = (
        build_profiler(listeners=[Log(lines, "one")], run="one"),
        build_profiler(listeners=[Log(lines, "two")], run="two"),
    )
    with first.capture(1), second.capture(1):
        pass
    assert [line for line in lines if "start" in line] == ["one start", "two start"]
    assert isinstance(plugin_manager(), pluggy.PluginManager)


def test_plugin_registered_during_a_capture_does_not_join_it(build_profiler: BuildProfiler) -> None:
    lines: list[str] = []
    first = build_profiler(steps=["1..2"], run="one")
    first.start(1)
    second = build_profiler(listeners=[Log(lines)], run="two")
    Profiler.register(Log(lines), "late")
    first.step(1)
    first.start(2)
    first.stop()
    Profiler.unregister("late")
    assert (calls_of(first), calls_of(second), lines) == (
        ["start step1", "step step1 global_step 1", "stop step1"],
        [],
        [],
    )


def test_name_or_object_can_be_registered_only_once(build_profiler: BuildProfiler) -> None:
    lines: list[str] = []
    log = Log(lines)
    Profiler.register(log, "mine")
    with pytest.raises(BrokenPluginError, match="A plugin 'mine' is already registered"):
        Profiler.register(Log([]), "mine")
    with pytest.raises(BrokenPluginError, match="'other' is already registered as 'mine'"):
        Profiler.register(log, "other")
    with build_profiler(listeners=[log]) as profiler, profiler.capture(1):
        pass
    assert lines == ["log start", "log stop complete"]
    Profiler.unregister("mine")
    with pytest.raises(PluginError, match="No plugin 'mine' is registered"):
        Profiler.unregister("mine")


def test_plugins_of_a_collected_profiler_are_unregistered(build_profiler: BuildProfiler) -> None:
    Profiler.unregister(Profiler.register(Log([])))
    build_profiler()
    plugin_count = len(plugin_manager().get_plugins())
    build_profiler(listeners=[Log([])])
    assert len(plugin_manager().get_plugins()) > plugin_count
    gc.collect()
    Profiler.unregister(Profiler.register(Log([])))  # each registration removes the plugins of collected profilers
    assert len(plugin_manager().get_plugins()) == plugin_count


def test_equal_plugins_are_registered_separately(build_profiler: BuildProfiler) -> None:
    lines: list[str] = []

    @attrs.define
    class Equal:
        @hookimpl
        def profile_start(self) -> None:
            lines.append("start")

    with build_profiler(listeners=[Equal(), Equal()]) as profiler, profiler.capture(1):
        pass
    assert lines == ["start", "start"]


def test_listener_without_hooks_is_rejected(build_profiler: BuildProfiler) -> None:
    with pytest.raises(BrokenPluginError, match="'object' implements no hook. Mark its methods"):
        build_profiler(listeners=[object()])


def test_arguments_outside_of_the_specification_are_rejected() -> None:
    class Wrong:
        @hookimpl
        def profile_start(self, batch: object) -> None: ...

    with pytest.raises(BrokenPluginError, match="'Wrong': profile_start has no argument 'batch'. Its arguments are"):
        Profiler.register(Wrong())


def test_plugin_for_another_hook_version_is_rejected() -> None:
    class Future(Log):
        hookspec_version = 99

    with pytest.raises(BrokenPluginError, match="'Future' was built for version 99 of profdeck's hooks; .* supports 1"):
        Profiler.register(Future([]))


# Engines.


@pytest.mark.parametrize("sync", [True, False])
def test_wrapper_observes_the_completion_of_an_engine_start(
    build_engine_profiler: BuildProfiler, tally: ModuleType, tmp_path: Path, sync: bool
) -> None:
    toy, lines = tally.ToyEngine(), []

    class Timer:
        @hookimpl(wrapper=True)
        def profile_start(self) -> Wrapper:
            (start,) = yield
            lines.append(f"called {len(toy.commands)}")

            async def timed() -> None:
                await start
                lines.append(f"completed {len(toy.commands)}")

            return [timed()]

    async def run() -> None:
        async with build_engine_profiler(toy, listeners=[Timer()]) as profiler, profiler.capture(1):
            toy.iterate("decode")

    if sync:
        with build_engine_profiler(toy, listeners=[Timer()]) as profiler, profiler.capture(1):
            toy.iterate("decode")
    else:
        asyncio.run(run())
    assert lines == ["called 0", "completed 1"]
    assert read_manifest(tmp_path, "target.step1.json")["status"] == "complete"


@pytest.mark.parametrize("closes", [True, False])
def test_discarded_awaitable_fails_the_start(
    build_engine_profiler: BuildProfiler, tally: ModuleType, tmp_path: Path, closes: bool
) -> None:
    class Discard:
        @hookimpl(wrapper=True)
        def profile_start(self) -> Wrapper:
            (start,) = yield
            if closes:
                start.close()
            return []

    toy = tally.ToyEngine()
    with build_engine_profiler(toy, listeners=[Discard()]) as profiler, profiler.capture(1) as capture:
        assert capture is None
    assert toy.commands == []
    assert "a wrapper discarded its awaitable" in read_manifest(tmp_path, "target.step1.json")["problems"][0]


def fail_after_the_yield() -> Wrapper:
    yield
    raise OSError("metrics server is down")


def fail_before_the_await() -> Wrapper:
    yield

    async def fail() -> None:
        raise OSError("metrics server is down")

    return [fail()]


def close_the_awaitable() -> Wrapper:
    (stop,) = yield
    stop.close()
    return []


@pytest.mark.parametrize(
    "wrap", [fail_before_the_yield, fail_after_the_yield, fail_before_the_await, close_the_awaitable]
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("sync", [True, False])
def test_engines_are_stopped_if_a_wrapper_fails_around_the_stop(
    build_engine_profiler: BuildProfiler,
    tally: ModuleType,
    tmp_path: Path,
    wrap: Callable[[], Wrapper],
    count: int,
    sync: bool,
) -> None:
    toys = [tally.ToyEngine() for _ in range(count)]
    target = toys if count > 1 else toys[0]
    metrics = type("Metrics", (), {"wrap": staticmethod(hookimpl(wrapper=True, specname="profile_stop")(wrap))})()

    async def run() -> None:
        async with build_engine_profiler(target, listeners=[metrics]) as profiler, profiler.capture(1):
            for toy in toys:
                toy.iterate("decode")

    if sync:
        with build_engine_profiler(target, listeners=[metrics]) as profiler, profiler.capture(1):
            for toy in toys:
                toy.iterate("decode")
    else:
        asyncio.run(run())
    assert [len(toy.commands) for toy in toys] == [2] * count  # start and stop
    files = list(tmp_path.glob("run/step_*/**/target*.json"))
    assert files
    assert {json.loads(file.read_text())["status"] for file in files} == {"partial"}


def test_wrappers_run_per_target_and_listeners_run_once(
    build_engine_profiler: BuildProfiler, tally: ModuleType, tmp_path: Path
) -> None:
    lines: list[str] = []

    class RecordTargets:
        @hookimpl(wrapper=True)
        def profile_start(self, capture: Capture, plugin_name: str) -> Wrapper:
            lines.append(f"{plugin_name} {capture.identity.replica}")
            return (yield)

    toys = [tally.ToyEngine() for _ in range(3)]
    count_before = len(plugin_manager().get_plugins())
    with build_engine_profiler(toys, listeners=[RecordTargets(), Log(lines)]) as profiler:
        count_after = len(plugin_manager().get_plugins())
        with profiler.capture(1):
            for toy in toys:
                toy.iterate("decode")
    plugin_count = 4  # two listeners, the fleet and its backend; none per target
    # Two objects per plugin, for implementations and wrappers, and the CallObserver.
    assert count_after - count_before == 2 * plugin_count + 1
    assert lines[0] == "fleet None"
    assert sorted(lines[1:4]) == [f"tally-engine {replica}" for replica in range(3)]
    assert lines[4:] == ["Log None", "log start", "log stop complete"]
    assert [
        json.loads(file.read_text())["status"] for file in tmp_path.glob("run/step_*/*/replica_*/target*.json")
    ] == ["complete"] * 3
