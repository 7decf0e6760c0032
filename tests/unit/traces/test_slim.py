"""Tests of slim trace files: parts of sources, their order, and errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from profdeck_traces.base.errors import TraceError
from profdeck_traces.writing.selection import Selection
from profdeck_traces.writing.slim import LANES, SlimSource, write_slim


def source(tmp_path: Path, number: int, selection: Selection | None = None, cut: int | None = None) -> SlimSource:
    events = [
        {"ph": "X", "cat": "kernel", "name": f"kernel {number}", "pid": 0, "tid": 7, "ts": 10 * n, "dur": 5, "args": {}}
        for n in range(20)
    ]
    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5, "args": {}})
    path = tmp_path / f"{number}.json"
    path.write_text(json.dumps({"traceEvents": events})[:cut])
    selection = selection or Selection(categories=LANES)
    return SlimSource(path=path, label=f"trainer rank {number}", sort_index=number, selection=selection)


@pytest.mark.parametrize("zipped", [False, True])
def test_file_is_independent_of_the_number_of_processes(tmp_path: Path, zipped: bool) -> None:
    sources = [source(tmp_path, number) for number in range(3)]

    written = [write_slim(sources, tmp_path / f"{count}", gzip=zipped, processes=count) for count in (1, 2)]

    first_content, second_content = ((tmp_path / str(count)).read_bytes() for count in (1, 2))
    assert first_content == second_content
    assert written[0] == written[1]
    assert (written[0].events, written[0].size_bytes, written[0].problems) == (60, len(first_content), ())
    data = gzip.decompress(first_content) if zipped else first_content
    assert data.index(b"trainer rank 0") < data.index(b"trainer rank 1") < data.index(b"trainer rank 2")
    assert b"aten::mm" not in data
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0.json", "1", "1.json", "2", "2.json"]


def test_window_and_categories_are_selected(tmp_path: Path) -> None:
    window = Selection(begin_ns=20_000, end_ns=50_000, categories=frozenset({"kernel"}))
    assert write_slim([source(tmp_path, 0, window)], tmp_path / "window", gzip=False).events == 3
    operators = Selection(categories=frozenset({"cpu_op"}))
    assert write_slim([source(tmp_path, 0, operators)], tmp_path / "operators", gzip=False).events == 1
    assert b"aten::mm" in (tmp_path / "operators").read_bytes()


def test_readable_part_of_a_corrupt_source_is_written(tmp_path: Path) -> None:
    sources = [source(tmp_path, 0), source(tmp_path, 1, cut=-30)]

    written = write_slim(sources, tmp_path / "all", gzip=False)

    (problem,) = written.problems
    assert problem.startswith(f"trainer rank 1 ({tmp_path / '1.json'}): The JSON is not closed")
    assert b"kernel 1" in (tmp_path / "all").read_bytes()


def test_failed_write_leaves_no_files(tmp_path: Path) -> None:
    nothing = Selection(categories=frozenset({"none"}))
    with pytest.raises(TraceError, match="No complete event is selected"):
        write_slim([source(tmp_path, 0, nothing)], tmp_path / "all")
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(FileExistsError):
        write_slim([source(tmp_path, 0)], tmp_path / "taken")
    (tmp_path / "0.json").unlink()
    missing = SlimSource(path=tmp_path / "0.json", label="x", sort_index=0, selection=nothing)
    with pytest.raises(TraceError, match="Cannot read"):
        write_slim([missing], tmp_path / "all")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["taken"]
