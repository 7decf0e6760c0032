"""What people call the traces of a summary, and which of them are ranks of one program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from profdeck_traces.analysis.collectives import Collectives
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.inputs.facts import CaptureStatus

_RANK, _ENGINE = (
    re.compile(rf"(?<![a-z0-9]){word}[-_ ]?\[?(\d{{1,9}})(?!\d)", re.IGNORECASE) for word in ("rank", "dp")
)


def places_in_paths(ranks: Sequence[RankSummary | Collectives]) -> list[tuple[int | None, int | None]]:
    """Return the rank and replica of each trace. If they are not recorded, derive them from the trace's path.

    If a trace has neither a manifest nor a rank, its rank is parsed from a file name such as ``rank0_trace.json`` or
    ``job-rank[0].json``, or from the name of its directory. If these ranks repeat, each data-parallel engine is assumed
    to count its own ranks from 0. The replica is then the number after ``dp`` in a name such as ``dp1_tp0_rank0``.
    """
    places = [
        (_number_in(of.path, _RANK) if of.role is None and of.rank is None else of.rank, of.replica) for of in ranks
    ]
    loose = [index for index, of in enumerate(ranks) if of.role is None and places[index][0] is not None]
    engines = {index: (places[index][0], _number_in(ranks[index].path, _ENGINE)) for index in loose}
    distinct = {place for place in engines.values() if place[1] is not None}
    if len({rank for rank, _ in engines.values()}) < len(distinct) == len(loose):
        places = [engines.get(index, place) for index, place in enumerate(places)]
    return places


def _number_in(path: str, pattern: re.Pattern[str]) -> int | None:
    """Return the number in the file name, or else the number in a directory name such as ``rank_0``.

    Return ``None`` if there is no number, or if there are several in the file name.
    """
    directory, _, name = path.rpartition("/")
    numbers = set(pattern.findall(name))
    if not numbers and (of_directory := pattern.fullmatch(directory.rpartition("/")[2])):
        numbers = {of_directory[1]}
    return int(numbers.pop()) if len(numbers) == 1 else None


def label_of(role: str | None, replica: int | None, rank: int | None, path: str) -> str:
    """Return what people call a rank: ``rollout/1 rank 0``, or the name of its file where it has neither."""
    parts = [role or "replica"] if role or replica is not None else []
    parts = [f"{part}/{replica}" if replica is not None else part for part in parts]
    parts += [f"rank {rank}"] if rank is not None else []
    return " ".join(parts) or path.rpartition("/")[2]


def labels_of(ranks: Sequence[RankSummary]) -> dict[str, str]:
    """Return by path what people call each of some traces.

    Ranks of several runs have the name of the run, and traces that are no ranks of one program that of their file.
    """
    alone = strangers(ranks)
    runs = runs_of(ranks)
    found = {}
    for rank in ranks:
        label = label_of(rank.role, rank.replica, None if rank.path in alone else rank.rank, rank.path)
        found[rank.path] = label + of_run(rank.run, runs)
    twice = {label for label, count in Counter(found[path] for path in alone).items() if count > 1}
    return {path: path if label in twice else label for path, label in found.items()}


def runs_of(ranks: Sequence[RankSummary | CaptureStatus]) -> dict[str, str]:
    """Return by directory what runs are called: by their names, or by their directories where names repeat."""
    directories = dict.fromkeys(rank.run for rank in ranks if rank.run is not None)
    names = {directory: directory.rpartition("/")[2] for directory in directories}
    return names if len(set(names.values())) == len(names) else {directory: directory for directory in directories}


def of_run(run: str | None, runs: Mapping[str, str]) -> str:
    """Return what to write after the label of something to say of which run it is; nothing where there is one run.

    Args:
        run: The directory.
        runs: As from `runs_of`.
    """
    return f" of {runs[run]}" if run is not None and len(runs) > 1 else ""


def strangers(ranks: Sequence[RankSummary]) -> frozenset[str]:
    """Return the paths of those traces without a manifest that are not known to be ranks of one program.

    These are traces without a rank, and all of them where two have one rank or worlds of different sizes.
    """
    loose = [rank for rank in ranks if rank.role is None]
    numbers = [(rank.replica, rank.rank) for rank in loose if rank.rank is not None]
    worlds = {rank.world_size for rank in loose if rank.world_size is not None}
    one_program = len(set(numbers)) == len(numbers) and len(worlds) <= 1
    return frozenset(rank.path for rank in loose if rank.rank is None or not one_program)
