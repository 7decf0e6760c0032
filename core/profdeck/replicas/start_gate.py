"""Lets many starts leave at one moment, however long each of them took to get ready."""

from __future__ import annotations

import asyncio
import time


class StartGate:
    """A gate that opens when the holders of all passes have arrived or left, or when the first one has waited long
    enough.

    It belongs to the event loop of its holders.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Args:
        timeout_s: how long the first one to arrive waits at most, in seconds; who comes later passes at once.
        """
        self.passes: list[GatePass] = []
        self.opened_ns: int | None = None
        """When it opened, by `time.monotonic_ns`."""
        self._timeout_s = timeout_s
        self._awaited = 0
        self._open = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def issue(self) -> GatePass:
        """Issue a pass; all are issued before the first holder arrives."""
        new = GatePass(self)
        self.passes.append(new)
        self._awaited += 1
        return new

    @property
    def skew_s(self) -> float | None:
        """The time between the first and the last that passed, in seconds; None if fewer than two did."""
        passed = [one.passed_ns for one in self.passes if one.passed_ns is not None]
        return (max(passed) - min(passed)) / 1e9 if len(passed) > 1 else None

    async def _wait(self) -> None:
        if self._timer is None and not self._open.is_set():
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._open_now)
        await self._open.wait()

    def _one_less(self) -> None:
        self._awaited -= 1
        if not self._awaited:
            self._open_now()

    def _open_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.opened_ns is None:
            self.opened_ns = time.monotonic_ns()
        self._open.set()


class GatePass:
    """One of those that pass a gate together: give it to an engine as its ``gate``."""

    def __init__(self, gate: StartGate) -> None:
        """Use `StartGate.issue`."""
        self.passed_ns: int | None = None
        """When it passed, by `time.monotonic_ns`: what it sends leaves right then."""
        self._gate = gate
        self._awaited = True

    async def __call__(self) -> None:
        """Arrive, and wait until the gate opens."""
        self.abandon()
        await self._gate._wait()  # noqa: SLF001  # they are one
        self.passed_ns = time.monotonic_ns()

    def abandon(self) -> None:
        """Let the others not wait for it any more, as it failed. Harmless when it has arrived."""
        if self._awaited:
            self._awaited = False
            self._gate._one_less()  # noqa: SLF001  # as above
