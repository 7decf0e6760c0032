"""Table of owners on the critical path of a recording."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.causes import MAX_STEPS, PathCauses
from profdeck_traces.account.gain import Gain, Replay, too_large
from profdeck_traces.account.model import (
    Account,
    JoinedGain,
    OwnerIdentity,
    OwnerKey,
    OwnerRowKey,
    OwnerTime,
    key_of_small_owners,
)
from profdeck_traces.account.owned_path import OwnedPath
from profdeck_traces.account.owner_kinds import KIND_TEXTS, OwnerKind
from profdeck_traces.account.row_kinds import SYNCS, RowKind
from profdeck_traces.account.walk import Path
from profdeck_traces.account.windows import PathWindow, PathWindows
from profdeck_traces.attribution.event_work import CountedCalls
from profdeck_traces.attribution.frames import module_class
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.reading.intervals import Int

MAX_OWNERS = 300
MAX_GAINS = 8
"""Number of owners for which gains are computed, starting with the largest."""
COLLECTIVES_INCLUDE_WAITS = "The time of collectives includes waiting for other ranks."
"""Note for accounts with collectives that were not matched with those of other ranks."""
NO_STACKS = f"No Python stacks: lines are unknown, and Python code is '{KIND_TEXTS['between']}'."
"""Note for accounts of traces without stacks."""
_MAX_UNLAUNCHED = 0.1
_NS_PER_US = 1000
_ADDRESS = re.compile(r"( object)? at 0x[0-9a-fA-F]+")
_BLOCK = 1 << 16  # segments to group at once; limits memory, because their columns take 100 bytes per segment
_MAX_LOOKUP = 1 << 22  # entries; sorting is faster than a larger lookup table


def account_of(
    windows: PathWindows,
    names: Attribution,
    basis: str,
    calls: CountedCalls | None = None,
    on_window: Callable[[PathWindow, Path], None] = lambda _window, _path: None,
) -> Account | None:
    """Return the account of a trace, or ``None`` if its steps take no time.

    Args:
        windows: Windows of the critical path.
        names: Operators, modules and lines of the events.
        basis: Kind of step.
        calls: Operator calls with known work.
        on_window: Callback that receives each window and its critical path within the account's steps.
    """
    texts = plain_names(names)
    times: dict[OwnerKey, tuple[int, int]] = {}
    causes = PathCauses(names, windows.kinds, texts, calls)
    rule, steps = "", 0
    for window in windows:
        rule, steps = window.recording.borders.rule, steps + int(window.is_used.sum())
        path = _used_path(window)
        if path is not None:
            _add_owners(times, path, names, texts, windows.kinds)
            on_window(window, path)
            causes.add(window)
    total_ns = sum(of_owner for of_owner, _ in times.values())
    if not total_ns:
        return None
    owners, joined = largest_owners(times, total_ns), tuple[JoinedGain, ...]()
    unknown = too_large(names.events)
    if unknown is None:
        owners, joined, unknown = _with_gains(owners, causes, windows, names, texts)
    return Account(
        basis=basis if windows.has_steps else "recording",
        border=rule,
        steps=steps if windows.has_steps else 1,
        time_us=total_ns / _NS_PER_US,
        owners=owners,
        notes=(*_notes(windows, names, owners), *((unknown,) if unknown else ())),
        causes=causes.times(has_gains=unknown is None),
        step_us=causes.steps_us,
        step_flops=causes.steps_flops,
        has_stacks=names.has_frames,
        joined_gains=joined,
    )


def plain_names(names: Attribution) -> list[str]:
    """Return the event names without memory addresses or instance numbers."""
    return [_plain(name) for name in names.events.names]


def _used_path(window: PathWindow) -> Path | None:
    """Return the critical path within the account's steps, or ``None`` if it is empty. Rows refer to the trace."""
    of_steps = zip(window.recording.parts(), window.is_used.tolist(), strict=True)
    parts = [path for (_, _, path), is_used in of_steps if is_used and len(path)]
    if not parts:
        return None
    return Path(
        np.concatenate([part.begin for part in parts]),
        np.concatenate([part.end for part in parts]),
        np.concatenate([part.kind for part in parts]),
        window.rows_of_trace(np.concatenate([part.row for part in parts])),
    )


