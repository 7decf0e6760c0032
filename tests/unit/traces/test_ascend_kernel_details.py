"""Tests of the reader for kernel_details.csv. Fixtures are synthetic and have the columns of real files."""

from __future__ import annotations

import csv
from collections import defaultdict
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import ascend_files
import pytest
from hypothesis import given, strategies as st

from profdeck_npu.traces.kernel_details import KernelDetails, read_kernel_details
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.columns import Columns
from profdeck_traces.reading.reader import read_trace

OLD = (
    "Step Id,Model ID,Task ID,Stream ID,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),Block Dim"
)
NEW = OLD.replace("Step Id", "Device_id").replace("Block Dim", "Block Num")

MSPROF = "Device_id,Stream ID,Op Name,OP Type,Task Type,Task Start Time(us),Task Duration(us)"


def kernel_details(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "kernel_details.csv"
    path.write_text("".join(f"{line}\r\n" for line in lines))
    return path


def read(path: Path) -> tuple[KernelDetails, Columns]:
    """Read a table and return its details and its kernels in file order."""
    details = read_kernel_details(path)
    return details, details.kernels


def test_rows_are_read_as_kernels_and_steps(tmp_path: Path) -> None:
    path = kernel_details(
        tmp_path,
        OLD,
        "1,1,2,16,Cast66,Cast,AI_VECTOR_CORE,1699529622790614.8,3.5,0,8",
        "1,1,N/A,N/A,hcom_allReduce__445_0,hcom_allReduce_,HCCL,1699529622790620.800\t,100.25,0,N/A",
        "2,1,3,16,Cast67,Cast,AI_VECTOR_CORE,1699529622790821.25\t,2.0,0,8",
        "2,1,4,16,aclnnMatmul_MatMulV3Common_MatMulV3,MatMulV3,AI_CORE,1699529622790823.25,7,0,8",
    )

    summary = summarise_trace(path)

    assert (summary.whole, summary.problem, summary.events) == (True, None, 4)
    assert [(kernel.name, kernel.category, kernel.count, kernel.total_us) for kernel in summary.kernels] == [
        ("hcom_allReduce_", "communication", 1, 100.25),
        ("aclnnMatmul_MatMulV3Common_MatMulV3", "gemm", 1, 7.0),
        ("Cast", "copy", 2, 5.5),
    ]
    (device,) = summary.devices
    assert (device.device, device.busy_us, device.communication_us) == (0, 112.75, 100.25)
    assert device.idle == ()  # requires host events
    assert [(step.step, step.start_us, step.duration_us, step.device_us) for step in summary.steps] == [
        (1, 0.0, 106.25, 103.75),
        (2, 206.45, 9.0, 9.0),
    ]


@pytest.mark.parametrize(
    ("columns", "steps", "stream"),
    [
        (ascend_files.LEVEL_0, True, 0),  # level 0 has no stream column
        (ascend_files.LEVEL_0, False, 0),
        (ascend_files.LEVEL_1, True, 16),
        (ascend_files.LEVEL_1, False, 16),
        (ascend_files.OLD, True, 16),
    ],
)
def test_columns_of_all_levels_are_read(tmp_path: Path, columns: tuple[str, ...], steps: bool, stream: int) -> None:
    path = kernel_details(tmp_path)
    path.write_text(ascend_files.kernel_rows(ascend_files.KERNELS, columns, steps=steps))

    details, kernels = read(path)

    assert (details.check.problem, details.check.events) == (None, 6)
    assert {kernels.tables.tracks[track] for track in kernels.track} == {(0, stream), (0, "group 445")}
    assert {(step.step, step.end_ns - step.start_ns) for step in details.steps} == (
        {(10, 950_000), (11, 160_000)} if steps else set()
    )
    assert details.types == {
        "aclnnMatmul_MatMulV3Common_MatMulV3": "MatMulV3", "Cast": "Cast", "hcom_allReduce_": "hcom_allReduce_"
    }  # fmt: skip
    assert details.cores == {
        "AI_CORE": (2, 82_000), "AI_VECTOR_CORE": (2, 40_000), "COMMUNICATION": (2, 190_250)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "header"),
    [
        (
            "rank3_kernel_details.csv",
            "Step ID,Device ID,Stream Id,NAME,Type,Accelerator_Core,Start Time(us),Duration(us)",
        ),
        ("op_summary_1.csv", f"\ufeffstep_id,{MSPROF}"),
    ],
)
def test_other_file_names_spellings_and_columns_are_read(tmp_path: Path, file: str, header: str) -> None:
    path = tmp_path / file
    path.write_text(f"{header},new column\n4,2,16,Cast66,Cast,AI_VECTOR_CORE,100\t,3.5,7\n", encoding="utf-8")
    summary = summarise_trace(path)
    assert (summary.whole, [(kernel.name, kernel.total_us) for kernel in summary.kernels]) == (True, [("Cast", 3.5)])
    assert [(step.step, step.device_us) for step in summary.steps] == [(4, 3.5)]
    assert [(device.device, device.streams[0].stream) for device in summary.devices] == [(2, 16)]
    assert [core.core for core in summary.cores] == ["AI_VECTOR_CORE"]


