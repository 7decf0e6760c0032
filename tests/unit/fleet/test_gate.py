"""Tests of `StartGate`."""

from __future__ import annotations

import asyncio
import time

from profdeck.replicas.start_gate import GatePass, StartGate


def test_gate_opens_after_all_holders_have_arrived() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=30)
        passes = [gate.issue() for _ in range(3)]
        early = [asyncio.create_task(gate_pass()) for gate_pass in passes[:2]]
        await asyncio.sleep(0)
        assert not any(task.done() for task in early)
        assert (gate.opened_ns, gate.skew_s) == (None, None)
        before_ns = time.monotonic_ns()
        await passes[2]()
        await asyncio.gather(*early)
        passed = [gate_pass.passed_ns for gate_pass in passes]
        assert gate.opened_ns is not None
        assert None not in passed
        assert before_ns <= gate.opened_ns <= min(passed)
        assert gate.skew_s == (max(passed) - min(passed)) / 1e9

    asyncio.run(main())


def test_single_holder_passes_immediately() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=30)
        await gate.issue()()
        assert gate.opened_ns is not None
        assert gate.skew_s is None

    asyncio.run(main())


def test_abandoned_pass_is_not_awaited() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=30)
        first, failed, second = (gate.issue() for _ in range(3))
        tasks = [asyncio.create_task(gate_pass()) for gate_pass in (first, second)]
        await asyncio.sleep(0)
        failed.abandon()
        failed.abandon()
        await asyncio.gather(*tasks)
        assert failed.passed_ns is None

    asyncio.run(main())


def test_abandoning_after_arrival_does_not_open_the_gate() -> None:
    """A holder that is cancelled while it waits abandons its pass."""

    async def main() -> None:
        gate = StartGate(timeout_s=30)
        cancelled, waiting, last = (gate.issue() for _ in range(3))
        tasks = [asyncio.create_task(gate_pass()) for gate_pass in (cancelled, waiting)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        cancelled.abandon()
        assert gate.opened_ns is None
        last.abandon()
        await tasks[1]
        assert (cancelled.passed_ns, last.passed_ns) == (None, None)

    asyncio.run(main())


def test_gate_opens_if_all_passes_are_abandoned() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=30)
        for gate_pass in [gate.issue() for _ in range(2)]:
            gate_pass.abandon()
        assert gate.opened_ns is not None

    asyncio.run(main())


def test_gate_opens_after_the_timeout() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=0.02)
        early, late = gate.issue(), gate.issue()
        await early()
        opened_ns = gate.opened_ns
        assert opened_ns is not None
        await late()
        assert late.passed_ns is not None
        assert late.passed_ns >= opened_ns
        assert gate.opened_ns == opened_ns
        await late()  # an open gate does not block later starts

    asyncio.run(main())


def test_thousand_holders_pass_within_one_loop_iteration() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=30)
        passes = [gate.issue() for _ in range(1000)]
        iterations = 0

        async def count_iterations() -> None:
            nonlocal iterations
            while True:
                await asyncio.sleep(0)
                iterations += gate.opened_ns is not None

        async def arrive(gate_pass: GatePass) -> int:
            await gate_pass()
            return iterations

        counter = asyncio.create_task(count_iterations())
        assert set(await asyncio.gather(*map(arrive, passes))) <= {0, 1}
        counter.cancel()

    asyncio.run(main())
