"""Files that ranks have written on other hosts: what is here, what is fetched, and what is said of the rest."""

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

Build = Callable[..., Profiler]
Read = Callable[..., Manifest]
PLACE = "run/step_000001/rollout"
MANIFEST, TRACE = "rank_0000.step1.json", "rank_0000.step1.trace.json"


def asked_for(server: SimulatedServer) -> list[str]:
    """Return what has been fetched from a server, in the order of the requests."""
    return [arrival.command for arrival in server.arrivals if "/files/" in arrival.path]


def temporary(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.name.startswith(".")]


async def ended(engine: Any) -> list[dict[str, Any]]:
    """Wait until the files of the ranks of an engine are whole, and return what they say."""
    while True:
        replies: list[dict[str, Any]] = await engine.command("status", {})
        if {reply["state"] for reply in replies} == {"ended"}:
            return replies
        await asyncio.sleep(0.01)  # another thread writes them


@attrs.define
class Remote:
    """A capture that the ranks of an engine have written below a directory of another host."""

    there: Path
    """The output directory of that host."""
    here: Path
    """That of this one."""
    asked: CaptureRequest
    answer: Answer
    server: SimulatedServer
    capture: CaptureRecord

    @property
    def source(self) -> Path:
        return self.there / PLACE

    @property
    def copies(self) -> Path:
        return self.here / PLACE

    def names(self) -> list[str]:
        """Return what is here, but for the manifest about the target."""
        return sorted(path.name for path in self.copies.iterdir() if not path.name.startswith("target."))

    def grow(self, size_bytes: int) -> None:
        """Make the trace larger."""
        path = self.source / TRACE
        document = json.loads(path.read_text())
        event = document["traceEvents"][0] | {"args": {"text": "x" * 1000}}
        document["traceEvents"] += [event] * (size_bytes // len(json.dumps(event)))
        path.write_text(json.dumps(document))
        self.tell(size_bytes=path.stat().st_size, events=len(document["traceEvents"]))

    def tell(self, rank: int = 0, **changed: Any) -> None:
        """Change what the manifest says of the trace."""
        path = self.source / f"rank_{rank:04d}.step1.json"
        document = json.loads(path.read_text())
        document["artifacts"][0] |= changed
        path.write_text(json.dumps(document))

    async def collect(self, *, fetch: bool = True, limit_s: float = 30, engine: Engine | None = None) -> RankFiles:
        """Collect, as the stop of a capture does."""
        remote = engine or HttpEngine(self.server.url, timeout_s=limit_s)
        found = RankFiles(self.capture, self.asked)
        try:
            until = time.monotonic() + limit_s
            await found.collect(
                remote, self.answer, fetch=fetch, deadline_s=until, timeout_message="The time limit has expired."
            )
        finally:
            await remote.close()
        return found


Check = Callable[[Remote], Awaitable[None]]


@pytest.fixture
def remote(recording: Callable[..., Any], tmp_path: Path) -> Callable[..., None]:
    """Run a check with a capture on another host and the server of that host."""

    def run(check: Check, ranks: int = 1, silent: tuple[int, ...] = (), **options: Any) -> None:
        there, here = tmp_path / "there", tmp_path / "here"
        request = CaptureRequest(
            id="step1", output=there, run="run", role="rollout", first_step=1, ranks="all", options=options
        )
        engine = recording(ranks)

        async def main() -> None:
            async with SimulatedServer(engine, host="elsewhere", output=str(there)) as server:
                server.gives = there
                await engine.command("start", unstructure(request))
                engine.iterate(3)
                await engine.command("stop", {"request": "step1"})
                replies = await ended(engine)
                told = [attrs.evolve(structure(data, Reply, where=""), host="elsewhere") for data in replies]
                capture = CaptureRecord(
                    id="step1",
                    directory=here / PLACE,
                    identity=Identity(role="rollout"),
                    first_step=1,
                    current_step=1,
                    target=server.url,
                    request=request,
                    expected_ranks=tuple(range(ranks)),
                )
                capture.directory.mkdir(parents=True)
                (here / "run" / "run.json").write_text('{"roles": []}')
                answer = Answer(ranks=tuple(reply for reply in told if reply.rank not in silent))
                asked = attrs.evolve(request, output=here)
                await check(Remote(there=there, here=here, asked=asked, answer=answer, server=server, capture=capture))
                assert temporary(here) == []

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


# What a host sees.


def test_files_of_other_hosts_come_into_the_run(
    build: Build, recording: Callable[..., Any], manifest: Read, tmp_path: Path
) -> None:
    async def main() -> None:
        async with simulated_servers(3) as servers:
            engines = []
            for number, server in enumerate(servers):
                there = tmp_path / f"host{number}"
                server.engine = engine = recording(ranks=2, output=there)
                server.gives, server.host, server.output = there, f"host{number}", str(there)
                engines.append(engine)
            async with build([server.url for server in servers]).capture(1):
                for engine in engines:
                    engine.iterate(2)
            for server in servers:
                assert sorted(asked_for(server)) == sorted(
                    f"rank_000{rank}.step1.{suffix}" for rank in (0, 1) for suffix in ("json", "trace.json")
                )

    asyncio.run(asyncio.wait_for(main(), 60))
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems, len(report.captures)) == (Status.COMPLETE, (), 3)
    assert [record.outcome for record in manifest().targets] == [Outcome.FLUSHED] * 3
    for number in range(3):
        place = f"run/step_000001/rollout/replica_{number:03d}"
        note = manifest(replica=number).notes[-1]
        assert note.startswith("Fetched 2 artifacts (")
        assert f"from host{number} in " in note
        for rank in range(2):
            name = f"rank_000{rank}.step1.json"
            there, here = tmp_path / f"host{number}" / place / name, tmp_path / place / name
            copy = json.loads(here.read_text())
            assert copy.pop("collected_from") == f"host{number}:{there}"
            assert copy == {
                key: value for key, value in json.loads(there.read_text()).items() if key != "collected_from"
            }
            trace = name.replace(".json", ".trace.json")
            assert here.with_name(trace).read_bytes() == there.with_name(trace).read_bytes()
    assert temporary(tmp_path / "run") == []


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_nothing_is_fetched_from_a_directory_that_hosts_share(
    build: Build, recording: Callable[..., Any], tmp_path: Path, host: str
) -> None:
    """Whatever it is called there."""
    other = tmp_path.with_name("mounted-elsewhere")
    other.symlink_to(tmp_path)

    async def main() -> None:
        async with SimulatedServer(recording(ranks=2, output=other), host=host, output=str(other)) as server:
            async with build([server.url]).capture(1):
                server.engine.iterate(2)
            assert asked_for(server) == []

    asyncio.run(asyncio.wait_for(main(), 60))
    other.unlink()
    report = read_run(tmp_path / "run")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    for file in (tmp_path / PLACE / "replica_000").glob("rank_*.step1.json"):
        assert read_manifest(file).collected_from is None


