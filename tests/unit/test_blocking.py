"""Tests of `run_in_thread` and `run_in_threads`."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from profdeck.base import blocking
from profdeck.base.blocking import run_in_thread, run_in_threads


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_in_threads_calls_each_item_once(count: int) -> None:
    done, threads = list[int](), set[int]()

    def call(item: int) -> None:
        done.append(item)
        threads.add(threading.get_ident())

    asyncio.run(run_in_threads(call, range(count)))
    assert sorted(done) == [*range(count)]
    assert len(threads) <= 16
    assert threading.get_ident() not in threads


def test_in_threads_starts_more_threads_if_the_first_blocks() -> None:
    """For example, a call can block on a network file system."""
    here = threading.Barrier(4)

    def call(_: int) -> None:
        here.wait(30)

    asyncio.run(run_in_threads(call, range(4)))


def test_in_threads_raises_the_error_of_an_item() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(run_in_threads(int, ["1", "x", "2"]))


def test_concurrent_calls_share_threads() -> None:
    threads = set[int]()

    def call(number: int) -> int:
        threads.add(threading.get_ident())
        return number * 2

    async def main() -> list[int]:
        return await asyncio.gather(*(run_in_thread(call, number) for number in range(1000)))

    assert asyncio.run(main()) == [number * 2 for number in range(1000)]
    assert len(threads) <= 16
    assert threading.get_ident() not in threads


def test_a_blocked_call_does_not_delay_others() -> None:
    async def main() -> None:
        go_on = threading.Event()
        others = [asyncio.create_task(run_in_thread(int)) for _ in range(100)]
        waiting = asyncio.create_task(run_in_thread(go_on.wait, 30))
        await asyncio.gather(*others, *(run_in_thread(int) for _ in range(100)))
        assert not waiting.done()
        go_on.set()
        assert await waiting

    asyncio.run(main())


def test_an_error_is_raised_by_its_own_call() -> None:
    async def main() -> None:
        found = await asyncio.gather(run_in_thread(int, "x"), run_in_thread(int, "1"), return_exceptions=True)
        assert isinstance(found[0], ValueError)
        assert found[1] == 1

    asyncio.run(main())


def test_a_cancelled_call_does_not_affect_later_calls() -> None:
    async def main() -> None:
        done = threading.Event()
        waiting = asyncio.create_task(run_in_thread(done.wait, 30))
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        done.set()
        assert await run_in_thread(int) == 0

    asyncio.run(main())


@pytest.mark.parametrize("started", [0, 2])
def test_calls_run_in_this_thread_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    """At interpreter shutdown, Python cannot start threads."""
    submit, left, done = ThreadPoolExecutor.submit, started, list[int]()

    def refuse(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return submit(*arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    asyncio.run(run_in_threads(done.append, range(50)))
    assert sorted(done) == [*range(50)]

    async def main() -> list[int]:
        return await asyncio.gather(*(run_in_thread(int, number) for number in range(50)))

    assert asyncio.run(main()) == [*range(50)]


@pytest.mark.parametrize("gather_s", [blocking._GATHER_S, 0.0], ids=["default", "stalled"])
def test_successive_runs_complete_all_calls(monkeypatch: pytest.MonkeyPatch, gather_s: float) -> None:
    monkeypatch.setattr(blocking, "_GATHER_S", gather_s)  # 0 simulates an event loop that stalls

    async def call(count: int) -> list[int]:
        async with asyncio.timeout(10):
            return await asyncio.gather(*(run_in_thread(abs, -number) for number in range(count)))

    with asyncio.Runner() as runner:
        for count in (1, 2, 100):
            assert runner.run(call(count)) == list(range(count))