def _add_owners(
    times: dict[OwnerKey, tuple[int, int]],
    path: Path,
    names: Attribution,
    texts: Sequence[str],
    kinds: NDArray[np.uint8],
) -> None:
    """Add the time and count of a path's segments to their owners. `texts` is the result of `plain_names`."""
    numbers: dict[OwnerKey, int] = {}
    owner = owners_of_segments(path, names, texts, kinds, numbers)
    time_ns = np.bincount(owner, weights=path.end - path.begin, minlength=len(numbers)).astype(np.int64)
    counts = np.bincount(owner, minlength=len(numbers))
    for key, of_owner, count in zip(numbers, time_ns.tolist(), counts.tolist(), strict=True):
        before = times.get(key, (0, 0))
        times[key] = before[0] + of_owner, before[1] + count


def owners_of_segments(
    path: Path,
    names: Attribution,
    texts: Sequence[str],
    kinds: NDArray[np.uint8],
    numbers: dict[OwnerKey, int],
) -> Int:
    """Return the number of each segment's owner.

    Args:
        path: Path with at least one segment.
        names: Operators, modules and lines of the events.
        texts: The result of `plain_names`.
        kinds: `RowKind` of each row.
        numbers: Number of each known owner. New owners are added.
    """
    owner = np.empty(len(path), np.int64)
    number_of: dict[tuple[int, ...], int] = {}
    for first in range(0, len(path), _BLOCK):
        block = slice(first, first + _BLOCK)
        columns = [path.kind[block].astype(np.int64), *_columns(names, kinds, path.row[block])]
        groups, of_group = _grouped(columns)
        number = []
        for code in map(tuple, np.stack([column[of_group] for column in columns], axis=1).tolist()):
            if code not in number_of:
                # Names that differ only in their addresses share a key.
                number_of[code] = numbers.setdefault(_key(code, texts, names.module_paths[1]), len(numbers))
            number.append(number_of[code])
        owner[block] = np.array(number)[groups]
    return owner


def owned_path(windows: PathWindows, names: Attribution) -> OwnedPath:
    """Return the critical path of the steps in the account, with the owner of each segment.

    Args:
        windows: Windows of the critical path.
        names: Operators, modules and lines of the events.
    """
    texts = plain_names(names)
    numbers: dict[OwnerKey, int] = {}
    none = np.zeros(0, np.int64)
    begins, ends, owners = [none], [none], [none.astype(np.int32)]
    process = None
    for window in windows:
        main = window.recording.threads.main
        process = names.events.tracks[main][0] if main >= 0 else None
        path = _used_path(window)
        if path is None:
            continue
        begins.append(path.begin)
        ends.append(path.end)
        owners.append(owners_of_segments(path, names, texts, windows.kinds, numbers).astype(np.int32))
    return OwnedPath(
        np.concatenate(begins),
        np.concatenate(ends),
        np.concatenate(owners),
        tuple(OwnerIdentity.from_key(key) for key in numbers),
        process,
    )


def _key(codes: Sequence[int], texts: Sequence[str], module_names: Sequence[str]) -> OwnerKey:
    """Return the key of an owner from the codes of its kind and of its `_columns`."""
    kind, *of_texts, module = codes
    name, operator, annotation, line = (texts[code] if code >= 0 else None for code in of_texts)
    module_path = module_names[module] if module >= 0 else None
    return OwnerKind(kind).label, name, operator, module_path, annotation, line, None, None, None


def largest_owners(times: dict[OwnerKey, tuple[int, int]], total_ns: int) -> tuple[OwnerTime, ...]:
    """Return owners sorted by time. Owners beyond the `MAX_OWNERS` largest are summed by kind, rank and peer.

    Args:
        times: Time in nanoseconds and number of intervals of each owner.
        total_ns: Total time of the account.
    """
    in_order = _sorted(times)
    times = dict(in_order[:MAX_OWNERS])
    for key, (of_group, count) in in_order[MAX_OWNERS:]:
        sum_key = key_of_small_owners(key)
        before = times.get(sum_key, (0, 0))
        times[sum_key] = before[0] + of_group, before[1] + count
    return tuple(
        OwnerTime(
            **attrs.asdict(OwnerIdentity.from_key(key)),
            count=count,
            time_us=of_group / _NS_PER_US,
            share=of_group / total_ns,
        )
        for key, (of_group, count) in _sorted(times)
    )


def _sorted(times: dict[OwnerKey, tuple[int, int]]) -> list[tuple[OwnerKey, tuple[int, int]]]:
    return sorted(times.items(), key=lambda item: (-item[1][0], [str(field or "") for field in item[0]]))


