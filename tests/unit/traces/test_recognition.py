"""Tests of file formats, which are detected by content. Skipped files are reported with a suitable reader."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from profdeck.cli import app
from profdeck_traces.base.errors import TraceError
from profdeck_traces.inputs.file_formats import FileFormat, format_of, reader_of
from profdeck_traces.inputs.sources import find_sources

EVENT = {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1, "dur": 5, "pid": 1, "tid": 1}
DATA = Path(__file__).parents[4] / "shared" / "data" / "gpu"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json.dumps({"traceEvents": [EVENT]}), FileFormat.TRACE),
        (json.dumps([EVENT]), FileFormat.TRACE),
        (json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0}] * 100, "traceEvents": []}), FileFormat.TRACE),
        (json.dumps({"traceEvents": [EVENT | {"cat": "FEE"}], "viztracer_metadata": {}}), FileFormat.OTHER),
        ("main;f;g 12\nmain;h 3\n", FileFormat.OTHER),
        ('{"profdeck": {"sources": []}, "traceEvents": []}', FileFormat.MERGED),
        (json.dumps({"ranks": [], "skew": []}), FileFormat.OTHER),
        ("", FileFormat.OTHER),
        ("[]", FileFormat.OTHER),
        ("nonsense", FileFormat.OTHER),
    ],
)
def test_formats(tmp_path: Path, content: str, expected: FileFormat) -> None:
    (tmp_path / "a").write_text(content)
    (tmp_path / "b").write_bytes(gzip.compress(content.encode()))
    assert format_of(tmp_path / "a") is expected
    assert format_of(tmp_path / "b") is expected


def test_paths_that_are_not_files_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    for name in ("pipe.json", "endless.json", "absent.json"):
        assert format_of(tmp_path / name) is FileFormat.OTHER
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"{}" * 1000)[:12])
    assert format_of(tmp_path / "cut.json.gz") is FileFormat.OTHER


def test_traces_of_a_directory_are_found_by_content(tmp_path: Path) -> None:
    names = ["a.trace.json", "trace_rank0.json", "verl.json.gz", "b.pt.trace.json.gz"]
    for name in names:
        text = json.dumps({"traceEvents": [EVENT]}).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    (tmp_path / "merged.json").write_text('{"profdeck": {"sources": []}, "traceEvents": []}')
    (tmp_path / "x.pftrace").write_bytes(b"\n")
    (tmp_path / "x.nsys-rep").write_bytes(b"x")
    sqlite3.connect(tmp_path / "x.sqlite").execute("create table a (b)").connection.close()
    (tmp_path / "settings.json").write_text("{}")
    reasons: dict[str, str] = {}
    sources = find_sources([tmp_path], on_left_out=lambda path, reason: reasons.update({path.name: reason}))
    assert sorted(source.path.name for source in sources) == sorted(names)
    assert reasons.keys() == {"merged.json", "x.pftrace", "x.nsys-rep", "x.sqlite"}
    assert "nsys stats FILE" in reasons["x.nsys-rep"]
    for name, reason in reasons.items():
        if name != "merged.json":
            with pytest.raises(TraceError, match="is not a Chrome trace") as caught:
                find_sources([tmp_path / name])
            assert reason.removeprefix("is ") in str(caught.value)


@pytest.mark.skipif(not DATA.is_dir(), reason="the real traces are not at hand")
def test_real_traces_are_found() -> None:
    assert {source.path for source in find_sources([DATA])} == set(DATA.iterdir())


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_merged_trace_is_not_summed(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.trace.json").write_text(json.dumps({"traceEvents": [EVENT]}))
    (tmp_path / "out").mkdir()
    merged = tmp_path / "out" / "all.json.gz"
    result = cli("merge", tmp_path / "0.trace.json", tmp_path / "1.trace.json", "-o", merged)
    assert result.exit_code == 0, result.output
    assert format_of(merged) is FileFormat.MERGED
    for command in (["summary", merged], ["diff", merged, merged]):
        result = cli(*command)
        assert result.exit_code == 4
        assert "was written by profdeck merge" in " ".join(result.stderr.split())
    shutil.copy(merged, tmp_path / "all.json.gz")
    result = cli("summary", tmp_path, "--json")
    assert len(json.loads(result.stdout)["ranks"]) == 2
    assert "The traces of its ranks are read instead" in result.stderr


def test_tables_have_each_name_once(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from profdeck_traces.reading.arrow import record_batches
    from profdeck_traces.reading.reader import read_trace

    names = ["a" * 5000, "a" * 5001, "b", "a" * 5000]  # cut to one
    events = [EVENT | {"name": name, "tid": tid} for tid, name in enumerate(names)]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    table = record_batches(read_trace(tmp_path / "a.json").events).read_all()
    for column in ("name", "category", "pid", "tid"):
        values = table[column].combine_chunks().dictionary.to_pylist()
        assert len(values) == len(set(values)), column
    counts = table.group_by("name").aggregate([([], "count_all")])
    assert sorted(counts["count_all"].to_pylist()) == [1, 3]
    assert isinstance(table, pa.Table)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"traceEvents": [EVENT | {"cat": "FEE"}], "viztracer_metadata": {"version": "1"}}), "vizviewer"),
        ("main;f;g 12\nmain;h 3\n", "folded stacks"),
    ],
)
def test_profiles_of_python_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "profile").write_text(content)
    assert message in (reader_of(tmp_path / "profile") or "")
