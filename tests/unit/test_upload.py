"""Tests of uploads to fsspec file systems.

tests/integration/trackers/test_upload.py uses local S3 and Google Cloud Storage servers.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from captured_runs import write_run
from gpu_job import GpuJob
from profdeck.after_capture.prune import prune
from profdeck.base.identity import Identity
from profdeck.cli import app
from profdeck.records.capture import CaptureRecord, CaptureState
from profdeck.records.manifest import ManifestWriter, is_manifest, write_manifest
from profdeck.records.status import Status
from profdeck.remote.upload import UploadListener, upload, upload_check
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ConfigError, ProfdeckError
from profdeck_traces.inputs.result_files import result_path
from profdeck_traces.inputs.url_copies import fetch
from remote_stores import RecordingStore

URL = "recording://profiles"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with 13 files, written by two ranks in three captures."""
    RecordingStore.empty()
    monkeypatch.setenv("PROFDECK_CACHE", str(tmp_path / "cache"))
    run = write_run(tmp_path / "output" / "job", 3, lambda _: GpuJob(ranks=2))
    (run / "run.json").write_text(json.dumps({"schema": 1, "created_ns": 5, "roles": ["trainer"], "config": {}}))
    return run


def stored_names() -> set[str]:
    return {path.removeprefix("/profiles/job/") for path in RecordingStore.store}


def local_names(run: Path) -> set[str]:
    return {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}


def upload_and_count(run: Path, url: str = URL) -> tuple[int, int]:
    result = upload(run, url)
    return result.files, result.there


def test_all_files_are_sent_once(run: Path) -> None:
    result = upload(run, URL)
    assert (result.files, result.there, result.waits_for) == (13, 0, ())
    assert result.size_bytes == sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    assert stored_names() == local_names(run)
    assert upload_and_count(run) == (0, 13)
    assert local_names(run) == local_names(fetch(f"{URL}/job"))


def test_results_of_traces_are_sent_but_not_required(run: Path) -> None:
    trace = next(run.rglob("*step50.trace.json.gz"))
    result_path(trace).write_bytes(b"a result")
    (trace.parent / "other.json.result").write_bytes(b"not the result of a trace")
    assert upload_and_count(run) == (14, 0)
    assert result_path(trace).relative_to(run).as_posix() in stored_names()
    later = next(run.rglob("*step0.trace.json.gz"))
    result_path(later).write_bytes(b"written after the upload")
    check = upload_check(run, URL)
    assert check(later.parents[1]) is None
    assert "other.json.result" in (check(trace.parents[1]) or "")


def test_artifacts_are_sent_before_manifests_and_the_run_file_last(run: Path) -> None:
    upload(run, URL)
    sent = [Path(path) for path in RecordingStore.transfers]
    assert [path.suffix for path in sent] == [".gz"] * 6 + [".json"] * 7
    assert sent[-1].name == "run.json"


@pytest.mark.parametrize("sent_count", [0, 3, 6, 9, 12])
def test_failing_store_has_no_manifest_without_artifacts(run: Path, sent_count: int) -> None:
    RecordingStore.transfers_left = sent_count
    with pytest.raises(
        ProfdeckError, match=r"recording://profiles/job cannot be written: ConnectionResetError.*Repeat"
    ):
        upload(run, URL)
    names = stored_names()
    assert len(names) == sent_count
    assert "run.json" not in names
    for manifest in filter(is_manifest, map(Path, names)):
        assert manifest.with_suffix(".trace.json.gz").as_posix() in names
    RecordingStore.transfers_left = float("inf")
    assert upload_and_count(run) == (13 - sent_count, sent_count)


def test_changed_file_is_sent_again(run: Path) -> None:
    upload(run, URL)
    (manifest,) = (run / "step_000050").rglob("rank_0001.step50.json")
    manifest.write_text(manifest.read_text().replace("17000000", "17000001"))  # other contents of the same size
    (trace,) = (run / "step_000000").rglob("rank_0000*.gz")
    trace.write_bytes(trace.read_bytes() + b"\0")
    assert upload_and_count(run) == (2, 11)
    assert RecordingStore.store[f"/profiles/job/{manifest.relative_to(run)}"].getvalue() == manifest.read_bytes()


def test_truncated_run_file_is_replaced(run: Path) -> None:
    upload(run, URL)
    RecordingStore.store["/profiles/job/run.json"].truncate(5)
    assert upload_and_count(run) == (1, 12)


def test_another_run_of_the_same_name_is_not_changed(run: Path) -> None:
    upload(run, URL)
    (run / "run.json").write_text(json.dumps({"schema": 1, "created_ns": 6}))
    with pytest.raises(ProfdeckError, match="is a different run with the same name"):
        upload(run, URL)


def test_artifact_named_like_a_manifest_is_sent_once(run: Path) -> None:
    manifest = min((run / "step_000000").rglob("rank_0000.*[!e].json"))
    (artifact := manifest.with_suffix(".memory.json")).write_text("{}")
    content = json.loads(manifest.read_text())
    content["artifacts"].append({"name": artifact.name, "kind": "memory", "size_bytes": 2, "whole": True})
    manifest.write_text(json.dumps(content))
    assert upload_and_count(run) == (14, 0)


def test_unfinished_captures_and_unlisted_files_are_not_sent(run: Path) -> None:
    capture = CaptureRecord(
        id="step150",
        directory=run / "step_000150" / "trainer",
        identity=Identity(role="trainer", rank=0, world_size=1),
        first_step=150,
        current_step=150,
        started_ns=1,
    )
    capture.directory.mkdir(parents=True)
    for state in (CaptureState.STARTING, CaptureState.RECORDING):
        capture.move_to(state)
    write_manifest(capture, ManifestWriter(backend="torch", versions={}, options={}, expected_ranks=(0,)))
    (run / "step_000100" / "unlisted.txt").write_text("x")
    result = upload(run, URL)
    assert result.waits_for == ("step_000150: rank 0 of trainer may still be recording",)
    assert result.files == 13


