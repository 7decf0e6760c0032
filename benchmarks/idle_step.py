"""Compare the cost of a profiler in steps that are not captured with an empty bound method.

python -m benchmarks.idle_step [--repeats 301] [--directory DIR] [--json FILE]

The profiler has a config and has already captured a step, so the benchmark measures the state after `stop`. Each repeat
times every statement once in the same process, and the time of an empty loop is subtracted. A statement contains two
global steps, because a profiler checks for requests once per step. The figures are per step.

By default (`on_demand`), a profiler checks its run directory, below `--directory`, once per step. To measure a shared
file system, pass one of its directories. The peer is the same profiler with `on_demand: false`.
"""

from __future__ import annotations

import statistics
import tempfile
from timeit import Timer

from benchmarks.measure import Row, parser, ratio_interval, report

from profdeck import Profiler

CAPTURED = 10
CALLS = 20_000
MAX_RATIO = 1.5
MAX_NS = 50.0
EMPTY_LOOP = "pass"
EMPTY_METHOD = "empty.step(11); empty.step(12)"
STEP = "profiler.step(11); profiler.step(12)"
START = "profiler.start(11); profiler.start(12)"
SCOPE = "with profiler.capture(11): pass\nwith profiler.capture(12): pass"
STATEMENTS = {
    "idle step(n)": STEP,
    "idle start(n)": START,
    "idle stop()": "profiler.stop(); profiler.stop()",
    "idle `with capture(n): pass`": SCOPE,
}
# Statements with `on_demand: false`.
WITHOUT = {statement: statement.replace("profiler", "without") for statement in (START, SCOPE)}


class Empty:
    """Host object with an empty method, the minimal cost of a call."""

    def step(self, index: int) -> None:
        """Do nothing."""


def idle_profiler(output: str, *, on_demand: bool) -> Profiler:
    """Return a profiler that has captured step 10. Its next selected step is 1000."""
    profiler = Profiler.from_config(
        settings={
            "output": output,
            "on_error": "raise",
            "on_demand": on_demand,
            "steps": [CAPTURED, "every 1000"],
            "trainer.backend": "torch",
        }
    )
    profiler.start(CAPTURED)
    profiler.step(CAPTURED)
    profiler.stop()
    assert profiler.enabled
    assert profiler.active is None
    return profiler


def measure(output: str, repeats: int) -> dict[str, list[float]]:
    """Return the nanoseconds per global step of each statement, one value per repeat."""
    names = {
        "source": idle_profiler(output, on_demand=True),
        "off": idle_profiler(output, on_demand=False),
        "other": Empty(),
    }
    timers = {
        statement: Timer(statement, "profiler = source; without = off; empty = other", globals=names)
        for statement in (EMPTY_LOOP, EMPTY_METHOD, *STATEMENTS.values(), *WITHOUT.values())
    }
    spent: dict[str, list[float]] = {statement: [] for statement in timers}
    order = list(timers)
    for _ in range(repeats):
        for statement in order:
            spent[statement].append(timers[statement].timeit(CALLS) / CALLS * 1e9)
        order.append(order.pop(0))  # rotate the order, so that no statement is always first
    loop = statistics.median(spent.pop(EMPTY_LOOP))
    return {statement: [(time_ns - loop) / 2 for time_ns in times] for statement, times in spent.items()}


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=301)
    options.add_argument("--directory", metavar="DIR", help="parent of the run directory")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.directory) as output:
        times = measure(output, chosen.repeats)
    peer = times[EMPTY_METHOD]
    rows = []
    for what, statement in STATEMENTS.items():
        ratio, interval = ratio_interval(times[statement], peer)
        has_goal = statement == STEP
        median_ns = statistics.median(times[statement])
        rows.append(
            Row(
                what=what,
                unit="ns",
                measured=median_ns,
                peer=statistics.median(peer),
                peer_name="empty method",
                ratio=ratio,
                interval=interval,
                goal=f"ratio <= {MAX_RATIO}, < {MAX_NS:.0f} ns" if has_goal else "",
                met=ratio <= MAX_RATIO and median_ns < MAX_NS if has_goal else None,
                detail=f"minimum {min(times[statement]):.1f} ns; empty method {min(peer):.1f} ns",
            )
        )
    for statement, without in WITHOUT.items():
        (what,) = (name for name, idle in STATEMENTS.items() if idle == statement)
        ratio, interval = ratio_interval(times[statement], times[without])
        pairs = zip(times[statement], times[without], strict=True)
        check_ns = statistics.median(time_ns - without_ns for time_ns, without_ns in pairs)
        rows.append(
            Row(
                what=f"{what}, with a check for requests",
                unit="ns",
                measured=statistics.median(times[statement]),
                peer=statistics.median(times[without]),
                peer_name="on_demand: false",
                ratio=ratio,
                interval=interval,
                detail=f"{check_ns:.0f} ns more per global step",
            )
        )
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
