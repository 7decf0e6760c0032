"""Tests for waits in collectives, which are assigned to the last rank to arrive and to its work in the meantime."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from simulated_ranks import Owner, owners, simulate, write

from profdeck_traces import write_result
from profdeck_traces.account.model import Account, OwnerTime
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.run_summary import summarise_run
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.findings.overview import teams_of
from profdeck_traces.inputs.sources import find_sources
from profdeck_traces.loading import summarise

HOST = {"cudaLaunchKernel", "cudaDeviceSynchronize"}


def summary_of(directory: Path, cache: ResultCache | None = None) -> RunSummary:
    run, errors = summarise_run(find_sources([directory]), cache=cache)
    assert not errors
    return run


def account(run: RunSummary, rank: int) -> Account:
    (found,) = (summary.account for summary in run.ranks if summary.rank == rank)
    assert found is not None
    return found


def times_of(found: Account) -> Counter[Owner]:
    """Return the time of each owner in nanoseconds, by awaited rank and name."""
    times: Counter[Owner] = Counter()
    for owner in found.owners:
        name = owner.name
        is_device = owner.kind in {"kernel", "collective"} or owner.awaited in {"kernel", "collective"}
        if name is None or not is_device:
            name = None
        elif name.startswith("nccl"):
            name = "all_reduce"
        times[owner.rank, name] += round(owner.time_us * 1000)
    return times


@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 5))
@settings(max_examples=25, deadline=None)
def test_waits_are_assigned_like_in_a_brute_force_simulation(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ranks: int
) -> None:
    job = simulate(seed, ranks=ranks)
    run = summary_of(write(job, tmp_path_factory.mktemp("job")))
    for rank in range(ranks):
        found = account(run, rank)
        total_ns = sum(end - begin for begin, end in job.steps[rank])
        assert sum(round(owner.time_us * 1000) for owner in found.owners) == total_ns
        assert times_of(found) == owners(job, rank)


def test_stored_results_have_the_same_accounts_as_traces(tmp_path: Path) -> None:
    directory = write(simulate(1), tmp_path / "job")
    direct = summary_of(directory)
    cache = ResultCache(tmp_path / "cache", max_bytes=1 << 30)
    assert summary_of(directory, cache).ranks == direct.ranks
    assert summary_of(directory, cache).ranks == direct.ranks
    for path in directory.glob("*.json"):
        assert write_result(path)
    assert summary_of(directory, ResultCache(tmp_path / "empty", max_bytes=1 << 30)).ranks == direct.ranks


def host_trace(directory: Path, rank: int, calls: list[tuple[str, str, int, int, int]], world_size: int = 2) -> None:
    """Write a trace of calls, each given as category, name, thread, and start and end in microseconds."""
    events = [
        {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": begin, "dur": end - begin, "args": {}}
        for category, name, tid, begin, end in calls
    ]
    write_events(directory, rank, events, world_size)


def write_events(directory: Path, rank: int, events: list[dict[str, Any]], world_size: int = 2) -> None:
    """Write the trace of a rank."""
    about = {"rank": rank, "world_size": world_size, "pg_count": 1, "backend": "gloo"}
    document = {"distributedInfo": about, "baseTimeNanoseconds": 10**18, "traceEvents": events}
    (directory / f"rank{rank}.trace.json").write_text(json.dumps(document))


def gloo_job(
    directory: Path,
    *,
    arrivals_us: tuple[int, ...] = (200, 700),
    steps: int = 4,
    name: str = "gloo:all_reduce",
    cut: int = 0,
    world_size: int | None = None,
    early_us: int = 0,
    late_us: int = 0,
) -> Path:
    """Write one trace per rank. In each 1,000 us step, every rank except 0 sorts until it arrives at the collective.

    Args:
        directory: Directory of the traces.
        arrivals_us: Time within the step at which each rank arrives at the collective.
        steps: Number of steps.
        name: Name of the collective.
        cut: Number of collectives missing from the end of the traces of ranks other than 0.
        world_size: Number of ranks in the job. Default: the ranks with an arrival.
        early_us: Time from the start of the collective to the end of the operator that launches it.
        late_us: Time from the moment the main thread continues to the end of the collective.
    """
    directory.mkdir()
    for rank, arrival_us in enumerate(arrivals_us):
        calls = []
        for step in range(steps):
            begin = 10_000 + 1_000 * step
            arrival = begin + arrival_us
            calls.append(("user_annotation", f"ProfilerStep#{step}", 1, begin, begin + 1_000))
            calls.append(("cpu_op", "aten::mm", 1, begin, begin + 200))
            if rank:
                calls.append(("cpu_op", "aten::sort", 1, begin + 200, arrival))
            if not (rank and step >= steps - cut):
                calls.append(("user_annotation", name, 2, arrival - early_us, begin + 800 + late_us))
            calls.append(("cpu_op", "aten::add", 1, begin + 800, begin + 1_000))
        host_trace(directory, rank, calls, world_size=world_size or len(arrivals_us))
    return directory


def owner(found: Account, name: str, rank: int | None = None) -> OwnerTime:
    (item,) = (item for item in found.owners if item.name == name and item.rank == rank)
    return item


def test_a_wait_for_a_rank_names_its_owner_and_the_gain(tmp_path: Path) -> None:
    run = summary_of(gloo_job(tmp_path / "job"))
    waiting, late = account(run, 0), account(run, 1)
    wait = owner(waiting, "aten::sort", 1)
    assert (wait.kind, wait.awaited, wait.time_us, wait.gain_us) == ("wait for rank", "operator", 2_000, 2_000)
    assert wait.title == "wait for rank 1: operator"
    assert owner(waiting, "gloo:all_reduce").time_us == 400
    assert owner(late, "aten::sort").time_us == 2_000
    assert not [item for item in late.owners if item.rank is not None]
    assert not [note for note in waiting.notes if "waiting" in note]


def test_a_synchronisation_does_not_save_the_wait_for_a_late_rank(tmp_path: Path) -> None:
    for rank, arrival_us in enumerate((200, 700)):
        calls = []
        for step in range(6):
            begin = 10_000 + 1_000 * step
            launch, kernel = {"correlation": step}, {"device": 0, "stream": 7, "correlation": step}
            allreduce = {"Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
            calls += [
                ("user_annotation", f"ProfilerStep#{step}", begin, begin + 1_000, {}),
                ("cpu_op", "aten::mm", begin, begin + arrival_us, {}),
                ("cuda_runtime", "cudaLaunchKernel", begin + arrival_us, begin + arrival_us + 5, launch),
                ("kernel", "ncclDevKernel_AllReduce", begin + arrival_us + 10, begin + 880, kernel | allreduce),
                ("cuda_runtime", "cudaDeviceSynchronize", begin + arrival_us + 5, begin + 890, {}),
                ("cpu_op", "aten::add", begin + 890, begin + 1_000, {}),
            ]
        events = [
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": 7,
                "ts": begin,
                "dur": end - begin,
                "args": args,
            }
            for category, name, begin, end, args in calls
        ]
        write_events(tmp_path, rank, events)
    gains = []
    for rank in range(2):
        found = account(summary_of(tmp_path), rank)
        (cause,) = (one for one in found.causes if one.cause == "synchronisation")
        assert cause.gain_us is not None
        gains.append(cause.gain_us / found.steps)
    assert 0 < gains[0] <= gains[1] < 200


def test_a_collective_can_start_before_its_operator_ends(tmp_path: Path) -> None:
    """Regression test: without stacks, the main thread's wait was counted as time without an event."""
    waiting = account(summary_of(gloo_job(tmp_path / "job", early_us=50)), 0)
    assert owner(waiting, "aten::sort", 1).time_us == 4 * 450
    assert owner(waiting, "aten::mm", 1).time_us == 4 * 50


