"""Inputs: generated traces of one rank or of a job, and their expected results.

These functions need much memory, so they run in a separate process; see `benchmarks.traces.costs.run`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
from benchmarks.traces.decode import decode_trace
from benchmarks.traces.expected import contents, late_ns
from benchmarks.traces.generate import (
    CLOCK_OFFSET_NS,
    DATA,
    REAL_TRACE,
    STRAGGLER,
    Template,
    base_text,
    late_in_collectives,
    rank_path,
    resize_job,
    write_ranks,
)

DECODE = "decode by graph launches"
BASES = {
    "nccl": REAL_TRACE,
    "ns_resolution": REAL_TRACE.with_name("ns_resolution_rank0.pt.trace.json.gz"),
    "pair_rank0": REAL_TRACE.with_name("pair_rank0.json.gz"),
    DECODE: None,
}
"""Base traces that are repeated to generate inputs. `random_base` adds a random trace, so that results do not depend
only on these traces."""


def random_base(seed: int) -> tuple[str, Path] | None:
    """Choose a random public trace and return its name and path, or None if there are no public traces."""
    directory = DATA / "public"
    paths = sorted(path for pattern in ("hta__*.json.gz", "tl__*.json.gz") for path in directory.glob(pattern))
    if not paths:
        return None
    path = random.Random(seed).choice(paths)
    return path.name.removesuffix(".json.gz").rpartition("__")[2], path


@attrs.frozen
class Input:
    """Traces, one per rank, with their sizes and expected results."""

    paths: list[Path]
    json_bytes: list[int]
    truth: dict[str, Any]

    def first(self, ranks: int) -> Input:
        """Return the first ranks. Expected results exist only for all ranks together."""
        return Input(self.paths[:ranks], self.json_bytes[:ranks], self.truth if ranks == len(self.paths) else {})


def one_rank(directory: Path, megabytes: float, base: Path | None = REAL_TRACE) -> Input:
    """Generate a trace of one rank. If `base` is None, repeat the synthetic trace `DECODE`."""
    text = decode_trace() if base is None else base_text(base)
    template = Template.from_text(text)
    count = template.copies(megabytes)
    path = directory / "one.trace.json.gz"
    size = template.write(path, count)
    truth = {name: count * figure for name, figure in contents(text).items()}
    return Input([path], [size], {**truth, "whole": True, "json_bytes": size})


def job(directory: Path, ranks: int, megabytes: float) -> Input:
    """Generate the traces of a job, each of about `megabytes`."""
    text = base_text()
    sizes = write_ranks(directory, text, ranks, megabytes)
    text = resize_job(text, ranks)
    count = Template.from_text(text).copies(megabytes)
    figures, straggler_figures = contents(text), contents(late_in_collectives(text))
    truth: dict[str, Any] = {
        name: count * ((ranks - 1) * figure + straggler_figures[name]) for name, figure in figures.items()
    }
    truth["clock_offsets_us"] = [-rank * CLOCK_OFFSET_NS / 1000 for rank in range(ranks)]
    truth["straggler"] = STRAGGLER
    truth["late_us"] = count * late_ns(text) / 1000
    truth["duplicate_flows"] = 0
    truth["whole"] = True
    return Input([rank_path(directory, rank) for rank in range(ranks)], sizes, truth)
