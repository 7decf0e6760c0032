"""Parties that pass a gate together."""

from __future__ import annotations

import asyncio
import time

from profdeck.replicas.start_gate import GatePass, StartGate


def test_nobody_passes_before_all_have_arrived() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=30)
        parties = [gate.issue() for _ in range(3)]
        early = [asyncio.create_task(party()) for party in parties[:2]]
        await asyncio.sleep(0)
        assert not any(task.done() for task in early)
        assert (gate.opened_ns, gate.skew_s) == (None, None)
        before_ns = time.monotonic_ns()
        await parties[2]()
        await asyncio.gather(*early)
        passed = [party.passed_ns for party in parties]
        assert gate.opened_ns is not None
        assert None not in passed
        assert before_ns <= gate.opened_ns <= min(passed)
        assert gate.skew_s == (max(passed) - min(passed)) / 1e9

    asyncio.run(main())


def test_one_party_alone_passes_at_once() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=30)
        await gate.issue()()
        assert gate.opened_ns is not None
        assert gate.skew_s is None

    asyncio.run(main())


def test_who_leaves_is_not_waited_for() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=30)
        first, failed, second = (gate.issue() for _ in range(3))
        tasks = [asyncio.create_task(party()) for party in (first, second)]
        await asyncio.sleep(0)
        failed.abandon()
        failed.abandon()
        await asyncio.gather(*tasks)
        assert failed.passed_ns is None

    asyncio.run(main())


def test_leaving_after_having_arrived_lets_nobody_else_in() -> None:
    """As a party does that is cancelled while it waits."""

    async def main() -> None:
        gate = StartGate(timeout_s=30)
        cancelled, waiting, last = (gate.issue() for _ in range(3))
        tasks = [asyncio.create_task(party()) for party in (cancelled, waiting)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        cancelled.abandon()
        assert gate.opened_ns is None
        last.abandon()
        await tasks[1]
        assert (cancelled.passed_ns, last.passed_ns) == (None, None)

    asyncio.run(main())


def test_all_may_leave() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=30)
        for party in [gate.issue() for _ in range(2)]:
            party.abandon()
        assert gate.opened_ns is not None

    asyncio.run(main())


def test_the_first_to_arrive_waits_so_long_and_no_longer() -> None:
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
        await late()  # as in a later start that has no gate of its own

    asyncio.run(main())


def test_a_thousand_pass_within_one_turn_of_the_loop() -> None:
    async def main() -> None:
        gate = StartGate(timeout_s=30)
        parties = [gate.issue() for _ in range(1000)]
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += gate.opened_ns is not None

        async def arrive(party: GatePass) -> int:
            await party()
            return turns

        counter = asyncio.create_task(count())
        assert set(await asyncio.gather(*map(arrive, parties))) <= {0, 1}
        counter.cancel()

    asyncio.run(main())
