"""Files of the output directory that a server exposes, and files that it does not."""

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
from profdeck.engine.transport.served_files import NotServedError, ServedFile, open_path
from profdeck.records.artifact import Artifact
from profdeck.records.capture import CaptureRecord
from profdeck.records.manifest import ManifestWriter
from profdeck.records.run_directory import RunDirectory
from profdeck_npu.traces.analysis_state import AnalysisState, write_state

STEP_DIRECTORY = "run/step_000001/rollout"
RAW = "rank_0000.step1_4711_20260101_ascend_pt"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output directory with a finished capture, a running capture and files that belong to no capture."""
    output = tmp_path / "profiles"
    run = RunDirectory(output, "run", {})
    recorder = ManifestWriter(backend="torch", versions={}, options={}, expected_ranks=(0,))
    for name in ("step1", "recording"):
        capture = CaptureRecord(
            id=name, directory=output / STEP_DIRECTORY, identity=Identity(role="rollout"), first_step=1, current_step=1
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
    (output / STEP_DIRECTORY / "notes.txt").write_text("private")
    (output / STEP_DIRECTORY / ".rank_0000.step1.json.0123.tmp").write_text("{}")
    (output / STEP_DIRECTORY / "rank_0009.step1.json").write_text("no manifest")
    (output / STEP_DIRECTORY / "rank_0009.step1.trace.json").write_text("of no manifest")
    (tmp_path / "secret.json").write_text("secret")
    return output


def content(served: ServedFile | Mapping[str, int]) -> bytes:
    assert isinstance(served, ServedFile)
    try:
        return served.read(0, served.size_bytes + 10)
    finally:
        served.close()


def refusal(output: Path, path: str) -> NotServedError:
    with pytest.raises(NotServedError) as caught:
        open_path(output, path)
    return caught.value


def test_manifests_and_listed_artifacts_are_served(output: Path) -> None:
    manifest = f"{STEP_DIRECTORY}/rank_0000.step1.json"
    assert content(open_path(output, manifest)) == (output / manifest).read_bytes()
    assert content(open_path(output, f"{STEP_DIRECTORY}/rank_0000.recording.json")).startswith(b"{")
    assert content(open_path(output, f"{STEP_DIRECTORY}/rank_0000.step1.trace.json.gz")) == b"step1"
    assert content(open_path(output, f"{STEP_DIRECTORY}/{RAW}/PROF_1/device_0/data 0")) == b"raw"


def test_read_range_and_tag_of_a_changed_file(output: Path) -> None:
    served = open_path(output, f"{STEP_DIRECTORY}/rank_0000.step1.trace.json.gz")
    assert isinstance(served, ServedFile)
    assert [served.read(2, 2), served.read(2, 100), served.read(5, 1)] == [b"ep", b"ep1", b""]
    (output / STEP_DIRECTORY / "rank_0000.step1.trace.json.gz").write_bytes(b"longer")
    new_version = open_path(output, f"{STEP_DIRECTORY}/rank_0000.step1.trace.json.gz")
    assert isinstance(new_version, ServedFile)
    assert new_version.tag != served.tag
    served.close()
    new_version.close()


def test_directories_are_listed(output: Path) -> None:
    assert open_path(output, STEP_DIRECTORY) == {
        name: (output / STEP_DIRECTORY / name).stat().st_size
        for name in ("rank_0000.step1.json", "rank_0000.recording.json", "rank_0009.step1.json")
    }
    assert open_path(output, f"{STEP_DIRECTORY}/{RAW}") == {"profiler_info.json": 2, "PROF_1/device_0/data 0": 3}
    assert open_path(output, f"{STEP_DIRECTORY}/{RAW}/PROF_1") == {"device_0/data 0": 3}
    assert open_path(output, "run") == {}


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        ".",
        "..",
        "../secret.json",
        "run/../../secret.json",
        f"{STEP_DIRECTORY}/../rollout/rank_0000.step1.json",
        f"{STEP_DIRECTORY}/",
        f"/{STEP_DIRECTORY}/rank_0000.step1.json",
        f"{STEP_DIRECTORY}//rank_0000.step1.json",
        "/etc/hostname",
        "run/run.json",
        f"{STEP_DIRECTORY}/notes.txt",
        f"{STEP_DIRECTORY}/.rank_0000.step1.json.0123.tmp",
        f"{STEP_DIRECTORY}/rank_0000.recording.trace.json.gz",
        f"{STEP_DIRECTORY}/rank_0009.step1.trace.json",
        f"{STEP_DIRECTORY}/rank_0000.step2.json",
        f"{STEP_DIRECTORY}/rank_0000.step1.json/x",
        f"{STEP_DIRECTORY}/{RAW}/link",
        f"{STEP_DIRECTORY}/{RAW}/pipe",
        f"{STEP_DIRECTORY}/{RAW}/nothing",
        f"{STEP_DIRECTORY}/{RAW}/../notes.txt",
        f"{STEP_DIRECTORY}/rank_0000.step1.json\0",
        "x" * 5000,
        "run/\udcff",
    ],
)
def test_other_paths_are_not_found(output: Path, path: str) -> None:
    error = refusal(output, path)
    assert error.status is HTTPStatus.NOT_FOUND
    assert f"found in {output} on {socket.gethostname()}." in str(error)


def test_links_are_not_followed(output: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / STEP_DIRECTORY
    other.mkdir(parents=True)
    for name in ("rank_0000.step1.json", "rank_0000.step1.trace.json.gz"):
        (other / name).write_bytes((output / STEP_DIRECTORY / name).read_bytes())
    (output / "linked").symlink_to(tmp_path / "other" / "run")
    (output / STEP_DIRECTORY / "rank_0001.step1.json").symlink_to(tmp_path / "secret.json")
    trace = output / STEP_DIRECTORY / "rank_0000.step1.trace.json.gz"
    trace.unlink()
    trace.symlink_to(tmp_path / "secret.json")
    for path in (
        "linked/step_000001/rollout/rank_0000.step1.json",
        "linked/step_000001/rollout/rank_0000.step1.trace.json.gz",
        "linked/step_000001/rollout",
        f"{STEP_DIRECTORY}/rank_0001.step1.json",
        f"{STEP_DIRECTORY}/{trace.name}",
    ):
        assert refusal(output, path).status is HTTPStatus.NOT_FOUND
    assert "rank_0001.step1.json" not in open_path(output, STEP_DIRECTORY)
    # The output directory itself may be a link.
    (tmp_path / "mounted").symlink_to(output)
    assert content(open_path(tmp_path / "mounted", f"{STEP_DIRECTORY}/rank_0000.step1.json"))


def test_artifact_directory_is_pending_during_its_analysis(output: Path) -> None:
    process = ProcessId()
    state = AnalysisState(
        state="running",
        host=process.host,
        pid=process.pid,
        process_started=process.process_started,
        started_ns=1,
    )
    write_state(output / STEP_DIRECTORY / RAW, state)
    error = refusal(output, f"{STEP_DIRECTORY}/{RAW}")
    assert error.status is HTTPStatus.CONFLICT
    assert f"Process {process.pid} on {process.host} is analysing {output / STEP_DIRECTORY / RAW}." in str(error)
    write_state(output / STEP_DIRECTORY / RAW, AnalysisState(**attrs.asdict(state) | {"state": "done"}))
    assert "profdeck_analysis.json" in open_path(output, f"{STEP_DIRECTORY}/{RAW}")


def test_missing_permission_is_reported(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def denied(path: object, *arguments: int, **keywords: int) -> int:
        if path == "rank_0000.step1.json":
            raise PermissionError
        return real(path, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", denied)  # the user who runs the tests may have all permissions
    error = refusal(output, f"{STEP_DIRECTORY}/rank_0000.step1.json")
    assert error.status is HTTPStatus.FORBIDDEN
    assert "The server's user has no permission to read" in str(error)


def test_missing_output_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere", f"{STEP_DIRECTORY}/rank_0000.step1.json").status is HTTPStatus.NOT_FOUND


def test_descriptors_are_closed(output: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    for path in (STEP_DIRECTORY, f"{STEP_DIRECTORY}/{RAW}", f"{STEP_DIRECTORY}/rank_0000.step1.trace.json.gz"):
        served = open_path(output, path)
        if isinstance(served, ServedFile):
            served.close()
    for path in ("..", f"{STEP_DIRECTORY}/notes.txt", f"{STEP_DIRECTORY}/{RAW}/pipe", f"{STEP_DIRECTORY}/{RAW}/link"):
        refusal(output, path)
    assert set(Path("/proc/self/fd").iterdir()) == before
