"""Generate large gzipped Chrome traces: copies of a real trace with shifted times and separate IDs.

python benchmarks/traces/generate.py /tmp/large.json.gz [--megabytes 500] [--base FILE]
python benchmarks/traces/generate.py /tmp/job --ranks 8 [--megabytes 100]      # a directory of one trace per rank

The ranks of a job have different process IDs, and their clocks differ by `CLOCK_OFFSET_NS` from one rank to the next.
Rank `STRAGGLER` enters each collective late, by half of its duration, and leaves it with the others.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
from isal import igzip

DATA = Path(os.environ.get("PROFDECK_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
REAL_TRACE = DATA / "gpu" / "nccl.json.gz"
CLOCK_OFFSET_NS = 137_250
STRAGGLER = 3

SYNTHETIC_STEPS = 2000
COLLECTIVE_STEPS = 100
# With more ranks, torch writes the first ones, dots and the last (torch/csrc/profiler/util.cpp).
LISTED_RANKS = 30

TS = '"ts": '
# Times in microseconds, then the IDs that connect launches with kernels and the ends of flow arrows.
SHIFTED = re.compile(r'("ts": |"correlation": |"External id": |"id": )(\d+(?:\.\d+)?)')
COLLECTIVE = re.compile(
    r'("cat": "kernel", "name": "nccl[^"]*", "pid": \d+, "tid": \d+,\s+"ts": )(\d+\.\d{3})(, "dur": )(\d+\.\d{3})'
)


def base_text(path: Path = REAL_TRACE) -> str:
    """Return the text of the trace to repeat. If the file does not exist, return a synthetic trace."""
    if path.exists():
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    print(f"{path} does not exist; a synthetic trace is repeated", file=sys.stderr)
    return synthetic_trace()


def synthetic_trace() -> str:
    """Return a small trace of rank 0 of two in Kineto's layout, for machines without the real trace."""
    group = (
        '"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 2, '
        '"dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"'
    )
    events = []
    for step in range(SYNTHETIC_STEPS):
        ts = 1000 + step * 100
        rows = [
            ("cpu_op", "aten::mm", 1010, 1010, ts, 40, ""),
            ("cuda_runtime", "cudaLaunchKernel", 1010, 1010, ts + 20, 8, ""),
            ("kernel", "ampere_sgemm_128x64_tn", 0, 7, ts + 30, 60, ', "stream": 7'),
        ]
        if not step % COLLECTIVE_STEPS:
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            rows.append(("kernel", name, 0, 20, ts + 50, 90, f', "stream": 20, {group}'))
        for category, name, pid, tid, start, dur, args in rows:
            events.append(
                f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
                f'    "ts": {start}.{step % 1000:03d}, "dur": {dur}.500,\n'
                f'    "args": {{\n      "External id": {step}, "correlation": {step}{args}\n    }}\n  }}'
            )
        for ph, pid, tid, start, end in (("s", 1010, 1010, ts + 20, ""), ("f", 0, 7, ts + 30, ', "bp": "e"')):
            events.append(
                f'  {{\n    "ph": "{ph}", "id": {step}, "pid": {pid}, "tid": {tid}, "ts": {start}.{step % 1000:03d},\n'
                f'    "cat": "ac2g", "name": "ac2g"{end}\n  }}'
            )
    info = '"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2}'
    return f'{{\n  "schemaVersion": 1,\n  {info},\n  "traceEvents": [\n' + ",\n".join(events) + "\n  ]\n}\n"


def resize_job(text: str, ranks: int) -> str:
    """Return a trace of rank 0 of two, changed to rank 0 of `ranks`."""
    listed = [str(rank) for rank in range(ranks)]
    shown = listed if ranks <= LISTED_RANKS else [*listed[: LISTED_RANKS - 1], "...", listed[-1]]
    for key in ("world_size", "pg_size", "Group size"):
        text = text.replace(f'"{key}": 2', f'"{key}": {ranks}')
    text = text.replace('"ranks": [0, 1]', f'"ranks": [{", ".join(listed)}]')
    return text.replace('"Process Group Ranks": "[0, 1]"', f'"Process Group Ranks": "[{", ".join(shown)}]"')


def late_in_collectives(text: str) -> str:
    """Return a trace whose rank enters each collective late, by half of its duration."""

    def delay(match: re.Match[str]) -> str:
        start_ns, duration_ns = nanoseconds(match[2]), nanoseconds(match[4])
        late_ns = duration_ns // 2
        return f"{match[1]}{microseconds(start_ns + late_ns)}{match[3]}{microseconds(duration_ns - late_ns)}"

    text, count = COLLECTIVE.subn(delay, text)
    assert count, "the trace has no collectives"
    return text


def nanoseconds(time_us: str) -> int:
    """Convert a time of a trace to nanoseconds without rounding."""
    whole, _, fraction = time_us.partition(".")
    return int(whole + fraction.ljust(3, "0"))


