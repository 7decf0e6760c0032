"""Ctrl-C and SIGTERM in a running event loop: cancellation, errors and restored signal handlers."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from profdeck.base import interrupts


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


async def forever() -> None:
    await asyncio.Event().wait()


def test_run_returns_the_result(runner: asyncio.Runner) -> None:
    assert interrupts.run(runner, asyncio.sleep(0, 7)) == 7


def test_first_interrupt_cancels_and_waits_for_the_cleanup(runner: asyncio.Runner) -> None:
    events = []

    async def work() -> None:
        try:
            press()
            await forever()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work())
    assert events == ["cleaned up"]


def test_second_interrupt_cancels_the_cleanup(runner: asyncio.Runner) -> None:
    async def work() -> None:
        try:
            press()
            await forever()
        finally:
            press()
            await forever()

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work())
    assert interrupts.run(runner, asyncio.sleep(0, 7)) == 7  # the loop is still usable


def test_third_interrupt_ends_a_blocking_call(runner: asyncio.Runner) -> None:
    async def work() -> None:
        press(3)
        pytest.fail("the coroutine continued")

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work())


def test_interrupts_do_not_abort_callbacks(runner: asyncio.Runner) -> None:
    async def work() -> None:
        done = asyncio.Event()

        def callback() -> None:
            press(2)  # asyncio's own handler would raise KeyboardInterrupt here
            done.set()

        asyncio.get_running_loop().call_soon(callback)
        try:
            await forever()
        finally:
            await done.wait()

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work())


def test_interrupt_before_the_coroutine_starts_cancels_it(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner.run

    def pressed(work: object) -> object:
        press()
        return run(work)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "run", pressed)
    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, forever())


def test_interrupt_is_raised_after_the_coroutine_ends(runner: asyncio.Runner) -> None:
    async def work() -> None:
        press()

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work())


def test_cleanup_error_is_the_cause_of_the_interrupt(runner: asyncio.Runner) -> None:
    async def work() -> None:
        try:
            press()
            await forever()
        finally:
            raise ValueError("cleanup failed")

    with pytest.raises(KeyboardInterrupt) as raised:
        interrupts.run(runner, work())
    assert isinstance(raised.value.__cause__, ValueError)


def test_other_exceptions_propagate(runner: asyncio.Runner) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def failed() -> None:
        raise ValueError

    with pytest.raises(asyncio.CancelledError):
        interrupts.run(runner, cancelled())
    with pytest.raises(ValueError):  # noqa: PT011  # it has no message
        interrupts.run(runner, failed())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_ends_the_wait_and_the_second_cancels(runner: asyncio.Runner, number: signal.Signals) -> None:
    stop = interrupts.StopSignal()

    async def early() -> None:
        signal.raise_signal(number)
        await stop.wait()

    async def work(*, again: bool) -> int:
        asyncio.get_running_loop().call_later(0, signal.raise_signal, number)
        await stop.wait()
        if again:
            signal.raise_signal(number)
            await stop.wait()
        return 7

    assert interrupts.run(runner, work(again=False), stop) == 7
    stop = interrupts.StopSignal()
    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work(again=True), stop)
    stop = interrupts.StopSignal()
    with pytest.raises(KeyboardInterrupt):  # the signal arrives before the wait
        interrupts.run(runner, early(), stop)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_host_signal_handler_is_kept() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("host"))
    try:
        host_handler = signal.getsignal(signal.SIGINT)

        async def work() -> int:
            press(3)
            return 7

        with asyncio.Runner() as runner:
            assert interrupts.run(runner, work()) == 7
        assert seen == ["host"] * 3
        assert signal.getsignal(signal.SIGINT) is host_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_install_no_handlers() -> None:
    results = []

    def drive() -> None:
        with asyncio.Runner() as runner:
            results.append(interrupts.run(runner, asyncio.sleep(0, 7)))

    thread = threading.Thread(target=drive)
    thread.start()
    thread.join()
    assert results == [7]
