"""Compare blocks of training steps with one regular capture each with the same blocks without captures.

python -m benchmarks.standing [--rounds 12] [--json FILE]

A block contains the steps from one capture to the next. Each round runs every block with and without its capture of
three steps and one warm-up step, in random order. The time includes the stop, the export and the compression.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.captured_step import Body, training_step
from benchmarks.measure import Row, in_turns, parser, ratio_interval, report

from profdeck import Profiler

COUNT = 3
BLOCKS = (100, 500)


def profiler_of(output: Path, every: int, *, captures: bool) -> Profiler:
    """Return a profiler that captures once per block, or never."""
    return Profiler.from_config(
        settings={
            "output": str(output),
            "run": f"{every}-{captures}",
            "on_error": "raise",
            "steps": [f"every {every} for {COUNT} from {every // 2}"] if captures else [],
            "trainer.backend": "torch",
            "trainer.warmup_steps": 1,
        }
    )


def block(body: Body, profiler: Profiler, first: int, steps: int) -> float:
    """Run a block and return its duration in seconds."""
    began_s = time.perf_counter()
    for step in range(first, first + steps):
        with profiler.capture(step):
            body()
    return time.perf_counter() - began_s


def measure(output: Path, body: Body, every: int, rounds: int) -> Row:
    """Compare blocks of one length."""
    profilers = {captures: profiler_of(output, every, captures=captures) for captures in (True, False)}
    times = in_turns(
        (True, False), rounds, lambda captures, number: block(body, profilers[captures], number * every, every)
    )
    for profiler in profilers.values():
        profiler.close()
    with_s, without_s = times[True], times[False]
    ratio, interval = ratio_interval(with_s, without_s)
    return Row(
        what=f"every {every} for {COUNT}",
        unit="s a block",
        measured=statistics.median(with_s),
        peer=statistics.median(without_s),
        peer_name="no captures",
        ratio=ratio,
        interval=interval,
    )


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=12)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as output:
        rows = [measure(Path(output), training_step(), every, chosen.rounds) for every in BLOCKS]
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
