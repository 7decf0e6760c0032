"""Tests of reading the tables of torch_npu's real analysis, whose formats are only partly documented."""

from __future__ import annotations

import pytest

from profdeck_npu.traces.communication import read_communication
from profdeck_npu.traces.step_times import read_step_times
from profdeck_traces.analysis.summary import summarise_trace

CAPTURE = """
import torch, torch_npu
from torch_npu.profiler import ProfilerLevel, _ExperimentalConfig, profile, schedule, tensorboard_trace_handler
from torch_npu.profiler.profiler import analyse

x = torch.ones(4).to("npu")
config = _ExperimentalConfig(profiler_level=ProfilerLevel.Level1)
handler = tensorboard_trace_handler("job", "worker", analyse_flag=False)
plan = schedule(wait=0, warmup=1, active=3, repeat=1)
profiler = profile(on_trace_ready=handler, schedule=plan, experimental_config=config)
profiler.start()
for _ in range(4):
    x + 1
    torch.npu.synchronize()
    profiler.step()
profiler.stop()
analyse(profiler.prof_if.prof_path, 1)
"""
# Runs both of torch_npu's writers on data as msprof and the framework provide it.
WRITERS = """
from torch_npu.profiler.analysis.prof_common_func._file_manager import FileManager
from torch_npu.profiler.analysis.prof_view._communication_parser import CommunicationParser
from torch_npu.profiler.analysis.prof_view._trace_step_time_parser import TraceStepTimeParser

def call(start_us, sent):
    link = {"Transit Size(MB)": sent, "Transit Time(ms)": sent / 20, "Bandwidth(GB/s)": 20.0,
            "Large Packet Ratio": 0.75, "Size Distribution": {"0.5": [4, sent / 20]}}
    times = {"Start Timestamp(us)": start_us, "Elapse Time(ms)": 0.5, "Transit Time(ms)": 0.2, "Wait Time(ms)": 0.25,
             "Synchronization Time(ms)": 0.125, "Idle Time(ms)": 0.05, "Wait Time Ratio": 0.5,
             "Synchronization Time Ratio": 0.5}
    return {"Communication Time Info": times, "Communication Bandwidth Info": {"HCCS": link}}

def steps(*numbers):
    return [{"step_id": str(step), "start_ts": step * 10**6, "end_ts": (step + 1) * 10**6 - 1,
             "fwk_step_start_ts": step * 10**6, "comm_ops": {}} for step in numbers]

calls = CommunicationParser.__new__(CommunicationParser)
calls.step_list = steps(3, 4)
calls.split_comm_op_by_step({
    "hcom_allReduce__445_0_1@13681369207305868445": call(3100.25, 2.0),
    "hcom_allReduce__445_1_1@13681369207305868445": call(4100.25, 2.0),
    "hcom_receive__612_0_1@5862276093215481612": call(4600.5, 1.0),
    "total": call(0.0, 5.0),
})
document = {f"step{step['step_id']}": calls.get_communication_ops_dict(step["comm_ops"]) for step in calls.step_list}
FileManager.create_json_file(".", document, CommunicationParser.COMMUNICATION)

def lane(name, start_us, duration_us):
    return {"name": name, "pid": 7, "ts": str(start_us), "dur": duration_us}

table = TraceStepTimeParser.__new__(TraceStepTimeParser)
table.step_range, table.torch_op_data = steps(3, 4), []
table.create_step_file(".", [
    {"name": "process_labels", "pid": 7, "args": {"labels": "NPU 2"}},
    lane("Computing", 3100.125, 50.5),
    lane("Communication", 3140, 30.25),
    lane("Communication(Not Overlapped)", 3150.625, 19.625),
    lane("hcom_receive__612_0_1", 3160, 5.0),
    lane("Free", 3170.25, 100.0),
    lane("Free", 4000.0, 100.0),
], TraceStepTimeParser.STEP_TRACE)
"""


@pytest.mark.usefixtures("msprof")
def test_analysed_capture_is_summarised(job) -> None:
    result = job(CAPTURE)
    assert "[ERROR]" not in result.stdout
    (directory,) = (job.directory / "job").iterdir()

    summary = summarise_trace(directory)

    assert (summary.whole, summary.problem) == (True, None)
    assert [step.step for step in summary.steps] == [1, 2, 3]
    assert [(step.step, step.compute_us) for step in summary.device_steps] == [(1, 10), (2, 10), (3, 10)]
    assert {kernel.type: kernel.category for kernel in summary.kernels}["Add"] == "elementwise"
    assert "COMMUNICATION" in [core.core for core in summary.cores]
    (operation,) = summary.communication
    assert (operation.name, operation.kind, operation.count, operation.total_us) == ("allReduce", "collective", 3, 12)
    assert [(link.link, link.size_bytes) for link in operation.links] == [("HCCS", 3_000_000), ("SDMA", 3_000_000)]


def test_output_of_torch_npus_writers_is_read(job) -> None:
    job(WRITERS)

    communication = read_communication(job.directory / "communication.json")
    table = read_step_times(job.directory / "step_trace_time.csv")

    assert (communication.problem, table.problem) == (None, None)
    allreduce, receive = communication.operations
    assert (allreduce.name, allreduce.kind, allreduce.count) == ("allReduce", "collective", 2)
    assert (allreduce.total_us, allreduce.transit_us, allreduce.wait_us) == (1000, 400, 500)
    assert (allreduce.synchronisation_us, allreduce.idle_us) == (250, 100)
    assert [(link.link, link.size_bytes, link.packets, link.large_packet_share) for link in allreduce.links] == [
        ("HCCS", 4_000_000, 8, 0.75)
    ]
    assert (receive.name, receive.kind, receive.group) == ("receive", "p2p", "5862276093215481612")
    third, fourth = table.steps
    assert (third.device, third.step, third.compute_us, third.communication_us) == (2, 3, 50.5, 30.25)
    assert (third.exposed_communication_us, third.overlap_us, third.idle_us) == (19.625, 10.625, 100)
    assert (third.pipeline_bubble_us, third.exposed_without_receives_us) == (5, 14.625)
    assert (third.pipeline_stage_us, third.preparation_us) == (165.125, 100.125)
    # For a step without device tasks, torch_npu uses the time since 1970.
    assert (fourth.step, fourth.idle_us, fourth.preparation_us) == (4, 100, None)