def _columns(names: Attribution, kinds: NDArray[np.uint8], row: NDArray[np.int32]) -> list[NDArray[np.integer]]:
    """Return the codes of each row's name, operator, annotation, frame and module; -1 if missing."""
    has_row = row >= 0
    rows = np.maximum(row, 0)
    columns = [_own_names(names, kinds, row)]
    columns += [
        _name_of(names, np.where(has_row, of_row[rows], -1))
        for of_row in (names.operator, names.annotation, names.frame)
    ]
    columns.append(np.where(has_row, names.module_paths[0][rows], -1))
    return columns


def _own_names(names: Attribution, kinds: NDArray[np.uint8], row: NDArray[np.int32]) -> NDArray[np.integer]:
    """Return the code of each row's name; -1 for steps and if the row is -1."""
    rows = np.maximum(row, 0)
    is_step = (kinds[rows] == RowKind.ANNOTATION) & (names.annotation[rows] != rows)
    return np.where((row >= 0) & ~is_step, names.events.name[rows], -1)


def _with_gains(
    owners: tuple[OwnerTime, ...], causes: PathCauses, windows: PathWindows, names: Attribution, texts: Sequence[str]
) -> tuple[tuple[OwnerTime, ...], tuple[JoinedGain, ...], str | None]:
    """Add gains to the largest owners and causes.

    Returns:
        The owners, the gains of the largest rows that join several owners and, if the gains are unknown, a note.
    """
    # A sum of small owners has no name, so it cannot be distinguished from time without an event.
    is_sum = {owner.key: owner.name is None and len(owners) >= MAX_OWNERS for owner in owners}
    groups: list[tuple[OwnerTime, ...]] = [(owner,) for owner in owners[:MAX_GAINS] if not is_sum[owner.key]]
    groups += [
        group for group in _rows(owners)[:MAX_GAINS] if len(group) > 1 and not any(is_sum[owner.key] for owner in group)
    ]
    gains = [Gain() for _ in groups]
    steps_us: list[list[float]] = [[] for _ in groups]
    finder = _OwnerFinder(names, windows.kinds, texts)
    for window in windows:
        replay = Replay(window.recording, window.events, window.is_used)
        if not replay.is_exact:
            note = "Gains are unknown: replaying the recorded dependencies does not reproduce the recorded times."
            return owners, (), note
        rows = np.append(np.arange(window.events.complete, dtype=np.int32), np.int32(-1))
        rows = window.rows_of_trace(rows)
        name = _own_names(names, windows.kinds, rows)
        for group, gain, of_steps in zip(groups, gains, steps_us, strict=True):
            kind, is_owner = OwnerKind.from_label(group[0].kind), finder.mask(group, rows, name)
            replay.add_gain(gain, kind, is_owner)
            of_steps.extend(_steps_us(window, kind, is_owner))
        causes.add_gains(replay, window)
    largest: dict[OwnerKey, OwnerTime] = {}
    joined: list[JoinedGain] = []
    for group, gain, of_steps in zip(groups, gains, steps_us, strict=True):
        if len(group) == 1 and len(of_steps) <= MAX_STEPS:
            largest[group[0].key] = attrs.evolve(group[0], steps_us=tuple(of_steps))
        if not gain.is_known:
            continue
        # If part of the path has no recorded cause, the time saved in a replay can exceed the owner's time.
        gain_us, limit = min(gain.saved_ns / _NS_PER_US, sum(owner.time_us for owner in group)), gain.limit.label
        if len(group) == 1:
            owner = largest.get(group[0].key, group[0])
            largest[owner.key] = attrs.evolve(owner, gain_us=gain_us, next_limit=limit)
        else:
            joined.append(JoinedGain(*group[0].row, gain_us=gain_us, next_limit=limit))
    return tuple(largest.get(owner.key, owner) for owner in owners), tuple(joined), None


def _steps_us(window: PathWindow, kind: OwnerKind, is_owner: NDArray[np.bool_]) -> list[float]:
    """Return the time an owner spends in each step of a window.

    `is_owner` masks the window's rows that belong to the owner.
    """
    return [
        float((path.end - path.begin)[(path.kind == kind) & is_owner[path.row]].sum()) / _NS_PER_US
        for (_, _, path), is_used in zip(window.recording.parts(), window.is_used.tolist(), strict=True)
        if is_used and len(path)
    ]


def _rows(owners: Iterable[OwnerTime]) -> list[tuple[OwnerTime, ...]]:
    """Group the owners that tables combine in one row. Groups are sorted by time, longest first."""
    rows: dict[OwnerRowKey, list[OwnerTime]] = {}
    for owner in owners:
        rows.setdefault(owner.row, []).append(owner)
    return sorted(map(tuple, rows.values()), key=lambda group: -sum(owner.time_us for owner in group))


