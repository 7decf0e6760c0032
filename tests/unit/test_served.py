"""What a server gives away of its output directory, and all that it does not."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

import attrs
import pytest

from profdeck.backends.recording import adopt, reserve
from profdeck.base.identity import Identity
from profdeck.base.processes import ProcessId
from profdeck.engine.transport.served_files import NotServedError, ServedFile, find
from profdeck.records.artifact import Artifact
from profdeck.records.capture import CaptureRecord
from profdeck.records.manifest import ManifestWriter
from profdeck.records.run_directory import RunDirectory
from profdeck_npu.traces.analysis_state import AnalysisState, write_state

PLACE = "run/step_000001/rollout"
RAW = "rank_0000.step1_4711_20260101_ascend_pt"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output directory with a capture, another one that is under way, and what is none of a capture's files."""
    output = tmp_path / "profiles"
    run = RunDirectory(output, "run", {})
    recorder = ManifestWriter(backend="torch", versions={}, options={}, expected_ranks=(0,))
    for name in ("step1", "recording"):
        capture = CaptureRecord(
            id=name, directory=output / PLACE, identity=Identity(role="rollout"), first_step=1, current_step=1
        )
        reserve(capture, run, recorder)
        trace = capture.artifact_path(".trace.json.gz")
        trace.write_bytes(name.encode())
        if name == "step1":
            raw = capture.directory / RAW
            (raw / "PROF_1" / "device_0").mkdir(parents=True)
            (raw / "PROF_1" / "device_0" / "data 0").write_bytes(b"raw")
            (raw / "profiler_info.json").write_bytes(b"{}")
            (raw / "link").symlink_to("/etc/hostname")
            os.mkfifo(raw / "pipe")
            artifacts = (Artifact(path=trace, size_bytes=5), Artifact(path=raw, kind="ascend_pt", size_bytes=5))
            adopt(capture, recorder, artifacts)
    (output / PLACE / "notes.txt").write_text("private")
    (output / PLACE / ".rank_0000.step1.json.0123.tmp").write_text("{}")
    (output / PLACE / "rank_0009.step1.json").write_text("no manifest")
    (output / PLACE / "rank_0009.step1.trace.json").write_text("of no manifest")
    (tmp_path / "secret.json").write_text("secret")
    return output


def content(found: ServedFile | Mapping[str, int]) -> bytes:
    assert isinstance(found, ServedFile)
    try:
        return found.read(0, found.size_bytes + 10)
    finally:
        found.close()


def refusal(output: Path, place: str) -> NotServedError:
    with pytest.raises(NotServedError) as caught:
        find(output, place)
    return caught.value


def test_manifests_and_what_they_name(output: Path) -> None:
    manifest = f"{PLACE}/rank_0000.step1.json"
    assert content(find(output, manifest)) == (output / manifest).read_bytes()
    assert content(find(output, f"{PLACE}/rank_0000.recording.json")).startswith(b"{")
    assert content(find(output, f"{PLACE}/rank_0000.step1.trace.json.gz")) == b"step1"
    assert content(find(output, f"{PLACE}/{RAW}/PROF_1/device_0/data 0")) == b"raw"


def test_a_part_of_a_file(output: Path) -> None:
    found = find(output, f"{PLACE}/rank_0000.step1.trace.json.gz")
    assert isinstance(found, ServedFile)
    assert [found.read(2, 2), found.read(2, 100), found.read(5, 1)] == [b"ep", b"ep1", b""]
    path = output / PLACE / "rank_0000.step1.trace.json.gz"
    path.write_bytes(b"longer")
    again = find(output, f"{PLACE}/rank_0000.step1.trace.json.gz")
    assert isinstance(again, ServedFile)
    assert again.tag != found.tag
    found.close()
    again.close()


def test_directories_are_listed(output: Path) -> None:
    assert find(output, PLACE) == {
        name: (output / PLACE / name).stat().st_size
        for name in ("rank_0000.step1.json", "rank_0000.recording.json", "rank_0009.step1.json")
    }
    assert find(output, f"{PLACE}/{RAW}") == {"profiler_info.json": 2, "PROF_1/device_0/data 0": 3}
    assert find(output, f"{PLACE}/{RAW}/PROF_1") == {"device_0/data 0": 3}
    assert find(output, "run") == {}


