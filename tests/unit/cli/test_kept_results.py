"""Tests for the result cache: unchanged files are not read again, and changed files are."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_traces import each
from typer.testing import Result

from gpu_job import GpuJob
from profdeck_traces.analysis import summary
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.result_keys import identity_of
from profdeck_traces.loading import summarise

Cli = Callable[..., Result]
Record = Callable[..., Path]


@pytest.fixture(autouse=True)
def _set_clock_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock three seconds ahead, because recently changed files are not cached."""
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 3_000_000_000)


def summary_json(cli: Cli, path: Path, *options: object) -> str:
    result = cli("summary", path, "--json", "--processes", 1, *options)
    assert result.exit_code in {0, 4}
    return result.stdout


@pytest.mark.shared_data
@each("gpu/*.json.gz", "npu/*.json")
def test_cached_summary_equals_a_new_summary(cli: Cli, read_names: list[str], path: Path) -> None:
    first = summary_json(cli, path)
    count = len(read_names)
    assert summary_json(cli, path) == first
    assert len(read_names) == count > 0
    assert summary_json(cli, path, "--no-cache") == first
    assert len(read_names) > count


def test_each_rank_is_cached_separately(cli: Cli, tmp_path: Path, read_names: list[str]) -> None:
    directory = GpuJob(ranks=3, slow_rank=1).write(tmp_path / "job")
    first = summary_json(cli, directory)
    read_names.clear()
    changed = directory / "rank2.trace.json.gz"
    changed.write_bytes(changed.read_bytes()[:-30])
    second = json.loads(summary_json(cli, directory))
    assert read_names == ["rank2.trace.json.gz"]
    assert [rank["whole"] for rank in second["ranks"]] == [True, True, False]
    assert second["ranks"][:2] == json.loads(first)["ranks"][:2]
    assert second["skew"]  # computed from cached and read ranks


def test_summary_and_report_share_results(cli: Cli, tmp_path: Path, read_names: list[str]) -> None:
    directory = GpuJob(ranks=3, slow_rank=1).write(tmp_path / "job")
    pages = [tmp_path / name for name in ("cached.html", "read.html")]
    first = summary_json(cli, directory)
    read_names.clear()
    assert cli("report", directory, "-o", pages[0], "--processes", 1).exit_code == 0
    assert cli("diff", directory, directory).exit_code == 0
    assert read_names == []
    assert cli("report", directory, "-o", pages[1], "--processes", 1, "--no-cache").exit_code == 0
    assert len(read_names) == 3
    assert pages[0].read_bytes() == pages[1].read_bytes()
    assert summary_json(cli, directory, "--no-cache") == first


@pytest.mark.parametrize("change", ["in place", "replaced", "touched", "restored times"])
def test_changed_file_is_read_again(cli: Cli, tmp_path: Path, read_names: list[str], change: str) -> None:
    path = tmp_path / "a.trace.json"
    events = [{"ph": "X", "cat": "cpu_op", "name": "one", "pid": 1, "tid": 1, "ts": 1, "dur": 2}]
    path.write_text(json.dumps({"traceEvents": events}))
    summary_json(cli, path)
    times = path.stat()
    text = path.read_text().replace("one", "two")
    if change == "replaced":
        path.unlink()
    if change == "touched":
        os.utime(path)
    else:
        path.write_text(text)
    if change == "restored times":
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert path.stat().st_size == times.st_size
    read_names.clear()
    assert ("two" in summary_json(cli, path)) is (change != "touched")
    assert read_names == [path.name]