class _OwnerFinder:
    """Finds the events of owners."""

    def __init__(self, names: Attribution, kinds: NDArray[np.uint8], texts: Sequence[str]) -> None:
        self._names, self._kinds = names, kinds
        self._name_codes, self._module_codes = _codes(texts), _codes(names.module_paths[1])

    def mask(
        self, owners: Sequence[OwnerTime], rows: NDArray[np.int32], name: NDArray[np.integer]
    ) -> NDArray[np.bool_]:
        """Return a mask of the rows that belong to any of the owners.

        Args:
            owners: The owners.
            rows: Rows of the trace.
            name: Name code of each row.
        """
        of_name: dict[str | None, list[OwnerTime]] = {}
        for owner in owners:
            of_name.setdefault(owner.name, []).append(owner)
        number_of_code = np.full(len(self._names.events.names) + 1, -1, np.int32)  # the last one is for code -1
        for position, text in enumerate(of_name):
            number_of_code[[-1] if text is None else self._name_codes[text]] = position
        number = number_of_code[name]
        found = np.flatnonzero(number >= 0)
        found = found[number[found].argsort(kind="stable")]
        bounds = number[found].searchsorted(np.arange(len(of_name) + 1))
        is_owner = np.zeros(len(rows), np.bool_)
        for same, first, end in zip(of_name.values(), bounds, bounds[1:], strict=False):
            row = found[first:end]
            columns = _columns(self._names, self._kinds, rows[row])[1:]
            for owner in same:
                fields = (owner.operator, owner.annotation, owner.line, owner.module)
                of_owner = np.ones(len(row), np.bool_)
                codes = (*[self._name_codes] * 3, self._module_codes)
                for field, column, of_field in zip(fields, columns, codes, strict=True):
                    of_owner &= _has_code(column, field, of_field)
                is_owner[row[of_owner]] = True
        return is_owner


def _has_code(column: NDArray[np.integer], text: str | None, codes: dict[str, list[int]]) -> NDArray[np.bool_]:
    """Return a mask of the codes of a text. The codes of ``None`` are negative."""
    return column < 0 if text is None else np.isin(column, codes[text])


def _codes(texts: Iterable[str]) -> dict[str, list[int]]:
    """Map each text to its codes."""
    codes: dict[str, list[int]] = {}
    for code, text in enumerate(texts):
        codes.setdefault(text, []).append(code)
    return codes


def _name_of(names: Attribution, rows: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the name code of each row, or -1 where the row is -1."""
    return np.where(rows >= 0, names.events.name[rows], -1)


def _grouped(columns: list[NDArray[np.integer]]) -> tuple[Int, Int]:
    """Group elements with equal values in all columns. Return each element's group and each group's first element."""
    code, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        number, count = _renumbered(column + 1, int(column.max()) + 2)
        code, size = _renumbered(code * count + number, size * count)
    first = np.empty(size, np.int64)
    first[code[::-1]] = np.arange(len(code))[::-1]
    return code, first


def _renumbered(values: NDArray[np.integer], limit: int) -> tuple[Int, int]:
    """Map values below `limit` to consecutive numbers in ascending order. Also return the number of distinct values."""
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


def _notes(windows: PathWindows, names: Attribution, owners: Sequence[OwnerTime]) -> tuple[str, ...]:
    """Return notes on the account's limitations, such as causes that are missing from the trace."""
    work = windows.work
    is_sync = np.isin(windows.kinds, SYNCS)
    notes = []
    if len(work) and is_sync.any() and not names.events.has_category({"cuda_sync"}).any():
        notes.append(
            "The trace has no cuda_sync records. Synchronisations are matched with device work that ended during the "
            "call, and waits between streams are inferred from timing."
        )
    share = float((names.launch[work] < 0).mean()) if len(work) else 0.0
    if share > _MAX_UNLAUNCHED:
        notes.append(
            f"{share:.0%} of device events have no recorded launch. The time before such an event is shown as "
            f"'device gap', '{KIND_TEXTS['device held']}' or 'not recorded'."
        )
    if not names.has_frames:
        notes.append(NO_STACKS)
    if any(owner.kind == OwnerKind.COLLECTIVE.label for owner in owners):
        notes.append(COLLECTIVES_INCLUDE_WAITS)
    if len(windows) > 1:
        notes.append(
            f"The trace is large, so the account is computed in {len(windows):,} windows. At the start of each window, "
            "the gains assume that the device is as far behind the host as recorded."
        )
    return tuple(notes)
