"""Tests of uploads and of runs at URLs, with an S3 server and a Google Cloud Storage emulator on this machine."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from captured_runs import write_run
from gpu_job import GpuJob
from processes import until

pytestmark = pytest.mark.trackers

SECRET = "sesame-0123456789"  # noqa: S105 - not a real secret
JOB = """
import sys
from profdeck import Profiler
from profdeck.after_capture.finish_child import await_own_finishes

settings = {"output": "profiles", "run": "job", "steps": [int(step) for step in sys.argv[1:]],
            "trainer.backend": "replaying", "listeners": ["upload"]}
with Profiler.from_config(settings=settings, role="trainer") as profiler:
    for step in range(10):
        with profiler.capture(step), profiler.stage("update"):
            pass
await_own_finishes()
"""
Profdeck = Callable[..., "subprocess.CompletedProcess[str]"]


@contextlib.contextmanager
def server(module: str, *arguments: str) -> Iterator[str]:
    """Run a module as a server and yield its URL. The port is appended to the arguments."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, *arguments, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def accepts_connections() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(accepts_connections, every_s=0.1, timeout_s=60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Run moto's S3 server and yield its URL."""
    with server("moto.server", "-H", "127.0.0.1", "-p") as url:
        yield url


@pytest.fixture(scope="module")
def google() -> Iterator[str]:
    """Run a Google Cloud Storage emulator with the bucket `bucket` and yield its URL."""
    arguments = ("start", "--host", "127.0.0.1", "--in-memory", "--default-bucket", "bucket", "--port")
    with server("gcp_storage_emulator", *arguments) as url:
        yield url


@pytest.fixture
def environment(endpoint: str, tmp_path: Path, replaying_site: str) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": replaying_site,
        "PROFDECK_CACHE": str(tmp_path / "cache"),
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_MAX_ATTEMPTS": "1",
    }


@pytest.fixture
def bucket(environment: dict[str, str], tmp_path: Path) -> Any:
    """A new S3 bucket: the file system and the bucket's name."""
    import s3fs

    files = s3fs.S3FileSystem(
        key="testing",
        secret=SECRET,
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        use_listings_cache=False,
    )
    name = "".join(letter for letter in tmp_path.name.lower() if letter.isalnum())[-40:]
    files.mkdir(name)
    return files, name


