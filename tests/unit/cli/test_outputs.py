"""Tests for errors of `profdeck report` and `profdeck export`: unwritable outputs and unreadable traces."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

import profdeck_traces as traces
from captured_runs import write_run
from gpu_job import GpuJob
from profdeck_traces.base.errors import TraceError

Cli = Callable[..., Result]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "no.txt").write_text("hi")
    return GpuJob(steps=3).write(tmp_path / "job")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("report job -o directory", "directory cannot be written"),
        ("report job -o file/page.html", "page.html cannot be written"),
        ("report no.txt -o page.html", "no.txt: Malformed JSON at offset 0"),
        ("report job no.txt -o page.html", "no.txt: Malformed JSON at offset 0"),
        ("report nowhere -o page.html", "Cannot read nowhere"),
        ("export job --parquet file", "file cannot be written"),
        ("export job --parquet file/tables", "cannot be written"),
        ("export job", "--parquet DIR, --speedscope FILE"),
        ("report job -o file", "file already exists and is not an output of this command"),
        ("report job -o pipe", "pipe already exists"),
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
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
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
            assert "already exists" in " ".join(result.stderr.split())
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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "run", 1, lambda _: GpuJob(steps=3, products=2))
    (run / "run.json").write_text('{"schema": 1, "roles": []}')
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(run, target_is_directory=True)
    for number, file in enumerate(sorted(path for path in run.rglob("*") if path.is_file())):
        (tmp_path / f"hard{number}").hardlink_to(file)
        (tmp_path / f"soft{number}").symlink_to(file)
    return run


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def spellings_of(run: Path) -> list[Path]:
    files = sorted(path for path in run.rglob("*") if path.is_file())
    others = [run / ".." / run.name / files[0].relative_to(run), run.parent / "link" / files[-1].relative_to(run)]
    links = [run.parent / f"{kind}{number}" for kind in ("hard", "soft") for number in range(len(files))]
    return [*files, *others, *links, run / "new.json", run / "step_000000" / "trainer" / "rank_0009.step0.json"]


@pytest.mark.parametrize(
    "command",
    [
        "report run -o OUT", "trend run -o OUT", "merge run -o OUT", "export run --speedscope OUT",
        "trim run/step_000000/trainer/rank_0000.step0.trace.json.gz --steps 1 -o OUT",
        "baseline check main run --directory elsewhere --junit OUT",
    ],
)  # fmt: skip
def test_output_does_not_replace_files_of_a_run(cli: Cli, run: Path, command: str) -> None:
    cli("baseline", "save", "main", run, "--directory", "elsewhere")
    before = files_of(run.parent)
    for output in spellings_of(run):
        result = cli(*command.replace("OUT", str(output)).split())
        assert result.exit_code in {2, 4}, (output, result.output)
        assert files_of(run.parent) == before, output


def test_output_replaces_an_earlier_output(cli: Cli, run: Path) -> None:
    for _ in range(2):
        assert cli("report", run, "-o", "page.html").exit_code == 0
        assert cli("trend", run, "-o", "trend.html").exit_code == 6  # too few captures
        assert cli("baseline", "save", "main", run).exit_code == 0
        assert cli("baseline", "check", "main", run, "--junit", "result.xml").exit_code == 0
    Path("empty").touch()
    assert cli("report", run, "-o", "empty").exit_code == 0


@pytest.mark.parametrize(
    ("command", "content"),
    [
        ("report run", '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Notes</title>'),
        ("report run -o run.html", "<!doctype html><title>Notes</title>"),
        ("trend run -o run.html", "<!doctype html><title>Notes</title>"),
        (
            "baseline check main run --junit run.html",
            '<?xml version="1.0"?><testsuites><testsuite name="pytest"/></testsuites>',
        ),
        ("baseline check main run --junit run.html", '<?xml version="1.0"?><testsuite name="unit"/>'),
        (
            "export run --speedscope run.html",
            '{"$schema":"https://www.speedscope.app/file-format-schema.json","exporter":"py-spy@0.4"}',
        ),
    ],
)
def test_output_does_not_replace_files_of_other_programs(cli: Cli, run: Path, command: str, content: str) -> None:
    cli("baseline", "save", "main", run)
    Path("run.html").write_text(content)
    result = cli(*command.split())
    assert (result.exit_code, "run.html already exists" in " ".join(result.stderr.split())) == (2, True)
    assert Path("run.html").read_text() == content


def test_export_of_an_unreadable_run_keeps_the_tables(cli: Cli, run: Path) -> None:
    pytest.importorskip("pyarrow")
    assert cli("export", run, "--parquet", "tables").exit_code == 0
    before = files_of(Path("tables"))
    for trace in run.rglob("*.gz"):
        trace.write_bytes(b"text")
    assert cli("export", run, "--parquet", "tables").exit_code == 4
    assert files_of(Path("tables")) == before
    assert before


def test_baseline_does_not_become_a_run(cli: Cli, run: Path) -> None:
    before = files_of(run)
    for name, directory in (("run", "."), ("RUN", "."), ("run", "run"), ("new", "run"), ("hard0", "run/step_000000")):
        assert cli("baseline", "save", name, run, "--directory", directory).exit_code == 2
    assert files_of(run) == before
    assert not Path("run.json").exists()