def test_they_can_stay_where_they_are(
    build: Build, recording: Callable[..., Any], manifest: Read, tmp_path: Path
) -> None:
    there = tmp_path / "there"

    async def main() -> None:
        async with SimulatedServer(recording(output=there), host="elsewhere", output=str(there)) as server:
            server.gives = there
            profiler = build([server.url], {"rollout.options.collect": False})
            with pytest.raises(CaptureError):
                async with profiler.capture(1):
                    server.engine.iterate(2)
            assert asked_for(server) == []

    asyncio.run(asyncio.wait_for(main(), 60))
    (record,) = manifest().targets
    assert record.outcome is Outcome.FILES_MISSING
    (problem,) = manifest(replica=0).problems
    here = tmp_path / PLACE / "replica_000"
    assert problem == (
        f"Files of rank 0 are on {socket.gethostname()}, in {there / PLACE / 'replica_000'}, not accessible from this "
        f"host ({socket.gethostname()}). The option collect is off. Fetch them with "
        f"'profdeck collect {tmp_path / 'run'}', or set output to a directory that all hosts share."
    )
    assert [path.name for path in here.iterdir()] == ["target.step1.json"]


def test_merged_are_those_that_were_fetched(
    build: Build, recording: Callable[..., Any], manifest: Read, tmp_path: Path
) -> None:
    there = tmp_path / "there"

    async def main() -> None:
        async with SimulatedServer(recording(ranks=2, output=there), host="elsewhere", output=str(there)) as server:
            server.gives = there
            async with build([server.url], {"rollout.options.merge": True}).capture(1):
                server.engine.iterate(2)

    asyncio.run(asyncio.wait_for(main(), 60))
    (merged,) = manifest(replica=0).artifacts
    assert (merged.kind, merged.whole) == ("merged_trace", True)
    ranks = [read_manifest(file) for file in (tmp_path / PLACE / "replica_000").glob("rank_*.step1.json")]
    assert len(ranks) == 2
    assert (merged.events or 0) > sum(rank.artifacts[0].events or 0 for rank in ranks)


