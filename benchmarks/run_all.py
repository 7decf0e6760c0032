"""Run every benchmark in a process of its own and print one table.

python benchmarks/run_all.py [--json FILE]

Exits with 1 if a benchmark cannot run, and with 0 whatever the numbers are: this is a measurement, not a test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this file may be run by its path

from benchmarks.measure import Row, parser, report  # noqa: E402  # found there

BENCHMARKS = ("idle_step", "import_time", "captured_step", "fan_out")
TRACES = ROOT / "benchmarks" / "traces"
BASE = "inflate"


def python(*arguments: str) -> str:
    """Run Python in the root of the repository and return what it printed."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def run(name: str, result: Path) -> dict[str, Any]:
    """Run one of `BENCHMARKS` and return its result."""
    python("-m", f"benchmarks.{name}", "--json", str(result))
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def verify(trace: Path) -> list[Row]:
    """Make a large trace, run ``traces/verify.py`` on it and return its figures as rows."""
    python(str(TRACES / "generate.py"), str(trace))
    tasks = json.loads(python(str(TRACES / "verify.py"), str(trace), "--json"))["tasks"]
    base = tasks.pop(BASE)
    return [
        Row(
            what=f"{task} a large trace",
            unit="s",
            measured=figures["median_wall_s"],
            peer=base["median_wall_s"],
            peer_name=BASE,
            ratio=figures["ratio"],
            detail=f"peak {figures['peak_rss_mib']:.0f} MiB; {BASE} {base['peak_rss_mib']:.0f} MiB",
        )
        for task, figures in tasks.items()
    ]


def main() -> None:
    """Run all, report, and say what could not run."""
    chosen = parser(__doc__).parse_args()
    rows: list[Row] = []
    about: dict[str, str] = {}
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        for name in (*BENCHMARKS, "traces/verify"):
            began_s = time.monotonic()
            try:
                if name in BENCHMARKS:
                    result = run(name, Path(directory, "result.json"))
                    about |= result["machine"]
                    rows += [Row(**row) for row in result["rows"]]
                else:
                    rows += verify(Path(directory, "large.trace.json.gz"))
            except subprocess.CalledProcessError as error:
                failed.append(name)
                print(f"{name} failed:\n{error.stderr}", file=sys.stderr)
            print(f"{name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    report(rows, chosen.json, **about)
    if failed:
        sys.exit(f"could not run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