def test_file_that_changes_while_it_is_read_is_not_cached(
    cli: Cli, tmp_path: Path, read_names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = GpuJob(steps=3).write(tmp_path / "job").iterdir()
    read_trace = summary.read_trace

    def read_and_change(file: Path, **options: object) -> object:
        result = read_trace(file, **options)  # type: ignore[arg-type]
        file.write_bytes(file.read_bytes())
        return result

    with monkeypatch.context() as patch:
        patch.setattr(summary, "read_trace", read_and_change)
        summary_json(cli, path)
    read_names.clear()
    summary_json(cli, path)
    assert read_names == [path.name]


@pytest.mark.parametrize(
    ("changed_ns", "age_ns", "is_cached"),
    [
        (7, 90_000_000, False),
        (7, 110_000_000, True),
        (0, 110_000_000, False),
        (0, 1_900_000_000, False),
        (0, 2_100_000_000, True),
    ],
)
def test_recently_changed_file_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed_ns: int, age_ns: int, *, is_cached: bool
) -> None:
    """With timestamps in whole seconds, a second change in the same second is not visible."""
    (tmp_path / "file").write_bytes(b"{}")
    changed_ns += 1_700_000_000_000_000_000
    real_stat = (tmp_path / "file").stat()

    class ChangedStat:
        """A ``stat`` result with another change time, because programs cannot set the change time of a file."""

        st_ctime_ns = st_mtime_ns = changed_ns

        def __getattr__(self, name: str) -> object:
            return getattr(real_stat, name)

    monkeypatch.setattr(os, "fstat", lambda _descriptor: ChangedStat())
    monkeypatch.setattr(time, "time_ns", lambda: changed_ns + age_ns)
    assert (identity_of(tmp_path / "file") is not None) is is_cached


def test_options_are_part_of_the_cache_key(cli: Cli, tmp_path: Path, read_names: list[str]) -> None:
    (path,) = GpuJob(steps=3).write(tmp_path / "job").iterdir()
    (tmp_path / "rules.yaml").write_text("- {class: mine, pattern: bf16}\n")
    first = summary_json(cli, path)
    rules = ("--rules", tmp_path / "rules.yaml")
    assert "mine" in summary_json(cli, path, *rules)
    count = len(read_names)
    assert "mine" in summary_json(cli, path, *rules)
    assert summary_json(cli, path) == first
    assert len(read_names) == count
    (tmp_path / "rules.yaml").write_text("- {class: yours, pattern: bf16}\n")
    assert "yours" in summary_json(cli, path, *rules)


def test_all_commands_share_results(cli: Cli, tmp_path: Path, read_names: list[str]) -> None:
    directory = GpuJob(ranks=2).write(tmp_path / "job")
    for command in (
        ("report", directory, "-o", tmp_path / "a.html", "--processes", 1),
        ("summary", directory, "--processes", 1),
        ("diff", directory, directory),
        ("export", directory, "--speedscope", tmp_path / "stacks.json"),
        ("report", directory, "-o", tmp_path / "b.html"),
    ):
        cli(*command)
        assert len(read_names) == 2, command
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()


def test_facts_of_a_changed_manifest_are_applied_to_cached_results(
    cli: Cli, record: Record, read_names: list[str]
) -> None:
    run = record(3)
    first = json.loads(summary_json(cli, run))
    (manifest,) = run.rglob("rank_*.step3.json")
    facts = json.loads(manifest.read_text()) | {"host": "another", "stall_s": 2.5}
    manifest.write_text(json.dumps(facts))
    count = len(read_names)
    second = summary_json(cli, run)
    assert first["ranks"][0]["host"] != json.loads(second)["ranks"][0]["host"] == "another"
    assert len(read_names) == count
    manifest.write_text(json.dumps(facts | {"cold_first_step": not facts["cold_first_step"]}))
    summary_json(cli, run)
    assert len(read_names) > count
    manifest.unlink()
    assert summary_json(cli, run) == summary_json(cli, run, "--no-cache") != second


