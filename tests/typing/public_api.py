"""Types of the public API. mypy checks this module; it is never imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, assert_type

import attrs

from profdeck import (
    HOOKSPEC_VERSION,
    Activity,
    Artifact,
    Backend,
    Capture,
    CommonOptions,
    Identity,
    Library,
    Profiler,
    Status,
    Step,
    Unit,
    hookimpl,
)
from profdeck_torch import TorchBackend, TorchOptions


def use_profiler(profiler: Profiler) -> None:
    assert_type(Profiler.from_config("profdeck.yaml", role="trainer"), Profiler)
    assert_type(profiler.start(1), Capture | None)
    assert_type(profiler.step(1), None)
    assert_type(profiler.step(0, "mini_batch"), None)
    assert_type(profiler.step(0, Unit.MINI_BATCH), None)
    assert_type(profiler.active, Capture | None)
    with profiler.capture(1) as capture:
        assert_type(capture, Capture | None)
    assert_type(Profiler.register(object(), "mine"), str)
    Profiler.unregister("mine")
    assert_type(Profiler.from_config(listeners=[object()]), Profiler)
    with profiler as entered:
        assert_type(entered, Profiler)

    @profiler.stage("update")
    def update(value: int, *, name: str) -> float:
        return value + len(name)

    assert_type(update(1, name="a"), float)  # a stage preserves the signature of the wrapped function

    @profiler.stage("generate")
    async def generate(value: int) -> str:
        return str(value)

    async def run() -> None:
        assert_type(await generate(1), str)
        assert_type(await profiler.astart(1), Capture | None)
        await profiler.astep(1)
        await profiler.astop()
        async with profiler.capture(1) as capture, profiler.stage("x"):
            assert_type(capture, Capture | None)


@attrs.frozen(kw_only=True)
class Options(CommonOptions):
    level: int = 0


@attrs.define
class CustomBackend(Backend):
    name: ClassVar[str] = "own"
    Options: ClassVar[type[CommonOptions]] = Options
    libraries: ClassVar[tuple[Library, ...]] = (Library(("own",), ">=1"),)
    common_options: ClassVar[tuple[str, ...]] = ("with_stack",)
    hookspec_version: ClassVar[int] = HOOKSPEC_VERSION

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        assert_type(capture.identity, Identity)
        assert_type(capture.status, Status)

    @hookimpl
    def profile_step(self, step: Step) -> None:
        assert_type(step.unit, Unit)
        assert_type(step.index, int)

    @hookimpl
    async def profile_stop(self, capture: Capture) -> Sequence[Artifact]:
        return [Artifact(path=capture.artifact_path(".memory.json"))]


assert_type(TorchBackend(TorchOptions(activities=(Activity.CPU,))).devices(), tuple[str, ...])
