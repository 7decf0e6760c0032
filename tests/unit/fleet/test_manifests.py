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

        def counted(path: Path, content: bytes, *, durable: bool) -> None:
            if path.is_relative_to(directory):  # garbage-collected profilers of earlier tests write, too
                self.written[path.parent.name] += 1
                self.synced[path.parent.name] += durable
            if path.parent.name.startswith("replica"):
                self.threads.add(threading.get_ident())
            write(path, content, durable=durable)

        monkeypatch.setattr(files, "_write", counted)


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
            seen = []

            async def look(server: SimulatedServer) -> None:
                await server.arrived.wait()
                seen.append(sum(disk.written.values()))

            looking = [asyncio.create_task(look(server)) for server in servers]
            async with build_profiler([server.url for server in servers]).capture(1):
                await asyncio.gather(*looking)
            assert max(seen) == 2  # the manifests of the run and of the fleet

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
        manifests, loop, begun, go_on = ManifestBatch(), asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        write = files._write

        def slow(path: Path, content: bytes, *, durable: bool) -> None:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait()
            write(path, content, durable=durable)

        monkeypatch.setattr(files, "_write", slow)
        manifests.add(tmp_path / "a", b"old")
        waiting = asyncio.create_task(manifests.flush())
        await begun.wait()
        manifests.add(tmp_path / "a", b"new")
        manifests.add(tmp_path / "b", b"new")
        go_on.set()
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


def test_who_gives_up_waiting_does_not_end_the_writing(tmp_path: Path) -> None:
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


def test_a_temporary_file_is_removed_where_the_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"):
        files.replace_file(path, b"new", durable=True)
    with pytest.raises(FileExistsError):
        files.write_new(path, b"new")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a", "old")]
