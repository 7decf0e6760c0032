"""Tests of file collection: files on other hosts are downloaded, or reported as missing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from typer.testing import CliRunner

from profdeck import Profiler, Status
from profdeck.base.errors import CaptureError
from profdeck.base.identity import Identity
from profdeck.base.outcome import Outcome
from profdeck.cli import app
from profdeck.config.structuring import structure, unstructure
from profdeck.engine.control import downloads
from profdeck.engine.control.rank_files import RankFiles
from profdeck.engine.engine import Engine
from profdeck.engine.transport import file_transfer
from profdeck.engine.transport.http_engine import HttpEngine
from profdeck.records.artifact import Artifact
from profdeck.records.capture import CaptureRecord
from profdeck.records.manifest import Manifest, read_manifest
from profdeck.records.request import Answer, CaptureRequest, Reply, RequestState
from profdeck.replicas.late_collection import Collected, collect_run
from profdeck.verification.run_report import read_run
from profdeck_npu.traces.analysis_state import AnalysisState, write_state
from simulated_servers import Act, SimulatedServer, simulated_servers

BuildProfiler = Callable[..., Profiler]
LoadManifest = Callable[..., Manifest]
DIRECTORY = "run/step_000001/rollout"
MANIFEST, TRACE = "rank_0000.step1.json", "rank_0000.step1.trace.json"


def requested_files(server: SimulatedServer) -> list[str]:
    """Return the names of the files requested from a server, in request order."""
    return [arrival.command for arrival in server.arrivals if "/files/" in arrival.path]


def temporary_files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.name.startswith(".")]


async def await_end(engine: Any) -> list[dict[str, Any]]:
    """Wait until all ranks of an engine have written their files. Return their replies."""
    while True:
        replies: list[dict[str, Any]] = await engine.command("status", {})
        if {reply["state"] for reply in replies} == {"ended"}:
            return replies
        await asyncio.sleep(0.01)  # another thread writes the files


@attrs.define
class RemoteCapture:
    """A capture whose files are in the output directory of another host."""

    remote_output: Path
    local_output: Path
    request: CaptureRequest
    answer: Answer
    server: SimulatedServer
    capture: CaptureRecord

    @property
    def source(self) -> Path:
        return self.remote_output / DIRECTORY

    @property
    def copies(self) -> Path:
        return self.local_output / DIRECTORY

    def names(self) -> list[str]:
        """Return the names of the local files, except the target's manifest."""
        return sorted(path.name for path in self.copies.iterdir() if not path.name.startswith("target."))

    def grow_trace(self, size_bytes: int) -> None:
        """Add about `size_bytes` of events to the trace."""
        path = self.source / TRACE
        document = json.loads(path.read_text())
        event = document["traceEvents"][0] | {"args": {"text": "x" * 1000}}
        document["traceEvents"] += [event] * (size_bytes // len(json.dumps(event)))
        path.write_text(json.dumps(document))
        self.update_manifest(size_bytes=path.stat().st_size, events=len(document["traceEvents"]))

    def update_manifest(self, **changes: Any) -> None:
        """Change the trace's fields in the manifest of rank 0."""
        path = self.source / MANIFEST
        document = json.loads(path.read_text())
        document["artifacts"][0] |= changes
        path.write_text(json.dumps(document))

    async def collect(self, *, fetch: bool = True, limit_s: float = 30, engine: Engine | None = None) -> RankFiles:
        """Collect the files as the stop of a capture does."""
        engine = engine or HttpEngine(self.server.url, timeout_s=limit_s)
        collection = RankFiles(self.capture, self.request)
        try:
            await collection.collect(
                engine,
                self.answer,
                fetch=fetch,
                deadline_s=time.monotonic() + limit_s,
                timeout_message="The time limit has expired.",
            )
        finally:
            await engine.close()
        return collection


RemoteCheck = Callable[[RemoteCapture], Awaitable[None]]


@pytest.fixture
def run_remote(make_engine: Callable[..., Any], tmp_path: Path) -> Callable[..., None]:
    """Function that runs a check with a capture on another host and that host's server.

    The replies of the ranks in `silent` are omitted.
    """

    def run(check: RemoteCheck, ranks: int = 1, silent: tuple[int, ...] = (), **options: Any) -> None:
        remote_output, local_output = tmp_path / "there", tmp_path / "here"
        request = CaptureRequest(
            id="step1", output=remote_output, run="run", role="rollout", first_step=1, ranks="all", options=options
        )
        engine = make_engine(ranks)

        async def main() -> None:
            async with SimulatedServer(engine, host="elsewhere", output=str(remote_output)) as server:
                server.served_directory = remote_output
                await engine.command("start", unstructure(request))
                engine.iterate(3)
                await engine.command("stop", {"request": "step1"})
                replies = [
                    attrs.evolve(structure(data, Reply, where=""), host="elsewhere") for data in await await_end(engine)
                ]
                capture = CaptureRecord(
                    id="step1",
                    directory=local_output / DIRECTORY,
                    identity=Identity(role="rollout"),
                    first_step=1,
                    current_step=1,
                    target=server.url,
                    request=request,
                    expected_ranks=tuple(range(ranks)),
                )
                capture.directory.mkdir(parents=True)
                (local_output / "run" / "run.json").write_text('{"roles": []}')
                answer = Answer(ranks=tuple(reply for reply in replies if reply.rank not in silent))
                local_request = attrs.evolve(request, output=local_output)
                await check(
                    RemoteCapture(
                        remote_output=remote_output,
                        local_output=local_output,
                        request=local_request,
                        answer=answer,
                        server=server,
                        capture=capture,
                    )
                )
                assert temporary_files(local_output) == []

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


# Captures.


def test_files_on_other_hosts_are_downloaded_into_the_run(
    build_profiler: BuildProfiler, make_engine: Callable[..., Any], load_manifest: LoadManifest, tmp_path: Path
) -> None:
    async def main() -> None:
        async with simulated_servers(3) as servers:
            engines = []
            for number, server in enumerate(servers):
                host_output = tmp_path / f"host{number}"
                server.engine = engine = make_engine(ranks=2, output=host_output)
                server.served_directory, server.host, server.output = host_output, f"host{number}", str(host_output)
                engines.append(engine)
            async with build_profiler([server.url for server in servers]).capture(1):
                for engine in engines:
                    engine.iterate(2)
            for server in servers:
                assert sorted(requested_files(server)) == sorted(
                    f"rank_000{rank}.step1.{suffix}" for rank in (0, 1) for suffix in ("json", "trace.json")
                )

    asyncio.run(asyncio.wait_for(main(), 60))
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems, len(report.captures)) == (Status.COMPLETE, (), 3)
    assert [record.outcome for record in load_manifest().targets] == [Outcome.FLUSHED] * 3
    for number in range(3):
        directory = f"run/step_000001/rollout/replica_{number:03d}"
        note = load_manifest(replica=number).notes[-1]
        assert note.startswith("Fetched 2 artifacts (")
        assert f"from host{number} in " in note
        for rank in range(2):
            name = f"rank_000{rank}.step1.json"
            original, copy = tmp_path / f"host{number}" / directory / name, tmp_path / directory / name
            document = json.loads(copy.read_text())
            assert document.pop("collected_from") == f"host{number}:{original}"
            original_document = json.loads(original.read_text())
            original_document.pop("collected_from", None)
            assert document == original_document
            trace = name.replace(".json", ".trace.json")
            assert copy.with_name(trace).read_bytes() == original.with_name(trace).read_bytes()
    assert temporary_files(tmp_path / "run") == []


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_files_in_a_shared_directory_are_not_downloaded(
    build_profiler: BuildProfiler, make_engine: Callable[..., Any], tmp_path: Path, host: str
) -> None:
    """The path of the directory may differ between the hosts."""
    mounted = tmp_path.with_name("mounted-elsewhere")
    mounted.symlink_to(tmp_path)

    async def main() -> None:
        async with SimulatedServer(make_engine(ranks=2, output=mounted), host=host, output=str(mounted)) as server:
            async with build_profiler([server.url]).capture(1):
                server.engine.iterate(2)
            assert requested_files(server) == []

    asyncio.run(asyncio.wait_for(main(), 60))
    mounted.unlink()
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    for file in (tmp_path / DIRECTORY / "replica_000").glob("rank_*.step1.json"):
        assert read_manifest(file).collected_from is None


