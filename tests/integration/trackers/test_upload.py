"""Runs at URLs: a real S3 server of this machine, and directories through fsspec."""

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

SECRET = "sesame-0123456789"  # noqa: S105 - of nobody
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
    """Run the server of a module, which takes these arguments and a port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, *arguments, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(answers, every_s=0.1, timeout_s=60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Run moto's server of S3."""
    with server("moto.server", "-H", "127.0.0.1", "-p") as url:
        yield url


@pytest.fixture(scope="module")
def google() -> Iterator[str]:
    """Run an emulator of Google Cloud Storage, which has a bucket `bucket`."""
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
    """A bucket of S3 for each test, as a file system of its own."""
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
    """A run of three captures of two ranks."""
    made = write_run(tmp_path / "profiles" / "job", 3, lambda _: GpuJob(ranks=2))
    (made / "run.json").write_text(json.dumps({"schema": 1, "created_ns": 5, "roles": ["trainer"], "config": {}}))
    return made


def names(bucket: Any) -> set[str]:
    files, name = bucket
    return {path.removeprefix(f"{name}/") for path in files.find(name)}


def local(run: Path) -> set[str]:
    return {path.relative_to(run.parent).as_posix() for path in run.rglob("*") if path.is_file()}


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_reads_there_as_it_does_here(profdeck: Profdeck, run: Path, bucket: Any) -> None:
    _, name = bucket
    url = f"s3://{name}/profiles/job"
    assert said(profdeck("upload", "profiles/job", f"s3://{name}/profiles")).startswith("Sent 13 files")
    assert names(bucket) == {f"profiles/{file}" for file in local(run)}
    for command in (["ls"], ["summary"], ["trend"]):
        assert said(profdeck(*command, url)).replace(url, "profiles/job") == said(profdeck(*command, "profiles/job"))
    assert said(profdeck("summary", f"{url}/step_000050", "--json")).replace(f"{url}/", "")
    assert "job.html" in said(profdeck("report", f"s3://{name}/profiles/latest"))
    assert said(profdeck("diff", url, "profiles/job"))


def test_what_is_there_is_not_sent_again(profdeck: Profdeck, run: Path, bucket: Any) -> None:
    _, name = bucket
    said(profdeck("upload", "profiles/job", f"s3://{name}"))
    assert said(profdeck("upload", "profiles/job", f"s3://{name}")).startswith(
        "Sent 0 files, 0 B; 13 were already in the store."
    )
    (run / "step_000000" / "page.html").write_text("a report")
    assert said(profdeck("upload", "profiles/job", f"s3://{name}")).startswith(
        "Sent 1 file, 8 B; 13 were already in the store."
    )


def test_an_upload_that_is_killed_goes_on_where_it_was(
    profdeck: Profdeck, environment: dict[str, str], run: Path, bucket: Any, tmp_path: Path
) -> None:
    files, name = bucket
    write_run(run, 40, lambda _: GpuJob(ranks=2))
    command = [sys.executable, "-m", "profdeck", "upload", str(run), f"s3://{name}"]
    with subprocess.Popen(command, env=environment, cwd=tmp_path) as process:
        until(lambda: len(files.find(name)) > 20, every_s=0.05, timeout_s=60)
        process.send_signal(signal.SIGKILL)
    there = len(names(bucket))
    assert 20 < there < 161
    assert not files.exists(f"{name}/job/run.json")  # so nobody takes it for the run
    rest = json.loads(said(profdeck("upload", "profiles/job", f"s3://{name}", "--json")))
    assert (rest["files"], rest["there"]) == (161 - there, there)
    assert names(bucket) == local(run)


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_what_differs_there_is_sent_again(
    profdeck: Profdeck, run: Path, bucket: Any, google: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gcsfs

    files, name = bucket
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", google)
    of_google = {"STORAGE_EMULATOR_HOST": google, "FSSPEC_GS_TOKEN": "anon"}
    profdeck = functools.partial(profdeck, **of_google)
    if kind == "gs":
        files, name = gcsfs.GCSFileSystem(token="anon", use_listings_cache=False), "bucket"  # noqa: S106 - none
    url = f"{kind}://{name}/deep/below"
    said(profdeck("upload", "profiles/job", url))
    (trace,) = (run / "step_000050").rglob("rank_0001*.gz")
    place = f"deep/below/{trace.relative_to(run.parent)}"
    files.pipe_file(f"{name}/{place}", bytes(trace.stat().st_size))
    assert profdeck("ls", f"{url}/job").returncode == 1
    assert said(profdeck("upload", "profiles/job", url)).startswith("Sent 1 file")
    said(profdeck("ls", f"{url}/job"))


def test_a_copy_follows_what_is_there(profdeck: Profdeck, run: Path, bucket: Any, tmp_path: Path) -> None:
    files, name = bucket
    said(profdeck("upload", "profiles/job", f"s3://{name}"))
    assert "3 captures" in said(profdeck("ls", f"s3://{name}/job"))
    kept = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("rank_*")}
    assert len(kept) == 12
    files.rm(f"{name}/job/step_000100", recursive=True)
    assert "2 captures" in said(profdeck("ls", f"s3://{name}/job"))
    after = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("rank_*")}
    assert len(after) == 8
    assert after.items() <= kept.items()  # not fetched again
    said(profdeck("ls", f"s3://{name}/job", PROFDECK_CACHE="off"))