@pytest.mark.parametrize(
    "place",
    [
        "",
        "/",
        ".",
        "..",
        "../secret.json",
        "run/../../secret.json",
        f"{PLACE}/../rollout/rank_0000.step1.json",
        f"{PLACE}/",
        f"/{PLACE}/rank_0000.step1.json",
        f"{PLACE}//rank_0000.step1.json",
        "/etc/hostname",
        "run/run.json",
        f"{PLACE}/notes.txt",
        f"{PLACE}/.rank_0000.step1.json.0123.tmp",
        f"{PLACE}/rank_0000.recording.trace.json.gz",
        f"{PLACE}/rank_0009.step1.trace.json",
        f"{PLACE}/rank_0000.step2.json",
        f"{PLACE}/rank_0000.step1.json/x",
        f"{PLACE}/{RAW}/link",
        f"{PLACE}/{RAW}/pipe",
        f"{PLACE}/{RAW}/nothing",
        f"{PLACE}/{RAW}/../notes.txt",
        f"{PLACE}/rank_0000.step1.json\0",
        "x" * 5000,
        "run/\udcff",
    ],
)
def test_nothing_else_is_given(output: Path, place: str) -> None:
    error = refusal(output, place)
    assert error.status is HTTPStatus.NOT_FOUND
    assert f"of a capture below {output} on {socket.gethostname()}." in str(error)


def test_links_are_not_followed(output: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / PLACE
    other.mkdir(parents=True)
    for name in ("rank_0000.step1.json", "rank_0000.step1.trace.json.gz"):
        (other / name).write_bytes((output / PLACE / name).read_bytes())
    (output / "linked").symlink_to(tmp_path / "other" / "run")
    (output / PLACE / "rank_0001.step1.json").symlink_to(tmp_path / "secret.json")
    trace = output / PLACE / "rank_0000.step1.trace.json.gz"
    trace.unlink()
    trace.symlink_to(tmp_path / "secret.json")
    for place in (
        "linked/step_000001/rollout/rank_0000.step1.json",
        "linked/step_000001/rollout/rank_0000.step1.trace.json.gz",
        "linked/step_000001/rollout",
        f"{PLACE}/rank_0001.step1.json",
        f"{PLACE}/{trace.name}",
    ):
        assert refusal(output, place).status is HTTPStatus.NOT_FOUND
    assert "rank_0001.step1.json" not in find(output, PLACE)
    # The output directory itself may be one.
    (tmp_path / "mounted").symlink_to(output)
    assert content(find(tmp_path / "mounted", f"{PLACE}/rank_0000.step1.json"))


def test_a_directory_that_is_analysed_is_not_whole_yet(output: Path) -> None:
    me = ProcessId()
    state = AnalysisState(state="running", host=me.host, pid=me.pid, process_started=me.process_started, started_ns=1)
    write_state(output / PLACE / RAW, state)
    error = refusal(output, f"{PLACE}/{RAW}")
    assert error.status is HTTPStatus.CONFLICT
    assert f"is being analysed by process {me.pid} on {me.host}: ask again later." in str(error)
    write_state(output / PLACE / RAW, AnalysisState(**attrs.asdict(state) | {"state": "done"}))
    assert "profdeck_analysis.json" in find(output, f"{PLACE}/{RAW}")


def test_what_may_not_be_read(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def denied(path: object, *arguments: int, **keywords: int) -> int:
        if path == "rank_0000.step1.json":
            raise PermissionError
        return real(path, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", denied)  # who runs the tests may read everything
    error = refusal(output, f"{PLACE}/rank_0000.step1.json")
    assert error.status is HTTPStatus.FORBIDDEN
    assert "may not be read by the server's user" in str(error)


def test_an_output_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere", f"{PLACE}/rank_0000.step1.json").status is HTTPStatus.NOT_FOUND


def test_nothing_stays_open(output: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    for place in (PLACE, f"{PLACE}/{RAW}", f"{PLACE}/rank_0000.step1.trace.json.gz"):
        found = find(output, place)
        if isinstance(found, ServedFile):
            found.close()
    for place in ("..", f"{PLACE}/notes.txt", f"{PLACE}/{RAW}/pipe", f"{PLACE}/{RAW}/link"):
        refusal(output, place)
    assert set(Path("/proc/self/fd").iterdir()) == before