def test_process_groups_have_lanes_and_stable_names(tmp_path: Path) -> None:
    path = kernel_details(
        tmp_path,
        OLD,
        "1,1,N/A,N/A,hcom_allReduce__445_0,hcom_allReduce_,HCCL,10,4,0,N/A",
        "1,1,N/A,N/A,hcom_allReduce__017_0_1,hcom_allReduce_,COMMUNICATION,11,4,0,N/A",
        "1,1,7,23,hcom_allReduce__445_0_1_AivKernel,hcom_allReduce_,AI_VECTOR_CORE,12,2,0,8",
        "1,1,N/A,N/A,MatMul_3_4,MatMul,AI_CORE,20,2,0,8",
    )

    _, kernels = read(path)

    streams = [kernels.tables.tracks[track][1] for track in kernels.track]
    assert list(zip([kernels.tables.names[code] for code in kernels.name], streams, strict=True)) == [
        ("hcom_allReduce_", "group 445"),
        ("hcom_allReduce_", "group 017"),
        ("hcom_allReduce__445_0_1_AivKernel", 23),
        ("MatMul", "N/A"),
    ]


@pytest.mark.parametrize(
    ("name", "kind", "read_as"),
    [
        ("Cast66", "Cast", "Cast"),
        ("ReduceSum146", "ReduceSumD", "ReduceSumD"),
        ("MatMulV2_7", "MatMulV2", "MatMulV2"),
        ("aclnnMm_MatMulCommon_MatMulV2", "MatMulV2", "aclnnMm_MatMulCommon_MatMulV2"),
        ("trans_Cast_18", "Cast", "trans_Cast_18"),
        ("NonZero57_MemSet", "MemSet", "NonZero57_MemSet"),
        ("12", "Cast", "12"),
        ("Cast66", "", "Cast66"),
        ("Cast66", "N/A", "Cast66"),
    ],
)
def test_counters_are_removed_from_names(tmp_path: Path, name: str, kind: str, read_as: str) -> None:
    details, kernels = read(kernel_details(tmp_path, OLD, f"1,1,2,16,{name},{kind},AI_CORE,10,3.5,0,8"))

    assert [kernels.tables.names[code] for code in kernels.name] == [read_as]
    assert details.types == ({read_as: kind} if kind not in {"", "N/A"} else {})


def test_optional_columns_can_be_missing(tmp_path: Path) -> None:
    path = kernel_details(tmp_path, NEW, "3,1,2,16,Add,Add,AI_VECTOR_CORE,10.5,1.5,0,8")

    summary = summarise_trace(path)

    assert [device.device for device in summary.devices] == [3]
    assert summary.steps == ()


def test_first_kernel_outside_steps_is_found(tmp_path: Path) -> None:
    row = "{},1,2,16,Add,Add,AI_VECTOR_CORE,{},1.5,0,8"
    path = kernel_details(tmp_path, OLD, row.format("", 12.5), row.format(4, 20), row.format("", 10.5))

    details, _ = read(path)

    assert details.first_outside_ns == 10_500
    assert [(step.step, step.device, step.start_ns, step.end_ns) for step in details.steps] == [(4, 0, 20_000, 21_500)]


@pytest.mark.parametrize(
    "row",
    [
        "1,2,3",
        "1,1,2,16,Cast66,Cast,AI,soon,3.5,0,8",
        "1,1,2,16,Cast66,Cast,AI,NaN,3.5,0,8",
        "1,1,2,16,Cast66,Cast,AI,,3.5,0,8",
        "1,1,2,16,Cast66,Cast,AI,1e999999999,3.5,0,8",
        "1,1,2,16,Cast66,Cast,AI,10,-1e18,0,8",
    ],
)
def test_invalid_row_is_reported_and_skipped(tmp_path: Path, row: str) -> None:
    good = "1,1,2,16,Cast66,Cast,AI_VECTOR_CORE,10,3.5,0,8"

    summary = summarise_trace(kernel_details(tmp_path, OLD, good, row, good))

    assert not summary.whole
    assert summary.problem == "Line 3 does not have 11 columns with valid times."
    assert summary.kernels[0].count == 2


def test_invalid_numbers_are_kept_as_text(tmp_path: Path) -> None:
    digits = "9" * 5000
    path = kernel_details(tmp_path, OLD, f"{digits},1,2,{digits},Cast,Cast,AI_VECTOR_CORE,10,3.5,0,8")

    details, kernels = read(path)

    assert (details.steps, kernels.tables.tracks) == ((), [(0, digits)])


def test_missing_columns_raise_an_error(tmp_path: Path) -> None:
    path = kernel_details(tmp_path, "Name,Duration(us)", "Add,1")

    with pytest.raises(
        TraceError, match=r"is not Ascend's kernel_details.csv: missing columns Type, Start Time\(us\)\."
    ):
        read_trace(path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"\x00" * 100, b'"' * 100, b"\r\n" * 10])
def test_file_without_a_table_raises_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kernel_details.csv"
    path.write_bytes(content)

    with pytest.raises(TraceError, match="kernel_details.csv"):
        read(path)


