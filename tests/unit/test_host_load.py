"""Tests for the CPU contention that captures record and commands report."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from profdeck.base.host_counters import HostCounters
from profdeck_traces.inputs.host_load import HostLoad, with_other_load

IDLE = HostLoad(wall_s=2.0, cpu_s=1.9, cpus=8, load_at_start=1.0, load_at_end=1.0, run_queue_s=0.01)


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (IDLE, None),
        (attrs.evolve(IDLE, wall_s=0.0, run_queue_s=1.0), None),
        (attrs.evolve(IDLE, run_queue_s=0.1), None),
        (attrs.evolve(IDLE, run_queue_s=0.5), "the main thread waited 25% of the time for a CPU"),
        (
            attrs.evolve(IDLE, run_queue_s=0.5, load_at_start=20.0, load_at_end=24.0),
            "the main thread waited 25% of the time for a CPU, load average 20.0 on 8 CPUs",
        ),
        # The thread hardly waited for a CPU, so other processes did not slow it down.
        (attrs.evolve(IDLE, load_at_start=20.0, load_at_end=20.0), None),
        (attrs.evolve(IDLE, run_queue_s=None, load_at_start=20.0, load_at_end=20.0), "load average 20.0 on 8 CPUs"),
        (attrs.evolve(IDLE, run_queue_s=None, load_at_start=20.0, load_at_end=2.0), None),
        (
            attrs.evolve(IDLE, throttled_s=0.6, throttled_periods=7),
            "its CPU quota throttled the process for 0.6 s of 2 s in 7 periods",
        ),
    ],
)
def test_contention_has_a_cause(load: HostLoad, text: str | None) -> None:
    assert load.describe_contention() == text


RANK = HostLoad(
    wall_s=2.0, cpu_s=1.8, cpus=2, load_at_start=2.0, load_at_end=2.0, run_queue_s=0.4, host_cpu_s=3.8,
    all_run_queue_s=0.5, usable_cpus=2,
)  # fmt: skip


def of_processes(loads: list[HostLoad]) -> list[HostLoad]:
    """Return the loads of different processes that were recorded together."""
    return [load for load in with_other_load(loads, [("host", process) for process in range(len(loads))]) if load]


def test_traces_of_one_process_count_its_cpu_time_once() -> None:
    loads = with_other_load([RANK] * 4, [("host", "rank 0")] * 4)
    assert [load and load.other_cpus for load in loads] == [pytest.approx(1.0)] * 4


def test_process_that_needs_more_than_its_cpus_is_oversubscribed_whatever_others_use() -> None:
    pinned = attrs.evolve(RANK, cpus=64, usable_cpus=2, all_run_queue_s=26.0, host_cpu_s=24.0)
    (load,) = of_processes([pinned])
    assert load.other_cpus == pytest.approx(11.1)
    assert load.is_oversubscribed
    assert load.describe_contention() is None


@pytest.mark.parametrize("wrong", [{"cpus": -2}, {"thread_cpu_s": -5.0}, {"run_queue_s": 1e308}, {"cpu_s": math.nan}])
def test_loads_that_cannot_have_been_measured_are_implausible(wrong: dict[str, Any]) -> None:
    assert RANK.is_plausible
    assert not attrs.evolve(RANK, **wrong).is_plausible


def test_ranks_that_use_the_cpus_themselves_do_not_make_the_machine_busy() -> None:
    loads = of_processes([RANK, RANK])
    assert [load.other_cpus for load in loads] == [pytest.approx(0.1), pytest.approx(0.1)]
    assert [load.describe_contention() for load in loads] == [None, None]
    assert not loads[0].is_oversubscribed  # 2.3 runnable threads on 2 CPUs
    assert loads[0].wait_fraction == pytest.approx(0.2)


def test_other_processes_make_the_machine_busy() -> None:
    load, _ = of_processes([attrs.evolve(RANK, cpu_s=0.9), attrs.evolve(RANK, cpu_s=0.9)])
    assert load.describe_contention() == (
        "the main thread waited 20% of the time for a CPU, other processes used 1.0 of 2 CPUs"
    )


def test_ranks_with_more_threads_than_cpus_are_oversubscribed() -> None:
    loads = of_processes([attrs.evolve(RANK, all_run_queue_s=6.0)] * 2)
    assert loads[0].wanted_cpus == pytest.approx(7.8)
    assert all(load.is_oversubscribed and load.describe_contention() is None for load in loads)


def test_load_average_estimates_other_processes_if_their_cpu_time_is_unknown() -> None:
    load, _ = of_processes([attrs.evolve(RANK, host_cpu_s=None)] * 2)
    assert load.other_cpus == 0.0
    load, _ = of_processes([attrs.evolve(RANK, host_cpu_s=None, load_at_start=9.0, load_at_end=8.2)] * 2)
    assert load.other_cpus == pytest.approx(6.0)


def write(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="ascii")


@pytest.mark.parametrize("is_v1", [True, False])
def test_counters_of_a_host(tmp_path: Path, is_v1: bool) -> None:
    def write_counters(factor: int) -> HostCounters:
        write(tmp_path, "proc/loadavg", f"{factor}.5 1.0 1.0 1/100 4\n")
        write(tmp_path, "proc/self/task/7/schedstat", f"{factor}500000000 {factor}000000000 3\n")
        pressure = f"some avg10=1 avg60=1 avg300=1 total={factor}500000\nfull avg10=0 avg60=0 avg300=0 total=0\n"
        write(tmp_path, "proc/pressure/cpu", pressure)
        write(tmp_path, "proc/self/task/8/schedstat", f"1 {factor}000000000 3\n")
        ticks = factor * 100
        write(tmp_path, "proc/stat", f"cpu  {ticks} 0 {ticks} 7777 9 0 0 5 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
        write(tmp_path, "proc/self/cgroup", "1:cpu,cpuacct:/docker/1\n" if is_v1 else "0::/job\n")
        if is_v1:
            stat = f"nr_periods 9\nnr_throttled {factor}\nthrottled_time {factor}00000000\n"
            write(tmp_path, "sys/fs/cgroup/cpu/cpu.stat", stat)
        else:
            write(tmp_path, "sys/fs/cgroup/job/cpu.stat", "usage_usec 5\n")
            stat = f"usage_usec 5\nnr_throttled {factor}\nthrottled_usec {factor}00000\n"
            write(tmp_path, "sys/fs/cgroup/cpu.stat", stat)
        return HostCounters.read(7, tmp_path)

    start = write_counters(1)
    load = write_counters(3).load_since(start)
    assert load.wall_s >= 0
    assert load.cpus >= 1
    assert (load.load_at_start, load.load_at_end) == (1.5, 3.5)
    assert (load.thread_cpu_s, load.run_queue_s, load.pressure_s) == (2, 2, 2)
    assert load.all_run_queue_s == 4
    assert load.host_cpu_s == pytest.approx(400 / os.sysconf("SC_CLK_TCK"))
    assert (load.throttled_periods, load.throttled_s) == (2, pytest.approx(0.2))


@pytest.mark.parametrize("content", [None, "", "garbage", "some\nnr_throttled\n"])
def test_unreadable_counters_are_unknown(tmp_path: Path, content: str | None) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    for name in ("proc/loadavg", "proc/self/task/7/schedstat", "proc/pressure/cpu", "sys/fs/cgroup/cpu.stat"):
        if content is not None:
            write(tmp_path, name, content)
    counters = HostCounters.read(7, tmp_path)
    load = counters.load_since(counters)
    assert (load.load_at_start, load.thread_cpu_s, load.run_queue_s, load.throttled_s) == (None,) * 4
    assert load.describe_contention() is None


def test_process_time_of_this_process() -> None:
    start = HostCounters.read()
    until = time.process_time() + 0.005
    while time.process_time() < until:
        pass
    load = HostCounters.read(start.thread).load_since(start)
    assert load.cpu_s >= 0.005
    assert load.wall_s > 0
