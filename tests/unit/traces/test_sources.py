"""Tests of finding traces in directories. Fixtures are synthetic."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from ascend_files import NAME, OUTPUT, analysed, raw

from profdeck_traces.base.errors import TraceError
from profdeck_traces.inputs.sources import find_sources


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a trace of Kineto and a directory of torch_npu."""
    analysed(raw(tmp_path))
    (tmp_path / "a.trace.json").write_text('{"traceEvents": []}')
    return tmp_path


def write_manifest(
    folder: Path, *artifacts: dict[str, Any], name: str = "rank_0003.step10.json", **changes: Any
) -> None:
    """Write a manifest of rank 3."""
    manifest = {
        "schema": 1, "profdeck": "0", "capture": "step10", "role": "trainer", "rank": 3, "world_size": 4,
        "replica": None, "parallel": {}, "host": "here", "pid": 4711, "process_started": None, "first_step": 10,
        "last_step": 11, "stage": None, "window": None, "backend": "npu", "versions": {}, "options": {},
        "expected_ranks": [3], "status": "complete", "started_ns": 1, "ended_ns": 2, "artifacts": artifacts, **changes,
    }  # fmt: skip
    (folder / name).write_text(json.dumps(manifest))


def ascend(name: str = NAME) -> dict[str, Any]:
    return {"name": name, "kind": "ascend_pt", "size_bytes": 1, "whole": True}


def test_torch_npu_directory_is_one_source(folder: Path) -> None:
    sources = find_sources([folder])

    assert [source.path for source in sources] == [folder / "a.trace.json", folder / NAME]
    assert [source.label for source in sources] == ["a.trace.json", "rank 3"]
    assert [(source.rank, source.is_json) for source in sources] == [(None, True), (3, True)]
    files = [folder / NAME / OUTPUT / name for name in ("trace_view.json", "kernel_details.csv")]
    assert sources[1].size_bytes == sum(file.stat().st_size for file in files)


def test_torch_npu_directory_and_its_files_can_be_passed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = folder / NAME
    trace = directory / OUTPUT / "trace_view.json"
    assert [source.path for source in find_sources([directory])] == [directory]
    assert [source.path for source in find_sources([trace, directory, folder])] == [
        trace, directory, folder / "a.trace.json"
    ]  # fmt: skip
    assert [source.path for source in find_sources([directory / OUTPUT])] == [directory / OUTPUT / "kernel_details.csv"]
    write_manifest(folder, ascend())
    monkeypatch.chdir(directory)
    (source,) = find_sources([Path()])
    assert (source.path, source.label) == (Path(os.path.abspath(directory)), "trainer rank 3")  # noqa: PTH100


def test_manifest_determines_the_source(folder: Path) -> None:
    write_manifest(folder, ascend(), role="rollout", replica=2, rank=1)

    for path in (folder, folder / NAME):
        source = find_sources([path])[-1]
        assert source.path == folder / NAME
        assert source.facts is not None
        assert (source.label, source.rank, source.facts.capture) == ("rollout/2 rank 1", 1, "step10")


@pytest.mark.parametrize("name", ["gone_1_1_ascend_pt", "../escaped_ascend_pt", "a.trace.json", "x" * 300])
def test_artifact_of_another_kind_is_not_a_source(folder: Path, name: str) -> None:
    write_manifest(folder, ascend(name))

    assert [source.facts for source in find_sources([folder])] == [None, None]


def test_files_inside_a_torch_npu_directory_are_not_sources(folder: Path) -> None:
    inner = folder / NAME / "FRAMEWORK"
    (inner / "b.trace.json").write_text("[]")
    write_manifest(inner, {"name": "b.trace.json", "kind": "trace", "size_bytes": 1, "whole": True})

    assert [source.path.name for source in find_sources([folder])] == ["a.trace.json", NAME]


def test_kernel_table_outside_a_directory_is_a_source(folder: Path) -> None:
    shutil.copy(folder / NAME / OUTPUT / "kernel_details.csv", folder)

    kinds = {source.path.name: source.is_json for source in find_sources([folder])}

    assert kinds == {"a.trace.json": True, "kernel_details.csv": False, NAME: True}


def test_directory_with_only_a_table_has_no_json(folder: Path) -> None:
    (folder / NAME / OUTPUT / "trace_view.json").unlink()
    assert not find_sources([folder / NAME])[0].is_json
    (folder / NAME / OUTPUT / "kernel_details.csv").unlink()
    source = find_sources([folder / NAME])[0]
    assert (source.is_json, source.size_bytes) == (True, 0)  # the reader reports instructions


def test_directory_without_traces_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file_ascend_pt").touch()

    with pytest.raises(
        TraceError, match=r"No trace found in .* \(expected names ending in \.trace\.json\[\.gz\] or _asc"
    ):
        find_sources([tmp_path])
