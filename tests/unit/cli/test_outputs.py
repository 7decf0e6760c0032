"""Tests for errors of `profdeck report` and `profdeck export`: unwritable outputs and unreadable traces."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import Result

import profdeck_traces as traces
from gpu_job import GpuJob
from profdeck_traces.base.errors import TraceError

Cli = Callable[..., Result]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    (tmp_path / "no.txt").write_text("hi")
    return GpuJob(steps=3).write(tmp_path / "job")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("report job -o directory", "directory cannot be written"),
        ("report job -o file/page.html", "page.html cannot be written"),
        ("report no.txt -o page.html", "no.txt: The JSON is not closed"),
        ("report job no.txt -o page.html", "no.txt: The JSON is not closed"),
        ("report nowhere -o page.html", "Cannot read nowhere"),
        ("export job --parquet file", "file cannot be written"),
        ("export job --parquet file/tables", "cannot be written"),
        ("export job", "--parquet DIR, --speedscope FILE"),
    ],
)
def test_unwritable_output_or_unreadable_trace_is_an_error(
    cli: Cli, job: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    monkeypatch.chdir(job.parent)
    result = cli(*command.split())
    assert result.exit_code in {2, 4}
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert message in " ".join(result.stderr.split())
    assert Path("file").read_text() == "mine"
    assert not Path("page.html").exists()


def test_export_replaces_only_its_own_tables(cli: Cli, job: Path, tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    for _ in range(2):
        assert cli("export", job, "--parquet", tables).exit_code == 0
    written = {file.name: file.read_bytes() for file in tables.iterdir()}
    assert written
    foreign = io.BytesIO()
    pq.write_table(pa.table({"x": [1]}), foreign)
    (target := tmp_path / "target").write_bytes(next(iter(written.values())))
    for name in (next(iter(written)), "collectives.parquet"):
        for content in (b"", b"text", foreign.getvalue(), None):
            (tables / name).unlink(missing_ok=True)
            if content is None:
                (tables / name).symlink_to(target)
            else:
                (tables / name).write_bytes(content)
            result = cli("export", job, "--parquet", tables)
            assert result.exit_code == 2
            assert "was not written by this command" in " ".join(result.stderr.split())
            assert content is None or (tables / name).read_bytes() == content
            assert target.read_bytes() == next(iter(written.values()))
        (tables / name).unlink()
        if name in written:
            (tables / name).write_bytes(written[name])


def test_page_reports_a_corrupt_trace(cli: Cli, job: Path, tmp_path: Path) -> None:
    (trace,) = job.iterdir()
    trace.write_bytes(trace.read_bytes()[:-40])
    assert cli("report", job, "-o", tmp_path / "new" / "page.html").exit_code == 0
    assert "damaged: " in (tmp_path / "new" / "page.html").read_text()


def test_load_raises_trace_error_without_a_readable_trace(job: Path) -> None:
    for path in (job.parent / "nowhere", job.parent / "no.txt"):
        with pytest.raises(TraceError):
            traces.load(path)
