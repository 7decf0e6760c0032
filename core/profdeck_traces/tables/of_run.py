"""Tables of a run. Each table starts with role, replica, rank, host, capture and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from profdeck_traces.account import model as account_model
from profdeck_traces.analysis import detail_model, model, recorder_model, run_model
from profdeck_traces.analysis.model import RankSummary, RunSummary
from profdeck_traces.analysis.step_names import GLOBAL_STEP, ITERATION
from profdeck_traces.attribution.model import AttributedTime
from profdeck_traces.inputs import facts
from profdeck_traces.tables.fields import ColumnType, columns_of, values_of
from profdeck_traces.tables.table import Table

_FRONT = {
    "role": ColumnType.TEXT,
    "replica": ColumnType.INTEGER,
    "rank": ColumnType.INTEGER,
    "host": ColumnType.TEXT,
    "capture": ColumnType.TEXT,
    "run": ColumnType.TEXT,
}
_PATH = {"path": ColumnType.TEXT}
_TEXT = ColumnType.TEXT

_Row = tuple[tuple[Any, ...], Any]
"""Values of the columns before an item, and the item."""


@attrs.frozen
class _Kind:
    """Definition of a table."""

    item: type
    """Class that defines the columns."""
    rows: Callable[[RunSummary], Iterable[_Row]]
    between: dict[str, ColumnType] = attrs.field(factory=lambda: dict(_PATH))
    """Columns between those of the rank and those of the item."""
    renamed: dict[str, str] = attrs.field(factory=dict)
    """New names for columns of the item that conflict with preceding columns."""


def _of_ranks(item: type, rows: Callable[[RankSummary], Iterable[_Row]], **between: ColumnType) -> _Kind:
    """Define a table with rows of each rank. The path of the trace follows the rank's columns."""

    def of_run(run: RunSummary) -> Iterator[_Row]:
        for rank in run.ranks:
            values = (*(getattr(rank, name) for name in _FRONT), rank.path)
            yield from (((*values, *front), item) for front, item in rows(rank))

    return _Kind(item, of_run, _PATH | between)


def _plain(item: type, name: str) -> _Kind:
    return _of_ranks(item, lambda rank: (((), one) for one in getattr(rank, name)))


def _steps(kind: str) -> _Kind:
    return _of_ranks(model.StepSummary, lambda rank: (((), one) for one in rank.steps if one.kind == kind))


def _of_devices(item: type, name: str, renamed: dict[str, str] | None = None) -> _Kind:
    table = _of_ranks(
        item,
        lambda rank: (((str(device.device),), part) for device in rank.devices for part in getattr(device, name)),
        device=ColumnType.TEXT,
    )
    return attrs.evolve(table, renamed=renamed or {})


def _operators(rank: RankSummary) -> Iterator[_Row]:
    for kind, items in (("operator", rank.operators), ("annotation", rank.annotations)):
        yield from (((kind,), one) for one in items)


def _attributed(table: str) -> _Kind:
    def rows(rank: RankSummary) -> Iterator[_Row]:
        if rank.attributed:
            yield from (((rank.attributed.basis,), one) for one in getattr(rank.attributed, table))

    return _of_ranks(AttributedTime, rows, basis=_TEXT)


def _memory_points(rank: RankSummary) -> Iterator[_Row]:
    for device in rank.memory:
        yield from (((device.device,), point) for point in device.points)


def _owners(rank: RankSummary) -> Iterator[_Row]:
    if rank.account:
        front = rank.account.basis, rank.account.border, rank.account.steps
        yield from ((front, owner) for owner in rank.account.owners)


def _stages(rank: RankSummary) -> Iterator[_Row]:
    if rank.host_times:
        yield from (((rank.host_times.basis,), one) for one in rank.host_times.stages)


def _states(rank: RankSummary) -> Iterator[_Row]:
    if rank.host_times:
        yield from (((rank.host_times.basis, None), one) for one in rank.host_times.states)
        for stage in rank.host_times.stages:
            yield from (((rank.host_times.basis, stage.name), one) for one in stage.host)


def _step_devices(rank: RankSummary) -> Iterator[_Row]:
    for step in rank.steps:
        yield from (((step.kind, step.step, step.name), one) for one in step.devices)


def _links(rank: RankSummary) -> Iterator[_Row]:
    for one in rank.communication:
        yield from (((one.kind, one.group, one.name), link) for link in one.links)


