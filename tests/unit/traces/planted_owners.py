"""Traces whose largest owner is known."""

from __future__ import annotations

from typing import Any

import attrs
from simulated_machine import CALL_US, LATENCY_US, Machine, Program, run_steps


@attrs.frozen
class Planted:
    """A trace and its expected largest owner."""

    machine: Machine
    kind: str
    name: str
    owns_nothing: str | None = None
    """Name of an event that is not on the critical path."""


def layers(count: int, kernel_us: float, operator_us: float = 8, name: str = "gemm", stream: int = 7) -> Program:
    """Return a program of ``count`` operators that each launch one kernel."""
    layer: Program = [("op", "aten::prologue", operator_us), ("launch", name, kernel_us, stream)]
    return [("in op", "aten::linear", layer)] * count


def _steps(program: Program, steps: int, kind: str, name: str, owns_nothing: str | None = None) -> Planted:
    return Planted(run_steps(program, steps), kind, name, owns_nothing)


def _lock() -> Planted:
    machine = Machine()
    wait = ("frame", "<built-in method acquire of _thread.lock object at 0x1>", 1000)
    machine.run([("note", "ProfilerStep#0", [("op", "aten::mm", 100), wait, ("op", "aten::relu", 50)])], 10, 1)
    machine.run([("at", 60), ("in frame", "train.py(77): writer", [("op", "aten::sort", 1044)])], 0, 2)
    return Planted(machine, "operator", "aten::sort")


def _backward_thread() -> Planted:
    machine = Machine()
    machine.run([("note", "ProfilerStep#0", [("op", "aten::mm", 100), ("gap", 630), ("op", "aten::add_", 50)])], 10, 1)
    node = ("in op", "autograd::engine::evaluate_function: MmBackward0", [("op", "MmBackward0", 60)])
    machine.run([("at", 120), *[node] * 10], 0, 2)
    return Planted(machine, "operator", "MmBackward0")


_WAIT_FOR_COLLECTIVE: Program = [("record", "f", 20), ("wait", "f", 7), ("launch", "adam", 50, 7), ("sync", None)]


def _collective(duration_us: float) -> Program:
    return [("record", "e", 7), ("wait", "e", 20), ("launch", "ncclDevKernel_AllReduce", duration_us, 20)]


def planted() -> dict[str, Planted]:
    """Return all traces by name."""
    exposed = [*layers(6, 50), *_collective(900), *_WAIT_FOR_COLLECTIVE]
    hidden = [*layers(2, 50), *_collective(400), *layers(10, 120, name="backward_gemm"), *_WAIT_FOR_COLLECTIVE]
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    to_device = "Memcpy HtoD (Pageable -> Device)"
    upload: Program = [("op", "aten::to", 5), ("copy", to_device, 300, 7, True), *layers(1, 10)]
    item: Program = [("launch", "small", 3, 7), ("copy", "Memcpy DtoH (Device -> Pageable)", 2, 7, True), ("sync", 7)]
    streams: Program = [("launch", "a", 300, 7), ("record", "e", 7), ("wait", "e", 8), ("launch", "b", 500, 8)]
    save: Program = [("op", "aten::to", 40), ("gap", 1), ("frame", "<built-in method write of file>", 1500)]
    nccl = "ncclDevKernel_AllReduce"
    collect: Program = [("in frame", "train.py(5): loop", [("frame", "Python GC", 800)])]
    return {
        "host bound": _steps(
            [("op", "aten::tokenize", 900), *layers(20, 5, 30), ("sync", None)], 2, "operator", "aten::tokenize"
        ),
        "device bound": _steps([*layers(20, 200, 3, "big_gemm"), ("sync", None)], 2, "kernel", "big_gemm"),
        "host runs ahead": _steps(layers(20, 200, 3, "big_gemm"), 3, "kernel", "big_gemm"),
        "item": _steps([("in op", "aten::item", item)] * 40, 1, "launch latency", "small"),
        "loader": _steps(
            [("note", loader, [("gap", 1500)]), *layers(10, 20), ("sync", None)], 2, "data loading", loader
        ),
        "exposed collective": _steps(exposed, 2, "collective", nccl),
        "no sync records": Planted(run_steps(exposed, 2, sync_records=False), "collective", nccl),
        "hidden collective": _steps(hidden, 2, "kernel", "backward_gemm", nccl),
        "pageable copies": _steps([*upload * 5, ("sync", None)], 2, "copy", to_device),
        "graph": _steps([("op", "sample", 20), ("graph", "decode", [30] * 20, 7), ("sync", 7)], 3, "kernel", "decode"),
        "graph without kernels": _steps(
            [("op", "sample", 20), ("graph", "decode", [None], 7, 600), ("sync", 7)],
            3,
            "not recorded",
            "cudaGraphLaunch",
        ),
        "two streams": _steps([*streams, ("launch", "c", 100, 7), ("sync", None)], 2, "kernel", "b", "c"),
        "collector": _steps(
            [*layers(10, 20), *collect, *layers(10, 20), ("sync", None)], 2, "garbage collection", "Python GC"
        ),
        "checkpoint": _steps(
            [*layers(10, 30), ("sync", None), ("in frame", "torch/serialization.py(900): save", save)],
            2,
            "checkpoint",
            "<built-in method write of file>",
        ),
        "lock": _lock(),
        "backward thread": _backward_thread(),
        "late rank": Planted(late_ranks()[1], "operator", "aten::preprocess"),
        "early rank": Planted(late_ranks()[0], "collective", nccl),
    }


def late_ranks() -> tuple[Machine, Machine]:
    """Return two ranks that run a collective, in which rank 0 waits for rank 1."""
    machines = Machine(0), Machine(1)
    late: Program = [("op", "aten::preprocess", 1200)]
    times = [machine.run([*late * machine.rank, *layers(4, 20)], 12) for machine in machines]
    begins: list[float] = []
    for machine, time in zip(machines, times, strict=True):
        machine.correlation += 1
        machine.add("cuda_runtime", "cudaLaunchKernel", time, CALL_US, 1, correlation=machine.correlation)
        begins.append(max(time + CALL_US + LATENCY_US, machine.free_us[7] + 1))
    end = max(begins) + 150
    for machine, time, begin in zip(machines, times, begins, strict=True):
        args: dict[str, Any] = {"stream": 7, "device": machine.rank, "correlation": machine.correlation}
        machine.add("kernel", "ncclDevKernel_AllReduce", begin, end - begin, 7, **args)
        machine.free_us[7] = end
        step_end = machine.run([*layers(2, 20), ("sync", None)], time + CALL_US)
        machine.add("user_annotation", "ProfilerStep#0", 10, step_end - 10, 1)
    return machines
