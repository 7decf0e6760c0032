"""Tests of the reader for step_trace_time.csv. Fixtures are synthetic and have the columns of real files."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import attrs
import pytest
from ascend_job import STEP_COLUMNS
from hypothesis import given, strategies as st

from profdeck_npu.traces import step_times
from profdeck_npu.traces.step_times import AscendStepTimes, read_step_times
from profdeck_traces.analysis.recorder_model import DeviceStepSummary
from profdeck_traces.base.errors import TraceError

TIMES = [field.name for field in attrs.fields(DeviceStepSummary) if field.name.endswith("_us")]
NOTHING = dict.fromkeys(TIMES)


def read(tmp_path: Path, *lines: str, end: str = "\r\n") -> AscendStepTimes:
    path = tmp_path / "step_trace_time.csv"
    path.write_text("".join(f"{line}{end}" for line in lines))
    return read_step_times(path)


def test_columns_are_read(tmp_path: Path) -> None:
    table = read(tmp_path, STEP_COLUMNS, "2,10,85704.0204,3873.52,630.54,4504.06,21471.45,111048.99,17.5,3856.02,0.67")

    assert table == AscendStepTimes(
        (
            DeviceStepSummary(
                device=2,
                step=10,
                compute_us=85704.02,
                communication_us=4504.06,
                overlap_us=630.54,
                exposed_communication_us=3873.52,
                exposed_without_receives_us=3856.02,
                idle_us=21471.45,
                pipeline_bubble_us=17.5,
                pipeline_stage_us=111048.99,
                preparation_us=0.67,
            ),
        ),
        None,
    )


def test_columns_can_be_reordered_or_missing(tmp_path: Path) -> None:
    table = read(tmp_path, "Free, Step ,More,Computing", "1.5,3,x,2.25", end="\n")

    expected = NOTHING | {"idle_us": 1.5, "compute_us": 2.25}
    assert table == AscendStepTimes((DeviceStepSummary(device=None, step=3, **expected),), None)


def test_recording_without_step_and_device_numbers(tmp_path: Path) -> None:
    (step,) = read(tmp_path, "Device_id,Step,Computing", "-1,,12000").steps

    assert (step.device, step.step, step.compute_us) == (None, None, 12000)


def test_missing_values_are_none(tmp_path: Path) -> None:
    # For a step without device tasks, torch_npu uses -1 us since 1970 as the start of the first task.
    (step,) = read(tmp_path, "Step,Computing,Preparing", "3,,-1713174287000001.5").steps

    assert (step.compute_us, step.preparation_us) == (None, None)


@pytest.mark.parametrize("line", ["1,2", "1,2,3,4", "1,soon,3", "1,nan,3", "1,1e300,3", '1,"2,3'])
def test_invalid_row_is_reported_and_skipped(tmp_path: Path, line: str) -> None:
    table = read(tmp_path, "Step,Computing,Free", "1,2.5,3", line, "3,2.5,4")

    assert table.steps[0].step == 1
    assert table.problem is not None
    assert table.problem.startswith("step_trace_time.csv: Line ")
    assert table.problem.endswith(" does not have 3 columns with valid times.")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((), "The file is not a table of step times: missing columns Step, Computing."),
        (("Step,Free", "1,2"), "The file is not a table of step times: missing columns Computing."),
        (("Step,Computing",), "The file has no rows."),
    ],
)
def test_file_problem_is_reported(tmp_path: Path, lines: tuple[str, ...], problem: str) -> None:
    assert read(tmp_path, *lines) == AscendStepTimes((), f"step_trace_time.csv: {problem}")


def test_missing_file_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Cannot read .*step_trace_time.csv: No such file"):
        read_step_times(tmp_path / "step_trace_time.csv")


def test_row_count_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "_MAX_ROWS", 2)

    table = read(tmp_path, "Step,Computing", *["1,2"] * 3)

    assert len(table.steps) == 2
    assert table.problem == "step_trace_time.csv: The file has more than 2 rows; the remaining rows were not read."


def test_overlong_line_is_reported(tmp_path: Path) -> None:
    table = read(tmp_path, "Step,Computing", "1,2", '"' + "x" * 2_000_000)

    assert [step.step for step in table.steps] == [1]
    assert table.problem is not None
    assert table.problem.endswith(" is not a row of step times: field larger than field limit (131072).")


CELLS = st.none() | st.integers(-(10**12), 10**15).map(lambda time_ns: time_ns / 1000)
ROWS = st.lists(
    st.tuples(st.integers(-1, 15), st.none() | st.integers(0, 10**6), st.lists(CELLS, min_size=9, max_size=9)),
    min_size=1,
    max_size=8,
)


@given(rows=ROWS, order=st.permutations(range(11)), cut=st.integers(0, 10**6) | st.none())
def test_tables_are_read_and_truncation_is_reported(
    rows: list[tuple[int, int | None, list[float | None]]],
    order: list[int],
    cut: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    header = next(csv.reader([STEP_COLUMNS]))
    table = io.StringIO()
    writer = csv.writer(table)
    for row in [header, *([device, step, *times] for device, step, times in rows)]:
        writer.writerow([row[column] for column in order])
    text = table.getvalue()
    path = tmp_path_factory.mktemp("job") / "step_trace_time.csv"
    path.write_text(text if cut is None else text[: cut % len(text)], newline="")

    parsed = read_step_times(path)

    expected = []
    for device, step, times in rows:
        values = dict(zip(header[2:], times, strict=True))
        if (preparing := values["Preparing"]) is not None and preparing < 0:
            values["Preparing"] = None
        fields = {step_times._FIELDS[column]: time_us for column, time_us in values.items()}
        expected.append(DeviceStepSummary(device=device if device >= 0 else None, step=step, **fields))
    assert list(parsed.steps) == expected[: len(parsed.steps)]
    if cut is None:
        assert parsed.problem is None
        assert len(parsed.steps) == len(rows)
    elif not text[: cut % len(text)].endswith("\r\n"):
        assert parsed.problem is not None


@given(text=st.binary(max_size=300))
def test_arbitrary_bytes_do_not_raise(text: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("job") / "step_trace_time.csv"
    path.write_bytes(b"Step,Computing\n" + text)

    table = read_step_times(path)

    assert table.steps or table.problem
