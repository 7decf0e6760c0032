"""Tests of the tables of a run. They must have the values of the summary in all formats."""

from __future__ import annotations

import csv
import json
import shutil
import types
import typing
from pathlib import Path
from typing import Any

import attrs
import pytest
from real_traces import each
from typer.testing import CliRunner

import profdeck_traces as traces
from gpu_job import GpuJob
from profdeck.cli import app
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.base.errors import ConfigError, TraceError
from profdeck_traces.reading import arrow
from profdeck_traces.reading.arrow import record_batches
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.run import Run
from profdeck_traces.tables.of_run import NAMES

pa = pytest.importorskip("pyarrow")
pc = pytest.importorskip("pyarrow.compute")
FRONT = ["role", "replica", "rank", "host", "capture", "run"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GpuJob(ranks=2, slow_rank=1).write(tmp_path_factory.mktemp("tables") / "run")


@pytest.fixture(scope="module")
def run(directory: Path) -> Run:
    return traces.load(directory)


def test_each_list_of_the_model_has_a_table(run: Run) -> None:
    """Otherwise, a new list in the model could be missing in the tables."""
    attrs.resolve_types(RankSummary)
    lists = {field.name for field in attrs.fields(RankSummary) if typing.get_origin(field.type) is tuple}
    sections = {"categories": "classes", "annotations": "operators"}
    without_table = {"timelines", "unrecorded_steps", "work", "stage_periods"}
    assert {sections.get(name, name) for name in lists} - without_table <= {*NAMES}
    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    for name in lists - without_table - {"annotations", "steps", "iterations"}:
        (model, _) = typing.get_args(attrs.fields_dict(RankSummary)[name].type)
        attrs.resolve_types(model)
        schema = run.table(sections.get(name, name)).to_arrow().schema
        for field in attrs.fields(model):
            of_field = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
            if of_field[0] in kinds and len({*of_field} - {types.NoneType}) == 1:
                assert schema.field(field.name).type == kinds[of_field[0]], (name, field.name)


@pytest.mark.parametrize("name", NAMES)
def test_tables_begin_with_the_rank(run: Run, name: str) -> None:
    table = run.table(name).to_arrow()
    assert table.column_names[: len(FRONT)] == FRONT
    assert len({*table.column_names}) == len(table.column_names)
    assert table.num_rows or name not in {"ranks", "kernels", "operators", "stages", "steps", "devices", "gaps", "skew"}


def check_sums(run: Run) -> None:
    """Check with Arrow that the sums of the rows equal the summary."""
    for rank in run.summary.ranks:
        is_rank = pc.field("path") == rank.path
        kernels = run.kernels.to_arrow().filter(is_rank)
        assert kernels.num_rows == len(rank.kernels)
        assert kernels["count"].to_pylist() == [kernel.count for kernel in rank.kernels]
        devices = run.devices.to_arrow().filter(is_rank)
        if devices.num_rows:
            assert pc.sum(devices["busy_us"]).as_py() == pytest.approx(rank.busy_us)
            idle = run.table("idle").to_arrow().filter(is_rank)
            assert (pc.sum(idle["idle_us"]).as_py() or 0) == pytest.approx(rank.idle_us)
        steps, iterations = (table.to_arrow().filter(is_rank).num_rows for table in (run.steps, run.iterations))
        assert steps + iterations == len(rank.steps)
        streams = run.table("streams").to_arrow().filter(is_rank)
        assert streams.num_rows == sum(len(device.streams) for device in rank.devices)
        operators = run.operators.to_arrow().filter(is_rank)
        assert operators.num_rows == len(rank.operators) + len(rank.annotations)
        gaps = run.gaps.to_arrow().filter(is_rank)
        assert gaps["host_event"].to_pylist() == [gap.host for device in rank.devices for gap in device.gaps]


def test_rows_add_up(run: Run) -> None:
    check_sums(run)
    assert run.findings.to_arrow()["rank"].to_pylist()[0] == 1
    assert set(run.skew.to_arrow()["rank"].to_pylist()) == {0, 1}


@pytest.mark.shared_data
@each("gpu/*.json.gz", "npu/*.json")
def test_rows_of_real_traces_add_up(path: Path) -> None:
    check_sums(traces.load(path))


@pytest.mark.parametrize("name", NAMES)
def test_csv_and_parquet_are_equal(directory: Path, run: Run, tmp_path: Path, name: str) -> None:
    import pyarrow.parquet as pq

    runner = CliRunner()
    printed = runner.invoke(app, ["summary", str(directory), "--csv", "--rows", name.replace("_", "-")])
    heading, *rows = csv.reader(printed.stdout.splitlines())
    table = run.table(name).to_arrow()
    assert heading == table.column_names
    expected = [["" if value is None else str(value) for value in row.values()] for row in table.to_pylist()]
    assert rows == expected
    result = runner.invoke(app, ["export", str(directory), "--parquet", str(tmp_path)])
    assert result.exit_code == 0, result.output
    file = tmp_path / f"{name}.parquet"
    assert file.exists() is bool(rows)
    if rows:
        assert pq.read_table(file) == table


def test_export_removes_older_tables(directory: Path, tmp_path: Path) -> None:
    export = ["export", str(directory), "--parquet", str(tmp_path)]
    assert CliRunner().invoke(app, export).exit_code == 0
    shutil.copy(tmp_path / "kernels.parquet", tmp_path / "links.parquet")
    assert CliRunner().invoke(app, export).exit_code == 0
    assert not (tmp_path / "links.parquet").exists()


def test_events_of_a_rank(directory: Path, run: Run) -> None:
    reader = run.events(1)
    assert isinstance(reader, pa.RecordBatchReader)
    (path,) = directory.glob("rank1.*")
    assert reader.read_all() == record_batches(read_trace(path).events).read_all()
    with pytest.raises(TraceError, match="No argument matches 2 traces.*capture and run: rank 0; rank 1"):
        run.events()
    with pytest.raises(TraceError, match="{'rank': 7} matches 0 traces"):
        run.events(7)
    with pytest.raises(TraceError, match="no table 'kernel'. The tables are ranks, kernels"):
        run.table("kernel")


def test_events_are_written_in_batches(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = directory.glob("rank1.*")
    events = read_trace(path).events
    monkeypatch.setattr(arrow, "_BATCH_EVENTS", 50)
    batches = list(record_batches(events))
    assert [batch.num_rows for batch in batches] == [min(50, len(events) - at) for at in range(0, len(events), 50)]
    rows = pa.Table.from_batches(batches).to_pylist()
    category = [events.tables.categories[code] for code in events.tables.category_of_names()[events.name]]
    assert [(row["name"], row["category"], row["start_ns"], row["end_ns"]) for row in rows] == list(
        zip(
            [events.tables.names[code] for code in events.name],
            category,
            events.start_ns.tolist(),
            events.end_ns.tolist(),
            strict=True,
        )
    )
    assert [(row["pid"], row["tid"]) for row in rows] == [
        tuple(map(str, events.tables.tracks[code])) for code in events.track
    ]


def test_notebook_shows_the_page_in_a_sandbox(run: Run, tmp_path: Path) -> None:
    html: Any = run._repr_html_()
    assert html.startswith('<iframe sandbox="allow-scripts" srcdoc="&lt;!doctype html&gt;')
    assert run.report(tmp_path / "page.html") == (tmp_path / "page.html").read_text()


def test_tables_are_shown_as_text(tmp_path: Path) -> None:
    GpuJob(name="gemm <script>alert(1)</script>").write(tmp_path)
    html = traces.load(tmp_path).kernels._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script" not in html


def test_rules_equal_those_of_the_command_line(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "classes.yaml").write_text('- {class: mine, pattern: "gemm"}\n')
    classes = traces.load(directory, rules=tmp_path / "classes.yaml").table("classes").to_arrow()
    assert "mine" in classes["category"].to_pylist()
    (tmp_path / "classes.yaml").write_text("- {class: 7}\n")
    with pytest.raises(ConfigError):
        traces.load(directory, rules=tmp_path / "classes.yaml")


def test_missing_pyarrow_is_reported_with_instructions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(Exception, match=r"pip install 'profdeck\[tables\]'"):
        run.kernels.to_arrow()
    assert list(run.kernels.rows())
    assert json.loads(json.dumps(run.summary.to_dict()))
