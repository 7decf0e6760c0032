"""Run a benchmark as a part of `make gpu`: ``python -m gpu.cost BENCHMARK``.

On a GPU, each row with a goal is a check.
"""

from __future__ import annotations

import json
import subprocess
import sys

from gpu.report import CUDA, OUT, Report

REPEATS = {"captured_step": ("--rounds", "12" if CUDA else "2"), "idle_step": ("--repeats", "31" if CUDA else "7")}


def main() -> None:
    report = Report()
    (name,) = sys.argv[1:]
    file = OUT / "rows.json"
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *REPEATS[name], "--json", str(file)], check=True)
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        ratio = row["ratio"]
        figure = f"{row['measured']:.3g} {row['unit']}, {ratio:.3f} of {row['peer_name']}"
        report.figure(row["what"], figure)
        if CUDA and row["goal"]:  # the goals apply to GPU sizes only
            report.check(row["what"], row["met"], f"{figure}; goal: {row['goal']}")
    report.finish()


if __name__ == "__main__":
    main()
