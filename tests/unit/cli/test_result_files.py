"""Tests for result files: unchanged traces are not read, and stale or invalid results are ignored."""

from __future__ import annotations

import base64
import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pytest
from isal import isal_zlib
from typer.testing import Result

from gpu_job import GpuJob
from profdeck.backends.trace_analysis import LEASE, QUEUE, analyse
from profdeck.base.leases import acquire_lease
from profdeck_traces import write_result
from profdeck_traces.analysis import cached_reading, summary
from profdeck_traces.analysis.detail_model import Timeline
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.base.files import sha256_of
from profdeck_traces.inputs import result_files
from profdeck_traces.inputs.result_files import ResultFile, read_result, result_path, store_result
from profdeck_traces.inputs.result_keys import code_files
from profdeck_traces.inputs.sources import TraceSource
from profdeck_traces.reading import compiled

Cli = Callable[..., Result]
Record = Callable[..., Path]


@pytest.fixture(scope="session")
def original_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = GpuJob(ranks=3, slow_rank=1).write(tmp_path_factory.mktemp("original") / "job")
    for path in [*directory.iterdir()]:
        assert write_result(path)
    return directory


@pytest.fixture
def job(tmp_path: Path, original_job: Path) -> Path:
    """Return a directory with the traces of three ranks and their results."""
    return shutil.copytree(original_job, tmp_path / "job")


@pytest.fixture
def run(record: Record) -> Path:
    """Return a run with two traces and their results."""
    run = record(3, ranks=(0, 1), world_size=2)
    for path in [*run.rglob("*.trace.json")]:
        manifest = json.loads(path.with_suffix("").with_suffix(".json").read_text())
        facts = {"cold_first_step": bool(manifest["cold_first_step"]), "last_step": manifest["last_step"]}
        assert write_result(path, **facts)
    return run


def output(cli: Cli, command: str, *arguments: object) -> str:
    processes = () if command == "diff" else ("--processes", 1)
    result = cli(command, *arguments, *processes)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stdout


def edit(trace: Path, change: Callable[[ResultFile], ResultFile]) -> None:
    """Change the content of a result file and update its checksum."""
    result, sha256 = read_result(trace), sha256_of(trace)
    assert result is not None
    assert sha256 is not None
    store_result(trace, sha256, change(result))


def test_first_commands_read_no_trace(
    cli: Cli, tmp_path: Path, job: Path, read_names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [tmp_path / "results.html", tmp_path / "read.html"]
    commands = [("summary", job, "--json"), ("report", job, "-o", pages[0]), ("diff", job, tmp_path / "job2")]
    shutil.copytree(job, tmp_path / "job2")
    outputs = []
    for number, command in enumerate(commands):
        monkeypatch.setenv("PROFDECK_CACHE", str(tmp_path / f"cache{number}"))
        outputs.append(output(cli, *command))  # type: ignore[arg-type]
    assert read_names == []
    assert outputs[0] == output(cli, "summary", job, "--json", "--no-cache")
    output(cli, "report", job, "-o", pages[1], "--no-cache")
    assert pages[0].read_bytes() == pages[1].read_bytes()
    assert len(read_names) == 6


@pytest.mark.parametrize("count", [9, 25])
def test_report_of_many_traces_uses_the_results(
    cli: Cli, tmp_path: Path, job: Path, read_names: list[str], count: int
) -> None:
    """The resolution of the pictures depends on the number of traces, which is unknown during a capture."""
    paths = [path for path in job.iterdir() if path.suffix == ".gz"]
    for number in range(count - len(paths)):
        shutil.copy(paths[0], copy := job / f"copy{number}.trace.json.gz")
        shutil.copy(result_path(paths[0]), result_path(copy))
    output(cli, "report", job, "-o", tmp_path / "page.html")
    assert read_names == []


def test_first_commands_on_a_run_read_no_trace(cli: Cli, run: Path, read_names: list[str]) -> None:
    listing = output(cli, "ls", run, "--json")
    overview = output(cli, "summary", run, "--json")
    assert read_names == []
    assert json.loads(listing)["totals"]["not_read_again"] == 2
    assert json.loads(listing)["problems"] == []
    assert overview == output(cli, "summary", run, "--json", "--no-cache")
    expected = output(cli, "ls", run, "--json", "--no-cache")
    assert len(read_names) == 4
    expected = expected.replace('"kept": false', '"kept": true').replace('"not_read_again": 0', '"not_read_again": 2')
    assert listing == expected


def test_facts_are_read_from_the_manifest(cli: Cli, run: Path, read_names: list[str]) -> None:
    manifest = next(run.rglob("rank_0000*.step3.json"))
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(facts | {"host": "another"}))
    assert json.loads(output(cli, "summary", run, "--json"))["ranks"][0]["host"] == "another"
    assert read_names == []
    manifest.write_text(json.dumps(facts | {"cold_first_step": not facts["cold_first_step"]}))
    output(cli, "summary", run)
    assert len(read_names) == 1


