"""Writes synthetic torch_npu directories of an NPU job with several ranks.

In each step, every rank runs a matrix product and an allReduce. The duration of the matrix product depends on the rank.
The allReduce starts on a rank when its product ends. It ends on all ranks `TRANSFER_US` after the last rank has joined.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

GROUP = "13681369207305868445"
"""ID of the process group of all ranks. Kernel names contain its last three digits."""
STEP_US = 2000.0
TRANSFER_US = 100.0
BYTES = 20_000_000
_EPOCH_US = 1_713_174_287_000_000
KERNEL_COLUMNS = (
    "Step Id,Device_id,Model ID,Task ID,Stream ID,Name,Type,OP State,Accelerator Core,Start Time(us),Duration(us),"
    "Wait Time(us),Block Num"
)
STEP_COLUMNS = (
    "Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble,"
    "Communication(Not Overlapped and Exclude Receive),Preparing"
)


@attrs.frozen
class Job:
    """Parameters of a job."""

    compute_us: Callable[[int, int], float]
    """Duration of the matrix product, from rank and step."""
    ranks: int = 8
    steps: Sequence[int] = (3, 4, 5, 6, 7, 8)
    clock_us: Callable[[int], float] = lambda _rank: 0.0
    """Clock offset of a rank. Positive values are ahead."""

    def write(self, folder: Path) -> list[Path]:
        """Write all ranks and return their directories."""
        return [self.write_rank(folder, rank) for rank in range(self.ranks)]

    def write_rank(self, folder: Path, rank: int) -> Path:
        """Write an analysed rank and return its directory."""
        directory = folder / f"rank_{rank:04}.step{self.steps[0]}_{4000 + rank}_20260102030405678_ascend_pt"
        output = directory / "ASCEND_PROFILER_OUTPUT"
        output.mkdir(parents=True)
        (directory / f"profiler_info_{rank}.json").write_text(json.dumps({"config": {}, "rank_id": rank}))
        kernels, step_times, calls = [KERNEL_COLUMNS], [STEP_COLUMNS], {}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "Python"}},
            {"ph": "M", "name": "process_name", "pid": 8, "args": {"name": "Ascend Hardware"}},
        ]
        for number, step in enumerate(self.steps):
            begin_us = _EPOCH_US + number * STEP_US + self.clock_us(rank)
            compute_us = self.compute_us(rank, step)
            wait_us = max(self.compute_us(peer, step) for peer in range(self.ranks)) - compute_us
            call_us = wait_us + TRANSFER_US
            kernels += [
                row(step, number, f"MatMulV2_{number}", "MatMulV2", "AI_CORE", begin_us + 50, compute_us, stream="16"),
                row(step, "N/A", f"hcom_allReduce__{GROUP[-3:]}_{number}_1", "hcom_allReduce_", "HCCL",
                    begin_us + 50 + compute_us, call_us),
            ]  # fmt: skip
            step_times.append(f"0,{step},{compute_us},{call_us},0,{call_us},0,{compute_us + call_us},0,{call_us},50.0")
            calls[f"step{step}"] = {
                "p2p": {},
                "collective": {
                    f"hcom_allReduce__{GROUP[-3:]}_{number}_1@{GROUP}": call(
                        elapse_us=call_us, transit_us=TRANSFER_US, wait_us=wait_us, links={"HCCS": BYTES, "RDMA": 0}
                    )
                },
            }
            events += [
                operator(f"ProfilerStep#{step}", begin_us, STEP_US - 10),
                operator("aten::mm", begin_us + 5, 20.0),
                {"ph": "X", "name": "MatMulV2", "pid": 8, "tid": 16, "ts": f"{begin_us + 50:.3f}", "dur": compute_us},
            ]
        (output / "kernel_details.csv").write_text("".join(f"{line}\r\n" for line in kernels))
        (output / "step_trace_time.csv").write_text("".join(f"{line}\r\n" for line in step_times))
        (output / "communication.json").write_text(json.dumps(calls))
        (output / "trace_view.json").write_text(json.dumps(events))
        return directory


def row(step: object, task: object, name: str, kind: str, core: str, start_us: float, duration_us: float,
        *, stream: str = "N/A") -> str:  # fmt: skip
    """Return a row of kernel_details.csv for device 0."""
    return f"{step},0,1,{task},{stream},{name},{kind},N/A,{core},{start_us:.3f}\t,{duration_us},0,24"


def operator(name: str, start_us: float, duration_us: float) -> dict[str, Any]:
    """Return an operator event of trace_view.json."""
    return {"ph": "X", "name": name, "pid": 9, "tid": 9, "ts": f"{start_us:.3f}", "dur": duration_us, "cat": "cpu_op"}


def call(
    *, elapse_us: float, transit_us: float, wait_us: float, links: dict[str, int], synchronisation_us: float = 0.0
) -> dict[str, Any]:
    """Return a call of communication.json that sends bytes over links in packets of 1 MB."""
    return {
        "Communication Time Info": {
            "Start Timestamp(us)": 1713174287407957.0,
            "Elapse Time(ms)": elapse_us / 1000,
            "Transit Time(ms)": transit_us / 1000,
            "Wait Time(ms)": wait_us / 1000,
            "Synchronization Time(ms)": synchronisation_us / 1000,
            "Idle Time(ms)": (elapse_us - transit_us - wait_us) / 1000,
            "Wait Time Ratio": 0.5,
            "Synchronization Time Ratio": 0.5,
        },
        "Communication Bandwidth Info": {
            link: {
                "Transit Size(MB)": size_bytes / 1e6,
                "Transit Time(ms)": transit_us / 1000 if size_bytes else 0,
                "Bandwidth(GB/s)": size_bytes / transit_us / 1000 if size_bytes else 0,
                "Large Packet Ratio": 0.5 if size_bytes else 0,
                "Size Distribution": {"1.0": [size_bytes // 1_000_000, transit_us / 1000]} if size_bytes else {},
            }
            for link, size_bytes in links.items()
        },
    }
