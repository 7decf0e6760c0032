"""Synchronizes the starts of several targets, so that their requests are sent at the same time."""

from __future__ import annotations

import asyncio
import time


class StartGate:
    """Barrier that opens when the holder of each pass has arrived or withdrawn, or after a timeout.

    All holders must use the same event loop.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Args:
        timeout_s: maximum time that the first holder waits, in seconds. Holders that arrive later pass immediately.
        """
        self.passes: list[GatePass] = []
        self.opened_ns: int | None = None
        """Time at which the gate opened, from `time.monotonic_ns`."""
        self._timeout_s = timeout_s
        self._pending_count = 0
        self._open = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def issue(self) -> GatePass:
        """Issue a pass. All passes must be issued before the first holder arrives."""
        gate_pass = GatePass(self)
        self.passes.append(gate_pass)
        self._pending_count += 1
        return gate_pass

    @property
    def skew_s(self) -> float | None:
        """Time between the first and the last pass, in seconds; None for fewer than two passes."""
        times = [gate_pass.passed_ns for gate_pass in self.passes if gate_pass.passed_ns is not None]
        return (max(times) - min(times)) / 1e9 if len(times) > 1 else None

    async def _wait(self) -> None:
        if self._timer is None and not self._open.is_set():
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._open_now)
        await self._open.wait()

    def _remove_pending(self) -> None:
        self._pending_count -= 1
        if not self._pending_count:
            self._open_now()

    def _open_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.opened_ns is None:
            self.opened_ns = time.monotonic_ns()
        self._open.set()


class GatePass:
    """Permission to pass a `StartGate` once. Engines receive it as ``gate`` and await it before they send a start."""

    def __init__(self, gate: StartGate) -> None:
        """Use `StartGate.issue`."""
        self.passed_ns: int | None = None
        """Time at which the holder passed, from `time.monotonic_ns`. The start is sent immediately afterwards."""
        self._gate = gate
        self._is_pending = True

    async def __call__(self) -> None:
        """Arrive, and wait until the gate opens."""
        self.abandon()
        await self._gate._wait()  # noqa: SLF001  # both classes form one unit
        self.passed_ns = time.monotonic_ns()

    def abandon(self) -> None:
        """Do not let the other holders wait for this one. No effect after the holder has arrived."""
        if self._is_pending:
            self._is_pending = False
            self._gate._remove_pending()  # noqa: SLF001  # both classes form one unit