def _skew(run: RunSummary) -> Iterator[_Row]:
    for group in run.skew:
        yield from (((group.role, group.replica, one.rank, None, group.capture, group.run), one) for one in group.ranks)


def _captures(run: RunSummary) -> Iterator[_Row]:
    for one in run.captures:
        yield tuple(getattr(one, name) for name in _FRONT), one


def _recordings(run: RunSummary) -> Iterator[_Row]:
    for one in run.recordings:
        yield (one.role, None, None, None, None, None), one


def _findings(run: RunSummary) -> Iterator[_Row]:
    ranks = {rank.path: rank for rank in run.ranks}
    for one in run.findings:
        rank = ranks.get(one.evidence.path) if one.evidence else None
        yield (*(getattr(rank, name, None) for name in _FRONT), ", ".join(one.ranks)), one


_KINDS = {
    "ranks": _of_ranks(RankSummary, lambda rank: [((), rank)]),
    "kernels": _plain(model.KernelSummary, "kernels"),
    "classes": _plain(model.CategorySummary, "categories"),
    "copies": _plain(model.CopySummary, "copies"),
    "implausible": _plain(model.ImplausibleEvents, "implausible"),
    "operators": _of_ranks(model.OperatorSummary, _operators, kind=_TEXT),
    "account": _of_ranks(account_model.OwnerTime, _owners, basis=_TEXT, border=_TEXT, steps=ColumnType.INTEGER),
    "stages": _of_ranks(detail_model.StageSummary, _stages, basis=_TEXT),
    "states": _of_ranks(detail_model.HostState, _states, basis=_TEXT, stage=_TEXT),
    "steps": _steps(GLOBAL_STEP),
    "iterations": _steps(ITERATION),
    "step_statistics": _plain(model.IterationStatistics, "iterations"),
    "step_devices": _of_ranks(
        detail_model.StepOfDevice, _step_devices, step_kind=_TEXT, step=ColumnType.INTEGER, step_name=_TEXT
    ),
    "devices": _plain(model.DeviceSummary, "devices"),
    "streams": _of_devices(model.StreamSummary, "streams"),
    "idle": _of_devices(detail_model.IdleCause, "idle"),
    "gaps": _of_devices(model.Gap, "gaps", {"host": "host_event"}),
    "runtime": _plain(detail_model.RuntimeCalls, "runtime"),
    "kernel_durations": _plain(detail_model.DurationBin, "kernel_durations"),
    "functions": _plain(detail_model.FunctionTime, "functions"),
    "stacks": _plain(detail_model.StackFrame, "stacks"),
    "shapes": _plain(detail_model.ShapeCalls, "shapes"),
    "time_by_operator": _attributed("operators"),
    "time_by_shape": _attributed("shapes"),
    "time_by_module": _attributed("modules"),
    "time_by_stage": _attributed("stages"),
    "time_by_line": _attributed("lines"),
    "memory": _plain(detail_model.MemorySummary, "memory"),
    "memory_points": _of_ranks(detail_model.MemoryPoint, _memory_points, device=_TEXT),
    "collectives": _plain(detail_model.CollectiveCalls, "collectives"),
    "skew": _Kind(model.RankSkew, _skew, {}),
    "cores": _plain(recorder_model.CoreSummary, "cores"),
    "device_steps": _plain(recorder_model.DeviceStepSummary, "device_steps"),
    "communication": _plain(recorder_model.CommunicationSummary, "communication"),
    "links": _of_ranks(recorder_model.LinkSummary, _links, kind=_TEXT, group=_TEXT, name=_TEXT),
    "captures": _Kind(facts.CaptureStatus, _captures, {}),
    "recordings": _Kind(facts.RecordingAbout, _recordings, {}),
    "findings": _Kind(run_model.Finding, _findings, {"ranks": _TEXT}),
}
NAMES = tuple(_KINDS)
"""Names of all tables."""


def table_of(run: RunSummary, name: str) -> Table:
    """Return a table of a run.

    Args:
        run: The run.
        name: One of `NAMES`.
    """
    kind = _KINDS[name]
    front = _FRONT | kind.between
    item_columns = {kind.renamed.get(column, column): type_ for column, type_ in columns_of(kind.item).items()}
    kept = [index for index, column in enumerate(item_columns) if column not in front]

    def rows() -> Iterator[tuple[Any, ...]]:
        for before, item in kind.rows(run):
            values = tuple(values_of(item, kind.item))
            yield *before, *(values[index] for index in kept)

    return Table(name, front | {column: type_ for column, type_ in item_columns.items() if column not in front}, rows)
