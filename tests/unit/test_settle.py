"""Calls that other threads make for an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from profdeck.base import blocking


async def called(count: int) -> list[int]:
    async with asyncio.timeout(10):
        return await asyncio.gather(*(blocking.in_thread(abs, -number) for number in range(count)))


@pytest.mark.parametrize("count", [1, 2, 100])
@pytest.mark.parametrize("gather_s", [blocking._GATHER_S, 0.0], ids=["", "on a machine that stalls"])
def test_all_calls_are_made(monkeypatch: pytest.MonkeyPatch, count: int, gather_s: float) -> None:
    monkeypatch.setattr(blocking, "_GATHER_S", gather_s)  # as if so much time had passed between any two lines
    with asyncio.Runner() as runner:
        for _ in range(3):
            assert runner.run(called(count)) == list(range(count))


def test_calls_of_one_turn_share_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    async def note() -> None:
        await asyncio.gather(*(blocking.in_thread(lambda: threads.add(threading.get_ident())) for _ in range(50)))

    monkeypatch.setattr(blocking, "_LOOK_S", 1.0)
    asyncio.run(note())
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