def microseconds(time_ns: int) -> str:
    """Format nanoseconds as a time in a trace."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


@attrs.frozen
class Template:
    """Text of a trace, split at the numbers that differ between copies."""

    head: str
    """Text before the first event."""
    texts: list[str]
    """Text between the numbers."""
    labels: list[str]
    numbers: list[int]
    """Times in nanoseconds, and IDs."""
    tail: str
    """Text after the last event."""
    events_bytes: int
    period_ns: int
    """Time offset between two copies."""
    ids: int
    pid: int | None
    """Process ID of the host."""

    @classmethod
    def from_text(cls, text: str) -> Template:
        """Split the text of a trace."""
        first = text.index("[", text.index('"traceEvents"')) + 1
        end = re.search(r"\}\s*\]\s*(?:,\s*\"|\}\s*$)", text[first:])
        assert end is not None, "the events array must end the trace or be followed by a key"
        last = first + end.start() + 1
        pieces = SHIFTED.split(text[first:last])  # text, label, number, text, label, number, ..., text
        labels = pieces[1::3]
        numbers = [
            nanoseconds(number) if label == TS else int(number)
            for label, number in zip(labels, pieces[2::3], strict=True)
        ]
        times = [number for label, number in zip(labels, numbers, strict=True) if label == TS]
        pid = re.search(r'"pid": (\d{4,}),', text)
        return cls(
            head=text[:first],
            texts=pieces[0::3],
            labels=labels,
            numbers=numbers,
            tail=text[last:],
            events_bytes=last - first,
            period_ns=max(times) - min(times) + 1_000_000_000,
            ids=max((number for label, number in zip(labels, numbers, strict=True) if label != TS), default=0) + 1,
            pid=int(pid[1]) if pid else None,
        )

    def copies(self, megabytes: float) -> int:
        """Return the number of copies with about this uncompressed size."""
        return max(1, round(megabytes * 1e6 / self.events_bytes))

    def for_rank(self, rank: int) -> Template:
        """Return the template of another rank, with its own rank, process ID and clock."""
        texts = self.texts
        if self.pid is not None:  # also the ID of the main thread
            texts = [text.replace(f'id": {self.pid},', f'id": {self.pid + rank},') for text in texts]
        return attrs.evolve(
            self,
            head=self.head.replace('"rank": 0', f'"rank": {rank}', 1),
            texts=texts,
            numbers=[
                number + rank * CLOCK_OFFSET_NS if label == TS else number
                for label, number in zip(self.labels, self.numbers, strict=True)
            ],
        )

    def chunks(self, count: int) -> Iterator[str]:
        """Yield the text of a trace with `count` copies."""
        yield self.head
        joined = [""] * (3 * len(self.numbers) + 1)
        joined[0::3], joined[1::3] = self.texts, self.labels
        for copy in range(count):
            if copy:
                yield ","
            joined[2::3] = [
                microseconds(number + copy * self.period_ns) if label == TS else str(number + copy * self.ids)
                for label, number in zip(self.labels, self.numbers, strict=True)
            ]
            yield "".join(joined)
        yield self.tail

    def write(self, destination: Path, count: int) -> int:
        """Write a trace with `count` copies in bounded memory. Return the size of its JSON in bytes."""
        size = 0
        with igzip.open(destination, "wb", compresslevel=1) as out:  # type: ignore[no-untyped-call]
            for chunk in self.chunks(count):
                size += out.write(chunk.encode())
        return size


def rank_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's trace. SGLang's merger recognizes the name."""
    return directory / f"job-TP-{rank:03d}.trace.json.gz"


def write_ranks(directory: Path, text: str, ranks: int, megabytes: float) -> list[int]:
    """Write the traces of a job, each of about `megabytes`. Return the sizes of their JSON in bytes."""
    text = resize_job(text, ranks)
    template = Template.from_text(text)
    count = template.copies(megabytes)
    straggler = Template.from_text(late_in_collectives(text))
    sources = (straggler if rank == STRAGGLER else template for rank in range(ranks))
    return [source.for_rank(rank).write(rank_path(directory, rank), count) for rank, source in enumerate(sources)]


def main() -> None:
    """Generate traces from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--megabytes", type=float, default=500.0, help="approximate uncompressed size (default: 500)")
    parser.add_argument("--ranks", type=int, help="number of ranks: write one trace per rank to a directory")
    parser.add_argument("--base", type=Path, default=REAL_TRACE, help="gzipped trace to repeat")
    options = parser.parse_args()
    text = base_text(options.base)
    if options.ranks:
        options.destination.mkdir(parents=True, exist_ok=True)
        size = sum(write_ranks(options.destination, text, options.ranks, options.megabytes))
    else:
        template = Template.from_text(text)
        size = template.write(options.destination, template.copies(options.megabytes))
    print(f"{options.destination}: {size:,} bytes of JSON")


if __name__ == "__main__":
    main()