def test_a_collective_can_end_after_the_main_thread_continues(tmp_path: Path) -> None:
    """Regression test: gloo notifies the main thread before its own event ends."""
    waiting = account(summary_of(gloo_job(tmp_path / "job", late_us=50)), 0)
    assert owner(waiting, "aten::sort", 1).time_us == 2_000
    assert owner(waiting, "gloo:all_reduce").time_us == 400


def test_the_gain_of_a_wait_is_limited_by_the_second_to_last_rank(tmp_path: Path) -> None:
    waiting = account(summary_of(gloo_job(tmp_path / "job", arrivals_us=(200, 600, 700))), 0)
    wait = owner(waiting, "aten::sort", 2)
    assert (wait.time_us, wait.gain_us) == (2_000, 400)


def test_a_collective_is_not_a_wait_if_its_root_can_leave_early(tmp_path: Path) -> None:
    run = summary_of(gloo_job(tmp_path / "job", name="gloo:broadcast"))
    assert not [item for item in account(run, 0).owners if item.rank is not None]
    assert owner(account(run, 0), "gloo:broadcast").time_us == 2_400


def test_calls_without_a_match_stay_collectives_and_the_account_says_so(tmp_path: Path) -> None:
    run = summary_of(gloo_job(tmp_path / "job", cut=1))
    waiting = account(run, 0)
    assert owner(waiting, "aten::sort", 1).time_us == 1_500
    assert owner(waiting, "gloo:all_reduce").time_us == 900
    assert "25% of the time of collectives" in waiting.notes[-1]