def test_overlong_line_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="a line has more than 1,048,576 characters"):
        read_trace(kernel_details(tmp_path, OLD, "x" * 2_000_000))


def test_rows_before_an_overlong_line_are_read(tmp_path: Path) -> None:
    good = "1,1,2,16,Cast66,Cast,AI_VECTOR_CORE,10,3.5,0,8"

    details, _ = read(kernel_details(tmp_path, OLD, good, "x" * 2_000_000))

    assert (details.check.events, details.check.whole) == (1, False)
    assert details.check.problem == "The file cannot be read after line 2: a line has more than 1,048,576 characters."


@given(st.data())
def test_truncation_inside_a_line_is_reported(tmp_path_factory: Any, data: st.DataObject) -> None:
    text = ascend_files.kernel_rows(ascend_files.KERNELS, ascend_files.LEVEL_1)
    cut = data.draw(st.integers(0, len(text) - 1).filter(lambda cut: text[cut - 1] != "\n"))
    path = tmp_path_factory.mktemp("cut") / "kernel_details.csv"
    path.write_bytes(text[:cut].encode())

    try:
        details, kernels = read(path)
    except TraceError:
        assert "\n" not in text[:cut]
    else:
        assert not details.check.whole
        assert len(kernels) >= text[:cut].count("\n") - 1


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
times = st.decimals(0, 10**15, places=3)
rows = st.fixed_dictionaries(
    {
        "Step Id": st.integers(0, 3) | st.just(""),
        "Device_id": st.integers(0, 1),
        "Stream ID": st.integers(0, 2) | st.just("N/A"),
        "Type": st.sampled_from(["Cast", "MatMulV2"]) | words,
        "number": words | st.integers(0, 99).map(str),
        "Accelerator Core": st.sampled_from(["AI_CORE", "AI_CPU", "N/A"]),
        "Start Time(us)": times,
        "Duration(us)": st.decimals(0, 10**6, places=3),
    }
)


@given(st.lists(rows, min_size=1, max_size=20), st.booleans())
def test_totals_match_the_rows(tmp_path_factory: Any, table: list[dict[str, Any]], tab: bool) -> None:
    path = tmp_path_factory.mktemp("table") / "kernel_details.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        columns = [*("Step Id", "Device_id", "Stream ID", "Name", "Type"), *("Accelerator Core", "Start Time(us)")]
        columns.append("Duration(us)")
        writer.writerow(columns)
        for row in table:
            start = f"{row['Start Time(us)']}\t" if tab else row["Start Time(us)"]
            full = {**row, "Name": row["Type"] + row["number"], "Start Time(us)": start}
            writer.writerow([full[column] for column in columns])

    details, kernels = read(path)

    def ns(time_us: Decimal) -> int:
        return int(time_us * 1000)

    spans = [(ns(row["Start Time(us)"]), ns(row["Start Time(us)"] + row["Duration(us)"])) for row in table]
    assert (details.check.whole, details.check.events) == (True, len(table))
    assert list(zip(kernels.start_ns.tolist(), kernels.end_ns.tolist(), strict=True)) == spans
    assert [kernels.tables.tracks[track] for track in kernels.track] == [
        (row["Device_id"], row["Stream ID"]) for row in table
    ]
    steps: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    cores: dict[str, list[int]] = defaultdict(list)
    for row, (start_ns, end_ns) in zip(table, spans, strict=True):
        if row["Step Id"] != "":
            steps[row["Step Id"], row["Device_id"]].append((start_ns, end_ns))
        if row["Accelerator Core"] != "N/A":
            cores[row["Accelerator Core"]].append(end_ns - start_ns)
    assert {(step.step, step.device): (step.start_ns, step.end_ns) for step in details.steps} == {
        key: (min(start for start, _ in intervals), max(end for _, end in intervals))
        for key, intervals in steps.items()
    }
    assert details.cores == {core: (len(durations), sum(durations)) for core, durations in cores.items()}


@given(st.data())
def test_arbitrary_files_raise_only_trace_errors(tmp_path_factory: Any, data: st.DataObject) -> None:
    text = bytearray(ascend_files.kernel_rows(ascend_files.KERNELS, ascend_files.LEVEL_1).encode())
    for _ in range(data.draw(st.integers(1, 6))):
        offset = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 40))
        text[offset : offset + length] = data.draw(
            st.binary(max_size=12)
            | st.sampled_from([b'"', b",", b"\r", b"\n", b"\0", b"9" * 5000, b"1e999999", b"NaN"])
        )
    path = tmp_path_factory.mktemp("odd") / "kernel_details.csv"
    path.write_bytes(text)

    with suppress(TraceError):
        details, kernels = read(path)
        assert details.check.events >= len(kernels)
        assert (kernels.end_ns >= kernels.start_ns).all()


@pytest.mark.shared_data
def test_real_file_is_intact(data: Path) -> None:
    summary = summarise_trace(data / "npu" / "kernel_details.csv")

    assert (summary.whole, summary.events) == (True, 591)
    assert sum(kernel.count for kernel in summary.kernels) == 591
    assert not [kernel.name for kernel in summary.kernels if kernel.category == "unclassified"]
