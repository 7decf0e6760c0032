"""What people call the traces of a summary, and which of them are ranks of one program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.inputs.facts import CaptureStatus


def label_of(role: str | None, replica: int | None, rank: int | None, path: str) -> str:
    """Return what people call a rank: ``rollout/1 rank 0``, or the name of its file where it has neither."""
    parts = [role if replica is None else f"{role}/{replica}"] if role else []
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
    numbers = [rank.rank for rank in loose if rank.rank is not None]
    worlds = {rank.world_size for rank in loose if rank.world_size is not None}
    one_program = len(set(numbers)) == len(numbers) and len(worlds) <= 1
    return frozenset(rank.path for rank in loose if rank.rank is None or not one_program)