def test_files_are_not_downloaded_if_collect_is_off(
    build_profiler: BuildProfiler, make_engine: Callable[..., Any], load_manifest: LoadManifest, tmp_path: Path
) -> None:
    host_output = tmp_path / "there"

    async def main() -> None:
        async with SimulatedServer(
            make_engine(output=host_output), host="elsewhere", output=str(host_output)
        ) as server:
            server.served_directory = host_output
            profiler = build_profiler([server.url], {"rollout.options.collect": False})
            with pytest.raises(CaptureError):
                async with profiler.capture(1):
                    server.engine.iterate(2)
            assert requested_files(server) == []

    asyncio.run(asyncio.wait_for(main(), 60))
    (record,) = load_manifest().targets
    assert record.outcome is Outcome.FILES_MISSING
    (problem,) = load_manifest(replica=0).problems
    source, directory = host_output / DIRECTORY / "replica_000", tmp_path / DIRECTORY / "replica_000"
    assert problem == (
        f"Files of rank 0 are on {socket.gethostname()}, in {source}, not accessible from this "
        f"host ({socket.gethostname()}). The option collect is off. Fetch them with "
        f"`profdeck collect {tmp_path / 'run'}`, or set output to a directory that all hosts share."
    )
    assert [path.name for path in directory.iterdir()] == ["target.step1.json"]


