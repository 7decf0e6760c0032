"""Tests of failures during captures of several targets: all targets stop, and no recorded data is lost."""

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

from fleet_captures import GOOD, capture, outcomes, urls, with_servers
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
"""Target policies, and whether a capture of four targets continues without one of them."""


def run_check(check: Callable[[list[SimulatedServer]], Awaitable[None]], count: int = 4) -> None:
    """Run a check, then assert that no server is recording."""

    async def check_and_assert_stopped(servers: list[SimulatedServer]) -> None:
        await check(servers)
        for server in servers:
            assert isinstance(server.engine, SimulatedEngine)
            assert server.engine.state is not RequestState.RECORDING

    with_servers(check_and_assert_stopped, count)


# Servers that exit or hang.


class SlowStatusEngine(SimulatedEngine):
    """Engine that replies to status requests after `may_reply` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_reply = asyncio.Event()

    async def command(self, command: str, payload: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        if command == "status":
            await self.may_reply.wait()
        return await super().command(command, payload)


@pytest.mark.parametrize(("policy", "continues"), POLICIES)
def test_replica_that_exits_after_its_status_reply(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, policy: dict[str, Any], continues: bool
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].engine = slow = SlowStatusEngine()

        async def stop_after_status() -> None:
            await servers[2].request_received.wait()
            await asyncio.gather(*servers[2].tasks)  # until the reply is sent
            await servers[2].stop()
            slow.may_reply.set()

        await asyncio.gather(capture(build_profiler(urls(servers), **policy)), stop_after_status())
        assert [server.commands() for server in servers] == [GOOD, GOOD, ["status"], GOOD]
        await servers[2].start()

    run_check(check)
    fleet = load_manifest()
    assert fleet.status is (Status.PARTIAL if continues else Status.FAILED)
    assert outcomes(fleet) == [Outcome.UNREACHABLE if replica == 2 else Outcome.FLUSHED for replica in range(4)]
    assert "cannot be reached: Connection refused" in str(fleet.targets[2].reason)
    assert load_manifest(replica=2).status is Status.FAILED


@pytest.fixture
def full_queue_url() -> Iterator[str]:
    """URL of a server that accepts no connections because its queue is full."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for client in (first, second):
            client.setblocking(False)  # noqa: FBT003  # the library's signature
            client.connect_ex(listening.getsockname())
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(("policy", "continues"), POLICIES)
def test_server_that_accepts_no_connection(
    build_profiler: BuildProfiler,
    load_manifest: LoadManifest,
    full_queue_url: str,
    policy: dict[str, Any],
    continues: bool,
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        began_s = time.monotonic()
        await capture(build_profiler([full_queue_url, *urls(servers)], **policy, start_timeout_s=1.6))
        assert time.monotonic() - began_s < 5
        assert [server.commands() for server in servers] == [GOOD if continues else ["status"]] * 3

    run_check(check, 3)
    fleet = load_manifest()
    assert fleet.status is (Status.PARTIAL if continues else Status.FAILED)
    assert outcomes(fleet) == [Outcome.TIMED_OUT, *[Outcome.FLUSHED if continues else None] * 3]
    assert fleet.targets[0].reason == "The connection was not established within 0.8 seconds, half of start_timeout_s."


def test_stop_of_a_hung_server_is_sent_again(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[1].acts["stop"] = [Act(raw=b"", hang=True), Act()]
        profiler = build_profiler(urls(servers), stop_timeout_s=1)
        await profiler.astart(1)
        with pytest.raises(CaptureError, match="1 of 4 targets are not complete: 1 timed_out"):
            await profiler.astop()
        assert servers[1].commands() == [*GOOD, "stop"]

    run_check(check)
    assert outcomes(load_manifest()) == [Outcome.TIMED_OUT if replica == 1 else Outcome.FLUSHED for replica in range(4)]


def test_all_servers_exit_between_start_and_stop(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        profiler = build_profiler(urls(servers), {"on_error": "warn"})
        async with profiler.capture(1):
            for server in servers:
                await server.stop()
                server.engine = SimulatedEngine()  # discard the recording of the process
        for server in servers:
            await server.start()

    run_check(check)
    fleet = load_manifest()
    assert (fleet.status, fleet.problems) == (Status.PARTIAL, ("4 of 4 targets are not complete: 4 unreachable.",))
    assert outcomes(fleet) == [Outcome.UNREACHABLE] * 4
    assert {load_manifest(replica=replica).status for replica in range(4)} == {Status.PARTIAL}


class SkippingSelector(selectors.DefaultSelector):
    """Selector that skips most of the time in which no file is ready."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(min(timeout, 0.003))  # most requests on loopback take less
        if not events:
            self.skipped_s += min(timeout, 1.0)
        return events


class FastForwardLoop(asyncio.SelectorEventLoop):
    """Event loop with a clock that skips idle time."""

    def __init__(self) -> None:
        self._skipping_selector = SkippingSelector()
        super().__init__(self._skipping_selector)

    def time(self) -> float:
        return super().time() + self._skipping_selector.skipped_s


def run_fast_forward(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=FastForwardLoop) as runner:
        runner.run(work)


def test_stop_waits_minutes_for_a_flush(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
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
            duration_s = loop.time() - began_s
            assert duration_s >= 300
            assert servers[1].commands().count("status") < duration_s + 20  # at most one poll per second

    run_fast_forward(main())
    fleet = load_manifest()
    assert fleet.status is Status.COMPLETE
    assert outcomes(fleet) == [Outcome.FLUSHED] * 3


def test_local_manifests_reduce_status_polls_during_a_flush(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "step_000001" / "rollout" / "replica_001" / "rank_0000.step1.json"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with simulated_servers(3) as servers:
            profiler = build_profiler(urls(servers))
            await profiler.astart(1)
            engine = servers[1].engine
            assert isinstance(engine, SimulatedEngine)
            engine.flushed.clear()
            rank_manifest = attrs.evolve(load_manifest(replica=1), target=None)
            assert rank_manifest.status is Status.RECORDING
            path.write_bytes(encode(rank_manifest))

            def flush() -> None:
                path.write_bytes(encode(attrs.evolve(rank_manifest, status=Status.COMPLETE)))
                engine.flushed.set()

            began_s = loop.time()
            loop.call_later(300, flush)
            await profiler.astop()
            assert 300 <= loop.time() - began_s < 315
            assert servers[1].commands().count("status") <= 300 / 10 + 3

    run_fast_forward(main())
    assert outcomes(load_manifest()) == [Outcome.FLUSHED] * 3


def test_stop_times_out_during_an_endless_flush(build_profiler: BuildProfiler, load_manifest: LoadManifest) -> None:
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

    run_fast_forward(main())
    fleet = load_manifest()
    assert outcomes(fleet) == [Outcome.FLUSHED, Outcome.TIMED_OUT, Outcome.FLUSHED]
    assert fleet.targets[1].reason == "The stop did not finish within stop_timeout_s=120 seconds."
    assert "increase stop_timeout_s under targets" in str(fleet.targets[1].fix)
    replica = load_manifest(replica=1)
    assert (replica.status, replica.problems[-1]) == (Status.PARTIAL, fleet.targets[1].reason)


def test_hung_servers_delay_start_and_stop_only_until_the_timeouts(
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

    run_fast_forward(main())
    assert outcomes(load_manifest()) == [Outcome.TIMED_OUT, Outcome.TIMED_OUT, Outcome.FLUSHED]


# Local directories.


def test_no_target_starts_if_the_run_directory_is_not_writable(build_profiler: BuildProfiler, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")

    async def check(servers: list[SimulatedServer]) -> None:
        with pytest.raises(CaptureError, match=f"Step 1: cannot write to {tmp_path}/run/step_000001/rollout"):
            await build_profiler(urls(servers)).astart(1)
        assert [server.commands() for server in servers] == [[]] * 4

    run_check(check)


@pytest.mark.parametrize(("policy", "continues"), POLICIES)
@pytest.mark.parametrize("existing", ["file", "link"])
def test_replica_whose_local_directory_is_not_writable(
    build_profiler: BuildProfiler,
    load_manifest: LoadManifest,
    tmp_path: Path,
    existing: str,
    policy: dict[str, Any],
    continues: bool,
) -> None:
    directory = tmp_path / "run/step_000001/rollout/replica_002"
    directory.parent.mkdir(parents=True)
    if existing == "file":
        directory.write_text("")
    else:
        directory.symlink_to(tmp_path.parent, target_is_directory=True)

    async def check(servers: list[SimulatedServer]) -> None:
        await capture(build_profiler(urls(servers), **policy))
        # A target without a manifest would be invisible in the run, so it is not started.
        commands = GOOD if continues else ["status"]
        assert [server.commands() for server in servers] == [commands, commands, ["status"], commands]

    run_check(check)
    fleet = load_manifest()
    assert fleet.status is (Status.PARTIAL if continues else Status.FAILED)
    expected = Outcome.FLUSHED if continues else None
    assert outcomes(fleet) == [Outcome.REFUSED if replica == 2 else expected for replica in range(4)]
    record = fleet.targets[2]
    assert record.capture is None
    assert str(record.reason).startswith(f"Cannot write to {directory}: ")
    assert ("outside of the output directory" in str(record.reason)) is (existing == "link")
    assert not [*tmp_path.parent.glob("target.*")]


def test_replica_directory_deleted_between_start_and_stop(
    build_profiler: BuildProfiler, load_manifest: LoadManifest, tmp_path: Path
) -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        async with build_profiler(urls(servers)).capture(1):
            shutil.rmtree(tmp_path / "run/step_000001/rollout/replica_002")

    run_check(check)
    fleet = load_manifest()
    assert outcomes(fleet) == [Outcome.FLUSHED] * 4
    assert "The manifest cannot be written: " in str(fleet.targets[2].reason)
    assert "replica_002" in str(fleet.targets[2].reason)
    assert [record.reason for record in fleet.targets if record.replica != 2] == [None] * 3
    assert read_run(tmp_path / "run").status is not Status.COMPLETE
