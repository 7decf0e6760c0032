"""Tests of manifests of many targets: number of writes, threads and order."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from profdeck import Profiler
from profdeck.replicas.manifest_batch import ManifestBatch
from profdeck_traces.base import files
from simulated_servers import Act, SimulatedServer, simulated_servers

BuildProfiler = Callable[..., Profiler]


class Disk:
    """Counts the files written below a directory."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: Counter[str] = Counter()
        """Number of writes by directory name."""
        self.synced: Counter[str] = Counter()
        self.threads: set[int] = set()
        """IDs of the threads that wrote manifests of targets."""
        write = files._write

        def counted_write(path: Path, content: bytes, *, durable: bool, mode: int) -> None:
            if path.is_relative_to(directory):  # garbage-collected profilers of earlier tests write, too
                self.written[path.parent.name] += 1
                self.synced[path.parent.name] += durable
            if path.parent.name.startswith("replica"):
                self.threads.add(threading.get_ident())
            write(path, content, durable=durable, mode=mode)

        monkeypatch.setattr(files, "_write", counted_write)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


@pytest.mark.parametrize("refused", [0, 5])
def test_each_target_has_two_unsynced_writes_on_other_threads(
    build_profiler: BuildProfiler, disk: Disk, refused: int
) -> None:
    async def main() -> None:
        async with simulated_servers(40) as servers:
            for server in servers[:refused]:
                server.acts["start"] = [Act(status=503)]
            async with build_profiler([server.url for server in servers], {"on_error": "warn"}).capture(1):
                pass
        assert threading.get_ident() not in disk.threads

    asyncio.run(main())
    assert disk.written == {"run": 1, "rollout": 2} | {f"replica_{replica:03d}": 2 for replica in range(40)}
    assert +disk.synced == {"rollout": 1}
    assert len(disk.threads) <= 16


@pytest.mark.slow  # on a busy machine, some targets reply before all requests are sent
def test_names_are_reserved_after_all_requests_are_sent(build_profiler: BuildProfiler, disk: Disk) -> None:
    """Reserving names earlier would delay the last requests."""

    async def main() -> None:
        async with simulated_servers(40) as servers:
            write_counts = []

            async def count_writes_at_arrival(server: SimulatedServer) -> None:
                await server.request_received.wait()
                write_counts.append(sum(disk.written.values()))

            counting = [asyncio.create_task(count_writes_at_arrival(server)) for server in servers]
            async with build_profiler([server.url for server in servers]).capture(1):
                await asyncio.gather(*counting)
            assert max(write_counts) == 2  # the manifests of the run and of the fleet

    asyncio.run(main())


def test_last_manifest_of_a_path_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        manifests = ManifestBatch()
        assert await manifests.flush() == {}
        for number in range(3):
            for name in "abc":
                manifests.add(tmp_path / name, f"{name}{number}".encode())
            if number:
                assert await manifests.flush() == {}

    asyncio.run(main())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "a2", "b": "b2", "c": "c2"}


def test_each_capture_can_use_a_different_event_loop(tmp_path: Path) -> None:
    manifests = ManifestBatch()

    async def write(content: bytes) -> None:
        manifests.add(tmp_path / "a", content)
        await asyncio.sleep(0)  # the batch waits for more manifests
        assert await manifests.flush() == {}

    for content in (b"old", b"new"):
        asyncio.run(write(content))
        assert (tmp_path / "a").read_bytes() == content


def test_manifests_added_during_a_write_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        manifests, loop = ManifestBatch(), asyncio.get_running_loop()
        write_started, may_continue = asyncio.Event(), threading.Event()
        write = files._write

        def blocking_write(path: Path, content: bytes, *, durable: bool, mode: int) -> None:
            loop.call_soon_threadsafe(write_started.set)
            may_continue.wait()
            write(path, content, durable=durable, mode=mode)

        monkeypatch.setattr(files, "_write", blocking_write)
        manifests.add(tmp_path / "a", b"old")
        waiting = asyncio.create_task(manifests.flush())
        await write_started.wait()
        manifests.add(tmp_path / "a", b"new")
        manifests.add(tmp_path / "b", b"new")
        may_continue.set()
        assert await waiting == {}

    asyncio.run(main())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "new", "b": "new"}


def test_write_error_is_reported_once(tmp_path: Path) -> None:
    async def main() -> None:
        manifests, path = ManifestBatch(), tmp_path / "missing" / "a"
        manifests.add(path, b"")
        manifests.add(tmp_path / "b", b"")
        errors = await manifests.flush()
        assert [*errors] == [path]
        assert isinstance(errors[path], FileNotFoundError)
        assert await manifests.flush() == {}

    asyncio.run(main())
    assert [path.name for path in tmp_path.iterdir()] == ["b"]  # no temporary file remains


def test_cancelled_flush_does_not_cancel_the_writes(tmp_path: Path) -> None:
    async def main() -> None:
        manifests = ManifestBatch()
        for number in range(50):
            manifests.add(tmp_path / str(number), b"")
        waiting = asyncio.create_task(manifests.flush())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await manifests.flush() == {}

    asyncio.run(main())
    assert len([*tmp_path.iterdir()]) == 50


def test_temporary_file_is_removed_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", raise_disk_full)
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"):
        files.replace_file(path, b"new", durable=True)
    with pytest.raises(FileExistsError):
        files.write_new(path, b"new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "old")]
