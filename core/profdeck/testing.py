"""Fixtures of pytest for tests of backends and listeners.

Load them with ``pytest_plugins = ["profdeck.testing"]`` in the test module or in the top-level ``conftest.py``.
pytest is not a dependency of profdeck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from profdeck.backends.hookspecs import hookimpl
from profdeck.lifecycle.exit_summary import suppress_exit_message
from profdeck.profiler import Profiler
from profdeck.records.artifact import Artifact
from profdeck.records.capture import Capture
from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


@attrs.frozen
class HookEvent:
    """One call of a hook of one plugin."""

    hook: str
    plugin: str
    capture: str
    """The id of the capture."""
    error: BaseException | None
    """The exception that the plugin or a wrapper raised."""

    def __str__(self) -> str:
        return f"{self.plugin} {self.hook}"


@attrs.define(eq=False)
class HookEvents:
    """The calls of ``profile_start``, ``profile_step`` and ``profile_stop`` in this process, in order."""

    events: list[HookEvent] = attrs.field(factory=list)

    def assert_order(self, *expected: str) -> None:
        """Check that calls occurred in an order; other calls may occur between them.

        Args:
            expected: the calls, such as ``"torch profile_start"``.

        Raises:
            AssertionError: a call is missing or is in another position.
        """
        remaining = iter(map(str, self.events))
        for position, call in enumerate(expected):
            if call not in remaining:
                calls = "\n".join(f"  {event}" for event in self.events) or "  none"
                after = f" after '{expected[position - 1]}'" if position else ""
                raise AssertionError(f"'{call}' was not called{after}. The calls were:\n{calls}")

    def assert_not_called(self, call: str) -> None:
        """Check that a call, such as ``"torch profile_start"``, did not occur.

        Raises:
            AssertionError: it did.
        """
        if call in map(str, self.events):
            raise AssertionError(f"'{call}' was called.")

    @hookimpl(wrapper=True, tryfirst=True)
    def profile_start(self, capture: Capture, plugin_name: str) -> Generator[None, Any, Any]:
        """Record a call and its error."""
        return (yield from self._record("profile_start", capture, plugin_name))

    @hookimpl(wrapper=True, tryfirst=True)
    def profile_step(self, capture: Capture, plugin_name: str) -> Generator[None, Any, Any]:
        """Record a call and its error."""
        return (yield from self._record("profile_step", capture, plugin_name))

    @hookimpl(wrapper=True, tryfirst=True)
    def profile_stop(self, capture: Capture, plugin_name: str) -> Generator[None, Any, Any]:
        """Record a call and its error."""
        return (yield from self._record("profile_stop", capture, plugin_name))

    def _record(self, hook: str, capture: Capture, plugin: str) -> Generator[None, Any, Any]:
        position = len(self.events)
        self.events.append(HookEvent(hook, plugin, capture.id, None))
        try:
            return (yield)
        except BaseException as error:
            self.events[position] = attrs.evolve(self.events[position], error=error)
            raise


@attrs.frozen
class CapturedRun:
    """The result of `capture_run`."""

    directory: Path
    """The run directory."""
    captures: tuple[Capture, ...]
    hooks: HookEvents

    @property
    def capture(self) -> Capture:
        """The only capture.

        Raises:
            AssertionError: the run has none or several.
        """
        if len(self.captures) != 1:
            raise AssertionError(f"The run has {len(self.captures)} captures.")
        return self.captures[0]

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """The artifacts of all captures."""
        return tuple(artifact for capture in self.captures for artifact in capture.artifacts)

    def assert_complete(self) -> None:
        """Check that all captures are complete, that their files are readable, and that no plugin failed.

        Raises:
            AssertionError: no capture exists, or a check failed. The message lists the problems.
        """
        if not self.captures:
            raise AssertionError("The run has no capture.")
        for capture in self.captures:
            if capture.status is not Status.COMPLETE or capture.notes:
                raise AssertionError(
                    f"Capture {capture.id} is {capture.status}. Problems: {capture.problems}. Notes: {capture.notes}."
                )
        report = read_run(self.directory)
        ranks = [rank for capture in report.captures for rank in capture.ranks]
        problems = [*report.problems, *(problem for rank in ranks for problem in rank.problems)]
        if problems or report.status is not Status.COMPLETE:
            raise AssertionError(f"The files of the run are {report.status}. Problems: {problems}.")


CaptureRun = Callable[..., CapturedRun]


@pytest.fixture
def hook_events() -> Iterator[HookEvents]:
    """The hook calls of this test."""
    events = HookEvents()
    name = Profiler.register(events, "profdeck.testing")
    yield events
    Profiler.unregister(name)


@pytest.fixture
def capture_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook_events: HookEvents) -> CaptureRun:
    """A function that captures steps of a simulated job in a temporary run.

    Its arguments are:

    - ``backend``: the name of the backend;
    - ``options``: options of the backend;
    - ``steps``: the steps to capture, as in a config. Default: step 1;
    - ``last_step``: the last step of the job. Default: 3;
    - ``listeners``: objects with hook implementations. Names of installed listeners belong in ``settings``;
    - ``body``: a function that is called in each step, with the number of the step;
    - ``settings``: further keys of the config, such as ``{"listeners": ["uploader"]}`` and
      ``{"listener_options.uploader.directory": "/data"}``.

    ``capture_finished`` is not called: it runs in another process after the capture. Call it on an instance to test it.
    Failures of the backend are not raised: they are problems of the capture.
    """
    monkeypatch.setenv("PROFDECK_LEASE_DIR", str(tmp_path / "leases"))

    def run(  # noqa: PLR0913 - keywords
        backend: str,
        *,
        options: Mapping[str, Any] | None = None,
        steps: Any = 1,
        last_step: int = 3,
        listeners: Iterable[object] = (),
        body: Callable[[int], object] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> CapturedRun:
        values = {"output": str(tmp_path / "profiles"), "run": "test", "on_demand": False}
        values |= {"steps": steps if isinstance(steps, list) else [steps], "trainer.backend": backend}
        values |= {f"trainer.options.{name}": value for name, value in (options or {}).items()}
        captures: dict[int, Capture] = {}
        recorder = _CaptureList(captures)
        with Profiler.from_config(
            settings={**values, **(settings or {})}, listeners=[recorder, *listeners]
        ) as profiler:
            for step in range(last_step + 1):
                with profiler.capture(step):
                    if body is not None:
                        body(step)
        suppress_exit_message()
        return CapturedRun(tmp_path / "profiles" / "test", tuple(captures.values()), hook_events)

    return run


@attrs.frozen(eq=False)
class _CaptureList:
    captures: dict[int, Capture]

    @hookimpl(wrapper=True)
    def profile_start(self, capture: Capture) -> Generator[None, Any, Any]:
        self.captures[id(capture)] = capture
        return (yield)


@attrs.define(eq=False)
class FakeClock:
    """A clock that replaces the functions of `time` and advances only on request."""

    now_ns: int = 1_700_000_000_000_000_000

    def advance(self, duration_s: float) -> None:
        """Advance the clock by a duration in seconds."""
        self.now_ns += round(duration_s * 1e9)

    def time_ns(self) -> int:
        """Return the current time in nanoseconds."""
        return self.now_ns

    def time(self) -> float:
        """Return the current time in seconds."""
        return self.now_ns / 1e9


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock in place of `time.time`, `time.monotonic`, `time.perf_counter` and their forms in nanoseconds.

    Only calls through the module are replaced: ``from time import time`` keeps the function of the system. Event loops
    and timeouts use the clock, too.
    """
    clock = FakeClock()
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, clock.time)
        monkeypatch.setattr(time, f"{name}_ns", clock.time_ns)
    return clock