@pytest.fixture
def profdeck(environment: dict[str, str], tmp_path: Path) -> Profdeck:
    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "profdeck", *arguments]
        return subprocess.run(
            command, env=environment | environ, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three captures of two ranks."""
    run = write_run(tmp_path / "profiles" / "job", 3, lambda _: GpuJob(ranks=2))
    (run / "run.json").write_text(json.dumps({"schema": 1, "created_ns": 5, "roles": ["trainer"], "config": {}}))
    return run


def remote_files(bucket: Any) -> set[str]:
    files, name = bucket
    return {path.removeprefix(f"{name}/") for path in files.find(name)}


def local_files(run: Path) -> set[str]:
    return {path.relative_to(run.parent).as_posix() for path in run.rglob("*") if path.is_file()}


def successful_output(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_uploaded_run_has_the_same_output_as_the_local_run(profdeck: Profdeck, run: Path, bucket: Any) -> None:
    _, name = bucket
    url = f"s3://{name}/profiles/job"
    assert successful_output(profdeck("upload", "profiles/job", f"s3://{name}/profiles")).startswith("Sent 13 files")
    assert remote_files(bucket) == {f"profiles/{file}" for file in local_files(run)}
    for command, status in (("ls", 0), ("summary", 0), ("trend", 6)):  # too few captures for a trend
        results = [profdeck(command, place) for place in (url, "profiles/job")]
        assert [result.returncode for result in results] == [status, status]
        assert results[0].stdout.replace(url, "profiles/job") == results[1].stdout
    assert successful_output(profdeck("summary", f"{url}/step_000050", "--json")).replace(f"{url}/", "")
    assert "job.html" in successful_output(profdeck("report", f"s3://{name}/profiles/latest"))
    assert successful_output(profdeck("diff", url, "profiles/job"))


def test_uploaded_files_are_not_sent_again(profdeck: Profdeck, run: Path, bucket: Any) -> None:
    _, name = bucket
    successful_output(profdeck("upload", "profiles/job", f"s3://{name}"))
    assert successful_output(profdeck("upload", "profiles/job", f"s3://{name}")).startswith(
        "Sent 0 files, 0 B; 13 were already in the store."
    )
    (run / "step_000000" / "page.html").write_text("a report")
    assert successful_output(profdeck("upload", "profiles/job", f"s3://{name}")).startswith(
        "Sent 1 file, 8 B; 13 were already in the store."
    )


def test_killed_upload_is_resumed(
    profdeck: Profdeck, environment: dict[str, str], run: Path, bucket: Any, tmp_path: Path
) -> None:
    files, name = bucket
    write_run(run, 40, lambda _: GpuJob(ranks=2))
    command = [sys.executable, "-m", "profdeck", "upload", str(run), f"s3://{name}"]
    with subprocess.Popen(command, env=environment, cwd=tmp_path) as process:
        until(lambda: len(files.find(name)) > 20, every_s=0.05, timeout_s=60)
        process.send_signal(signal.SIGKILL)
    sent_count = len(remote_files(bucket))
    assert 20 < sent_count < 161
    assert not files.exists(f"{name}/job/run.json")  # without run.json, the copy is not a run
    result = json.loads(successful_output(profdeck("upload", "profiles/job", f"s3://{name}", "--json")))
    assert (result["files"], result["there"]) == (161 - sent_count, sent_count)
    assert remote_files(bucket) == local_files(run)


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_modified_remote_file_is_sent_again(
    profdeck: Profdeck, run: Path, bucket: Any, google: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gcsfs

    files, name = bucket
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google)
    google_variables = {"STORAGE_EMULATOR_HOST": google, "FSSPEC_GS_TOKEN": "anon"}
    profdeck = functools.partial(profdeck, **google_variables)
    if kind == "gs":
        files, name = gcsfs.GCSFileSystem(token="anon", use_listings_cache=False), "bucket"  # noqa: S106 - not a secret
    url = f"{kind}://{name}/deep/below"
    successful_output(profdeck("upload", "profiles/job", url))
    (trace,) = (run / "step_000050").rglob("rank_0001*.gz")
    remote_path = f"deep/below/{trace.relative_to(run.parent)}"
    files.pipe_file(f"{name}/{remote_path}", bytes(trace.stat().st_size))
    assert profdeck("ls", f"{url}/job").returncode == 1
    assert successful_output(profdeck("upload", "profiles/job", url)).startswith("Sent 1 file")
    successful_output(profdeck("ls", f"{url}/job"))


def test_local_copy_is_updated_from_the_bucket(profdeck: Profdeck, run: Path, bucket: Any, tmp_path: Path) -> None:
    files, name = bucket
    successful_output(profdeck("upload", "profiles/job", f"s3://{name}"))
    assert "3 captures" in successful_output(profdeck("ls", f"s3://{name}/job"))
    inodes = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("rank_*")}
    assert len(inodes) == 12
    files.rm(f"{name}/job/step_000100", recursive=True)
    assert "2 captures" in successful_output(profdeck("ls", f"s3://{name}/job"))
    later_inodes = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("rank_*")}
    assert len(later_inodes) == 8
    assert later_inodes.items() <= inodes.items()  # files are not fetched again
    successful_output(profdeck("ls", f"s3://{name}/job", PROFDECK_CACHE="off"))


def test_different_run_with_the_same_name_is_not_overwritten(profdeck: Profdeck, run: Path, bucket: Any) -> None:
    _, name = bucket
    successful_output(profdeck("upload", "profiles/job", f"s3://{name}"))
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"created_ns": 6}))
    refused = profdeck("upload", "profiles/job", f"s3://{name}")
    assert refused.returncode != 0
    assert f"s3://{name}/job is a different run with the same name" in refused.stderr


def test_names_outside_the_copy_are_rejected(profdeck: Profdeck, bucket: Any, tmp_path: Path) -> None:
    files, name = bucket
    files.pipe_file(f"{name}/job/run.json", b"{}")
    files.pipe_file(f"{name}/job/../../../../out", b"x")
    refused = profdeck("ls", f"s3://{name}/job")
    assert refused.returncode == 4
    assert "Nothing was copied." in refused.stderr
    assert not list(tmp_path.rglob("out"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "s3://BUCKET"], "BUCKET does not exist or contains no files"),
        (["ls", "s3://BUCKET/latest"], "There is no run in s3://BUCKET, so 'latest' cannot be resolved"),
        (["ls", "wrong://place"], "wrong://place is not a URL that fsspec supports"),
        (["upload", "profiles/job", "s3://no-such-bucket"], "cannot be written: FileNotFoundError"),
        (["upload", "profiles/job", f"ftp://me:{SECRET}@127.0.0.1:1/x"], "ftp://***@127.0.0.1:1/x cannot be opened"),
        (["upload", "profiles/job"], "PROFDECK_UPLOAD is not set. Set it to the URL of a directory"),
        (["prune", "s3://BUCKET/job", "--steps", "1"], "requires a local path, not a URL"),
        (["summary", f"https://127.0.0.1:1/a.json?signature={SECRET}"], "https://127.0.0.1:1/a.json cannot be read"),
    ],
)
def test_unsupported_url_is_reported(
    profdeck: Profdeck, run: Path, bucket: Any, arguments: list[str], message: str
) -> None:
    _, name = bucket
    refused = profdeck(*(argument.replace("BUCKET", name) for argument in arguments))
    assert refused.returncode in {2, 4}, refused
    assert message.replace("BUCKET", name) in " ".join(refused.stderr.split())
    assert SECRET not in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr


def test_url_with_several_runs_lists_their_names(profdeck: Profdeck, run: Path, bucket: Any) -> None:
    _, name = bucket
    successful_output(profdeck("upload", "profiles/job", f"s3://{name}"))
    (run / "run.json").write_text(json.dumps({"schema": 1, "created_ns": 9}))
    run.rename(run.with_name("later"))
    successful_output(profdeck("upload", "profiles/later", f"s3://{name}"))
    refused = profdeck("ls", f"s3://{name}")
    assert f"s3://{name} contains 2 runs: job, later. Pass the URL of a run, such as s3://{name}/job," in refused.stderr
    assert f"s3://{name}/later: 3 captures" in successful_output(profdeck("ls", f"s3://{name}/latest"))


def test_listener_sends_each_capture_and_retries_after_an_outage(
    environment: dict[str, str], profdeck: Profdeck, bucket: Any, tmp_path: Path
) -> None:
    files, name = bucket

    def train(*steps: int, **environ: str) -> None:
        job_environment = environment | {"PROFDECK_UPLOAD": f"s3://{name}/runs"} | environ
        command = [sys.executable, "-c", JOB, *map(str, steps)]
        result = subprocess.run(
            command, env=job_environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 0, result.stderr

    run = tmp_path / "profiles" / "job"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        train(3, AWS_ENDPOINT_URL=f"http://127.0.0.1:{unused.getsockname()[1]}")
    record = json.loads((run / "step_000003" / "finish.step3.json").read_text())
    assert record["state"] == "failed"
    assert f"s3://{name}/runs/job cannot be read: EndpointConnectionError" in record["parts"][0]["output"]
    successful_output(profdeck("summary", "profiles/job"))

    train(7)
    record = json.loads((run / "step_000007" / "finish.step7.json").read_text())
    assert record["state"] == "done", record
    assert record["parts"][0]["output"].endswith(f" to s3://{name}/runs/job\n")
    listed = json.loads(successful_output(profdeck("ls", f"s3://{name}/runs/job", "--json")))
    assert [capture["first_step"] for capture in listed["captures"]] == [3, 7]
    assert {capture["status"] for capture in listed["captures"]} == {"complete"}
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    contents += [files.cat_file(f"{name}/{path}") for path in remote_files(bucket)]
    assert not any(SECRET.encode() in content for content in contents)
