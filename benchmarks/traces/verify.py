"""Compare the verification of a trace with its decompression: wall time and peak memory, each in its own process.

python benchmarks/traces/verify.py /tmp/large.json.gz [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from isal import igzip

from profdeck_traces.reading.integrity import check_trace

READ_BYTES = 1 << 20


def inflate(path: Path) -> str:
    """Decompress with isal into a reused buffer."""
    buffer = bytearray(READ_BYTES)
    size = 0
    with igzip.open(path) as file:  # type: ignore[no-untyped-call]
        while count := file.readinto(buffer):
            size += count
    return f"{size:,} bytes"


def verify(path: Path) -> str:
    """Verify a trace with profdeck."""
    return str(check_trace(path))


TASKS = {"inflate": inflate, "verify": verify}


def run_one(task: str, path: Path) -> None:
    """Run one task in this process and print its figures. Imports are not timed."""
    begin = time.perf_counter()
    result = TASKS[task](path)
    wall_s = time.perf_counter() - begin
    peak_rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"task": task, "wall_s": wall_s, "peak_rss_mib": peak_rss_mib, "result": result}))


def main() -> None:
    """Run the tasks alternately. The best time approximates an idle machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--task", choices=TASKS, help="run only this task, in this process")
    options = parser.parse_args()
    if options.task:
        run_one(options.task, options.path)
        return
    runs: dict[str, list[dict[str, float]]] = {task: [] for task in TASKS}
    for _ in range(options.rounds):
        for task, figures in runs.items():
            command = [sys.executable, __file__, str(options.path), "--task", task]
            figures.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    walls_s = {task: [run["wall_s"] for run in figures] for task, figures in runs.items()}
    table = {
        task: {
            "median_wall_s": statistics.median(walls_s[task]),
            "ratio": statistics.median(walls_s[task]) / statistics.median(walls_s["inflate"]),
            "best_wall_s": min(walls_s[task]),
            "best_ratio": min(walls_s[task]) / min(walls_s["inflate"]),
            "peak_rss_mib": max(run["peak_rss_mib"] for run in figures),
        }
        for task, figures in runs.items()
    }
    if options.json:
        print(json.dumps({"path": str(options.path), "rounds": options.rounds, "tasks": table}, indent=2))
        return
    print(f"{'task':<10} {'median s':>9} {'ratio':>6} {'best s':>7} {'ratio':>6} {'peak MiB':>9}")
    for task, row in table.items():
        print(
            f"{task:<10} {row['median_wall_s']:>9.3f} {row['ratio']:>6.2f}"
            f" {row['best_wall_s']:>7.3f} {row['best_ratio']:>6.2f} {row['peak_rss_mib']:>9.0f}"
        )


if __name__ == "__main__":
    main()
