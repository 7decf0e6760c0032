"""Measure the CPU time and the imported libraries of `import profdeck`, relative to a bare interpreter.

python -m benchmarks.import_time [--repeats 41] [--json FILE]

Each repeat runs every statement in a new process. The time is the process's user and system time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.measure import Row, parser, ratio_interval, report

BARE = "pass"
# Statements, with the libraries that they must not import. A statement without libraries has no goal.
STATEMENTS = {
    "import profdeck": ("torch", "typer", "rich"),
    "from profdeck import Profiler; Profiler.from_config()": (),
}
LIBRARIES = ("torch", "typer", "rich", "numpy", "attrs", "yaml", "pluggy")
MAX_MS = 60.0


def environment() -> dict[str, str]:
    """Return the environment without profdeck's variables, so that `from_config` selects nothing."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PROFDECK")}


def cpu_ms(statement: str, directory: str) -> float:
    """Run a statement in a new interpreter. Return its user and system time in milliseconds."""
    process = subprocess.Popen([sys.executable, "-c", statement], env=environment(), cwd=directory)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return (usage.ru_utime + usage.ru_stime) * 1e3


def imported(statement: str, directory: str) -> list[str]:
    """Return the `LIBRARIES` that a statement imports."""
    program = f"{statement}\nimport sys\nprint(*[name for name in {LIBRARIES!r} if name in sys.modules])"
    command = [sys.executable, "-c", program]
    return subprocess.check_output(command, env=environment(), cwd=directory, text=True).split()


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=41)
    chosen = options.parse_args()
    spent: dict[str, list[float]] = {statement: [] for statement in (BARE, *STATEMENTS)}
    with tempfile.TemporaryDirectory() as directory:
        imports = {statement: imported(statement, directory) for statement in spent}  # also compiles the modules
        for _ in range(chosen.repeats):
            for statement, times in spent.items():
                times.append(cpu_ms(statement, directory))
    rows = []
    for statement, banned in STATEMENTS.items():
        over = [cpu - bare for cpu, bare in zip(spent[statement], spent[BARE], strict=True)]
        over_ms = statistics.median(over)
        ratio, interval = ratio_interval(spent[statement], spent[BARE])
        low, _, high = statistics.quantiles(over, n=4)
        goal = f"<= {MAX_MS:.0f} ms over bare, no {'/'.join(banned)}" if banned else ""
        rows.append(
            Row(
                what=statement,
                unit="ms CPU",
                measured=statistics.median(spent[statement]),
                peer=statistics.median(spent[BARE]),
                peer_name="bare python",
                ratio=ratio,
                interval=interval,
                goal=goal,
                met=over_ms <= MAX_MS and not {*banned} & {*imports[statement]} if banned else None,
                detail=f"{over_ms:.1f} ms over bare (quartiles {low:.1f}..{high:.1f}); imports of "
                f"{', '.join(LIBRARIES)}: {', '.join(imports[statement]) or 'none'}",
            )
        )
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
