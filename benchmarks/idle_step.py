"""What a profiler costs a host in the steps that are not captured, against an empty bound method.

python -m benchmarks.idle_step [--repeats 301] [--directory DIR] [--json FILE]

The profiler has a real config and has captured a step before, so what is measured is the state that `stop` leaves.
Each repeat times every statement once, in the same process; the same empty loop is subtracted from all. A statement
is about two global steps, since a profiler looks for requests once per step; the figures are for one.

With `on_demand`, the default, a profiler looks into its run directory once per step, which is below `--directory`:
name one on a shared file system to see what it costs there. Its peer is the same profiler without.
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
# As they are with `on_demand: false`.
WITHOUT = {statement: statement.replace("profiler", "without") for statement in (START, SCOPE)}


class Empty:
    """What a host could not do without: a call."""

    def step(self, index: int) -> None:
        """Do nothing."""


def idle_profiler(output: str, *, on_demand: bool) -> Profiler:
    """Return a profiler that has captured step 10 and waits for step 1000, or for a request."""
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
    """Return nanoseconds per global step of each statement, one for each repeat."""
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
        order.append(order.pop(0))  # nobody is always first
    loop = statistics.median(spent.pop(EMPTY_LOOP))
    return {statement: [(one - loop) / 2 for one in times] for statement, times in spent.items()}


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=301)
    options.add_argument("--directory", metavar="DIR", help="where the run directory is made")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.directory) as output:
        times = measure(output, chosen.repeats)
    peer = times[EMPTY_METHOD]
    rows = []
    for what, statement in STATEMENTS.items():
        ratio, interval = ratio_interval(times[statement], peer)
        judged = statement == STEP
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
                goal=f"ratio <= {MAX_RATIO}, < {MAX_NS:.0f} ns" if judged else "",
                met=ratio <= MAX_RATIO and median_ns < MAX_NS if judged else None,
                detail=f"at least {min(times[statement]):.1f} ns, and {min(peer):.1f} ns for the empty method",
            )
        )
    for statement, without in WITHOUT.items():
        (what,) = (name for name, one in STATEMENTS.items() if one == statement)
        ratio, interval = ratio_interval(times[statement], times[without])
        look_ns = statistics.median(one - other for one, other in zip(times[statement], times[without], strict=True))
        rows.append(
            Row(
                what=f"{what}, looking for requests",
                unit="ns",
                measured=statistics.median(times[statement]),
                peer=statistics.median(times[without]),
                peer_name="on_demand: false",
                ratio=ratio,
                interval=interval,
                detail=f"{look_ns:.0f} ns more per global step",
            )
        )
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