def test_copied_run_keeps_its_results(cli: Cli, tmp_path: Path, run: Path, read_names: list[str]) -> None:
    shutil.copytree(run, tmp_path / "copy" / "job", copy_function=shutil.copyfile)  # without timestamps
    output(cli, "summary", tmp_path / "copy" / "job")
    assert read_names == []


def test_options_for_the_cache_apply(
    cli: Cli, tmp_path: Path, job: Path, read_names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.yaml").write_text("- {class: mine, pattern: bf16}\n")
    assert "mine" in output(cli, "summary", job, "--json", "--rules", tmp_path / "rules.yaml")
    assert len(read_names) == 3
    output(cli, "summary", job, "--no-cache")
    assert len(read_names) == 6
    monkeypatch.setenv("PROFDECK_CACHE", "off")
    output(cli, "summary", job)
    assert len(read_names) == 9


@pytest.mark.parametrize("is_gzip", [False, True])
@pytest.mark.parametrize("change", ["middle", "end", "truncated", "longer", "replaced", "swapped"])
def test_changed_trace_is_read_again(cli: Cli, tmp_path: Path, change: str, *, is_gzip: bool) -> None:
    """Where possible, the size, the last 4 KiB and the timestamps stay the same."""
    events = [
        {"ph": "X", "cat": "cpu_op", "name": f"operator {number:05}", "pid": 1, "tid": 1, "ts": 10 * number, "dur": 2}
        for number in range(2000)
    ]
    text = json.dumps({"traceEvents": events})
    path = tmp_path / f"a.trace.json{'.gz' * is_gzip}"
    other = tmp_path / f"b.trace.json{'.gz' * is_gzip}"

    def pack(content: str) -> bytes:
        return gzip.compress(content.encode(), mtime=0) if is_gzip else content.encode()

    for file, content in ((path, text), (other, text.replace("operator 00700", "operator 99999"))):
        file.write_bytes(pack(content))
        assert write_result(file)
    data, times = bytearray(path.read_bytes()), path.stat()
    match change:
        case "middle":
            data[len(data) // 2] ^= 1
        case "end":
            data[-6] ^= 1
        case "truncated":
            del data[-100:]
        case "longer":
            data += b" x"
        case "replaced":
            data[:] = other.read_bytes()
        case "swapped":
            result_path(other).replace(result_path(path))
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read_result(path) is None
    outputs = [output(cli, "summary", path, "--json", *options) for options in ((), ("--no-cache",))]
    assert outputs[0] == outputs[1]
    if change == "replaced":
        assert "operator 99999" in outputs[0]


def test_trace_that_changes_during_the_analysis_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = GpuJob(steps=3).write(tmp_path / "job").iterdir()
    read_trace = summary.read_trace

    def read_and_change(file: Path, **options: object) -> object:
        trace = read_trace(file, **options)  # type: ignore[arg-type]
        file.write_bytes(file.read_bytes() + b"\n")
        return trace

    monkeypatch.setattr(summary, "read_trace", read_and_change)
    assert not write_result(path)
    assert not result_path(path).exists()


@pytest.mark.parametrize("content", ["{", '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}'])
def test_corrupt_trace_has_no_result(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.trace.json"
    path.write_text(content)
    assert not write_result(path)
    assert not result_path(path).exists()


def test_result_of_another_version_is_ignored(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = job / "rank0.trace.json.gz"
    assert read_result(path) is not None
    monkeypatch.setattr(result_files, "__version__", "9.9")
    assert read_result(path) is None


def test_result_of_another_reader_is_ignored(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = job / "rank0.trace.json.gz", job / "_reader.so"
    other.write_bytes(b"another build")
    files = code_files()
    assert (compiled.LIBRARY in files) == compiled.LIBRARY.exists()
    assert read_result(path) is not None
    changed = (*(file for file in files if file != compiled.LIBRARY), other)
    monkeypatch.setattr(result_files, "code_files", lambda: changed)
    assert read_result(path) is None


INVALID_FILES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "header": lambda path: path.write_bytes(path.read_bytes()[:19]),
    "checksum": lambda path: path.write_bytes(path.read_bytes()[:21]),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "pickle": lambda path: path.write_bytes(b"cos\nsystem\n(S'touch executed'\ntR."),
    "huge": lambda path: os.truncate(path, 1 << 40),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "loop": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("name", INVALID_FILES)
def test_invalid_file_is_ignored(cli: Cli, tmp_path: Path, job: Path, read_names: list[str], name: str) -> None:
    path = job / "rank0.trace.json.gz"
    INVALID_FILES[name](result_path(path))
    assert output(cli, "summary", job, "--json") == output(cli, "summary", job, "--json", "--no-cache")
    assert read_names[0] == path.name
    assert len(read_names) == 4
    assert not (tmp_path / "executed").exists()


def test_file_of_another_user_is_ignored(job: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can change the owner of a file")
    path = job / "rank0.trace.json.gz"
    os.chown(result_path(path), 12345, -1)
    assert read_result(path) is None
    os.chown(path, 12345, -1)
    assert read_result(path) is not None


def _changed(change: Callable[[RankReading], RankReading]) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        reading = cached_reading.from_bytes(content, TraceSource(Path("a")))
        changed = cached_reading.to_bytes(change(reading))
        assert changed is not None
        return changed

    return apply


def _calls(**columns: object) -> Callable[[bytes], bytes]:
    return _changed(lambda reading: attrs.evolve(reading, collectives=attrs.evolve(reading.collectives, **columns)))


INVALID_READINGS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "no deflate stream": lambda _: b"x" * 100,
    "truncated stream": lambda content: content[:-20],
    "other data": lambda _: isal_zlib.compress(msgspec.msgpack.encode([1, "a", None])),
    "too large": lambda _: isal_zlib.compress(bytes((1 << 28) + 1)),
    "negative code": _calls(name=np.array([-1]), group=np.array([0]), start_ns=np.array([1]), end_ns=np.array([2])),
    "code without text": _calls(names=[]),
    "columns of different lengths": _calls(start_ns=np.array([1, 2, 3])),
}


def _pictures(change: Callable[[tuple[Timeline, ...]], object]) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        pictures = msgspec.msgpack.decode(zlib.decompress(content), type=tuple[Timeline, ...])
        return zlib.compress(msgspec.msgpack.encode(change(pictures)))

    return apply


def _lanes(**values: object) -> Callable[[bytes], bytes]:
    def change(pictures: tuple[Timeline, ...]) -> object:
        lanes = [attrs.evolve(lane, **values) for lane in pictures[0].lanes]
        return [attrs.evolve(pictures[0], lanes=lanes), *pictures[1:]]

    return _pictures(change)


INVALID_PICTURES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "truncated stream": lambda content: content[:-20],
    "other data": lambda _: zlib.compress(msgspec.msgpack.encode([1, "a", None])),
    "missing pictures": _pictures(lambda pictures: pictures[:1]),
    "another resolution": _pictures(lambda pictures: [attrs.evolve(one, buckets=1000) for one in pictures]),
    "missing classes": _lanes(classes=("a",) * 40),
    "no base64": _lanes(shares="?"),
    "no deflate stream in a lane": _lanes(shares="abcd"),
    "too many shares": _lanes(shares=base64.b64encode(zlib.compress(bytes(1 << 24))).decode()),
}


@pytest.mark.parametrize("name", INVALID_PICTURES)
def test_invalid_pictures_are_ignored(cli: Cli, tmp_path: Path, job: Path, read_names: list[str], name: str) -> None:
    path, change = job / "rank0.trace.json.gz", INVALID_PICTURES[name]
    edit(path, lambda result: msgspec.structs.replace(result, pictures=change(result.pictures)))
    output(cli, "report", job, "-o", tmp_path / "page.html")
    assert read_names == [path.name]


def test_summary_does_not_decode_pictures(cli: Cli, job: Path, read_names: list[str]) -> None:
    edit(job / "rank0.trace.json.gz", lambda result: msgspec.structs.replace(result, pictures=b""))
    output(cli, "summary", job)
    assert read_names == []


@pytest.mark.parametrize("name", INVALID_READINGS)
def test_invalid_reading_is_ignored(cli: Cli, tmp_path: Path, job: Path, read_names: list[str], name: str) -> None:
    """The checksum is valid, as if another program had written the file."""
    path, pages = job / "rank0.trace.json.gz", [tmp_path / "a.html", tmp_path / "b.html"]
    change = INVALID_READINGS[name]
    edit(path, lambda result: msgspec.structs.replace(result, reading=change(result.reading)))
    output(cli, "report", job, "-o", pages[0])
    assert read_names == [path.name]
    output(cli, "report", job, "-o", pages[1], "--no-cache")
    assert pages[0].read_bytes() == pages[1].read_bytes()


@pytest.mark.parametrize("value", [{"whole": False}, {"sha256": None}, {"sha256": "0" * 64}])
def test_result_with_another_check_is_ignored(job: Path, value: dict[str, object]) -> None:
    path = job / "rank0.trace.json.gz"
    edit(path, lambda result: msgspec.structs.replace(result, check=msgspec.structs.replace(result.check, **value)))
    assert read_result(path) is None


def test_concurrent_readers_and_writers_agree(cli: Cli, job: Path) -> None:
    paths = sorted(job.glob("*.gz"))
    expected = [read_result(path) for path in paths]
    with ThreadPoolExecutor(4) as pool:
        written = [pool.submit(write_result, path) for path in paths * 2]
        found = [pool.submit(read_result, path) for path in paths * 20]
        assert all(future.result() for future in written)
        assert [future.result() for future in found] == expected * 20
    assert [file for file in job.iterdir() if file.name.startswith(".")] == []


def test_result_files_are_neither_traces_nor_unlisted_files(cli: Cli, job: Path, run: Path) -> None:
    result = result_path(job / "rank0.trace.json.gz")
    refused = cli("summary", result)
    assert refused.exit_code
    assert f"Pass the trace instead: {result.with_suffix('')}" in " ".join(refused.output.split())
    assert json.loads(output(cli, "summary", job, "--json"))["ranks"][0]["path"].endswith(".gz")
    trace = next(run.rglob("*.trace.json"))
    manifest = trace.with_suffix("").with_suffix(".json")
    assert json.loads(output(cli, "ls", run, "--json"))["problems"] == []
    trace.unlink()
    manifest.unlink()
    assert f"{result_path(trace).name} is not listed" in output(cli, "ls", run, "--json")


def test_prune_deletes_results_with_their_traces(cli: Cli, record: Record) -> None:
    run = record(3, 5)
    for path in run.rglob("*.trace.json"):
        assert write_result(path)
    assert cli("prune", run, "--steps", 1).exit_code == 0
    assert [file.name for file in run.rglob("*.result")] == ["rank_0000.step5.trace.json.result"]


def test_process_skips_traces_that_cannot_be_analysed(job: Path) -> None:
    path = job / "rank2.trace.json.gz"
    result_path(path).unlink()
    broken, missing = job / "broken.trace.json", job / "missing.trace.json"
    broken.write_text("nothing")
    analyse([missing, broken, path], cold_first_step=False)
    assert read_result(path) is not None
    assert not result_path(broken).exists()


def test_one_process_of_a_host_analyses_at_a_time(job: Path) -> None:
    path = job / "rank0.trace.json.gz"
    result_path(path).unlink()
    lease = acquire_lease([LEASE], holder="a test")
    with ThreadPoolExecutor() as pool:
        analysis = pool.submit(analyse, [path], cold_first_step=False)
        with pytest.raises(TimeoutError):
            analysis.result(timeout=0.7)
        assert not result_path(path).exists()
        lease.release()
        analysis.result(timeout=60)
    assert read_result(path) is not None


def test_few_processes_wait_for_the_analysis_of_others(job: Path) -> None:
    path = job / "rank0.trace.json.gz"
    result_path(path).unlink()
    lease = acquire_lease(QUEUE, holder="a test")
    analyse([path], cold_first_step=False)
    assert not result_path(path).exists()
    lease.release()
    analyse([path], cold_first_step=False)
    assert read_result(path) is not None
    acquire_lease([LEASE, *QUEUE], holder="a test").release()


def test_killed_process_leaves_no_partial_result(cli: Cli, run: Path) -> None:
    trace = next(run.rglob("*.trace.json"))
    result_path(trace).unlink()
    code = (
        "import os, signal, sys, pathlib, profdeck_traces\n"
        "os.replace = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "profdeck_traces.write_result(pathlib.Path(sys.argv[1]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(trace)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [file.suffix for file in trace.parent.glob(".*")] == [".tmp"]
    assert not result_path(trace).exists()
    assert json.loads(output(cli, "ls", run, "--json"))["problems"] == []


def test_full_disk_leaves_no_result(job: Path) -> None:
    path = job / "rank0.trace.json.gz"
    before = result_path(path).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_result(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result_path(path).read_bytes() == before
    assert [file for file in job.iterdir() if file.name.startswith(".")] == []
