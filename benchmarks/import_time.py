"""Measure the CPU time and imported libraries of `import profdeck` and of short commands, relative to a peer.

python -m benchmarks.import_time [--repeats 41] [--json FILE]

Each repeat runs every program in a new process and measures its user plus system time. The peer of an import is a bare
interpreter. The peer of a command is `import numpy`, because reading traces requires numpy.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
from benchmarks.measure import Row, parser, ratio_interval, report

BARE, NUMPY = "pass", "import numpy"
PEER_NAMES = {BARE: "bare python", NUMPY: NUMPY}
LIBRARIES = ("torch", "typer", "pydantic", "rich", "numpy", "attrs", "yaml", "pluggy")
TRACE = "small.json"


@attrs.frozen(kw_only=True)
class Case:
    """A program to measure, and its limits."""

    name: str
    program: str
    peer: str
    max_more_ms: float | None = None
    """Maximum excess over the peer's CPU time."""
    max_ratio: float | None = None
    """Maximum ratio of the CPU time to the peer's."""
    banned: tuple[str, ...] = ()
    """Libraries that the program must not import."""

    @property
    def goal(self) -> str:
        """The limits as text."""
        limits = [
            f"<= {self.max_more_ms:.0f} ms over {PEER_NAMES[self.peer]}" if self.max_more_ms else "",
            f"<= {self.max_ratio:g} times" if self.max_ratio else "",
            f"no {'/'.join(self.banned)}" if self.banned else "",
        ]
        return ", ".join(filter(None, limits))

    def is_met(self, more_ms: float, ratio: float, imports: list[str]) -> bool | None:
        """Return whether all limits are met, or ``None`` if the program has no limits."""
        if not self.goal:
            return None
        return (
            (self.max_more_ms is None or more_ms <= self.max_more_ms)
            and (self.max_ratio is None or ratio <= self.max_ratio)
            and not {*self.banned} & {*imports}
        )


def command(*arguments: str, max_ratio: float, banned: tuple[str, ...]) -> Case:
    """Create the case for a `profdeck` command."""
    program = f"import sys; sys.argv = {['profdeck', *arguments]!r}; from profdeck.cli import main; main()"
    name = " ".join(["profdeck", *arguments])
    return Case(name=name, program=program, peer=NUMPY, max_ratio=max_ratio, banned=banned)


CASES = [
    Case(
        name="import profdeck",
        program="import profdeck",
        peer=BARE,
        max_more_ms=60,
        banned=("torch", "typer", "pydantic", "rich"),
    ),
    Case(
        name="Profiler.from_config()",
        program="from profdeck import Profiler; Profiler.from_config()",
        peer=BARE,
    ),
    command("--help", max_ratio=1.5, banned=("torch", "pydantic", "rich", "numpy")),
    command("summary", TRACE, max_ratio=3, banned=("torch", "pydantic", "yaml", "pluggy")),
    command("summary", TRACE, "--no-cache", max_ratio=3.5, banned=("torch", "pydantic", "yaml", "pluggy")),
]


def environment() -> dict[str, str]:
    """Return the environment without profdeck's variables, so that `from_config` selects nothing."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PROFDECK")}


def write_trace(directory: str) -> None:
    """Write a trace of about 2 kB: one step with a few operators."""
    times = {"ph": "X", "pid": 1, "tid": 1, "dur": 50}
    steps = [{"cat": "user_annotation", "name": "ProfilerStep#0", **times, "ts": 1000, "dur": 1000}]
    operators = [{"cat": "cpu_op", "name": "aten::mm", **times, "ts": 1000 + 60 * number} for number in range(16)]
    Path(directory, TRACE).write_text(json.dumps({"traceEvents": steps + operators}), encoding="utf-8")


def cpu_ms(program: str, directory: str) -> float:
    """Run a program in a new interpreter and return its user plus system time in milliseconds."""
    arguments = [sys.executable, "-c", program]
    process = subprocess.Popen(arguments, env=environment(), cwd=directory, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return (usage.ru_utime + usage.ru_stime) * 1e3


def imported(program: str, directory: str) -> list[str]:
    """Return the libraries from `LIBRARIES` that a program imports."""
    listing = f"print(*[name for name in {LIBRARIES!r} if name in sys.modules], file=sys.stderr)"
    arguments = [sys.executable, "-c", f"import atexit, sys\natexit.register(lambda: {listing})\n{program}"]
    result = subprocess.run(arguments, env=environment(), cwd=directory, text=True, capture_output=True, check=True)
    return result.stderr.split()


def main() -> None:
    """Run the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=41)
    chosen = options.parse_args()
    spent: dict[str, list[float]] = {program: [] for program in (BARE, NUMPY, *(case.program for case in CASES))}
    with tempfile.TemporaryDirectory() as directory:
        write_trace(directory)
        imports = {program: imported(program, directory) for program in spent}  # also compiles the modules
        for _ in range(chosen.repeats):
            for program, times in spent.items():
                times.append(cpu_ms(program, directory))
    rows = []
    for case in CASES:
        measured, peer = spent[case.program], spent[case.peer]
        more = [cpu - peer_cpu for cpu, peer_cpu in zip(measured, peer, strict=True)]
        more_ms = statistics.median(more)
        ratio, interval = ratio_interval(measured, peer)
        low, _, high = statistics.quantiles(more, n=4)
        rows.append(
            Row(
                what=case.name,
                unit="ms CPU",
                measured=statistics.median(measured),
                peer=statistics.median(peer),
                peer_name=PEER_NAMES[case.peer],
                ratio=ratio,
                interval=interval,
                goal=case.goal,
                met=case.is_met(more_ms, ratio, imports[case.program]),
                detail=f"{more_ms:.1f} ms over {PEER_NAMES[case.peer]} (quartiles {low:.1f}..{high:.1f}); imports of "
                f"{', '.join(LIBRARIES)}: {', '.join(imports[case.program]) or 'none'}",
            )
        )
    report(rows, chosen.json)


if __name__ == "__main__":
    main()
