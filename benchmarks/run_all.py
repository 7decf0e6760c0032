"""Run all benchmarks, each in its own process, and print one table.

python benchmarks/run_all.py [--json FILE]

The exit code is 1 if a benchmark fails, and 0 otherwise, even if goals are missed.
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
sys.path.insert(0, str(ROOT))  # allows running this file by its path

from benchmarks.measure import Row, parser, report  # noqa: E402  # requires the sys.path entry above

BENCHMARKS = ("idle_step", "import_time", "captured_step", "fan_out")
TRACES = ROOT / "benchmarks" / "traces"
BASE = "inflate"


def python(*arguments: str) -> str:
    """Run Python in the repository root and return its stdout."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def run(name: str, result: Path) -> dict[str, Any]:
    """Run one of `BENCHMARKS` and return its JSON result."""
    python("-m", f"benchmarks.{name}", "--json", str(result))
    document: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return document


def verify(trace: Path) -> list[Row]:
    """Generate a large trace, run ``traces/verify.py`` on it and return the result rows."""
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
    """Run all benchmarks, report the results, and list failed benchmarks."""
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
        sys.exit(f"Failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
