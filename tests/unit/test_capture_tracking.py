"""Capture events reported to a server's metrics, with a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.engine.engine import Engine
from profdeck.engine.server import capture_tracking
from profdeck.engine.server.capture_tracking import CaptureTracker, EndedCapture
from profdeck.records.request import Answer, CaptureRequest, Recorded, Reply, RequestState
from profdeck.records.status import Status

REQUEST = CaptureRequest(id="step3", output=Path("/profiles"), run="job", role="rollout", token="ours")  # noqa: S106  # no secret
IDLE = Reply(rank=0, world_size=2, host="host1", pid=1, state=RequestState.IDLE)
ARMED = attrs.evolve(IDLE, state=RequestState.ARMED, request="step3", token="ours")  # noqa: S106  # as above


def recorded(status: Status, stall_s: float) -> Recorded:
    return Recorded(
        id="step3",
        status=status,
        manifest="",
        files=(),
        size_bytes=5,
        events=1,
        problems=(),
        duration_s=2,
        stall_s=stall_s,
    )


ENDED = tuple(
    attrs.evolve(ARMED, state=RequestState.ENDED, captures=(recorded(status, stall_s),))
    for status, stall_s in ((Status.COMPLETE, 0.25), (Status.PARTIAL, 0.5))
)


class ScriptedEngine(Engine):
    """Returns scripted answers, one per command."""

    name = "scripted"

    def __init__(self, *script: Reply | tuple[Reply, ...] | TargetError) -> None:
        self.script = list(script)

    async def has_profdeck(self) -> bool:
        return True

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:  # noqa: ARG002  # the engine's signature
        answer = self.script.pop(0)
        if isinstance(answer, TargetError):
            raise answer
        return Answer(ranks=answer if isinstance(answer, tuple) else (answer,))


class Log:
    """Observer that records its events."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.is_over = asyncio.Event()

    def began(self) -> None:
        self.events.append("began")

    def ended(self, captures: Sequence[EndedCapture]) -> None:
        self.events.append(captures)
        self.is_over.set()

    def refused(self, outcome: Outcome) -> None:
        self.events.append(outcome)


COMBINED = (EndedCapture(status=Status.PARTIAL, size_bytes=10, duration_s=2, stall_s=0.5),)
EMPTY = (EndedCapture(status=Status.FAILED, size_bytes=0, duration_s=0, stall_s=0),)


@pytest.mark.parametrize(
    ("script", "events"),
    [
        ((ARMED, ARMED, ENDED), ["began", COMBINED]),
        ((ARMED, TargetError("It is busy.", Outcome.TIMED_OUT), ENDED), ["began", COMBINED]),
        ((ARMED, IDLE), ["began", EMPTY]),  # the engine's processes were replaced
        ((TargetError("It is busy.", Outcome.TIMED_OUT), ENDED), ["began", COMBINED]),  # started despite the timeout
    ],
)
def test_capture_is_polled_until_its_end_without_a_client(
    monkeypatch: pytest.MonkeyPatch, script: tuple[Any, ...], events: list[Any]
) -> None:
    monkeypatch.setattr(capture_tracking, "_POLL_S", 0.001)

    async def main() -> list[Any]:
        log, tracker = Log(), CaptureTracker()
        tracker.observer = log
        with contextlib.suppress(TargetError):
            await tracker.start(ScriptedEngine(*script), REQUEST)
        await asyncio.wait_for(log.is_over.wait(), 10)
        return log.events

    assert asyncio.run(main()) == events


@pytest.mark.parametrize(
    "answer",
    [
        attrs.evolve(IDLE, token="theirs", error="Capture other is armed.", refusal=Outcome.ALREADY_ACTIVE),  # noqa: S106  # as above
        TargetError("Another capture is recording.", Outcome.ALREADY_ACTIVE),
    ],
)
def test_refused_start_is_reported_and_does_not_end_the_active_capture(answer: Any) -> None:
    async def main() -> list[Any]:
        log, tracker = Log(), CaptureTracker()
        tracker.observer = log
        engine = ScriptedEngine(ARMED, ARMED, answer, ENDED)  # the second start first queries the status
        await tracker.start(engine, REQUEST)
        with contextlib.suppress(TargetError):
            await tracker.start(engine, attrs.evolve(REQUEST, id="second", token="second"))  # noqa: S106  # as above
        await tracker._query(engine, tracker._request)
        return log.events

    assert asyncio.run(main()) == ["began", Outcome.ALREADY_ACTIVE, COMBINED]


def test_observer_error_does_not_stop_the_capture(caplog: pytest.LogCaptureFixture) -> None:
    class FailingObserver(Log):
        def began(self) -> None:
            raise OSError("the disk is full")

    async def main() -> list[Any]:
        log, tracker = FailingObserver(), CaptureTracker()
        tracker.observer = log
        engine = ScriptedEngine(ARMED, ENDED)
        await tracker.start(engine, REQUEST)
        await tracker._query(engine, tracker._request)
        return log.events

    assert asyncio.run(main()) == [COMBINED]
    assert "the disk is full" in caplog.text
