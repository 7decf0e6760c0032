"""Simulation of a machine's threads, streams and events. It generates the trace that Kineto would write.

A program is a list of instructions. Times are in microseconds. To measure how a duration affects the step, a program
can be simulated again with that duration changed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

LATENCY_US, BACK_TO_BACK_US, CALL_US, RETURN_US = 6, 1, 4, 2
_LONG_AGO_US = -9

Program = list[tuple[Any, ...]]
"""Instructions:

- ``("op", name, duration)``, ``("frame", name, duration)``, ``("gap", duration)``, ``("at", time)``
- ``("note", name, program)``, ``("in frame", name, program)``, ``("in op", name, program)``
- ``("launch", name, duration, stream)``, ``("copy", name, duration, stream, blocks)``
- ``("graph", name, durations, stream, duration of unrecorded kernels)``
- ``("record", event, stream)``, ``("wait", event, stream)``
- ``("sync", stream)``, ``("sync", ("event", event))``, ``("sync", None)`` for the device
"""
_NESTED = {"note": "user_annotation", "in frame": "python_function", "in op": "cpu_op"}
_LAUNCHES = {"launch": "cudaLaunchKernel", "copy": "cudaMemcpyAsync", "graph": "cudaGraphLaunch"}


class Machine:
    """Simulated machine that runs the programs of one rank.

    Args:
        rank: Index of the rank and of its device.
        sync_records: Whether to write ``cuda_sync`` records.
    """

    def __init__(self, rank: int = 0, *, sync_records: bool = True) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation, self.rank, self.sync_records = 100, rank, sync_records
        self.free_us: dict[int, float] = {}
        """Time at which each stream finishes its work."""
        self._recorded: dict[str, tuple[float, int, int]] = {}
        self._waits_us: dict[int, float] = {}

    def add(self, category: str, name: str, ts: float, dur: float, tid: int, **args: Any) -> None:
        """Add an event to the trace."""
        pid = self.rank if category in {"kernel", "gpu_memcpy", "cuda_sync"} else 1000 + self.rank
        event = {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}
        self.events.append(event)

    def run(self, program: Sequence[tuple[Any, ...]], time: float = 0, tid: int = 1) -> float:
        """Run a program on a thread and return its end time."""
        for instruction, *arguments in program:
            match instruction:
                case "at":
                    time = max(time, arguments[0])
                case "gap":
                    time += arguments[0]
                case "op" | "frame":
                    category = "cpu_op" if instruction == "op" else "python_function"
                    self.add(category, arguments[0], time, arguments[1], tid)
                    time += arguments[1]
                case "note" | "in frame" | "in op":
                    begin = time
                    time = self.run(arguments[1], time + (instruction != "note"), tid)
                    self.add(_NESTED[instruction], arguments[0], begin, time - begin, tid)
                case "launch" | "copy" | "graph":
                    time = self._launch(instruction, arguments, time, tid)
                case "record":
                    self.correlation += 1
                    free_us = self.free_us.get(arguments[1], _LONG_AGO_US)
                    self._recorded[arguments[0]] = free_us, self.correlation, arguments[1]
                    self.add("cuda_runtime", "cudaEventRecord", time, 1, tid, correlation=self.correlation)
                    time += 1
                case "wait":
                    time = self._wait(*arguments, time, tid)
                case "sync":
                    time = self._sync(arguments[0], time, tid)
        return time

    def _launch(self, instruction: str, arguments: list[Any], time: float, tid: int) -> float:
        name, durations, stream, *more = arguments
        self.correlation += 1
        ready = time + CALL_US + LATENCY_US
        for duration in durations if isinstance(durations, list) else [durations]:
            waits = self._waits_us.pop(stream, _LONG_AGO_US)
            begin = max(ready, *(end + BACK_TO_BACK_US for end in (self.free_us.get(stream, _LONG_AGO_US), waits)))
            if duration is not None:
                category = "gpu_memcpy" if instruction == "copy" else "kernel"
                args = {"stream": stream, "device": self.rank, "correlation": self.correlation}
                self.add(category, name, begin, duration, stream, **args)
            self.free_us[stream] = ready = begin + (more[0] if duration is None else duration)
        blocks = instruction == "copy" and more and more[0]
        called = max(CALL_US, self.free_us[stream] + RETURN_US - time) if blocks else CALL_US
        self.add("cuda_runtime", _LAUNCHES[instruction], time, called, tid, correlation=self.correlation)
        return time + called

    def _wait(self, event: str, stream: int, time: float, tid: int) -> float:
        self.correlation += 1
        ended, recorded, other = self._recorded[event]
        self._waits_us[stream] = max(self._waits_us.get(stream, _LONG_AGO_US), ended)
        self.add("cuda_runtime", "cudaStreamWaitEvent", time, 1, tid, correlation=self.correlation)
        self._record("Stream Wait Event", time, 1, stream, other, recorded)
        return time + 1

    def _sync(self, target: Any, time: float, tid: int) -> float:
        self.correlation += 1
        other = recorded = -1
        if target is None:
            ended, call, kind, stream = max(self.free_us.values(), default=time), "Device", "Context Sync", -1
        elif isinstance(target, tuple):
            ended, recorded, other = self._recorded[target[1]]
            call, kind, stream = "Event", "Event Sync", -1
        else:
            ended, call, kind, stream = self.free_us.get(target, time), "Stream", "Stream Sync", target
        end = max(time + CALL_US, ended + RETURN_US)
        self.add("cuda_runtime", f"cuda{call}Synchronize", time, end - time, tid, correlation=self.correlation)
        self._record(kind, time, end - time, stream, other, recorded)
        return end

    def _record(self, kind: str, time: float, duration: float, stream: int, other: int, recorded: int) -> None:
        if self.sync_records:
            args: dict[str, Any] = {"correlation": self.correlation, "stream": stream, "cuda_sync_kind": kind}
            if other >= 0:
                args |= {"wait_on_stream": other, "wait_on_cuda_event_record_corr_id": recorded}
            self.add("cuda_sync", kind, time, duration, stream, **args)


def scaled(program: Program, name: str, factor: float) -> Program:
    """Return a copy of the program in which the durations of all instructions with this name are scaled."""
    program = copy.deepcopy(program)

    def scale(part: Program) -> None:
        for place, (instruction, *arguments) in enumerate(part):
            if instruction in _NESTED:
                scale(arguments[1])
            elif instruction in {"op", "frame", "launch", "copy"} and arguments[0] == name:
                part[place] = (instruction, name, arguments[1] * factor, *arguments[2:])

    scale(program)
    return program


def run_steps(program: Program, steps: int = 1, *, sync_records: bool = True) -> Machine:
    """Run a program once per step, each time inside a step annotation."""
    machine, time = Machine(sync_records=sync_records), 10.0
    for step in range(steps):
        time = machine.run([("note", f"ProfilerStep#{step}", program)], time) + 2
    return machine


def random_program(rnd: random.Random) -> Program:
    """Return a random program that uses two streams and ends with a synchronisation."""
    program: Program = []
    recorded: list[tuple[str, int]] = []
    for number in range(rnd.randint(10, 40)):
        chance = rnd.random()
        stream = rnd.choice([7, 8])
        if chance < 0.25:
            program.append(("op", rnd.choice(["opA", "opB"]), rnd.randint(1, 60)))
        elif chance < 0.65:
            program.append(("launch", rnd.choice(["kA", "kB", "kC"]), rnd.randint(2, 120), rnd.choice([7, 7, 8])))
        elif chance < 0.72:
            program.append(("copy", "cA", rnd.randint(5, 60), 7, rnd.random() < 0.3))
        elif chance < 0.80:
            recorded.append((f"e{number}", stream))
            program.append(("record", *recorded[-1]))
        elif chance < 0.90 and recorded:
            event, stream = rnd.choice(recorded)
            program.append(("wait", event, 15 - stream))
        elif chance < 0.95 and recorded:
            program.append(("sync", ("event", rnd.choice(recorded)[0])))
        elif chance < 0.98:
            program.append(("sync", stream))
        else:
            program.append(("gap", rnd.randint(1, 80)))
    return [*program, ("sync", None)]


def step_us(program: Program) -> float:
    """Simulate one step of a program and return its duration."""
    machine = run_steps(program)
    return float(next(event["dur"] for event in machine.events if event["name"].startswith("ProfilerStep")))
