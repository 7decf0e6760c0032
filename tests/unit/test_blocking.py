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
def test_run_in_threads_processes_each_item_once(count: int) -> None:
    processed, threads = list[int](), set[int]()

    def process(item: int) -> None:
        processed.append(item)
        threads.add(threading.get_ident())

    asyncio.run(run_in_threads(process, range(count)))
    assert sorted(processed) == [*range(count)]
    assert len(threads) <= 16
    assert threading.get_ident() not in threads


def test_run_in_threads_adds_threads_if_the_first_call_blocks() -> None:
    """For example, a call can block on a network file system."""
    barrier = threading.Barrier(4)

    def wait_for_others(_: int) -> None:
        barrier.wait(30)

    asyncio.run(run_in_threads(wait_for_others, range(4)))


def test_run_in_threads_raises_the_error_of_an_item() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(run_in_threads(int, ["1", "x", "2"]))


def test_concurrent_calls_share_threads() -> None:
    threads = set[int]()

    def double(number: int) -> int:
        threads.add(threading.get_ident())
        return number * 2

    async def main() -> list[int]:
        return await asyncio.gather(*(run_in_thread(double, number) for number in range(1000)))

    assert asyncio.run(main()) == [number * 2 for number in range(1000)]
    assert len(threads) <= 16
    assert threading.get_ident() not in threads


def test_blocked_call_does_not_delay_other_calls() -> None:
    async def main() -> None:
        release = threading.Event()
        other_calls = [asyncio.create_task(run_in_thread(int)) for _ in range(100)]
        blocked_call = asyncio.create_task(run_in_thread(release.wait, 30))
        await asyncio.gather(*other_calls, *(run_in_thread(int) for _ in range(100)))
        assert not blocked_call.done()
        release.set()
        assert await blocked_call

    asyncio.run(main())


def test_error_is_raised_only_by_the_failed_call() -> None:
    async def main() -> None:
        results = await asyncio.gather(run_in_thread(int, "x"), run_in_thread(int, "1"), return_exceptions=True)
        assert isinstance(results[0], ValueError)
        assert results[1] == 1

    asyncio.run(main())


def test_cancelled_call_does_not_affect_later_calls() -> None:
    async def main() -> None:
        release = threading.Event()
        blocked_call = asyncio.create_task(run_in_thread(release.wait, 30))
        await asyncio.sleep(0.02)
        blocked_call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await blocked_call
        release.set()
        assert await run_in_thread(int) == 0

    asyncio.run(main())


@pytest.mark.parametrize("started", [0, 2])
def test_calls_run_in_the_calling_thread_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    """At interpreter shutdown, Python cannot start threads."""
    submit, remaining_starts, processed = ThreadPoolExecutor.submit, started, list[int]()

    def submit_or_fail(*arguments: Any) -> Any:
        nonlocal remaining_starts
        remaining_starts -= 1
        if remaining_starts < 0:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return submit(*arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_or_fail)
    asyncio.run(run_in_threads(processed.append, range(50)))
    assert sorted(processed) == [*range(50)]

    async def main() -> list[int]:
        return await asyncio.gather(*(run_in_thread(int, number) for number in range(50)))

    assert asyncio.run(main()) == [*range(50)]


@pytest.mark.parametrize("gather_s", [blocking._GATHER_S, 0.0], ids=["default", "stalled"])
def test_successive_runs_complete_all_calls(monkeypatch: pytest.MonkeyPatch, gather_s: float) -> None:
    monkeypatch.setattr(blocking, "_GATHER_S", gather_s)  # 0 simulates an event loop that stalls

    async def make_calls(count: int) -> list[int]:
        async with asyncio.timeout(10):
            return await asyncio.gather(*(run_in_thread(abs, -number) for number in range(count)))

    with asyncio.Runner() as runner:
        for count in (1, 2, 100):
            assert runner.run(make_calls(count)) == list(range(count))
