"""Table of the owners on the critical path of a recording."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.model import Account, OwnerTime
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.recording import RecordingPath
from profdeck_traces.account.row_kinds import SYNCS, RowKind
from profdeck_traces.account.walk import Path
from profdeck_traces.attribution.frames import module_class
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.reading.intervals import Int

MAX_OWNERS = 300
_MAX_UNLAUNCHED = 0.1
_NS_PER_US = 1000
_ADDRESS = re.compile(r"( object)? at 0x[0-9a-fA-F]+")
_MAX_LOOKUP = 1 << 22  # entries; a larger table of values is slower than sorting
_Key = tuple[str, str | None, str | None, str | None, str | None, str | None]
"""Kind, name, operator, module, annotation and line."""


def account_of(recording: RecordingPath, names: Attribution, basis: str, excluded: NDArray[np.bool_]) -> Account | None:
    """Return the account of a recording, or ``None`` if it has no time.

    Args:
        recording: The critical path.
        names: Operators, modules and lines of the events.
        basis: Kind of the steps.
        excluded: Cold steps, by index of the annotation.
    """
    has_annotations = len(recording.steps) > 0
    is_used = ~excluded[recording.steps] if has_annotations else np.ones(max(0, len(recording.borders.times) - 1), bool)
    parts = [path for (_, _, path), used in zip(recording.parts(), is_used.tolist(), strict=True) if used]
    parts = [path for path in parts if len(path)]
    if not parts:
        return None
    path = Path(
        np.concatenate([part.begin for part in parts]),
        np.concatenate([part.end for part in parts]),
        np.concatenate([part.kind for part in parts]),
        np.concatenate([part.row for part in parts]),
    )
    total_ns = int((path.end - path.begin).sum())
    return Account(
        basis=basis if has_annotations else "recording",
        border=recording.borders.rule,
        steps=int(is_used.sum()),
        time_us=total_ns / _NS_PER_US,
        owners=_owners(path, names, recording.kinds, total_ns),
        notes=_notes(recording, names, path),
    )


def _owners(path: Path, names: Attribution, kinds: NDArray[np.uint8], total_ns: int) -> tuple[OwnerTime, ...]:
    """Group the segments of a path by owner."""
    has_row = path.row >= 0
    rows = np.maximum(path.row, 0)
    is_step = has_row & (kinds[rows] == RowKind.ANNOTATION) & (names.annotation[rows] != rows)
    module, module_names = names.module_paths
    texts = [_plain(name) for name in names.events.names]
    columns = [np.where(has_row & ~is_step, names.events.name[rows], -1)]
    columns += [
        _name_of(names, np.where(has_row, of_row[rows], -1))
        for of_row in (names.operator, names.annotation, names.frame)
    ]
    columns.append(np.where(has_row, module[rows], -1))
    groups, first = _grouped([path.kind.astype(np.int64), *columns])
    time_ns = np.bincount(groups, weights=path.end - path.begin, minlength=len(first)).astype(np.int64)
    counts = np.bincount(groups, minlength=len(first))
    times: dict[_Key, tuple[int, int]] = {}
    keys = np.stack([column[first] for column in (path.kind, *columns)], axis=1).tolist()
    for (kind, *codes, module_code), of_group, count in zip(keys, time_ns.tolist(), counts.tolist(), strict=True):
        name, operator, annotation, frame = (texts[code] if code >= 0 else None for code in codes)
        module_path = module_names[module_code] if module_code >= 0 else None
        key = OwnerKind(kind).label, name, operator, module_path, annotation, frame
        before = times.get(key, (0, 0))
        times[key] = before[0] + of_group, before[1] + count
    largest = sorted(times.items(), key=lambda item: (-item[1][0], [text or "" for text in item[0]]))
    for key, (of_group, count) in largest[MAX_OWNERS:]:
        sum_key = key[0], None, None, None, None, None
        del times[key]
        before = times.get(sum_key, (0, 0))
        times[sum_key] = before[0] + of_group, before[1] + count
    owners = sorted(times.items(), key=lambda item: (-item[1][0], [text or "" for text in item[0]]))
    return tuple(
        OwnerTime(
            kind=kind,
            name=name,
            operator=operator,
            module=module_path,
            annotation=annotation,
            line=line,
            count=count,
            time_us=of_group / _NS_PER_US,
            share=of_group / total_ns,
        )
        for (kind, name, operator, module_path, annotation, line), (of_group, count) in owners
    )


def _name_of(names: Attribution, rows: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the name codes of rows; -1 stays -1."""
    return np.where(rows >= 0, names.events.name[rows], -1)


def _grouped(columns: list[NDArray[np.integer]]) -> tuple[Int, Int]:
    """Return the group of each element, by equal values in all columns, and the first element of each group."""
    code, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        number, count = _renumbered(column + 1, int(column.max()) + 2)
        code, size = _renumbered(code * count + number, size * count)
    first = np.empty(size, np.int64)
    first[code[::-1]] = np.arange(len(code))[::-1]
    return code, first


def _renumbered(values: NDArray[np.integer], limit: int) -> tuple[Int, int]:
    """Map values below `limit` to consecutive numbers in the same order, and return the count of distinct values."""
    if limit > _MAX_LOOKUP:
        _, number = np.unique(values, return_inverse=True)
        return number, int(number.max()) + 1
    used = np.zeros(limit, np.int64)
    used[values] = 1
    numbers = np.cumsum(used) - 1
    return numbers[values], int(numbers[-1]) + 1


def _plain(name: str) -> str:
    """Remove addresses and instance numbers from a name."""
    name = _ADDRESS.sub("", name)
    module = module_class(name)
    return name if module is None else module


def _notes(recording: RecordingPath, names: Attribution, path: Path) -> tuple[str, ...]:
    """Return the limits of the account: causes that the trace does not record."""
    is_sync = np.isin(recording.kinds, SYNCS)
    notes = []
    if len(recording.work.rows) and is_sync.any() and not len(recording.work.sync_records.rows):
        notes.append(
            "The trace has no cuda_sync records. A synchronisation is matched with the device work that ended in it, "
            "and waits between streams are matched by time."
        )
    share = float((recording.work.launch < 0).mean()) if len(recording.work.rows) else 0.0
    if share > _MAX_UNLAUNCHED:
        notes.append(
            f"{share:.0%} of the device events have no recorded launch. The time before them is 'device gap', "
            "'device held' or 'not recorded'."
        )
    if not names.has_frames:
        notes.append(
            "The trace has no Python stacks. Lines are unknown, and Python code is part of 'between'. "
            "Record stacks to get both."
        )
    if (path.kind == OwnerKind.COLLECTIVE).any():
        notes.append("The time of collectives includes the wait for other ranks.")
    return tuple(notes)
