"""What a profiler costs a host in the steps that are not captured, against an empty bound method.

python -m benchmarks.idle_step [--repeats 301] [--json FILE]

The profiler has a real config and has captured a step before, so what is measured is the state that `stop` leaves.
Each repeat times every statement once, in the same process; the same empty loop is subtracted from all.
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
EMPTY_METHOD = "empty.step(11)"
STATEMENTS = {
    "idle step(n)": "profiler.step(11)",
    "idle start(n)": "profiler.start(11)",
    "idle stop()": "profiler.stop()",
    "idle `with capture(n): pass`": "with profiler.capture(11): pass",
}


class Empty:
    """What a host could not do without: a call."""

    def step(self, index: int) -> None:
        """Do nothing."""


def idle_profiler(output: str) -> Profiler:
    """Return a profiler that has captured step 10 and waits for step 1000."""
    profiler = Profiler.from_config(
        settings={
            "output": output,
            "on_error": "raise",
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


def measure(profiler: Profiler, repeats: int) -> dict[str, list[float]]:
    """Return nanoseconds per call of each statement, one for each repeat."""
    names = {"source": profiler, "other": Empty()}
    timers = {
        statement: Timer(statement, "profiler = source; empty = other", globals=names)
        for statement in (EMPTY_LOOP, EMPTY_METHOD, *STATEMENTS.values())
    }
    spent: dict[str, list[float]] = {statement: [] for statement in timers}
    order = list(timers)
    for _ in range(repeats):
        for statement in order:
            spent[statement].append(timers[statement].timeit(CALLS) / CALLS * 1e9)
        order.append(order.pop(0))  # nobody is always first
    loop = statistics.median(spent.pop(EMPTY_LOOP))
    return {statement: [one - loop for one in times] for statement, times in spent.items()}


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=301)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as output:
        times = measure(idle_profiler(output), chosen.repeats)
    peer = times[EMPTY_METHOD]
    rows = []
    for what, statement in STATEMENTS.items():
        ratio, interval = ratio_interval(times[statement], peer)
        judged = statement == "profiler.step(11)"
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
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
