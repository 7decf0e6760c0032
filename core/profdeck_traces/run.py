"""A run in Python and in notebooks: its summary, its tables, its events and its page."""

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
from profdeck_traces.base.files import replace_file
from profdeck_traces.base.result_cache import ResultCache
from profdeck_traces.inputs.sources import find_sources
from profdeck_traces.loading import summarise
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
    _how: dict[str, Any] = attrs.field(factory=dict, repr=False)

    @property
    def kernels(self) -> Table:
        """All runs of each kernel, copy and fill."""
        return self.table("kernels")

    @property
    def operators(self) -> Table:
        """All calls of each operator and annotation of the host, which the column ``kind`` tells apart."""
        return self.table("operators")

    @property
    def stages(self) -> Table:
        """What the job marks inside its steps."""
        return self.table("stages")

    @property
    def steps(self) -> Table:
        """The global steps, one by one."""
        return self.table("steps")

    @property
    def iterations(self) -> Table:
        """The iterations of engines, one by one."""
        return self.table("iterations")

    @property
    def devices(self) -> Table:
        """What each device did in all."""
        return self.table("devices")

    @property
    def gaps(self) -> Table:
        """The longest times in which a device did nothing."""
        return self.table("gaps")

    @property
    def collectives(self) -> Table:
        """Collectives by group and size."""
        return self.table("collectives")

    @property
    def skew(self) -> Table:
        """How late each rank was at collectives."""
        return self.table("skew")

    @property
    def captures(self) -> Table:
        """Whether each rank of each capture is there."""
        return self.table("captures")

    @property
    def findings(self) -> Table:
        """What stands out, and what to do about it."""
        return self.table("findings")

    def table(self, name: str) -> Table:
        """Return any of the tables.

        Args:
            name: One of `profdeck_traces.tables.of_run.NAMES`: those above, and what else there is.

        Raises:
            TraceError: There is no such table.
        """
        if name not in NAMES:
            raise TraceError(f"There is no table {name!r}. There are {', '.join(NAMES)}.")
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
        """Read the complete events of one trace once more, as Arrow in batches, in bounded memory.

        Columns: ``name``, ``category``, ``pid``, ``tid``; ``start_ns`` and ``end_ns``, which count from the trace's
        own origin.

        Args:
            rank: Of which rank; needed where there are several.
            role: Of which role, as the next three.
            replica: Of which replica.
            capture: Of which capture.
            run: Of which run, by its directory.

        Raises:
            TraceError: No trace, or more than one, is meant.
            ProfdeckError: pyarrow is not installed.
        """
        arrow()
        wanted = {"rank": rank, "role": role, "replica": replica, "capture": capture, "run": run}
        given = {name: value for name, value in wanted.items() if value is not None}
        found = [one for one in self.summary.ranks if all(getattr(one, name) == given[name] for name in given)]
        if len(found) != 1:
            raise TraceError(
                f"{len(found)} traces are meant by {given or 'no choice'}. Choose one by rank, role, replica, "
                f"capture and run; there are: {'; '.join(self._named())}."
            )
        return read_trace(Path(found[0].path), devices_only=self._how["devices_only"]).to_batches()

    def _named(self) -> list[str]:
        labels = labels_of(self.summary.ranks)
        return [f"{labels[one.path]}, {one.capture}" if one.capture else labels[one.path] for one in self.summary.ranks]

    def report(self, file: Path | str | None = None) -> str:
        """Return the page of ``profdeck report``; without a cache that reads the traces once more for its pictures.

        Args:
            file: Where to write it, too.

        Raises:
            OSError: The file cannot be written.
        """
        buckets = buckets_of(len(self.summary.ranks))
        summary, _ = summarise(self.paths, buckets=buckets, **self._how)
        trend = trend_of(points_of([summary], find_sources(self.paths)))
        page = write_page([summary], [" ".join(map(str, self.paths))], trend)
        if file is not None:
            replace_file(Path(file), page.encode("utf-8", "replace"), durable=False)
        return page

    def _repr_html_(self) -> str:
        """Show the page in a notebook, closed off from it."""
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self.report())}" '
            f'style="width:100%;height:{_FRAME_PIXELS}px;border:0"></iframe>'
        )


def load(
    *paths: str | os.PathLike[str],
    devices_only: bool = False,
    rules: str | os.PathLike[str] | None = None,
    processes: int = 1,
    cache: bool = True,
) -> Run:
    """Read all traces in the given paths, for use in tables and notebooks.

    Args:
        paths: runs, captures, directories of traces, or traces.
        devices_only: read only devices and annotations, not operators, which is about three times as fast.
        rules: a file with additional rules for kernel classes.
        processes: the number of traces to read in parallel.
        cache: cache the results, so that later calls read only files that have changed.

    Raises:
        TraceError: a directory has no traces, or no trace can be read.
        ConfigError: the rules are invalid.
    """
    how: dict[str, Any] = {
        "devices_only": devices_only,
        "classifier": Classifier(load_rules(Path(rules))) if rules else None,
        "processes": processes,
        "cache": ResultCache.of_user() if cache else None,
    }
    read = tuple(map(Path, paths))
    summary, errors = summarise(read, **how)
    if not summary.ranks:
        raise TraceError(" ".join(map(str, errors)))
    return Run(summary, tuple(map(str, errors)), read, how)