def test_ranks_without_a_common_clock_do_not_wait_for_each_other(tmp_path: Path) -> None:
    directory = gloo_job(tmp_path / "job", steps=1)
    path = directory / "rank1.trace.json"
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        event["name"] = event["name"].replace("all_reduce", "all_gather")
    path.write_text(json.dumps(document))
    waiting = account(summary_of(directory), 0)
    assert not [item for item in waiting.owners if item.rank is not None]
    assert [note for note in waiting.notes if "waiting for other ranks" in note]


def test_a_wait_is_assigned_to_the_path_to_the_collective_and_not_to_the_path_of_the_step(tmp_path: Path) -> None:
    """On rank 1, the step ends with compute kernels. Its all-reduce is late because the host launches it late."""
    directory = tmp_path / "job"
    directory.mkdir()
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, tid: int, begin: int, end: int, pid: int = 1, **args: Any) -> None:
        times = {"ts": begin, "dur": end - begin}
        events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args})

    for rank in range(2):
        events.clear()
        for step in range(4):
            begin = 10_000 + 10_000 * step
            number = 10 * step
            add("user_annotation", f"ProfilerStep#{step}", 1, begin, begin + 10_000)
            add("cuda_runtime", "cudaLaunchKernel", 1, begin, begin + 10, correlation=number + 1)
            computed = begin + (9_000 if rank else 3_000)
            add("kernel", "gemm", 7, begin + 20, computed, pid=0, stream=7, correlation=number + 1)
            launch = begin + 10
            if rank:
                add("cpu_op", "aten::sort", 1, begin + 10, begin + 5_000)
                launch = begin + 5_000
            add("cuda_runtime", "cudaLaunchKernel", 1, launch, launch + 10, correlation=number + 2)
            about = {"Collective name": "allreduce", "Process Group Name": "0", "stream": 20}
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"
            add("kernel", name, 20, launch + 20, begin + 5_500, pid=0, correlation=number + 2, **about)
            add("cuda_runtime", "cudaDeviceSynchronize", 1, launch + 10, begin + (9_000 if rank else 5_500))
            add("cpu_op", "aten::add", 1, begin + (9_000 if rank else 5_500), begin + 10_000)
        document = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
        (directory / f"rank{rank}.trace.json").write_text(json.dumps(document))
    run = summary_of(directory)
    assert {item.name for item in account(run, 1).owners} >= {"gemm"}
    assert "aten::sort" not in {item.name for item in account(run, 1).owners}
    assert owner(account(run, 0), "aten::sort", 1).time_us == 4 * (5_000 - 30)


def test_ranks_do_not_wait_for_each_other_if_ranks_of_their_group_were_not_recorded(tmp_path: Path) -> None:
    """A rank that was not recorded may arrive last."""
    directory = gloo_job(tmp_path / "job", steps=6, world_size=4)
    run = summary_of(directory)
    for rank in (0, 1):
        found = account(run, rank)
        assert not [item for item in found.owners if item.rank is not None]
        assert "100% of the time of collectives" in found.notes[-1]
        assert "ranks that were not recorded" in found.notes[-1]
    findings = summarise([directory])[0].findings
    assert not {finding.rule for finding in findings} & {"straggler", "imbalance"}


def test_collectives_are_matched_within_their_steps(tmp_path: Path) -> None:
    """Rank 0 lacks its last collective, and rank 1 its first."""
    directory = gloo_job(tmp_path / "job", steps=12)
    for rank, step in ((0, 11), (1, 0)):
        path = directory / f"rank{rank}.trace.json"
        document = json.loads(path.read_text())
        document["traceEvents"] = [
            event
            for event in document["traceEvents"]
            if not event["name"].startswith("gloo") or (event["ts"] - 10_000) // 1_000 != step
        ]
        document["baseTimeNanoseconds"] += 3_600 * 10**9 * rank
        path.write_text(json.dumps(document))
    waiting = account(summary_of(directory), 0)
    assert owner(waiting, "aten::sort", 1).time_us == 10 * 500
    assert "could not be compared" in waiting.notes[-1]


def test_waits_for_ranks_are_not_exposed_communication(tmp_path: Path) -> None:
    found = account(summary_of(gloo_job(tmp_path / "job")), 0)
    (cause,) = (cause for cause in found.causes if cause.cause == "exposed-communication")
    assert (cause.time_us, cause.gain_us) == (400, 400)


def test_notes_that_do_not_apply_to_all_ranks_name_the_ranks(tmp_path: Path) -> None:
    run, _ = summarise([gloo_job(tmp_path / "job", cut=1)])
    (team,) = teams_of(run)
    (note,) = (note for note in team.notes if "could not be compared" in note)
    assert note.startswith("Rank 0: 25% of the time")
