"""Python and notebook API for loaded traces: summary, tables, events and report page."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from profdeck_traces.analysis.class_rules import load_rules
from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.pictures import buckets_of
from profdeck_traces.analysis.rank_labels import labels_of
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import replace_file, user_path
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.outputs import HTML, check_output
from profdeck_traces.inputs.sources import find_sources
from profdeck_traces.loading import summarise
from profdeck_traces.reading.arrow import record_batches
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.report.page import write_page
from profdeck_traces.tables.of_run import NAMES, table_of
from profdeck_traces.tables.table import Table, arrow
from profdeck_traces.trend.points import points_of
from profdeck_traces.trend.trend import trend_of

if TYPE_CHECKING:
    import pyarrow as pa

_FRAME_PIXELS = 900


@attrs.frozen
class Run:
    """Traces loaded from one or more paths. `profdeck_traces.load` returns this object."""

    summary: RunSummary = attrs.field(repr=False)
    """Content of ``profdeck summary --json``. The tables are created from it."""
    problems: tuple[str, ...]
    """Messages about traces that could not be read."""
    paths: tuple[Path, ...]
    _arguments: dict[str, Any] = attrs.field(factory=dict, repr=False)

    @property
    def account(self) -> Table:
        """Time on the critical path of each rank's steps, by owner."""
        return self.table("account")

    @property
    def kernels(self) -> Table:
        """Statistics of each kernel, copy and memset."""
        return self.table("kernels")

    @property
    def operators(self) -> Table:
        """Statistics of each host operator and annotation, distinguished by the column ``kind``."""
        return self.table("operators")

    @property
    def stages(self) -> Table:
        """Stages inside the steps of the job."""
        return self.table("stages")

    @property
    def steps(self) -> Table:
        """Global steps, one row each."""
        return self.table("steps")

    @property
    def iterations(self) -> Table:
        """Engine iterations, one row each."""
        return self.table("iterations")

    @property
    def devices(self) -> Table:
        """Total times of each device."""
        return self.table("devices")

    @property
    def gaps(self) -> Table:
        """Longest idle intervals of each device."""
        return self.table("gaps")

    @property
    def collectives(self) -> Table:
        """Collectives by group and size."""
        return self.table("collectives")

    @property
    def skew(self) -> Table:
        """Delay of each rank at collectives."""
        return self.table("skew")

    @property
    def captures(self) -> Table:
        """Status of each rank in each capture."""
        return self.table("captures")

    @property
    def findings(self) -> Table:
        """Findings, with the recommended action."""
        return self.table("findings")

    def table(self, name: str) -> Table:
        """Return a table by name.

        Args:
            name: One of `profdeck_traces.tables.of_run.NAMES`.

        Raises:
            TraceError: There is no such table.
        """
        if name not in NAMES:
            raise TraceError(f"There is no table {name!r}. The tables are {', '.join(NAMES)}.")
        return table_of(self.summary, name)

    def events(
        self,
        rank: int | None = None,
        *,
        role: str | None = None,
        replica: int | None = None,
        capture: str | None = None,
        run: str | None = None,
    ) -> pa.RecordBatchReader:
        """Read the duration events of one trace as Arrow record batches, in bounded memory.

        The columns are ``name``, ``category``, ``pid``, ``tid``, ``start_ns`` and ``end_ns``. Times are relative to the
        trace's origin.

        Args:
            rank: Rank of the trace. Required if there are several.
            role: Role of the trace. Required if there are several, as are the next arguments.
            replica: Replica of the trace.
            capture: Capture of the trace.
            run: Run directory of the trace.

        Raises:
            TraceError: The arguments match no trace, or more than one.
            ProfdeckError: pyarrow is not installed.
        """
        arrow()
        arguments = {"rank": rank, "role": role, "replica": replica, "capture": capture, "run": run}
        selection = {name: value for name, value in arguments.items() if value is not None}
        matches = [
            trace for trace in self.summary.ranks if all(getattr(trace, name) == selection[name] for name in selection)
        ]
        if len(matches) != 1:
            raise TraceError(
                f"{selection or 'No argument'} matches {len(matches)} traces. Select one by rank, role, replica, "
                f"capture and run: {'; '.join(self._labels())}."
            )
        return record_batches(read_trace(Path(matches[0].path)).events)

    def _labels(self) -> list[str]:
        labels = labels_of(self.summary.ranks)
        return [
            f"{labels[trace.path]}, {trace.capture}" if trace.capture else labels[trace.path]
            for trace in self.summary.ranks
        ]

    def report(self, file: Path | str | None = None) -> str:
        """Return the HTML page of ``profdeck report``.

        Without a cache, this reads the traces again.

        Args:
            file: Path to write the page to; ``None`` to only return it.

        Raises:
            ConfigError: The file exists and is not a page written by profdeck.
            OSError: The file cannot be written.
        """
        if file is not None:
            file = user_path(file)
            check_output(file, HTML)
        buckets = buckets_of(len(self.summary.ranks))
        summary, _ = summarise(self.paths, buckets=buckets, **self._arguments)
        trend = trend_of(points_of([summary], find_sources(self.paths)))
        page = write_page([summary], [" ".join(map(str, self.paths))], trend)
        if file is not None:
            replace_file(file, page.encode("utf-8", "replace"), durable=False)
        return page

    def _repr_html_(self) -> str:
        """Show the report page in a notebook, inside a sandboxed frame."""
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self.report())}" '
            f'style="width:100%;height:{_FRAME_PIXELS}px;border:0"></iframe>'
        )


def load(
    *paths: str | os.PathLike[str],
    rules: str | os.PathLike[str] | None = None,
    processes: int = 1,
    cache: bool = True,
) -> Run:
    """Read all traces in the given paths, for use in tables and notebooks.

    Args:
        paths: Runs, captures, directories of traces, or traces.
        rules: File with additional rules for kernel classes.
        processes: Number of traces to read in parallel.
        cache: Cache the results, so that later calls read only files that have changed.

    Raises:
        TraceError: A directory contains no traces, or no trace can be read.
        ConfigError: The rules are invalid.
    """
    arguments: dict[str, Any] = {
        "classifier": Classifier(load_rules(user_path(rules))) if rules else None,
        "processes": processes,
        "cache": ResultCache.of_user() if cache else None,
    }
    inputs = tuple(map(user_path, paths))
    summary, errors = summarise(inputs, **arguments)
    if not summary.ranks:
        raise TraceError(" ".join(map(str, errors)))
    return Run(summary, tuple(map(str, errors)), inputs, arguments)