def test_another_run_of_the_name_is_left_as_it_is(profdeck: Profdeck, run: Path, bucket: Any) -> None:
    _, name = bucket
    said(profdeck("upload", "profiles/job", f"s3://{name}"))
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"created_ns": 6}))
    refused = profdeck("upload", "profiles/job", f"s3://{name}")
    assert refused.returncode != 0
    assert f"s3://{name}/job is a different run with the same name" in refused.stderr


def test_names_that_lead_out_of_a_copy_are_refused(profdeck: Profdeck, bucket: Any, tmp_path: Path) -> None:
    files, name = bucket
    files.pipe_file(f"{name}/job/run.json", b"{}")
    files.pipe_file(f"{name}/job/../../../../out", b"x")
    refused = profdeck("ls", f"s3://{name}/job")
    assert refused.returncode == 4
    assert "Nothing was copied." in refused.stderr
    assert not list(tmp_path.rglob("out"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "s3://BUCKET"], "BUCKET does not exist or contains no files"),
        (["ls", "s3://BUCKET/latest"], "There is no run in s3://BUCKET, so 'latest' cannot be resolved"),
        (["ls", "wrong://place"], "wrong://place is not a URL that fsspec supports"),
        (["upload", "profiles/job", "s3://no-such-bucket"], "cannot be written: FileNotFoundError"),
        (["upload", "profiles/job", f"ftp://me:{SECRET}@127.0.0.1:1/x"], "ftp://127.0.0.1:1/x cannot be opened"),
        (["upload", "profiles/job"], "PROFDECK_UPLOAD is not set. Set it to the URL of a directory"),
        (["prune", "s3://BUCKET/job", "--steps", "1"], "requires a local path, not a URL"),
        (["summary", f"https://127.0.0.1:1/a.json?signature={SECRET}"], "https://127.0.0.1:1/a.json cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said(
    profdeck: Profdeck, run: Path, bucket: Any, arguments: list[str], words: str
) -> None:
    _, name = bucket
    refused = profdeck(*(argument.replace("BUCKET", name) for argument in arguments))
    assert refused.returncode in {2, 4}, refused
    assert words.replace("BUCKET", name) in " ".join(refused.stderr.split())
    assert SECRET not in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr


def test_several_runs_are_named(profdeck: Profdeck, run: Path, bucket: Any) -> None:
    _, name = bucket
    said(profdeck("upload", "profiles/job", f"s3://{name}"))
    (run / "run.json").write_text(json.dumps({"schema": 1, "created_ns": 9}))
    run.rename(run.with_name("later"))
    said(profdeck("upload", "profiles/later", f"s3://{name}"))
    refused = profdeck("ls", f"s3://{name}")
    assert f"s3://{name} contains 2 runs: job, later. Pass the URL of a run, such as s3://{name}/job," in refused.stderr
    assert f"s3://{name}/later: 3 captures" in said(profdeck("ls", f"s3://{name}/latest"))


def test_a_listener_sends_each_capture_and_makes_up_for_an_outage(
    environment: dict[str, str], profdeck: Profdeck, bucket: Any, tmp_path: Path
) -> None:
    files, name = bucket

    def trained(*steps: int, **environ: str) -> None:
        own = environment | {"PROFDECK_UPLOAD": f"s3://{name}/runs"} | environ
        command = [sys.executable, "-c", JOB, *map(str, steps)]
        done = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr

    run = tmp_path / "profiles" / "job"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        trained(3, AWS_ENDPOINT_URL=f"http://127.0.0.1:{nobody.getsockname()[1]}")
    record = json.loads((run / "step_000003" / "finish.step3.json").read_text())
    assert record["state"] == "failed"
    assert f"s3://{name}/runs/job cannot be read: EndpointConnectionError" in record["parts"][0]["output"]
    said(profdeck("summary", "profiles/job"))

    trained(7)
    record = json.loads((run / "step_000007" / "finish.step7.json").read_text())
    assert record["state"] == "done", record
    assert record["parts"][0]["output"].endswith(f" to s3://{name}/runs/job\n")
    listed = json.loads(said(profdeck("ls", f"s3://{name}/runs/job", "--json")))
    assert [one["first_step"] for one in listed["captures"]] == [3, 7]
    assert {one["status"] for one in listed["captures"]} == {"complete"}
    everything = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    everything += [files.cat_file(f"{name}/{path}") for path in names(bucket)]
    assert not any(SECRET.encode() in content for content in everything)
