"""What breaks while many targets are captured: each ends with nothing lost and everything stopped."""

from __future__ import annotations

import asyncio
import selectors
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from fleet_captures import GOOD, capture, outcomes, urls, with_servers as run_with_servers
from profdeck import Profiler, Status
from profdeck.base.errors import CaptureError
from profdeck.base.outcome import Outcome
from profdeck.records.manifest import Manifest, encode
from profdeck.records.request import RequestState
from profdeck.verification.run_report import read_run
from simulated_servers import Act, SimulatedEngine, SimulatedServer, simulated_servers

BuildProfiler = Callable[..., Profiler]
LoadManifest = Callable[..., Manifest]
POLICIES = [({"policy": "any"}, True), ({"policy": "quorum", "quorum": 3}, True), ({"policy": "all"}, False)]
"""Whether a capture of four targets goes on without one of them."""


def with_servers(check: Callable[[list[SimulatedServer]], Awaitable[None]], count: int = 4) -> None:
    """Run a check, after which no server records any more."""

    async def check_ends(servers: list[SimulatedServer]) -> None:
        await check(servers)
        for server in servers:
            assert isinstance(server.engine, SimulatedEngine)
            assert server.engine.state is not RequestState.RECORDING

    run_with_servers(check_ends, count)


# Servers that end or hang.


class Held(SimulatedEngine):
    """Does not answer whether it is there before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()

    async def command(self, command: str, payload: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        if command == "status":
            await self.may.wait()
        return await super().command(command, payload)


@pytest.mark.parametrize(("policy", "goes_on"), POLICIES)
def test_a_replica_that_ends_when_it_has_been_reached(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, policy: dict[str, Any], goes_on: bool
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].engine = held = Held()

        async def end() -> None:
            await servers[2].arrived.wait()
            await asyncio.gather(*servers[2].tasks)  # until it has answered
            await servers[2].stop()
            held.may.set()

        await asyncio.gather(capture(build_profiler(urls(servers), **policy)), end())
        assert [server.commands() for server in servers] == [GOOD, GOOD, ["status"], GOOD]
        await servers[2].start()

    with_servers(check)
    fleet = load_manifest()
    assert fleet.status is (Status.PARTIAL if goes_on else Status.FAILED)
    assert outcomes(fleet) == [Outcome.UNREACHABLE if replica == 2 else Outcome.FLUSHED for replica in range(4)]
    assert "cannot be reached: Connection refused" in str(fleet.targets[2].reason)
    assert load_manifest(replica=2).status is Status.FAILED


@pytest.fixture
def deaf() -> Iterator[str]:
    """The URL of a server that accepts no connection, as its queue is full."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for client in (first, second):
            client.setblocking(False)  # noqa: FBT003  # the library's signature
            client.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(("policy", "goes_on"), POLICIES)