def test_cache_is_independent_of_the_working_directory(
    cli: Cli, record: Record, read_names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(3)
    summary_json(cli, run)
    count = len(read_names)
    monkeypatch.chdir(run.parent)
    document = json.loads(summary_json(cli, Path(run.name)))
    assert len(read_names) == count
    assert document["ranks"][0]["path"].startswith(f"{run.name}/step_000003")
    assert document["ranks"][0]["run"] == run.name


def test_ls_reads_only_changed_files(cli: Cli, record: Record, read_names: list[str]) -> None:
    run = record(3, 5, ranks=(0, 1), world_size=2)
    assert cli("ls", run, "--processes", 1).exit_code == 0
    assert len(read_names) == 4
    unchanged = cli("ls", run, "--processes", 1)
    assert unchanged.exit_code == 0
    assert len(read_names) == 4
    assert "4 unchanged files were not read again" in unchanged.stdout
    report = json.loads(cli("ls", run, "--processes", 1, "--json").stdout)
    assert report["totals"]["not_read_again"] == 4
    trace = next(run.rglob("rank_0001*step3.trace.json*"))
    times = trace.stat()
    trace.write_bytes(trace.read_bytes()[:-4] + b"    ")
    os.utime(trace, ns=(times.st_atime_ns, times.st_mtime_ns))
    damaged = cli("ls", run, "--processes", 1)
    assert damaged.exit_code == 1
    assert read_names[4:] == [trace.name]
    assert cli("ls", run, "--processes", 1, "--no-cache").exit_code == 1
    assert len(read_names) == 9


def test_ls_uses_checks_of_a_summary(cli: Cli, record: Record, read_names: list[str]) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    expected = cli("ls", run, "--json", "--no-cache", "--processes", 1).stdout
    read_names.clear()
    summary_json(cli, run)
    assert len(read_names) == 2
    result = cli("ls", run, "--json", "--processes", 1)
    assert len(read_names) == 2
    expected = expected.replace('"kept": false', '"kept": true').replace('"not_read_again": 0', '"not_read_again": 2')
    assert result.stdout == expected


@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_independent_of_cache_and_processes(tmp_path: Path, processes: int) -> None:
    directory = GpuJob(ranks=4, slow_rank=2, items=3).write(tmp_path / "job")
    (tmp_path / "cache").mkdir()
    cache = ResultCache(tmp_path / "cache")
    results = [
        summarise([directory], cache=used_cache, processes=count, buckets=256)[0]
        for used_cache, count in ((None, 1), (cache, processes), (cache, 1), (cache, 2))
    ]
    assert all(result == results[0] for result in results)
    assert [*(tmp_path / "cache").rglob("*")]


def test_invalid_cache_entry_is_replaced(cli: Cli, tmp_path: Path, read_names: list[str]) -> None:
    (path,) = GpuJob(steps=3).write(tmp_path / "job").iterdir()
    first = summary_json(cli, path)
    cache = ResultCache.of_user()
    assert cache is not None
    for content in (b"", b"x", gzip.compress(b"[]")):
        for file in cache.directory.rglob("??*"):
            if file.is_file():
                cache.put(file.parent.name + file.name, content)
        read_names.clear()
        assert summary_json(cli, path) == first
        assert read_names == [path.name]


@pytest.mark.parametrize(
    "member",
    ['"name": "half \\ud800 of a pair"', '"name": "a", "pid": 123456789012345678901234567890', '"name": "\\u0000"'],
)
def test_result_that_cannot_be_cached_is_returned(cli: Cli, tmp_path: Path, read_names: list[str], member: str) -> None:
    text = '{"traceEvents": [{"ph": "X", "cat": "kernel", "tid": 7, "ts": 1, "dur": 2, MEMBER}]}'
    (tmp_path / "a.trace.json").write_text(text.replace("MEMBER", member))
    outputs = [summary_json(cli, tmp_path / "a.trace.json") for _ in range(2)]
    assert outputs[0] == outputs[1] == summary_json(cli, tmp_path / "a.trace.json", "--no-cache")
    assert json.loads(outputs[0])["ranks"][0]["whole"]


def test_errors_are_not_cached(cli: Cli, tmp_path: Path, read_names: list[str]) -> None:
    (tmp_path / "a.trace.json").write_text("nothing")
    for _ in range(2):
        assert cli("summary", tmp_path / "a.trace.json").exit_code == 4
    assert len(read_names) == 2
