"""Tests of profilers that several wrappers in one process share."""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import profdeck
from profdeck import Profiler
from profdeck_traces.base.errors import ConfigError

JoinProfiler = Callable[..., Profiler]
_runs = itertools.count()


@pytest.fixture
def join_profiler(tally: ModuleType, tmp_path: Path) -> JoinProfiler:
    """Function that joins the shared profiler of the role `trainer`. The profiler writes to tmp_path/run."""

    def join(run: str = "run", **settings: Any) -> Profiler:
        values = {"output": str(tmp_path), "run": run, "trainer.backend": "tally", "steps": ["2..3", 5], **settings}
        return Profiler.from_config(settings=values, shared=True)

    return join


def read_captures(run: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the status and notes of each capture of a run, by ID."""
    manifests = [json.loads(path.read_text()) for path in run.glob("step_*/trainer/rank_0000.step*[0-9].json")]
    return {manifest["capture"]: (manifest["status"], manifest["notes"]) for manifest in manifests}


def test_each_wrapper_can_begin_and_end_every_step(join_profiler: JoinProfiler, tmp_path: Path) -> None:
    actor, ref, critic = join_profiler(), join_profiler(), join_profiler()
    for step in range(7):
        for wrapper in (actor, ref, critic):
            assert (wrapper.start(step) is not None) is (step in {2, 3, 5})
        for wrapper in (actor, ref, critic):
            assert (ref.active is not None) is (step in {2, 3, 5})
            wrapper.stop()
    assert read_captures(tmp_path / "run") == {"step2": ("complete", []), "step5": ("complete", [])}


def test_repeated_calls_of_a_wrapper_have_no_effect(join_profiler: JoinProfiler, tmp_path: Path) -> None:
    actor, ref = join_profiler(), join_profiler()
    for step in range(4):
        actor.start(step)
        actor.start(step)
        ref.start(step)
        ref.step(step)
        actor.step(step)
        ref.stop()
        ref.stop()
        if step == 2:
            assert actor.active is not None
        actor.stop()
    assert read_captures(tmp_path / "run") == {"step2": ("complete", [])}


def test_missing_stop_of_a_wrapper_loses_no_later_step(join_profiler: JoinProfiler, tmp_path: Path) -> None:
    actor, ref = join_profiler(), join_profiler()
    for step in range(6):
        actor.start(step)
        ref.start(step)
        actor.stop()
        if step != 3:
            ref.stop()
    actor.close()
    assert {name: status for name, (status, _) in read_captures(tmp_path / "run").items()} == {
        "step2": "complete",
        "step5": "complete",
    }


def test_mini_batches_of_only_one_wrapper_are_counted(
    join_profiler: JoinProfiler, tmp_path: Path, tally: ModuleType
) -> None:
    window = {"trainer.window": {"active": 2, "repeat": 1}}
    actor, critic = join_profiler(**window), join_profiler(**window)
    actor.start(5)
    critic.start(5)
    for index in range(2):
        actor.step(index, "mini_batch")
    for index in range(3):
        critic.step(index, "mini_batch")
    actor.stop()
    critic.stop()
    (trace,) = (tmp_path / "run").rglob("rank_0000.step5.trace.json")
    annotations = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert annotations == ["start", "mini_batch 0", "mini_batch 1"]


def test_listeners_can_be_passed_as_an_iterator(tally: ModuleType, tmp_path: Path) -> None:
    class Starts:
        count = 0

        @profdeck.hookimpl
        def profile_start(self) -> None:
            self.count += 1

    listener = Starts()
    values = {"output": str(tmp_path), "run": "run", "trainer.backend": "tally", "steps": [5]}
    profiler = Profiler.from_config(settings=values, shared=True, listeners=iter([listener]))
    with profiler.capture(5):
        pass
    assert listener.count == 1


def test_nested_capture_of_one_caller_does_not_end_the_step(join_profiler: JoinProfiler) -> None:
    actor, ref = join_profiler(), join_profiler()
    with actor.capture(5), ref.capture(5):
        with actor.capture(5):
            pass
        ref.stop()
        assert actor.active is not None
    assert actor.active is None


def test_deleting_profilers_inside_a_step_releases_the_role(join_profiler: JoinProfiler) -> None:
    window = {"trainer.window": {"active": 2, "repeat": 1}}
    gc.disable()
    try:
        actor, critic = join_profiler(**window), join_profiler(**window)
        actor.start(1)
        critic.start(1)
        actor.step(0, "mini_batch")
        del actor, critic
        assert join_profiler().enabled  # different settings are accepted because the role was released
    finally:
        gc.enable()


def test_exception_in_one_wrapper_ends_the_capture_for_all(join_profiler: JoinProfiler, tmp_path: Path) -> None:
    actor, ref = join_profiler(), join_profiler()
    ref.start(5)
    with pytest.raises(ZeroDivisionError), actor.capture(5):
        raise ZeroDivisionError
    assert ref.active is None
    ref.stop()
    (manifest,) = (tmp_path / "run").rglob("rank_0000.step5.json")
    document = json.loads(manifest.read_text())
    assert (document["status"], document["problems"]) == ("partial", ["An exception ended it: ZeroDivisionError."])


def test_async_wrappers_share_steps(join_profiler: JoinProfiler, tmp_path: Path) -> None:
    async def work(wrapper: Profiler, step: int) -> None:
        async with wrapper.capture(step):
            await asyncio.sleep(0)

    async def main() -> None:
        wrappers = [join_profiler(), join_profiler()]
        for step in range(6):
            await asyncio.gather(*(work(wrapper, step) for wrapper in wrappers))

    asyncio.run(main())
    assert {name: status for name, (status, _) in read_captures(tmp_path / "run").items()} == {
        "step2": "complete",
        "step5": "complete",
    }


def test_later_wrappers_must_pass_the_same_arguments_or_none(join_profiler: JoinProfiler) -> None:
    first = join_profiler()
    assert Profiler.from_config(shared=True).enabled
    with pytest.raises(ConfigError, match="settings: the shared profiler of the role 'trainer' was created with"):
        join_profiler(steps=[7])
    del first


def test_import_error_of_a_removed_name_mentions_its_replacement() -> None:
    with pytest.raises(ImportError, match=r"SharedProfiler was replaced by profdeck.Profiler.*shared=True"):
        _ = profdeck.SharedProfiler
    with pytest.raises(ImportError, match=r"Fleet was replaced by profdeck.Profiler.*role=None, targets="):
        importlib.import_module("profdeck.fleet")
    with pytest.raises(ImportError, match=r"profdeck.traces is now a separate package. Import profdeck_traces."):
        importlib.import_module("profdeck.traces")


def test_roles_are_separate_and_the_last_wrapper_releases_the_profiler(join_profiler: JoinProfiler) -> None:
    first = join_profiler()
    assert not Profiler.from_config(role="critic", shared=True).enabled
    del first
    assert not Profiler.from_config(shared=True).enabled


def test_forked_child_does_not_share_the_profiler(join_profiler: JoinProfiler) -> None:
    first = join_profiler()
    child = os.fork()
    if child == 0:
        os._exit(1 if Profiler.from_config(shared=True).enabled else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert first.enabled


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["start", "guarded", "stop", "step"])), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_extra_calls_of_some_wrappers_lose_no_selected_step(
    join_profiler: JoinProfiler, tmp_path: Path, extra: list[tuple[int, str]]
) -> None:
    """All wrappers begin and end each step. Between these calls, the first two wrappers make the extra calls."""
    run = f"run{next(_runs)}"
    wrappers = [join_profiler(run) for _ in range(3)]
    for step in range(7):
        for wrapper in wrappers:
            wrapper.start(step)
        for index, call in extra:
            wrapper = wrappers[index]
            if call == "start" or (call == "guarded" and wrapper.active is None):
                wrapper.start(step)
            elif call == "step":
                wrapper.step(step, "mini_batch")
            elif call == "stop":
                wrapper.stop()
        for wrapper in wrappers:
            wrapper.stop()
    statuses = {name: status for name, (status, _) in read_captures(tmp_path / run).items()}
    assert statuses == {"step2": "complete", "step5": "complete"}