def test_a_server_that_accepts_no_connection(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, deaf: str, policy: dict[str, Any], goes_on: bool
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        began_s = time.monotonic()
        await capture(build_profiler([deaf, *urls(servers)], **policy, start_timeout_s=1.6))
        assert time.monotonic() - began_s < 5
        assert [server.commands() for server in servers] == [GOOD if goes_on else ["status"]] * 3

    with_servers(check, 3)
    fleet = load_manifest()
    assert fleet.status is (Status.PARTIAL if goes_on else Status.FAILED)
    assert outcomes(fleet) == [Outcome.TIMED_OUT, *[Outcome.FLUSHED if goes_on else None] * 3]
    assert fleet.targets[0].reason == "The connection was not established within 0.8 seconds, half of start_timeout_s."


def test_a_server_that_hangs_at_its_stop_is_told_again(
    build_profiler: BuildProfiler, load_manifest: LoadManifest
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[1].acts["stop"] = [Act(raw=b"", hang=True), Act()]
        profiler = build_profiler(urls(servers), stop_timeout_s=1)
        await profiler.astart(1)
        with pytest.raises(CaptureError, match="1 of 4 targets are not complete: 1 timed_out"):
            await profiler.astop()
        assert servers[1].commands() == [*GOOD, "stop"]

    with_servers(check)
    assert outcomes(load_manifest()) == [Outcome.TIMED_OUT if replica == 1 else Outcome.FLUSHED for replica in range(4)]


def test_all_servers_end_between_start_and_stop(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build_profiler(urls(servers), {"on_error": "warn"})
        async with profiler.capture(1):
            for server in servers:
                await server.stop()
                server.engine = SimulatedEngine()  # what was recorded there has ended with it
        for server in servers:
            await server.start()

    with_servers(check)
    fleet = load_manifest()
    assert (fleet.status, fleet.problems) == (Status.PARTIAL, ("4 of 4 targets are not complete: 4 unreachable.",))
    assert outcomes(fleet) == [Outcome.UNREACHABLE] * 4
    assert {load_manifest(replica=replica).status for replica in range(4)} == {Status.PARTIAL}


class Impatient(selectors.DefaultSelector):
    """Passes over the time in which there is nothing to do."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(min(timeout, 0.003))  # on loopback hardly anything takes longer
        if not found:
            self.skipped_s += min(timeout, 1.0)
        return found


class QuickLoop(asyncio.SelectorEventLoop):
    """An event loop whose minutes pass in no time."""

    def __init__(self) -> None:
        self._impatient = Impatient()
        super().__init__(self._impatient)

    def time(self) -> float:
        return super().time() + self._impatient.skipped_s


def quickly(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        runner.run(work)


def test_a_flush_of_minutes(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with simulated_servers(3) as servers:
            profiler = build_profiler(urls(servers))
            await profiler.astart(1)
            engine = servers[1].engine
            assert isinstance(engine, SimulatedEngine)
            engine.flushed.clear()
            began_s = loop.time()
            loop.call_later(300, engine.flushed.set)
            await profiler.astop()
            lasted_s = loop.time() - began_s
            assert lasted_s >= 300
            assert servers[1].commands().count("status") < lasted_s + 20  # not asked more often than once a second

    quickly(main())
    fleet = load_manifest()
    assert fleet.status is Status.COMPLETE
    assert outcomes(fleet) == [Outcome.FLUSHED] * 3


def test_manifests_that_are_here_tell_of_a_flush(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, tmp_path: Path
) -> None:
    rank = tmp_path / "run" / "step_000001" / "rollout" / "replica_001" / "rank_0000.step1.json"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with simulated_servers(3) as servers:
            profiler = build_profiler(urls(servers))
            await profiler.astart(1)
            engine = servers[1].engine
            assert isinstance(engine, SimulatedEngine)
            engine.flushed.clear()
            of_rank = attrs.evolve(load_manifest(replica=1), target=None)
            assert of_rank.status is Status.RECORDING
            rank.write_bytes(encode(of_rank))

            def flush() -> None:
                rank.write_bytes(encode(attrs.evolve(of_rank, status=Status.COMPLETE)))
                engine.flushed.set()

            began_s = loop.time()
            loop.call_later(300, flush)
            await profiler.astop()
            assert 300 <= loop.time() - began_s < 315
            assert servers[1].commands().count("status") <= 300 / 10 + 3

    quickly(main())
    assert outcomes(load_manifest()) == [Outcome.FLUSHED] * 3


def test_a_flush_that_never_ends(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with simulated_servers(3) as servers:
            profiler = build_profiler(urls(servers), stop_timeout_s=120)
            await profiler.astart(1)
            engine = servers[1].engine
            assert isinstance(engine, SimulatedEngine)
            engine.flushed.clear()
            began_s = loop.time()
            with pytest.raises(CaptureError, match="1 of 3 targets are not complete: 1 timed_out"):
                await profiler.astop()
            assert loop.time() - began_s >= 120
            assert engine.state is RequestState.WRITING

    quickly(main())
    fleet = load_manifest()
    assert outcomes(fleet) == [Outcome.FLUSHED, Outcome.TIMED_OUT, Outcome.FLUSHED]
    assert fleet.targets[1].reason == "The stop did not finish within stop_timeout_s=120 seconds."
    assert "increase stop_timeout_s under targets" in str(fleet.targets[1].fix)
    replica = load_manifest(replica=1)
    assert (replica.status, replica.problems[-1]) == (Status.PARTIAL, fleet.targets[1].reason)


def test_a_server_that_hangs_holds_up_start_and_stop_for_little_longer_than_allowed(
    build_profiler: BuildProfiler, load_manifest: LoadManifest
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with simulated_servers(3) as servers:
            servers[0].acts["start"] = servers[0].acts["stop"] = [Act(raw=b"", hang=True)]
            servers[1].acts["stop"] = [Act(raw=b"", hang=True)]
            profiler = build_profiler(urls(servers), start_timeout_s=20, stop_timeout_s=30)
            began_s = loop.time()
            await profiler.astart(1)
            assert 20 <= loop.time() - began_s < 20 + 3 + 1
            began_s = loop.time()
            with pytest.raises(CaptureError, match="1 of 3 targets are not complete: 1 timed_out"):
                await profiler.astop()
            assert 30 <= loop.time() - began_s < 30 + 3 + 1

    quickly(main())
    assert outcomes(load_manifest()) == [Outcome.TIMED_OUT, Outcome.TIMED_OUT, Outcome.FLUSHED]


# This host's own directory.


def test_a_run_that_this_host_cannot_write_starts_nothing(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")

    async def check(servers: list[SimulatedServer]) -> None:
        with pytest.raises(CaptureError, match=f"Step 1: cannot write to {tmp_path}/run/step_000001/rollout"):
            await build_profiler(urls(servers)).astart(1)
        assert [server.commands() for server in servers] == [[]] * 4

    with_servers(check)


@pytest.mark.parametrize(("policy", "goes_on"), POLICIES)
@pytest.mark.parametrize("taken", ["file", "link"])
def test_a_replica_whose_directory_this_host_cannot_write(
    build_profiler: BuildProfiler,
    load_manifest: LoadManifest,
    tmp_path: Path,
    taken: str,
    policy: dict[str, Any],
    goes_on: bool,
) -> None:
    place = tmp_path / "run/step_000001/rollout/replica_002"
    place.parent.mkdir(parents=True)
    if taken == "file":
        place.write_text("")
    else:
        place.symlink_to(tmp_path.parent, target_is_directory=True)

    async def check(servers: list[SimulatedServer]) -> None:
        await capture(build_profiler(urls(servers), **policy))
        # The one whose manifest cannot be written is not started: nobody would know of it.
        others = GOOD if goes_on else ["status"]
        assert [server.commands() for server in servers] == [others, others, ["status"], others]

    with_servers(check)
    fleet = load_manifest()
    assert fleet.status is (Status.PARTIAL if goes_on else Status.FAILED)
    ended = Outcome.FLUSHED if goes_on else None
    assert outcomes(fleet) == [Outcome.REFUSED if replica == 2 else ended for replica in range(4)]
    record = fleet.targets[2]
    assert record.capture is None
    assert str(record.reason).startswith(f"Cannot write to {place}: ")
    assert ("outside of the output directory" in str(record.reason)) is (taken == "link")
    assert not [*tmp_path.parent.glob("target.*")]


def test_a_directory_that_vanishes_between_start_and_stop(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, tmp_path: Path
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        async with build_profiler(urls(servers)).capture(1):
            shutil.rmtree(tmp_path / "run/step_000001/rollout/replica_002")

    with_servers(check)
    fleet = load_manifest()
    assert outcomes(fleet) == [Outcome.FLUSHED] * 4
    assert "The manifest cannot be written: " in str(fleet.targets[2].reason)
    assert "replica_002" in str(fleet.targets[2].reason)
    assert [record.reason for record in fleet.targets if record.replica != 2] == [None] * 3
    assert read_run(tmp_path / "run").status is not Status.COMPLETE
