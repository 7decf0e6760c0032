from __future__ import annotations

import pytest

from profdeck_traces.analysis.host_states import state_of_call
from profdeck_traces.reading.event_names import (
    CallKind,
    call_kind,
    is_backend_collective,
    is_data_loading,
    is_file_read,
    is_host_collective,
    is_loader,
)


@pytest.mark.parametrize(
    ("name", "kind", "state"),
    [
        ("cudaStreamSynchronize", CallKind.STREAM_SYNCHRONISATION, "synchronising"),
        ("zeCommandQueueSynchronize", CallKind.STREAM_SYNCHRONISATION, "synchronising"),
        ("AscendCL@aclrtSynchronizeStreamWithTimeout", CallKind.STREAM_SYNCHRONISATION, "synchronising"),
        ("hipEventSynchronize", CallKind.EVENT_SYNCHRONISATION, "synchronising"),
        ("zeEventHostSynchronize", CallKind.EVENT_SYNCHRONISATION, "synchronising"),
        ("cudaDeviceSynchronize", CallKind.DEVICE_SYNCHRONISATION, "synchronising"),
        ("cudaEventQuery", CallKind.QUERY, "synchronising"),
        ("cudaGraphLaunch", CallKind.LAUNCH, "launching"),
        ("AscendCL@aclnnMatmul", CallKind.OPERATOR_EXECUTION, "launching"),
        ("AscendCL@aclnnMatmulGetWorkspaceSize", CallKind.OTHER, "other runtime calls"),
        ("cudaMemcpyAsync", CallKind.COPY, "copying"),
        ("cudaFree", CallKind.FREE, "allocating"),
        ("cuMemMap", CallKind.ALLOCATION, "allocating"),
        ("cudaHostUnregister", CallKind.ALLOCATION, "allocating"),
        ("cudaGetDevice", CallKind.OTHER, "other runtime calls"),
    ],
)
def test_calls_have_one_kind_for_all_tables(name: str, kind: CallKind, state: str) -> None:
    assert call_kind(name) is kind
    assert state_of_call(name, "cuda_runtime") == state


def test_collectives_on_the_host() -> None:
    assert is_backend_collective("gloo:all_reduce")
    assert is_host_collective("c10d::allreduce_")
    assert not is_backend_collective("c10d::allreduce_")
    assert not is_host_collective("ncclKernel")


@pytest.mark.parametrize(
    ("name", "is_loading"),
    [
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", True),
        ("torch/utils/data/dataloader.py(625): __next__", True),
        ("torch/utils/data/dataloader.py(675): _next_data", True),
        ("torch/utils/data/_utils/fetch.py(51): fetch", True),
        ("train.py(12): load_batch", True),
        ("/app/data_loading/model.py(3): forward", False),
        ("torch/utils/data/dataloader.py(140): __init__", False),
        ("<built-in method readinto of _io.BufferedReader object>", False),
    ],
)
def test_loaders_are_selected_by_function_and_not_by_path(name: str, *, is_loading: bool) -> None:
    assert is_loader(name) == is_loading


def test_stages_and_reads_of_files_are_recognised() -> None:
    assert is_data_loading("data_loading")
    assert is_file_read("<built-in method readinto of _io.BufferedReader object>")
    assert not is_file_read("<built-in method append of list object>")
