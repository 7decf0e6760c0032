"""Ascend's kernel_details.csv: fixtures are synthetic, to the columns of real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from profdeck.errors import TraceError
from profdeck.traces.reading import read_trace
from profdeck.traces.summary import summarise_trace

BESIDE_THE_CHECKOUT = Path(__file__).resolve().parents[4] / "shared" / "data"
DATA = Path(os.environ.get("PROFDECK_TEST_DATA") or BESIDE_THE_CHECKOUT)

OLD = (
    "Step Id,Model ID,Task ID,Stream ID,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),Block Dim"
)
NEW = OLD.replace("Step Id", "Device_id").replace("Block Dim", "Block Num")


def kernel_details(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "kernel_details.csv"
    path.write_text("".join(f"{line}\r\n" for line in lines))
    return path


def test_rows_are_kernels_and_steps(tmp_path: Path) -> None:
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
    assert device.idle == ()  # nothing is known of the host
    assert [(step.step, step.start_us, step.duration_us, step.device_us) for step in summary.steps] == [
        (1, 0.0, 106.25, 103.75),
        (2, 206.45, 9.0, 9.0),
    ]


def test_columns_that_are_not_always_there_may_be_missing(tmp_path: Path) -> None:
    path = kernel_details(tmp_path, NEW, "3,1,2,16,Add,Add,AI_VECTOR_CORE,10.5,1.5,0,8")

    summary = summarise_trace(path, devices_only=True)

    assert [device.device for device in summary.devices] == [3]
    assert summary.steps == ()


@pytest.mark.parametrize(
    "row", ["1,2,3", "1,1,2,16,Cast66,Cast,AI,soon,3.5,0,8", "1,1,2,16,Cast66,Cast,AI,NaN,3.5,0,8"]
)
def test_a_row_that_is_broken_is_told_and_costs_no_other(tmp_path: Path, row: str) -> None:
    good = "1,1,2,16,Cast66,Cast,AI_VECTOR_CORE,10,3.5,0,8"

    summary = summarise_trace(kernel_details(tmp_path, OLD, good, row, good))

    assert not summary.whole
    assert summary.problem == "Line 3 is not a row of 11 columns with its times."
    assert summary.kernels[0].count == 2


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = kernel_details(tmp_path, "Name,Duration(us)", "Add,1")

    with pytest.raises(
        TraceError, match=r"is not Ascend's kernel_details.csv: it has no column Type, Start Time\(us\)\."
    ):
        read_trace(path)


def test_an_endless_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="a line has more than 1,048,576 characters"):
        read_trace(kernel_details(tmp_path, OLD, "x" * 2_000_000))


@pytest.mark.shared_data
def test_the_real_file_is_read_whole() -> None:
    path = DATA / "npu" / "kernel_details.csv"
    if not path.exists():
        pytest.skip(f"no traces in {DATA}: set PROFDECK_TEST_DATA")

    summary = summarise_trace(path)

    assert (summary.whole, summary.events) == (True, 591)
    assert sum(kernel.count for kernel in summary.kernels) == 591
    assert not [kernel.name for kernel in summary.kernels if kernel.category == "unclassified"]
