"""The rows of `profdeck summary --csv`."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profdeck.traces.analysis.model import RankSummary

_OF_A_RANK = ("path", "role", "replica", "rank")
_OF_A_KERNEL = ("name", "category", "kind", "count", "total_us", "mean_us", "max_us", "share", "type")
_OF_A_CORE = ("core", "count", "total_us", "share")
_OF_A_STEP = (
    "device",
    "step",
    "compute_us",
    "communication_us",
    "overlap_us",
    "exposed_communication_us",
    "exposed_without_receives_us",
    "idle_us",
    "pipeline_bubble_us",
    "pipeline_stage_us",
    "preparation_us",
)
_OF_AN_OPERATION = ("kind", "group", "name")
_OF_CALLS = ("count", "total_us", "max_us", "transit_us", "wait_us", "synchronisation_us", "idle_us")
_OF_A_LINK = ("link", "size_bytes", "transit_us", "bytes_per_s", "packets", "large_packet_share")


class CsvRows(StrEnum):
    """What rows ``--csv`` can print."""

    KERNELS = "kernels"
    CORES = "cores"
    DEVICE_STEPS = "device-steps"
    COMMUNICATION = "communication"
    LINKS = "links"


def print_csv(ranks: Iterable[RankSummary], rows: CsvRows) -> None:
    """Print a row for each of them of each trace, below a heading."""
    writer = csv.writer(sys.stdout)
    writer.writerow([*_OF_A_RANK, *_columns(rows)])
    for rank in ranks:
        about = _values(rank, _OF_A_RANK)
        writer.writerows([*about, *row] for row in _rows(rank, rows))


def _columns(rows: CsvRows) -> Sequence[str]:
    return {
        CsvRows.KERNELS: _OF_A_KERNEL,
        CsvRows.CORES: _OF_A_CORE,
        CsvRows.DEVICE_STEPS: _OF_A_STEP,
        CsvRows.COMMUNICATION: (*_OF_AN_OPERATION, *_OF_CALLS),
        CsvRows.LINKS: (*_OF_AN_OPERATION, *_OF_A_LINK),
    }[rows]


def _rows(rank: RankSummary, rows: CsvRows) -> Iterator[list[object]]:
    if rows is CsvRows.LINKS:
        for operation in rank.communication:
            about = _values(operation, _OF_AN_OPERATION)
            yield from ([*about, *_values(link, _OF_A_LINK)] for link in operation.links)
        return
    items: Sequence[object] = {
        CsvRows.KERNELS: rank.kernels,
        CsvRows.CORES: rank.cores,
        CsvRows.DEVICE_STEPS: rank.device_steps,
        CsvRows.COMMUNICATION: rank.communication,
    }[rows]
    yield from (_values(item, _columns(rows)) for item in items)


def _values(item: object, fields: Iterable[str]) -> list[object]:
    return [getattr(item, field) for field in fields]