# What is taken for a rank's files.


def test_what_stands_at_the_same_place_by_chance_is_left_alone(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        for name in (MANIFEST, TRACE):
            shutil.copy(found.source / name, found.copies / name)
        path = found.copies / MANIFEST
        path.write_text(path.read_text().replace(found.asked.token, "0" * 16))
        before = path.read_bytes()
        collection = await found.collect()
        assert (collection.complete, collection.manifests) == (False, [])
        (problem,) = found.capture.problems
        assert "Files of rank 0 are on elsewhere" in problem
        assert f"Another capture already has a file of this name: {path}." in problem
        assert path.read_bytes() == before
        assert asked_for(found.server) == [MANIFEST]

    remote(check)


def test_a_trace_of_the_same_name_is_left_alone(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        (found.copies / TRACE).write_bytes(b"x" * (found.source / TRACE).stat().st_size)
        assert not (await found.collect()).complete
        (problem,) = found.capture.problems
        assert f"Files of rank 0 ({TRACE}) are on elsewhere, in {found.source}" in problem
        assert "Another file already has this name: " in problem
        assert (found.copies / TRACE).read_bytes()[:1] == b"x"
        assert read_run(found.here / "run").status is Status.PARTIAL

    remote(check)


def test_manifests_of_a_profdeck_that_tells_no_token(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        path = found.source / MANIFEST
        document = json.loads(path.read_text()) | {"host": "elsewhere"}
        del document["request_token"]
        path.write_text(json.dumps(document))
        (found.copies / MANIFEST).write_text(json.dumps(document | {"pid": 1}))
        assert not (await found.collect()).complete
        shutil.copy(path, found.copies / MANIFEST)
        before = len(found.server.arrivals)
        assert (await found.collect()).manifests == [found.copies / MANIFEST]
        assert len(found.server.arrivals) == before

    remote(check)


def test_a_shared_directory_of_which_this_host_learns_late(
    remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(found: Remote) -> None:
        for name in (MANIFEST, TRACE):
            shutil.copy(found.source / name, found.copies / name)
        monkeypatch.setattr(RankFiles, "_read_local_manifests", lambda *_: {})
        collection = await found.collect()
        assert (collection.complete, collection.manifests) == (True, [found.copies / MANIFEST])
        assert read_manifest(found.copies / MANIFEST).collected_from is None

    remote(check)


def test_keys_that_this_version_does_not_know_are_kept(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        path = found.source / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"later": [1]}))
        await found.collect()
        assert json.loads((found.copies / MANIFEST).read_text())["later"] == [1]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
        (found.copies / MANIFEST).unlink()
        assert not (await found.collect()).complete
        assert "has a newer format" in found.capture.problems[-1]

    remote(check)


def test_a_rank_that_left_no_file_is_known_here(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        path = found.source / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed", "artifacts": []}))
        assert (await found.collect()).complete
        (capture,) = read_run(found.here / "run").captures
        assert capture.status is Status.FAILED

    remote(check)


# Ranks whose answers do not come.


def test_ranks_that_do_not_answer_are_found_by_their_manifests(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        for wrong in ("rank_0002.step10.json", "rank_0002.step1-take2.json", "rank_0007.step1.json"):
            text = (found.source / "rank_0002.step1.json").read_text()
            (found.source / wrong).write_text(text.replace(found.asked.token, "0" * 16))
        collection = await found.collect()
        assert collection.complete, found.capture.problems
        assert [path.name for path in collection.manifests] == [f"rank_000{rank}.step1.json" for rank in range(3)]
        assert "rank_0007.step1.json" not in asked_for(found.server)
        assert found.names() == sorted(
            f"rank_000{rank}.step1.{suffix}" for rank in range(3) for suffix in ("json", "trace.json")
        )

    remote(check, ranks=3, silent=(1, 2))


def test_ranks_on_hosts_that_the_server_cannot_see_are_named(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        (found.source / "rank_0001.step1.json").unlink()
        (found.source / "rank_0002.step1.json").unlink()
        assert not (await found.collect()).complete
        known, unknown = found.capture.problems
        assert known.startswith(f"Files of rank 1 are on elsewhere, in {found.source}, not accessible from this host")
        assert "returned status 404: No capture file 'run/step_000001/rollout/rank_0001.step1.json' found" in known
        assert unknown.startswith(f"Files of rank 2 are on another host, in {found.there}, not accessible")
        assert "They are not on elsewhere, the server's host" in unknown

    remote(check, ranks=3, silent=(2,))


def test_a_rank_that_does_not_answer_is_waited_for(
    remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_POLL_S", 0.01)

    async def check(found: Remote) -> None:
        path = found.source / "rank_0001.step1.json"
        ended = path.read_text()
        path.write_text(json.dumps(json.loads(ended) | {"status": "recording", "artifacts": []}))
        collecting = asyncio.create_task(found.collect())
        await found.server.heard(path.name, 3)
        path.write_text(ended)
        assert (await collecting).complete
        path.write_text(ended.replace('"complete"', '"recording"'))
        (found.copies / path.name).unlink()
        monkeypatch.setattr(downloads, "_MAX_WAIT_S", 0.05)
        assert not (await found.collect()).complete
        assert "Its process was still recording." in found.capture.problems[-1]

    remote(check, ranks=2, silent=(1,))


def test_answers_that_were_made_up_say_nothing(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        (first, second) = found.answer.ranks
        found.answer = Answer(ranks=(first, attrs.evolve(second, host="", captures=(), state=RequestState.ENDED)))
        assert (await found.collect()).complete
        assert len(found.names()) == 4

    remote(check, ranks=2)


# Where there is no route.


class EngineObject(Engine):
    """An engine in this process, whose ranks may be on other hosts."""

    name = "object"
    blocking = True

    async def has_profdeck(self) -> bool:
        return True

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:  # noqa: ARG002  # as the base
        raise AssertionError(command)


def test_an_engine_object_has_nothing_that_could_send_them(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        for name in (MANIFEST, TRACE):
            shutil.copy(found.source / name, found.copies / name)
        collection = await found.collect(engine=EngineObject())
        assert [path.name for path in collection.manifests] == [MANIFEST]
        (problem,) = found.capture.problems
        assert problem.startswith(
            f"Files of rank 1, rank 2, rank 3, rank 4, 1 more are on elsewhere, in {found.source}"
        )
        assert "The engine has no server that can send them." in problem

    remote(check, ranks=6)


def test_a_server_of_an_older_version(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        found.server.gives = None
        found.server.acts[MANIFEST] = [Act(status=404, content=b'{"detail":"Not Found"}')]
        found.server.version = "0.0.9"
        assert not (await found.collect()).complete
        (problem,) = found.capture.problems
        assert f"Profdeck 0.0.9 of {found.server.url} has no route for files." in problem

    remote(check)


# What breaks.


def message(found: Remote, name: str = TRACE) -> bytes:
    """Return the answer that the server sends for a file."""
    content = (found.source / name).read_bytes()
    about = (found.source / name).stat()
    tag = f'"{about.st_ino:x}-{about.st_size:x}-{about.st_mtime_ns:x}"'
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(content)}\r\n"
    return f"{head}ETag: {tag}\r\n\r\n".encode() + content


def test_a_server_that_dies_in_mid_transfer(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        found.grow(3_000_000)
        whole = message(found)
        found.server.acts[TRACE] = [Act(raw=whole[:1_500_000], hang=True)]
        collecting = asyncio.create_task(found.collect())
        await found.server.heard(TRACE)
        await found.server.stop()
        assert not (await collecting).complete
        (problem,) = found.capture.problems
        assert "cannot be reached: Connection refused" in problem
        assert found.names() == [MANIFEST]
        (rank,) = read_run(found.here / "run").captures[0].ranks
        assert rank.status is Status.MISSING
        assert rank.problems[0].startswith(
            f"{TRACE}: not on this host but at elsewhere:{found.source / TRACE}: {found.server.url}"
        )
        await found.server.start()  # for its end

    remote(check)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "expected"),
        (lambda path: path.write_bytes(b"{" * path.stat().st_size), "The download is corrupt"),
        (Path.unlink, "returned status 404"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "returned status 404"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
    ],
)
def test_what_is_not_what_the_manifest_says_does_not_come(
    remote: Callable[..., None], harm: Callable[[Path], None], why: str
) -> None:
    async def check(found: Remote) -> None:
        harm(found.source / TRACE)
        assert not (await found.collect()).complete
        (problem,) = found.capture.problems
        assert why in problem
        assert found.names() == [MANIFEST]

    remote(check)


def test_what_was_never_whole_comes_as_it_is(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        path = found.source / TRACE
        path.write_bytes(path.read_bytes()[:-10])
        found.tell(size_bytes=path.stat().st_size, whole=False, problem="cut off")
        assert (await found.collect()).complete
        (rank,) = read_run(found.here / "run").captures[0].ranks
        assert rank.status is Status.PARTIAL
        assert rank.problems[0].startswith(f"{TRACE}: ")

    remote(check)


@pytest.mark.parametrize(
    "name", ["../../../../x", "/etc/passwd", "other.trace.json", "rank_0000.step1.a/../../../x", ""]
)
def test_a_manifest_that_leads_elsewhere(remote: Callable[..., None], name: str) -> None:
    async def check(found: Remote) -> None:
        found.tell(name=name)
        assert not (await found.collect()).complete
        (problem,) = found.capture.problems
        assert f"{name!r}" in problem
        assert found.names() == []

    remote(check)


@pytest.mark.parametrize("path", ["/x/../../up.json", "", "/", "/x/.hidden.json", "/x/rank_0\0.json"])
def test_an_answer_that_leads_elsewhere(remote: Callable[..., None], path: str) -> None:
    async def check(found: Remote) -> None:
        (reply,) = found.answer.ranks
        recorded = attrs.evolve(reply.captures[0], manifest=path)
        found.answer = Answer(ranks=(attrs.evolve(reply, captures=(recorded,)),))
        await found.collect()
        assert asked_for(found.server) == []
        assert found.names() == []

    remote(check)


def test_a_token_that_is_wrong_for_files(remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(found: Remote) -> None:
        found.server.acts[TRACE] = [Act(status=401, error="The token is missing or wrong.")]
        assert not (await found.collect()).complete
        assert "returned status 401: The token is missing or wrong." in found.capture.problems[0]
        found.server.acts = {}
        found.server.token = "a secret"  # noqa: S105  # of this test
        assert not (await found.collect()).complete
        monkeypatch.setenv("PROFDECK_TOKEN", "a secret")
        assert (await found.collect()).complete

    remote(check)


def test_a_disk_that_is_full_while_it_is_written(remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def check(found: Remote) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(file_transfer, "write_all", full)
            assert not (await found.collect()).complete
        (problem,) = found.capture.problems
        assert "No space left on device" in problem
        assert found.names() == [MANIFEST]
        assert (await found.collect()).complete  # what has come is not fetched again
        assert asked_for(found.server) == [MANIFEST, TRACE] * 2
        assert read_run(found.here / "run").captures[0].status is Status.COMPLETE

    remote(check)


def test_a_disk_without_room_is_not_filled(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        found.tell(size_bytes=1 << 60)
        assert not (await found.collect()).complete
        (problem,) = found.capture.problems
        assert f"{1 << 60:,} bytes are required, " in problem
        assert asked_for(found.server) == [MANIFEST]

    remote(check)


def test_a_directory_that_cannot_be_written(remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(found: Remote) -> None:
        found.copies.rmdir()
        found.copies.write_text("in the way")
        monkeypatch.setattr(RankFiles, "_read_local_manifests", lambda *_: {})
        await found.collect()
        (problem,) = found.capture.problems
        assert "FileExistsError" in problem

    remote(check)


def test_the_time_is_limited(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        found.server.acts[TRACE] = [Act(raw=message(found)[:-5], hang=True)]
        engine = HttpEngine(found.server.url, timeout_s=30)
        collection = RankFiles(found.capture, found.asked)
        until = time.monotonic() + 0.5
        await collection.collect(
            engine, found.answer, fetch=True, deadline_s=until, timeout_message="Time limit: 0.5 s"
        )
        await engine.close()
        (problem,) = found.capture.problems
        assert "Time limit: 0.5 s." in problem
        assert found.names() == [MANIFEST]

    remote(check)


def test_no_time_at_all(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        assert not (await found.collect(limit_s=0.0)).complete
        assert (found.names(), found.server.opened) == ([], 0)

    remote(check)


def test_a_collection_that_is_cancelled_tells_what_it_has_not_fetched(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        found.grow(3_000_000)
        found.server.acts[TRACE] = [Act(raw=message(found)[:2_000_000], hang=True)]
        collecting = asyncio.create_task(found.collect())
        await found.server.heard(TRACE)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        assert found.names() == [MANIFEST]
        (record,) = read_manifest(found.copies / MANIFEST).artifacts
        location = f"elsewhere:{found.source / TRACE}"
        assert record.problem == f"not on this host but at {location}: it has not been downloaded yet"
        found.server.acts = {}
        assert (await found.collect()).complete

    remote(check)


def test_two_who_collect_at_once(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        found.grow(3_000_000)
        found.server.acts[TRACE] = [Act(delay_s=0.05)]
        for collection in await asyncio.gather(*(found.collect() for _ in range(4))):
            assert (collection.complete, len(collection.manifests)) == (True, 2)
        assert read_run(found.here / "run").captures[0].status is Status.COMPLETE
        assert len(found.names()) == 4

    remote(check, ranks=2)


def test_a_few_files_come_at_once(remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(found: Remote) -> None:
        most = 0
        answer = found.server.answer

        async def watched(*arguments: Any) -> tuple[int, bytes]:
            nonlocal most
            most = max(most, len(found.server.connections))
            await asyncio.sleep(0)
            return await answer(*arguments)

        monkeypatch.setattr(found.server, "answer", watched)
        assert (await found.collect()).complete
        assert most == downloads._MAX_DOWNLOADS

    remote(check, ranks=40)


# Directories of torch_npu.


def ascend(found: Remote) -> Path:
    """Let the artifact be a directory of raw data."""
    directory = found.source / "rank_0000.step1_4711_20260101_ascend_pt"
    for name, size in (("profiler_info_0.json", 20), ("FRAMEWORK/torch.op_range", 0), ("PROF_1/device_0/data", 90_000)):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (directory / "leads-away").symlink_to("/etc/hostname")
    (found.source / TRACE).unlink()
    found.tell(name=directory.name, kind="ascend_pt", size_bytes=90_020, events=None)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_directories_come_whole(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        directory = ascend(found)
        assert (await found.collect()).complete, found.capture.problems
        copy = found.copies / directory.name
        assert contents(copy) == contents(directory)
        assert not (copy / "leads-away").exists()

    remote(check)


def test_a_directory_of_which_a_file_does_not_come(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        directory = ascend(found)
        found.server.acts["data"] = [Act(status=403, error="not that one")]
        assert not (await found.collect()).complete
        assert "not that one" in found.capture.problems[0]
        assert found.names() == [MANIFEST]
        found.server.acts = {"data": [Act(raw=message(found, f"{directory.name}/profiler_info_0.json"))]}
        assert not (await found.collect()).complete
        assert "has 20 bytes, expected 90,000" in found.capture.problems[1]
        assert found.names() == [MANIFEST]
        found.server.acts = {}
        assert (await found.collect()).complete

    remote(check)


def test_a_directory_is_waited_for_while_it_is_analysed(
    remote: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_POLL_S", 0.01)

    async def check(found: Remote) -> None:
        from profdeck.base.processes import ProcessId

        directory, me = ascend(found), ProcessId()
        state = AnalysisState(
            state="running", host=me.host, pid=me.pid, process_started=me.process_started, started_ns=1
        )
        write_state(directory, state)
        collecting = asyncio.create_task(found.collect())
        await found.server.heard(directory.name, 3)
        (directory / "ASCEND_PROFILER_OUTPUT").mkdir()
        (directory / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").write_text("[]")
        write_state(directory, AnalysisState(**attrs.asdict(state) | {"state": "done"}))
        assert (await collecting).complete
        assert contents(found.copies / directory.name) == contents(directory)

    remote(check)


def test_names_in_a_directory_that_lead_out_of_it(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        directory = ascend(found)
        files = json.dumps({"files": [{"name": "../../x", "size_bytes": 1}]}).encode()
        found.server.acts[directory.name] = [Act(content=files)]
        assert not (await found.collect()).complete
        assert "contains '../../x', which points outside the directory" in found.capture.problems[0]
        assert found.names() == [MANIFEST]

    remote(check)


def test_merging_leaves_out_what_is_not_here(remote: Callable[..., None], tally: ModuleType) -> None:
    from profdeck.engine.control.merging import merge_ranks

    async def check(found: Remote) -> None:
        (found.source / TRACE).unlink()
        collection = await found.collect()
        (merged,) = merge_ranks(found.capture, collection.manifests)
        assert isinstance(merged, Artifact)
        assert (merged.whole, merged.problem) == (True, None)

    remote(check, ranks=2)


def test_an_artifact_that_was_never_written_is_not_asked_for(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        (found.source / TRACE).unlink()
        found.tell(size_bytes=0, whole=False, problem="the disk was full", events=None)
        for _ in range(2):
            assert (await found.collect()).complete
        assert asked_for(found.server) == [MANIFEST]
        (rank,) = read_run(found.here / "run").captures[0].ranks
        assert rank.problems == (f"{TRACE}: the disk was full",)

    remote(check)


def test_more_than_there_should_be_is_not_taken(remote: Callable[..., None]) -> None:
    async def check(found: Remote) -> None:
        found.grow(3_000_000)
        found.tell(size_bytes=2_000_000)
        assert not (await found.collect()).complete
        assert "the file has more than 2,000,000 bytes" in found.capture.problems[0]

    remote(check)


# What is fetched later.


@attrs.define
class Left:
    """A run of two servers that still have its files."""

    run: Path
    hosts: list[Path]
    servers: list[SimulatedServer]

    def names(self, replica: int) -> list[str]:
        directory = self.run / "step_000001/rollout" / f"replica_{replica:03d}"
        return sorted(path.name for path in directory.iterdir() if not path.name.startswith("target."))

    async def collect(self) -> list[Collected]:
        return await collect_run(self.run, limit_s=30)


@pytest.fixture
def left(build: Build, recording: Callable[..., Any], tmp_path: Path) -> Callable[..., None]:
    """Run a check with a run whose files are still on the hosts of its servers."""

    def run(check: Callable[[Left], Awaitable[None]]) -> None:
        async def main() -> None:
            async with simulated_servers(2) as servers:
                hosts = [tmp_path / f"host{number}" for number in range(2)]
                for server, there in zip(servers, hosts, strict=True):
                    server.engine = recording(ranks=2, output=there)
                    server.gives, server.host, server.output = there, there.name, str(there)
                profiler = build(
                    [server.url for server in servers], {"rollout.options.collect": False, "on_error": "warn"}
                )
                async with profiler.capture(1):
                    for server in servers:
                        server.engine.iterate(2)
                await check(Left(tmp_path / "run", hosts, servers))

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


ALL_NAMES = [f"rank_000{rank}.step1.{suffix}" for rank in (0, 1) for suffix in ("json", "trace.json")]


def test_what_was_left_is_fetched_later_and_once(left: Callable[..., None], manifest: Read) -> None:
    async def check(run: Left) -> None:
        assert read_run(run.run).status is Status.MISSING
        found = await run.collect()
        assert [(one.role_and_replica, one.capture, one.problems) for one in found] == [
            (f"rollout/{replica}", "step1", ()) for replica in (0, 1)
        ]
        for replica, one in enumerate(found):
            assert one.notes[0].startswith("Fetched 2 artifacts (")
            assert run.names(replica) == ALL_NAMES
        report = read_run(run.run)
        assert (report.status, report.problems, len(report.captures)) == (Status.COMPLETE, (), 2)
        whole = manifest()
        assert (whole.status, whole.problems) == (Status.COMPLETE, ())
        assert [(one.outcome, one.reason, one.fix) for one in whole.targets] == [(Outcome.FLUSHED, None, None)] * 2
        asked = [len(asked_for(server)) for server in run.servers]
        assert await run.collect() == []
        assert [len(asked_for(server)) for server in run.servers] == asked
        assert temporary(run.run) == []

    left(check)


@pytest.mark.parametrize(
    "late",
    [
        "After flush_timeout_s=1 seconds, the files of rank 0 on elsewhere (writing) are not complete.",
        "The engine did not reply to the stop: http://elsewhere:1 cannot be reached: no connection within 5 seconds.",
        # Messages of earlier versions.
        "After flush_timeout_s=1 seconds, the files of rank 0 on elsewhere (writing) are not whole.",
        "It did not answer at its stop: http://elsewhere:1 cannot be reached: no connection within 5 seconds.",
        "Files of rank 0 are on elsewhere, in /run, which cannot be seen from here (here). The option collect is off.",
    ],
)
def test_what_was_not_whole_in_time_is_complete_when_it_is(left: Callable[..., None], late: str) -> None:
    async def check(run: Left) -> None:
        file = run.run / "step_000001" / "rollout" / "replica_000" / "target.step1.json"
        for _ in range(2):  # with files elsewhere, and with all of them here
            document = json.loads(file.read_text())
            file.write_text(json.dumps(document | {"status": "partial", "problems": [*document["problems"], late]}))
            assert read_run(run.run).status is not Status.COMPLETE
            found = await run.collect()
            assert [one.problems for one in found if one.manifest == file] == [()]
            assert read_run(run.run).status is Status.COMPLETE

    left(check)


def test_a_server_that_has_recorded_something_else_since_still_sends_it(left: Callable[..., None]) -> None:
    async def check(run: Left) -> None:
        for server in run.servers:
            other = CaptureRequest(id="step7", output=Path(server.output), run="other", role="rollout", ranks="all")
            await server.engine.command("start", unstructure(other))
            server.engine.iterate(1)
            await server.engine.command("stop", {"request": "step7"})
            await ended(server.engine)
        assert [one.problems for one in await run.collect()] == [(), ()]
        assert [run.names(replica) for replica in (0, 1)] == [ALL_NAMES] * 2
        assert read_run(run.run).status is Status.COMPLETE

    left(check)


def test_what_was_deleted_or_changed_there_is_named_and_the_rest_comes(
    left: Callable[..., None], manifest: Read
) -> None:
    async def check(run: Left) -> None:
        place = "run/step_000001/rollout/replica_000"
        (run.hosts[0] / place / "rank_0000.step1.trace.json").unlink()
        changed = run.hosts[0] / place / "rank_0001.step1.trace.json"
        text = changed.read_text()
        changed.write_text(text[:-9])
        first, second = await run.collect()
        assert second.problems == ()
        assert "rank 0 (rank_0000.step1.trace.json)" in " ".join(first.problems)
        assert "rank 1 (rank_0001.step1.trace.json)" in " ".join(first.problems)
        assert run.names(0) == ["rank_0000.step1.json", "rank_0001.step1.json"]
        assert run.names(1) == ALL_NAMES
        whole = manifest()
        assert (whole.status, whole.problems) == (
            Status.PARTIAL,
            ("1 of 2 targets are not complete: 1 files_missing.",),
        )
        assert [one.outcome for one in whole.targets] == [Outcome.FILES_MISSING, Outcome.FLUSHED]
        changed.write_text(text)
        (again,) = await run.collect()
        assert run.names(0) == ALL_NAMES[:1] + ALL_NAMES[2:]
        assert "rank 1" not in " ".join(again.problems)
        assert read_run(run.run).status is not Status.COMPLETE

    left(check)


def test_a_server_that_is_gone_costs_its_own_files(left: Callable[..., None]) -> None:
    async def check(run: Left) -> None:
        await run.servers[0].stop()
        first, second = await run.collect()
        assert run.servers[0].url.removeprefix("http://") in first.problems[0]
        assert (second.problems, run.names(1)) == ((), ALL_NAMES)
        assert (run.run / "step_000001/rollout/replica_000/target.step1.json").exists()

    left(check)


def test_what_a_killed_host_did_not_fetch_comes_and_is_called_partial(left: Callable[..., None]) -> None:
    async def check(run: Left) -> None:
        file = run.run / "step_000001/rollout/replica_000/target.step1.json"
        killed = {"status": "recording", "pid": 2**22 + 1, "process_started": "1", "problems": [], "ended_ns": None}
        file.write_text(json.dumps(json.loads(file.read_text()) | killed))
        first, second = await run.collect()
        assert (run.names(0), second.problems) == (ALL_NAMES, ())
        assert first.problems == (
            f"Process {2**22 + 1} on {socket.gethostname()} requested this capture and exited before its end.",
        )
        assert read_manifest(file).status is Status.PARTIAL
        assert await run.collect() == []

    left(check)


def test_a_lost_copy_comes_again(left: Callable[..., None]) -> None:
    async def check(run: Left) -> None:
        await run.collect()
        (run.run / "step_000001/rollout/replica_001" / TRACE).unlink()
        assert read_run(run.run).status is not Status.COMPLETE
        (one,) = await run.collect()
        assert one.problems == ()
        assert read_run(run.run).status is Status.COMPLETE

    left(check)


def test_the_command_says_what_came_and_what_is_left(left: Callable[..., None], tmp_path: Path) -> None:
    async def check(run: Left) -> None:
        (run.hosts[0] / "run/step_000001/rollout/replica_000" / TRACE).unlink()
        done = await asyncio.to_thread(CliRunner().invoke, app, ["collect", str(run.run)])
        assert done.exit_code == 1
        first, *_, last = done.stdout.splitlines()
        assert first.startswith("rollout/0 step1: Fetched 1 artifact (")
        assert last.startswith("1 of 2 engine captures are complete. Next: profdeck ls ")
        assert "error: Files of rank 0 (rank_0000.step1.trace.json) are on host0" in done.stderr
        shutil.copytree(tmp_path / "host1/run/step_000001/rollout/replica_001", tmp_path / "other")
        again = await asyncio.to_thread(CliRunner().invoke, app, ["collect", str(tmp_path / "other")])
        assert (again.exit_code, again.stdout) == (4, "")

    left(check)