def test_records_of_older_uploads_are_ignored(run: Path) -> None:
    (run / "uploaded").mkdir()
    (run / "uploaded" / "step_000050.json").write_text('{"name": "step_000050", "url": "s3://x", "files": {}}')
    assert upload_and_count(run) == (13, 0)
    assert read_run(run).status is Status.COMPLETE


def test_file_names_can_contain_any_characters(run: Path) -> None:
    directory = run / "step_000000" / "trainer"
    names = ["größe [1].trace.json", "🚀*?#%41.trace.json", f"{'ä' * 110}.trace.json"]
    (manifest,) = directory.glob("rank_0000.step0.json")
    content = json.loads(manifest.read_text())
    for name in names:
        (directory / name).write_text('{"traceEvents": []}')
        content["artifacts"].append({"name": name, "kind": "trace", "size_bytes": 19, "whole": True})
    manifest.write_text(json.dumps(content))
    renamed_run = run.rename(run.with_name("Größe [2]*"))
    for url in (URL, f"file://{run.parent}/store"):
        assert upload_and_count(renamed_run, url) == (16, 0)
        assert upload_and_count(renamed_run, url) == (0, 16)
        assert local_names(fetch(f"{url}/Größe [2]*")) == local_names(renamed_run)


def test_concurrent_uploads_send_each_file_once(run: Path) -> None:
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda _: upload(run, URL), range(4)))
    assert sorted(result.files for result in results) == [0, 0, 0, 13]
    assert stored_names() == local_names(run)


def test_local_run_is_not_changed(run: Path) -> None:
    modified_ns_by_path = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    upload(run, URL)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == modified_ns_by_path


def test_listener_sends_the_files_that_failed_earlier(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROFDECK_UPLOAD", URL)
    listener = UploadListener()
    RecordingStore.transfers_left = 4
    with pytest.raises(ProfdeckError, match="cannot be written"):
        listener.capture_finished({"directory": str(run / "step_000000")})
    RecordingStore.transfers_left = float("inf")
    listener.capture_finished({"directory": str(run / "step_000050")})
    assert capsys.readouterr().out.startswith("9 files, ")
    assert stored_names() == local_names(run)


def test_listener_requires_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROFDECK_UPLOAD", raising=False)
    with pytest.raises(ConfigError, match="PROFDECK_UPLOAD is not set. Set it to the URL of a directory"):
        UploadListener()


def test_prune_keeps_files_that_are_newer_than_the_upload(run: Path) -> None:
    upload(run, URL)
    (trace,) = (run / "step_000000").rglob("rank_0000*.gz")
    trace.write_bytes(bytes(trace.stat().st_size))  # other contents of the same size
    check = upload_check(run, URL)
    for dry_run in (True, False):
        steps = prune(run, steps=1, dry_run=dry_run, reason_to_keep=check)
        assert [step.is_deleted for step in steps] == [False, True, False]
        assert steps[0].stays_because is not None
        assert steps[0].stays_because == f"recording://profiles/job has no identical copy of {trace.relative_to(run)}"
    assert trace.exists()
    assert not (run / "step_000050").exists()


@pytest.mark.parametrize("name", ["unlisted.txt", "trainer/rank_0000.step0-take2.json", "link"])
def test_prune_keeps_files_that_were_not_uploaded(run: Path, name: str) -> None:
    upload(run, URL)
    file = run / "step_000000" / name
    if name == "link":
        file.symlink_to(run / "run.json")
    else:
        file.write_text("x")
    prune(run, steps=1, reason_to_keep=upload_check(run, URL))
    assert file.exists()


def test_prune_keeps_files_that_are_written_during_the_check(run: Path) -> None:
    def write_file(step: Path) -> None:
        (step / "late.txt").write_text("x")

    steps = prune(run, steps=1, reason_to_keep=write_file)
    assert [step.stays_because for step in steps] == ["its files have just changed"] * 2 + [None]
    assert len(list(run.rglob("late.txt"))) == 2
    assert read_run(run).pruned == ()


def test_symbolic_links_are_not_uploaded(run: Path, tmp_path: Path) -> None:
    (private := tmp_path / "private").write_text("{}")
    (run / "page.html").symlink_to(private)
    (run / "step_000000" / "page.html").symlink_to(private)
    assert upload_and_count(run) == (13, 0)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("profiles", "is not a URL"),
        ("/data/profiles", "is not a URL"),
        ("", "is not a URL"),
        ("file://$HOME/profiles", "environment variable"),
        ("simplecache::s3://user:sesame@${BUCKET}", "environment variable"),
    ],
)
def test_only_complete_urls_are_targets(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    for command in (["upload", str(run), target], ["prune", str(run), "--steps", "1", "--uploaded", target]):
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, message in result.stderr, "sesame" in result.output) == (2, True, False)
    monkeypatch.setenv("PROFDECK_UPLOAD", target)
    with pytest.raises(ConfigError, match=f"PROFDECK_UPLOAD.*{message if target else 'is not set'}"):
        UploadListener()
    result = CliRunner().invoke(app, ["upload", str(run)])
    assert (result.exit_code, "PROFDECK_UPLOAD" in result.stderr, "sesame" in result.output) == (2, True, False)
    assert set(tmp_path.iterdir()) == before
