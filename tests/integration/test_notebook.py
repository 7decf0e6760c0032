"""Tests of the example notebook and of pandas data frames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_job import GpuJob

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.torch  # the environment of these tests has pandas
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.setenv("RUN", str(GpuJob(ranks=2, slow_rank=1).write(tmp_path / "run")))
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)  # noqa: S102 - a file of this repository
    assert set(names["stages"]["rank"]) == {0, 1}  # type: ignore[index]
    assert len(names["starts"]) > 5  # type: ignore[arg-type]


@pytest.mark.torch
def test_pandas_frames_equal_arrow_tables(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    import profdeck_traces as traces

    run = traces.load(GpuJob(ranks=2).write(tmp_path / "run"))
    for table in (run.kernels, run.steps, run.captures):
        expected = table.to_arrow()
        frame = table.to_pandas()
        assert list(frame.columns) == expected.column_names
        assert len(frame) == expected.num_rows
