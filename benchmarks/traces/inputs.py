"""What is read: generated traces of one rank or of a job, and what they say.

Functions here need much memory, so they run in a process of their own; see `benchmarks.traces.costs.run`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from benchmarks.traces.decode import decode_trace
from benchmarks.traces.expected import contents, late_ns
from benchmarks.traces.generate import (
    CLOCK_OFFSET_NS,
    REAL_TRACE,
    STRAGGLER,
    Template,
    base_text,
    late_in_collectives,
    of_job,
    rank_path,
    write_ranks,
)

DECODE = "decode by graph launches"
BASES = {
    "ns_resolution": REAL_TRACE.with_name("ns_resolution_rank0.pt.trace.json.gz"),
    "pair_rank0": REAL_TRACE.with_name("pair_rank0.json.gz"),
    DECODE: None,
}
"""Traces besides `REAL_TRACE` that are repeated, so that none is tuned for."""


@attrs.frozen
class Input:
    """Traces, one for each rank."""

    paths: list[Path]
    json_bytes: list[int]
    truth: dict[str, Any]

    def first(self, ranks: int) -> Input:
        """Return some of the ranks; what they say is known of all only."""
        return Input(self.paths[:ranks], self.json_bytes[:ranks], self.truth if ranks == len(self.paths) else {})


def one_rank(directory: Path, megabytes: float, base: Path | None = REAL_TRACE) -> Input:
    """Make a trace of one rank; of the synthetic `DECODE` if there is no base."""
    text = decode_trace() if base is None else base_text(base)
    template = Template.of(text)
    count = template.copies(megabytes)
    path = directory / "one.trace.json.gz"
    size = template.write(path, count)
    truth = {name: count * figure for name, figure in contents(text).items()}
    return Input([path], [size], {**truth, "whole": True, "json_bytes": size})


def job(directory: Path, ranks: int, megabytes: float) -> Input:
    """Make the traces of a job, each of about so many megabytes."""
    text = base_text()
    sizes = write_ranks(directory, text, ranks, megabytes)
    text = of_job(text, ranks)
    count = Template.of(text).copies(megabytes)
    figures, of_straggler = contents(text), contents(late_in_collectives(text))
    truth: dict[str, Any] = {
        name: count * ((ranks - 1) * figure + of_straggler[name]) for name, figure in figures.items()
    }
    truth["clock_offsets_us"] = [-rank * CLOCK_OFFSET_NS / 1000 for rank in range(ranks)]
    truth["straggler"] = STRAGGLER
    truth["late_us"] = count * late_ns(text) / 1000
    truth["duplicate_flows"] = 0
    truth["whole"] = True
    return Input([rank_path(directory, rank) for rank in range(ranks)], sizes, truth)