def test_downloaded_traces_are_merged(
    build_profiler: BuildProfiler, make_engine: Callable[..., Any], load_manifest: LoadManifest, tmp_path: Path
) -> None:
    host_output = tmp_path / "there"

    async def main() -> None:
        async with SimulatedServer(
            make_engine(ranks=2, output=host_output), host="elsewhere", output=str(host_output)
        ) as server:
            server.served_directory = host_output
            async with build_profiler([server.url], {"rollout.options.merge": True}).capture(1):
                server.engine.iterate(2)

    asyncio.run(asyncio.wait_for(main(), 60))
    (merged,) = load_manifest(replica=0).artifacts
    assert (merged.kind, merged.whole) == ("merged_trace", True)
    ranks = [read_manifest(file) for file in (tmp_path / DIRECTORY / "replica_000").glob("rank_*.step1.json")]
    assert len(ranks) == 2
    assert (merged.events or 0) > sum(rank.artifacts[0].events or 0 for rank in ranks)


# Validation of files and manifests.


def test_manifest_of_another_capture_is_not_overwritten(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        for name in (MANIFEST, TRACE):
            shutil.copy(remote.source / name, remote.copies / name)
        path = remote.copies / MANIFEST
        path.write_text(path.read_text().replace(remote.request.token, "0" * 16))
        content = path.read_bytes()
        collection = await remote.collect()
        assert (collection.complete, collection.manifests) == (False, [])
        (problem,) = remote.capture.problems
        assert "Files of rank 0 are on elsewhere" in problem
        assert f"Another capture already has a file of this name: {path}." in problem
        assert path.read_bytes() == content
        assert requested_files(remote.server) == [MANIFEST]

    run_remote(check)


def test_different_trace_of_the_same_name_is_not_overwritten(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        (remote.copies / TRACE).write_bytes(b"x" * (remote.source / TRACE).stat().st_size)
        assert not (await remote.collect()).complete
        (problem,) = remote.capture.problems
        assert f"Files of rank 0 ({TRACE}) are on elsewhere, in {remote.source}" in problem
        assert "Another file already has this name: " in problem
        assert (remote.copies / TRACE).read_bytes()[:1] == b"x"
        assert read_run(remote.local_output / "run").status is Status.PARTIAL

    run_remote(check)


def test_manifests_without_a_request_token(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        path = remote.source / MANIFEST
        document = json.loads(path.read_text()) | {"host": "elsewhere"}
        del document["request_token"]
        path.write_text(json.dumps(document))
        (remote.copies / MANIFEST).write_text(json.dumps(document | {"pid": 1}))
        assert not (await remote.collect()).complete
        shutil.copy(path, remote.copies / MANIFEST)
        request_count = len(remote.server.arrivals)
        assert (await remote.collect()).manifests == [remote.copies / MANIFEST]
        assert len(remote.server.arrivals) == request_count

    run_remote(check)


def test_shared_manifest_that_becomes_visible_late_is_accepted(
    run_remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(remote: RemoteCapture) -> None:
        for name in (MANIFEST, TRACE):
            shutil.copy(remote.source / name, remote.copies / name)
        monkeypatch.setattr(RankFiles, "_read_local_manifests", lambda *_: {})
        collection = await remote.collect()
        assert (collection.complete, collection.manifests) == (True, [remote.copies / MANIFEST])
        assert read_manifest(remote.copies / MANIFEST).collected_from is None

    run_remote(check)


def test_unknown_manifest_keys_are_kept_and_newer_formats_are_rejected(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        path = remote.source / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"later": [1]}))
        await remote.collect()
        assert json.loads((remote.copies / MANIFEST).read_text())["later"] == [1]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
        (remote.copies / MANIFEST).unlink()
        assert not (await remote.collect()).complete
        assert "has a newer format" in remote.capture.problems[-1]

    run_remote(check)


def test_manifest_of_a_rank_without_files_is_downloaded(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        path = remote.source / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed", "artifacts": []}))
        assert (await remote.collect()).complete
        (capture,) = read_run(remote.local_output / "run").captures
        assert capture.status is Status.FAILED

    run_remote(check)


# Ranks without a reply.


def test_ranks_without_a_reply_are_found_by_their_manifests(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        for other_name in ("rank_0002.step10.json", "rank_0002.step1-take2.json", "rank_0007.step1.json"):
            text = (remote.source / "rank_0002.step1.json").read_text()
            (remote.source / other_name).write_text(text.replace(remote.request.token, "0" * 16))
        collection = await remote.collect()
        assert collection.complete, remote.capture.problems
        assert [path.name for path in collection.manifests] == [f"rank_000{rank}.step1.json" for rank in range(3)]
        assert "rank_0007.step1.json" not in requested_files(remote.server)
        assert remote.names() == sorted(
            f"rank_000{rank}.step1.{suffix}" for rank in range(3) for suffix in ("json", "trace.json")
        )

    run_remote(check, ranks=3, silent=(1, 2))


def test_ranks_without_files_on_the_server_host_are_reported(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        (remote.source / "rank_0001.step1.json").unlink()
        (remote.source / "rank_0002.step1.json").unlink()
        assert not (await remote.collect()).complete
        replied, silent = remote.capture.problems
        assert replied.startswith(
            f"Files of rank 1 are on elsewhere, in {remote.source}, not accessible from this host"
        )
        assert "returned status 404: No capture file 'run/step_000001/rollout/rank_0001.step1.json' found" in replied
        assert silent.startswith(f"Files of rank 2 are on another host, in {remote.remote_output}, not accessible")
        assert "They are not on elsewhere, the server's host" in silent

    run_remote(check, ranks=3, silent=(2,))


def test_collection_waits_for_a_rank_without_a_reply(
    run_remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_POLL_S", 0.01)

    async def check(remote: RemoteCapture) -> None:
        path = remote.source / "rank_0001.step1.json"
        complete_text = path.read_text()
        path.write_text(json.dumps(json.loads(complete_text) | {"status": "recording", "artifacts": []}))
        collecting = asyncio.create_task(remote.collect())
        await remote.server.wait_for_command(path.name, 3)
        path.write_text(complete_text)
        assert (await collecting).complete
        path.write_text(complete_text.replace('"complete"', '"recording"'))
        (remote.copies / path.name).unlink()
        monkeypatch.setattr(downloads, "_MAX_WAIT_S", 0.05)
        assert not (await remote.collect()).complete
        assert "Its process was still recording." in remote.capture.problems[-1]

    run_remote(check, ranks=2, silent=(1,))


def test_reply_without_a_host_counts_as_missing(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        (first, second) = remote.answer.ranks
        remote.answer = Answer(ranks=(first, attrs.evolve(second, host="", captures=(), state=RequestState.ENDED)))
        assert (await remote.collect()).complete
        assert len(remote.names()) == 4

    run_remote(check, ranks=2)


# Engines without a file route.


class EngineObject(Engine):
    """An engine object in this process. Its ranks may be on other hosts."""

    name = "object"
    blocking = True

    async def has_profdeck(self) -> bool:
        return True

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:  # noqa: ARG002  # base class signature
        raise AssertionError(command)


def test_files_of_an_engine_object_on_another_host_are_reported(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        for name in (MANIFEST, TRACE):
            shutil.copy(remote.source / name, remote.copies / name)
        collection = await remote.collect(engine=EngineObject())
        assert [path.name for path in collection.manifests] == [MANIFEST]
        (problem,) = remote.capture.problems
        assert problem.startswith(
            f"Files of rank 1, rank 2, rank 3, rank 4, 1 more are on elsewhere, in {remote.source}"
        )
        assert "The engine has no server that can send them." in problem

    run_remote(check, ranks=6)


def test_server_without_the_file_route_is_reported(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        remote.server.served_directory = None
        remote.server.acts[MANIFEST] = [Act(status=404, content=b'{"detail":"Not Found"}')]
        remote.server.version = "0.0.9"
        assert not (await remote.collect()).complete
        (problem,) = remote.capture.problems
        assert f"Profdeck 0.0.9 of {remote.server.url} has no route for files." in problem

    run_remote(check)


# Failures.


def file_response(remote: RemoteCapture, name: str = TRACE) -> bytes:
    """Return the server's HTTP response for a file, as bytes."""
    content = (remote.source / name).read_bytes()
    status = (remote.source / name).stat()
    tag = f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"'
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(content)}\r\n"
    return f"{head}ETag: {tag}\r\n\r\n".encode() + content


def test_server_that_exits_during_a_download(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        remote.grow_trace(3_000_000)
        response = file_response(remote)
        remote.server.acts[TRACE] = [Act(raw=response[:1_500_000], hang=True)]
        collecting = asyncio.create_task(remote.collect())
        await remote.server.wait_for_command(TRACE)
        await remote.server.stop()
        assert not (await collecting).complete
        (problem,) = remote.capture.problems
        assert "cannot be reached: Connection refused" in problem
        assert remote.names() == [MANIFEST]
        (rank,) = read_run(remote.local_output / "run").captures[0].ranks
        assert rank.status is Status.MISSING
        assert rank.problems[0].startswith(
            f"{TRACE}: not on this host but at elsewhere:{remote.source / TRACE}: {remote.server.url}"
        )
        await remote.server.start()  # the fixture stops it again

    run_remote(check)


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "expected"),
        (lambda path: path.write_bytes(b"{" * path.stat().st_size), "The download is corrupt"),
        (Path.unlink, "returned status 404"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "returned status 404"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
    ],
)
def test_file_that_does_not_match_its_manifest_is_rejected(
    run_remote: Callable[..., None], corrupt: Callable[[Path], None], reason: str
) -> None:
    async def check(remote: RemoteCapture) -> None:
        corrupt(remote.source / TRACE)
        assert not (await remote.collect()).complete
        (problem,) = remote.capture.problems
        assert reason in problem
        assert remote.names() == [MANIFEST]

    run_remote(check)


def test_truncated_trace_that_its_manifest_declares_is_downloaded(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        path = remote.source / TRACE
        path.write_bytes(path.read_bytes()[:-10])
        remote.update_manifest(size_bytes=path.stat().st_size, whole=False, problem="cut off")
        assert (await remote.collect()).complete
        (rank,) = read_run(remote.local_output / "run").captures[0].ranks
        assert rank.status is Status.PARTIAL
        assert rank.problems[0].startswith(f"{TRACE}: ")

    run_remote(check)


@pytest.mark.parametrize(
    "name", ["../../../../x", "/etc/passwd", "other.trace.json", "rank_0000.step1.a/../../../x", ""]
)
def test_artifact_names_outside_of_the_capture_are_rejected(run_remote: Callable[..., None], name: str) -> None:
    async def check(remote: RemoteCapture) -> None:
        remote.update_manifest(name=name)
        assert not (await remote.collect()).complete
        (problem,) = remote.capture.problems
        assert f"{name!r}" in problem
        assert remote.names() == []

    run_remote(check)


@pytest.mark.parametrize("path", ["/x/../../up.json", "", "/", "/x/.hidden.json", "/x/rank_0\0.json"])
def test_manifest_paths_outside_of_the_run_are_not_requested(run_remote: Callable[..., None], path: str) -> None:
    async def check(remote: RemoteCapture) -> None:
        (reply,) = remote.answer.ranks
        recorded = attrs.evolve(reply.captures[0], manifest=path)
        remote.answer = Answer(ranks=(attrs.evolve(reply, captures=(recorded,)),))
        await remote.collect()
        assert requested_files(remote.server) == []
        assert remote.names() == []

    run_remote(check)


def test_file_requests_need_the_token(run_remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(remote: RemoteCapture) -> None:
        remote.server.acts[TRACE] = [Act(status=401, error="The token is missing or wrong.")]
        assert not (await remote.collect()).complete
        assert "returned status 401: The token is missing or wrong." in remote.capture.problems[0]
        remote.server.acts = {}
        remote.server.token = "a secret"  # noqa: S105  # used only in this test
        assert not (await remote.collect()).complete
        monkeypatch.setenv("PROFDECK_TOKEN", "a secret")
        assert (await remote.collect()).complete

    run_remote(check)


def test_collection_after_a_full_disk_downloads_only_missing_files(
    run_remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def check(remote: RemoteCapture) -> None:
        with monkeypatch.context() as context:
            context.setattr(file_transfer, "write_all", raise_disk_full)
            assert not (await remote.collect()).complete
        (problem,) = remote.capture.problems
        assert "No space left on device" in problem
        assert remote.names() == [MANIFEST]
        assert (await remote.collect()).complete
        assert requested_files(remote.server) == [MANIFEST, TRACE] * 2
        assert read_run(remote.local_output / "run").captures[0].status is Status.COMPLETE

    run_remote(check)


def test_file_larger_than_the_free_space_is_not_requested(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        remote.update_manifest(size_bytes=1 << 60)
        assert not (await remote.collect()).complete
        (problem,) = remote.capture.problems
        assert f"{1 << 60:,} bytes are required, " in problem
        assert requested_files(remote.server) == [MANIFEST]

    run_remote(check)


def test_unwritable_directory_is_reported(run_remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(remote: RemoteCapture) -> None:
        remote.copies.rmdir()
        remote.copies.write_text("not a directory")
        monkeypatch.setattr(RankFiles, "_read_local_manifests", lambda *_: {})
        await remote.collect()
        (problem,) = remote.capture.problems
        assert "FileExistsError" in problem

    run_remote(check)


def test_download_is_cancelled_at_the_deadline(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        remote.server.acts[TRACE] = [Act(raw=file_response(remote)[:-5], hang=True)]
        engine = HttpEngine(remote.server.url, timeout_s=30)
        collection = RankFiles(remote.capture, remote.request)
        deadline_s = time.monotonic() + 0.5
        await collection.collect(
            engine, remote.answer, fetch=True, deadline_s=deadline_s, timeout_message="Time limit: 0.5 s"
        )
        await engine.close()
        (problem,) = remote.capture.problems
        assert "Time limit: 0.5 s." in problem
        assert remote.names() == [MANIFEST]

    run_remote(check)


def test_no_request_is_sent_after_the_deadline(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        assert not (await remote.collect(limit_s=0.0)).complete
        assert (remote.names(), remote.server.connection_count) == ([], 0)

    run_remote(check)


def test_cancelled_collection_records_missing_files(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        remote.grow_trace(3_000_000)
        remote.server.acts[TRACE] = [Act(raw=file_response(remote)[:2_000_000], hang=True)]
        collecting = asyncio.create_task(remote.collect())
        await remote.server.wait_for_command(TRACE)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        assert remote.names() == [MANIFEST]
        (record,) = read_manifest(remote.copies / MANIFEST).artifacts
        location = f"elsewhere:{remote.source / TRACE}"
        assert record.problem == f"not on this host but at {location}: it has not been downloaded yet"
        remote.server.acts = {}
        assert (await remote.collect()).complete

    run_remote(check)


def test_concurrent_collections_are_all_complete(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        remote.grow_trace(3_000_000)
        remote.server.acts[TRACE] = [Act(delay_s=0.05)]
        for collection in await asyncio.gather(*(remote.collect() for _ in range(4))):
            assert (collection.complete, len(collection.manifests)) == (True, 2)
        assert read_run(remote.local_output / "run").captures[0].status is Status.COMPLETE
        assert len(remote.names()) == 4

    run_remote(check, ranks=2)


def test_number_of_concurrent_downloads_is_limited(
    run_remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(remote: RemoteCapture) -> None:
        max_connections = 0
        answer = remote.server.answer

        async def counted_answer(*arguments: Any) -> tuple[int, bytes]:
            nonlocal max_connections
            max_connections = max(max_connections, len(remote.server.connections))
            await asyncio.sleep(0)
            return await answer(*arguments)

        monkeypatch.setattr(remote.server, "answer", counted_answer)
        assert (await remote.collect()).complete
        assert max_connections == downloads._MAX_DOWNLOADS

    run_remote(check, ranks=40)


# Directories of torch_npu.


def write_ascend_directory(remote: RemoteCapture) -> Path:
    """Replace the trace by a directory with raw data of an Ascend profiler."""
    directory = remote.source / "rank_0000.step1_4711_20260101_ascend_pt"
    for name, size in (("profiler_info_0.json", 20), ("FRAMEWORK/torch.op_range", 0), ("PROF_1/device_0/data", 90_000)):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (directory / "leads-away").symlink_to("/etc/hostname")
    (remote.source / TRACE).unlink()
    remote.update_manifest(name=directory.name, kind="ascend_pt", size_bytes=90_020, events=None)
    return directory


def read_files(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_directory_is_downloaded_without_its_links(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        directory = write_ascend_directory(remote)
        assert (await remote.collect()).complete, remote.capture.problems
        copy = remote.copies / directory.name
        assert read_files(copy) == read_files(directory)
        assert not (copy / "leads-away").exists()

    run_remote(check)


def test_incomplete_directory_is_not_kept(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        directory = write_ascend_directory(remote)
        remote.server.acts["data"] = [Act(status=403, error="not available")]
        assert not (await remote.collect()).complete
        assert "not available" in remote.capture.problems[0]
        assert remote.names() == [MANIFEST]
        remote.server.acts = {"data": [Act(raw=file_response(remote, f"{directory.name}/profiler_info_0.json"))]}
        assert not (await remote.collect()).complete
        assert "has 20 bytes, expected 90,000" in remote.capture.problems[1]
        assert remote.names() == [MANIFEST]
        remote.server.acts = {}
        assert (await remote.collect()).complete

    run_remote(check)


def test_collection_waits_for_the_analysis_of_a_directory(
    run_remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_POLL_S", 0.01)

    async def check(remote: RemoteCapture) -> None:
        from profdeck.base.processes import ProcessId

        directory, process = write_ascend_directory(remote), ProcessId()
        state = AnalysisState(
            state="running", host=process.host, pid=process.pid, process_started=process.process_started, started_ns=1
        )
        write_state(directory, state)
        collecting = asyncio.create_task(remote.collect())
        await remote.server.wait_for_command(directory.name, 3)
        (directory / "ASCEND_PROFILER_OUTPUT").mkdir()
        (directory / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").write_text("[]")
        write_state(directory, AnalysisState(**attrs.asdict(state) | {"state": "done"}))
        assert (await collecting).complete
        assert read_files(remote.copies / directory.name) == read_files(directory)

    run_remote(check)


def test_file_names_outside_of_a_directory_are_rejected(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        directory = write_ascend_directory(remote)
        files = json.dumps({"files": [{"name": "../../x", "size_bytes": 1}]}).encode()
        remote.server.acts[directory.name] = [Act(content=files)]
        assert not (await remote.collect()).complete
        assert "contains '../../x', which points outside the directory" in remote.capture.problems[0]
        assert remote.names() == [MANIFEST]

    run_remote(check)


def test_merge_skips_missing_traces(run_remote: Callable[..., None], tally: ModuleType) -> None:
    from profdeck.engine.control.merging import merge_ranks

    async def check(remote: RemoteCapture) -> None:
        (remote.source / TRACE).unlink()
        collection = await remote.collect()
        (merged,) = merge_ranks(remote.capture, collection.manifests)
        assert isinstance(merged, Artifact)
        assert (merged.whole, merged.problem) == (True, None)

    run_remote(check, ranks=2)


def test_unwritten_artifact_is_not_requested(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        (remote.source / TRACE).unlink()
        remote.update_manifest(size_bytes=0, whole=False, problem="the disk was full", events=None)
        for _ in range(2):
            assert (await remote.collect()).complete
        assert requested_files(remote.server) == [MANIFEST]
        (rank,) = read_run(remote.local_output / "run").captures[0].ranks
        assert rank.problems == (f"{TRACE}: the disk was full",)

    run_remote(check)


def test_file_larger_than_declared_is_rejected(run_remote: Callable[..., None]) -> None:
    async def check(remote: RemoteCapture) -> None:
        remote.grow_trace(3_000_000)
        remote.update_manifest(size_bytes=2_000_000)
        assert not (await remote.collect()).complete
        assert "the file has more than 2,000,000 bytes" in remote.capture.problems[0]

    run_remote(check)


# Later collection.


@attrs.define
class UncollectedRun:
    """A run of two servers. Its files are on their hosts."""

    directory: Path
    host_outputs: list[Path]
    servers: list[SimulatedServer]

    def names(self, replica: int) -> list[str]:
        directory = self.directory / "step_000001/rollout" / f"replica_{replica:03d}"
        return sorted(path.name for path in directory.iterdir() if not path.name.startswith("target."))

    async def collect(self) -> list[Collected]:
        return await collect_run(self.directory, limit_s=30)


@pytest.fixture
def run_uncollected(
    build_profiler: BuildProfiler, make_engine: Callable[..., Any], tmp_path: Path
) -> Callable[..., None]:
    """Function that runs a check with a run whose files are still on the servers' hosts."""

    def run(check: Callable[[UncollectedRun], Awaitable[None]]) -> None:
        async def main() -> None:
            async with simulated_servers(2) as servers:
                host_outputs = [tmp_path / f"host{number}" for number in range(2)]
                for server, host_output in zip(servers, host_outputs, strict=True):
                    server.engine = make_engine(ranks=2, output=host_output)
                    server.served_directory, server.host, server.output = (
                        host_output,
                        host_output.name,
                        str(host_output),
                    )
                profiler = build_profiler(
                    [server.url for server in servers], {"rollout.options.collect": False, "on_error": "warn"}
                )
                async with profiler.capture(1):
                    for server in servers:
                        server.engine.iterate(2)
                await check(UncollectedRun(tmp_path / "run", host_outputs, servers))

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


ALL_NAMES = [f"rank_000{rank}.step1.{suffix}" for rank in (0, 1) for suffix in ("json", "trace.json")]


def test_later_collection_completes_the_run_and_is_idempotent(
    run_uncollected: Callable[..., None], load_manifest: LoadManifest
) -> None:
    async def check(run: UncollectedRun) -> None:
        assert read_run(run.directory).status is Status.MISSING
        results = await run.collect()
        assert [(result.role_and_replica, result.capture, result.problems) for result in results] == [
            (f"rollout/{replica}", "step1", ()) for replica in (0, 1)
        ]
        for replica, result in enumerate(results):
            assert result.notes[0].startswith("Fetched 2 artifacts (")
            assert run.names(replica) == ALL_NAMES
        report = read_run(run.directory)
        assert (report.status, report.problems, len(report.captures)) == (Status.COMPLETE, (), 2)
        fleet = load_manifest()
        assert (fleet.status, fleet.problems) == (Status.COMPLETE, ())
        assert [(record.outcome, record.reason, record.fix) for record in fleet.targets] == [
            (Outcome.FLUSHED, None, None)
        ] * 2
        request_counts = [len(requested_files(server)) for server in run.servers]
        assert await run.collect() == []
        assert [len(requested_files(server)) for server in run.servers] == request_counts
        assert temporary_files(run.directory) == []

    run_uncollected(check)


@pytest.mark.parametrize(
    "problem",
    [
        "After flush_timeout_s=1 seconds, the files of rank 0 on elsewhere (writing) are not complete.",
        "The engine did not reply to the stop: http://elsewhere:1 cannot be reached: no connection within 5 seconds.",
        # Messages of earlier versions.
        "After flush_timeout_s=1 seconds, the files of rank 0 on elsewhere (writing) are not whole.",
        "It did not answer at its stop: http://elsewhere:1 cannot be reached: no connection within 5 seconds.",
        "Files of rank 0 are on elsewhere, in /run, which cannot be seen from here (here). The option collect is off.",
    ],
)
def test_later_collection_removes_problems_of_late_files(run_uncollected: Callable[..., None], problem: str) -> None:
    async def check(run: UncollectedRun) -> None:
        file = run.directory / "step_000001" / "rollout" / "replica_000" / "target.step1.json"
        for _ in range(2):  # first with files on the servers' hosts, then with local copies
            document = json.loads(file.read_text())
            file.write_text(json.dumps(document | {"status": "partial", "problems": [*document["problems"], problem]}))
            assert read_run(run.directory).status is not Status.COMPLETE
            results = await run.collect()
            assert [result.problems for result in results if result.manifest == file] == [()]
            assert read_run(run.directory).status is Status.COMPLETE

    run_uncollected(check)


def test_files_are_served_after_a_later_capture(run_uncollected: Callable[..., None]) -> None:
    async def check(run: UncollectedRun) -> None:
        for server in run.servers:
            other = CaptureRequest(id="step7", output=Path(server.output), run="other", role="rollout", ranks="all")
            await server.engine.command("start", unstructure(other))
            server.engine.iterate(1)
            await server.engine.command("stop", {"request": "step7"})
            await await_end(server.engine)
        assert [result.problems for result in await run.collect()] == [(), ()]
        assert [run.names(replica) for replica in (0, 1)] == [ALL_NAMES] * 2
        assert read_run(run.directory).status is Status.COMPLETE

    run_uncollected(check)


def test_deleted_and_changed_files_are_reported_and_others_downloaded(
    run_uncollected: Callable[..., None], load_manifest: LoadManifest
) -> None:
    async def check(run: UncollectedRun) -> None:
        directory = "run/step_000001/rollout/replica_000"
        (run.host_outputs[0] / directory / "rank_0000.step1.trace.json").unlink()
        changed = run.host_outputs[0] / directory / "rank_0001.step1.trace.json"
        text = changed.read_text()
        changed.write_text(text[:-9])
        first, second = await run.collect()
        assert second.problems == ()
        assert "rank 0 (rank_0000.step1.trace.json)" in " ".join(first.problems)
        assert "rank 1 (rank_0001.step1.trace.json)" in " ".join(first.problems)
        assert run.names(0) == ["rank_0000.step1.json", "rank_0001.step1.json"]
        assert run.names(1) == ALL_NAMES
        fleet = load_manifest()
        assert (fleet.status, fleet.problems) == (
            Status.PARTIAL,
            ("1 of 2 targets are not complete: 1 files_missing.",),
        )
        assert [record.outcome for record in fleet.targets] == [Outcome.FILES_MISSING, Outcome.FLUSHED]
        changed.write_text(text)
        (remaining,) = await run.collect()
        assert run.names(0) == ALL_NAMES[:1] + ALL_NAMES[2:]
        assert "rank 1" not in " ".join(remaining.problems)
        assert read_run(run.directory).status is not Status.COMPLETE

    run_uncollected(check)


def test_stopped_server_affects_only_its_own_files(run_uncollected: Callable[..., None]) -> None:
    async def check(run: UncollectedRun) -> None:
        await run.servers[0].stop()
        first, second = await run.collect()
        assert run.servers[0].url.removeprefix("http://") in first.problems[0]
        assert (second.problems, run.names(1)) == ((), ALL_NAMES)
        assert (run.directory / "step_000001/rollout/replica_000/target.step1.json").exists()

    run_uncollected(check)


def test_capture_of_a_killed_driver_is_collected_as_partial(run_uncollected: Callable[..., None]) -> None:
    async def check(run: UncollectedRun) -> None:
        file = run.directory / "step_000001/rollout/replica_000/target.step1.json"
        changes = {"status": "recording", "pid": 2**22 + 1, "process_started": "1", "problems": [], "ended_ns": None}
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        first, second = await run.collect()
        assert (run.names(0), second.problems) == (ALL_NAMES, ())
        assert first.problems == (
            f"Process {2**22 + 1} on {socket.gethostname()} requested this capture but has not ended it.",
        )
        assert read_manifest(file).status is Status.PARTIAL
        assert await run.collect() == []

    run_uncollected(check)


def test_deleted_copy_is_downloaded_again(run_uncollected: Callable[..., None]) -> None:
    async def check(run: UncollectedRun) -> None:
        await run.collect()
        (run.directory / "step_000001/rollout/replica_001" / TRACE).unlink()
        assert read_run(run.directory).status is not Status.COMPLETE
        (result,) = await run.collect()
        assert result.problems == ()
        assert read_run(run.directory).status is Status.COMPLETE

    run_uncollected(check)


def test_collect_command_reports_downloaded_and_missing_files(
    run_uncollected: Callable[..., None], tmp_path: Path
) -> None:
    async def check(run: UncollectedRun) -> None:
        (run.host_outputs[0] / "run/step_000001/rollout/replica_000" / TRACE).unlink()
        result = await asyncio.to_thread(CliRunner().invoke, app, ["collect", str(run.directory)])
        assert result.exit_code == 1
        first, *_, last = result.stdout.splitlines()
        assert first.startswith("rollout/0 step1: Fetched 1 artifact (")
        assert last.startswith("1 of 2 engine captures are complete. Next: profdeck ls ")
        assert "error: Files of rank 0 (rank_0000.step1.trace.json) are on host0" in result.stderr
        shutil.copytree(tmp_path / "host1/run/step_000001/rollout/replica_001", tmp_path / "other")
        other_result = await asyncio.to_thread(CliRunner().invoke, app, ["collect", str(tmp_path / "other")])
        assert (other_result.exit_code, other_result.stdout) == (4, "")

    run_uncollected(check)
