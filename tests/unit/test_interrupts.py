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


def press_ctrl_c(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


async def wait_forever() -> None:
    await asyncio.Event().wait()


def test_run_returns_the_result(runner: asyncio.Runner) -> None:
    assert interrupts.run(runner, asyncio.sleep(0, 7)) == 7


def test_first_interrupt_cancels_and_waits_for_the_cleanup(runner: asyncio.Runner) -> None:
    events = []

    async def work() -> None:
        try:
            press_ctrl_c()
            await wait_forever()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work())
    assert events == ["cleaned up"]


def test_second_interrupt_cancels_the_cleanup(runner: asyncio.Runner) -> None:
    async def work() -> None:
        try:
            press_ctrl_c()
            await wait_forever()
        finally:
            press_ctrl_c()
            await wait_forever()

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work())
    assert interrupts.run(runner, asyncio.sleep(0, 7)) == 7  # the loop is still usable


def test_third_interrupt_ends_a_blocking_call(runner: asyncio.Runner) -> None:
    async def work() -> None:
        press_ctrl_c(3)
        pytest.fail("the coroutine continued")

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work())


def test_interrupts_do_not_abort_callbacks(runner: asyncio.Runner) -> None:
    async def work() -> None:
        finished = asyncio.Event()

        def callback() -> None:
            press_ctrl_c(2)  # asyncio's own handler would raise KeyboardInterrupt here
            finished.set()

        asyncio.get_running_loop().call_soon(callback)
        try:
            await wait_forever()
        finally:
            await finished.wait()

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work())


def test_interrupt_before_the_coroutine_starts_cancels_it(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runner.run

    def interrupt_and_run(work: object) -> object:
        press_ctrl_c()
        return run(work)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "run", interrupt_and_run)
    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, wait_forever())


def test_interrupt_is_raised_after_the_coroutine_ends(runner: asyncio.Runner) -> None:
    async def work() -> None:
        press_ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work())


def test_cleanup_error_is_the_cause_of_the_interrupt(runner: asyncio.Runner) -> None:
    async def work() -> None:
        try:
            press_ctrl_c()
            await wait_forever()
        finally:
            raise ValueError("cleanup failed")

    with pytest.raises(KeyboardInterrupt) as excinfo:
        interrupts.run(runner, work())
    assert isinstance(excinfo.value.__cause__, ValueError)


def test_other_exceptions_propagate(runner: asyncio.Runner) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def failed() -> None:
        raise ValueError

    with pytest.raises(asyncio.CancelledError):
        interrupts.run(runner, cancelled())
    with pytest.raises(ValueError):  # noqa: PT011  # the error has no message
        interrupts.run(runner, failed())


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_ends_the_wait_and_the_second_cancels(
    runner: asyncio.Runner, signal_number: signal.Signals
) -> None:
    stop = interrupts.StopSignal()

    async def signal_before_wait() -> None:
        signal.raise_signal(signal_number)
        await stop.wait()

    async def work(*, send_again: bool) -> int:
        asyncio.get_running_loop().call_later(0, signal.raise_signal, signal_number)
        await stop.wait()
        if send_again:
            signal.raise_signal(signal_number)
            await stop.wait()
        return 7

    assert interrupts.run(runner, work(send_again=False), stop) == 7
    stop = interrupts.StopSignal()
    with pytest.raises(KeyboardInterrupt):
        interrupts.run(runner, work(send_again=True), stop)
    stop = interrupts.StopSignal()
    with pytest.raises(KeyboardInterrupt):  # the signal arrives before the wait
        interrupts.run(runner, signal_before_wait(), stop)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_host_signal_handler_is_kept() -> None:
    calls = []
    previous_handler = signal.signal(signal.SIGINT, lambda *_: calls.append("host"))
    try:
        host_handler = signal.getsignal(signal.SIGINT)

        async def work() -> int:
            press_ctrl_c(3)
            return 7

        with asyncio.Runner() as runner:
            assert interrupts.run(runner, work()) == 7
        assert calls == ["host"] * 3
        assert signal.getsignal(signal.SIGINT) is host_handler
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def test_other_threads_install_no_handlers() -> None:
    results = []

    def run_loop() -> None:
        with asyncio.Runner() as runner:
            results.append(interrupts.run(runner, asyncio.sleep(0, 7)))

    thread = threading.Thread(target=run_loop)
    thread.start()
    thread.join()
    assert results == [7]
