"""Tests of `fan_out`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from profdeck.base.errors import target_error
from profdeck.base.outcome import Outcome
from profdeck.replicas.fan_out import fan_out


def test_no_targets() -> None:
    async def raise_if_called(_: object) -> None:
        raise AssertionError

    assert asyncio.run(fan_out(raise_if_called, [], timeout_s=1, each_timeout_s=1)) == []


def test_operations_run_concurrently_and_results_are_in_order() -> None:
    async def main() -> None:
        arrived, all_arrived = set[int](), asyncio.Event()

        async def meet(target: int) -> int:
            arrived.add(target)
            if len(arrived) == 100:
                all_arrived.set()
            await all_arrived.wait()
            return target * 2

        assert await fan_out(meet, range(100), timeout_s=30, each_timeout_s=30) == [2 * n for n in range(100)]

    asyncio.run(main())


def test_errors_are_returned_as_results() -> None:
    async def divide(target: int) -> float:
        await asyncio.sleep(0)
        if target == 2:
            raise asyncio.CancelledError
        return 1 / target

    def fail(target: int) -> asyncio.Future[float]:
        raise KeyError(target)

    quotient, zero_division, cancelled = asyncio.run(fan_out(divide, [1, 0, 2], timeout_s=30, each_timeout_s=30))
    assert quotient == 1
    assert isinstance(zero_division, ZeroDivisionError)
    assert isinstance(cancelled, asyncio.CancelledError)
    (error,) = asyncio.run(fan_out(fail, [1], timeout_s=30, each_timeout_s=30))
    assert isinstance(error, KeyError)


@pytest.mark.parametrize(("timeout_s", "each_timeout_s"), [(0.02, 30), (30, 0.02)])
def test_late_operations_are_cancelled_and_awaited(timeout_s: float, each_timeout_s: float) -> None:
    cleaned_up = []

    async def wait(target: int) -> int:
        if target:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned_up.append(target)
        return target

    results = asyncio.run(fan_out(wait, [0, 1, 2], timeout_s=timeout_s, each_timeout_s=each_timeout_s))
    assert results[0] == 0
    assert [str(result) for result in results[1:]] == ["The operation did not finish within 0.02 seconds."] * 2
    assert target_error(results[1]).outcome is Outcome.TIMED_OUT
    assert cleaned_up == [1, 2]


def test_timeout_error_of_an_operation_keeps_its_message() -> None:
    async def wait(_: int) -> None:
        raise TimeoutError("mine")

    (error,) = asyncio.run(fan_out(wait, [0], timeout_s=30, each_timeout_s=30))
    assert str(error) == "mine"


def test_all_operations_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop, timers = asyncio.get_running_loop(), list[float]()
        call_at = loop.call_at

        def counted_call_at(when_s: float, *arguments: Any, **keywords: Any) -> asyncio.TimerHandle:
            timers.append(when_s)
            return call_at(when_s, *arguments, **keywords)

        monkeypatch.setattr(loop, "call_at", counted_call_at)

        async def yield_once(_: int) -> None:
            await asyncio.sleep(0)

        assert await fan_out(yield_once, range(1000), timeout_s=30, each_timeout_s=30) == [None] * 1000
        assert len(timers) == 1

    asyncio.run(main())


def test_cancellation_cancels_and_awaits_all_operations() -> None:
    async def main() -> None:
        running, cleaned_up, all_run = set[int](), set[int](), asyncio.Event()

        async def wait(target: int) -> None:
            running.add(target)
            if len(running) == 10:
                all_run.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned_up.add(target)

        task = asyncio.create_task(fan_out(wait, range(10), timeout_s=30, each_timeout_s=30))
        await all_run.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned_up == running

    asyncio.run(main())
