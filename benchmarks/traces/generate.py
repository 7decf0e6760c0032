"""Make a large gzipped Chrome trace: copies of a real one, later in time and with ids of their own.

python benchmarks/traces/generate.py /tmp/large.json.gz [--megabytes 500] [--base FILE]
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from pathlib import Path

from isal import igzip

REAL_TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "gpu" / "nccl.json.gz"
# In order: times in microseconds, then the ids that tie launches to kernels and the ends of flow arrows.
SHIFTED = re.compile(r'("ts": |"correlation": |"External id": |"id": )(\d+(?:\.\d+)?)')
TS = '"ts": '
SYNTHETIC_STEPS = 2000


def synthetic_trace() -> str:
    """Return a small trace in Kineto's layout, for machines without the real one."""
    events = []
    for step in range(SYNTHETIC_STEPS):
        ts = 1000 + step * 100
        for category, name, pid, start, dur in (
            ("cpu_op", "aten::mm", 10, ts, 40),
            ("cuda_runtime", "cudaLaunchKernel", 10, ts + 20, 8),
            ("kernel", "ampere_sgemm_128x64_tn", 0, ts + 30, 60),
        ):
            events.append(
                f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {pid}, "tid": 7,\n'
                f'    "ts": {start}.{step % 1000:03d}, "dur": {dur}.500,\n'
                f'    "args": {{\n      "External id": {step}, "correlation": {step}\n    }}\n  }}'
            )
    return '{\n  "schemaVersion": 1,\n  "traceEvents": [\n' + ",\n".join(events) + "\n  ]\n}\n"


def copies(text: str, megabytes: float) -> list[str]:
    """Return the pieces of a trace of about so many megabytes that repeats the events of ``text``."""
    first = text.index("[", text.index('"traceEvents"')) + 1
    end = re.search(r"\}\s*\]\s*(?:,\s*\"|\}\s*$)", text[first:])
    assert end is not None, "the events array must end the trace or be followed by a key"
    head, events, tail = text[:first], text[first : first + end.start() + 1], text[first + end.start() + 1 :]
    pieces = SHIFTED.split(events)  # text, label, number, text, label, number, ..., text
    labels = pieces[1::3]
    numbers = [
        int(number.replace(".", "").ljust(len(number.partition(".")[0]) + 3, "0")) if label == TS else int(number)
        for label, number in zip(labels, pieces[2::3], strict=True)
    ]
    times = [number for label, number in zip(labels, numbers, strict=True) if label == TS]
    period = max(times) - min(times) + 1_000_000
    ids = max((number for label, number in zip(labels, numbers, strict=True) if label != TS), default=0) + 1
    out = [head]
    for copy in range(max(1, round(megabytes * 1e6 / len(events)))):
        if copy:
            out.append(",")
        pieces[2::3] = [
            f"{(time := number + copy * period) // 1000}.{time % 1000:03d}" if label == TS else str(number + copy * ids)
            for label, number in zip(labels, numbers, strict=True)
        ]
        out.append("".join(pieces))
    out.append(tail)
    return out


def main() -> None:
    """Write the trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--megabytes", type=float, default=500.0, help="uncompressed size, about (default: 500)")
    parser.add_argument("--base", type=Path, default=REAL_TRACE, help="the trace to repeat, gzipped")
    options = parser.parse_args()
    if options.base.exists():
        with gzip.open(options.base, "rt", encoding="utf-8") as file:
            text = file.read()
    else:
        print(f"{options.base} is not there: repeating a synthetic trace", file=sys.stderr)
        text = synthetic_trace()
    with igzip.open(options.destination, "wb", compresslevel=1) as out:  # type: ignore[no-untyped-call]
        for piece in copies(text, options.megabytes):
            out.write(piece.encode())
    print(f"{options.destination}: {options.destination.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
