"""Which traces of two runs belong together: by role, rank and capture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import attrs

from profdeck_traces.analysis.model import RankSummary

# profdeck's names of captures: the step or request, the stage or batch, which one of them, and a repetition.
_CAPTURE = re.compile(r"(?:step\d+|iteration\d+|capture)(?:-(?P<stage>[A-Za-z].*?))??(?:-\d+)?(?:-take\d+)?")


# Pairs.


@attrs.frozen
class RankPair:
    """One rank on both sides, with all its traces."""

    role: str | None
    stage: str | None
    replica: int | None
    rank: int | None
    before: tuple[RankSummary, ...]
    after: tuple[RankSummary, ...]

    @property
    def sides(self) -> tuple[tuple[RankSummary, ...], tuple[RankSummary, ...]]:
        """Both sides, before and after."""
        return self.before, self.after


RankSummaries = Sequence[RankSummary]


def paired(before: RankSummaries, after: RankSummaries) -> tuple[list[RankPair], list[RankSummary], list[RankSummary]]:
    """Return the pairs, and what only one side has."""
    if len(before) == len(after) == 1:
        return [_pair(before, after)], [], []
    # A number alone is ambiguous if it is one of several roles or replicas.
    by_role = all(any(rank.role for rank in side) for side in (before, after)) or any(
        len({(rank.role, rank.replica) for rank in side}) > 1 for side in (before, after)
    )
    old, new = (_by_key(side, by_role=by_role) for side in (before, after))
    pairs = [_pair(old[key], new[key]) for key in old if key in new]
    only_before, only_after = (
        [rank for key, ranks in side.items() if key not in other for rank in ranks]
        for side, other in ((old, new), (new, old))
    )
    return pairs, only_before, only_after


def _by_key(ranks: RankSummaries, *, by_role: bool) -> dict[tuple[object, ...], list[RankSummary]]:
    """Group the traces of a side by what they are of."""
    groups: dict[tuple[object, ...], list[RankSummary]] = {}
    nameless: Counter[tuple[object, ...]] = Counter()
    for rank in ranks:
        of = (rank.role, rank.replica, stage_of(rank)) if by_role else (stage_of(rank),)
        number: object = rank.rank
        if number is None:
            number = f"position {nameless[of]}"
            nameless[of] += 1
        groups.setdefault((*of, number), []).append(rank)
    return groups


def _pair(before: RankSummaries, after: RankSummaries) -> RankPair:
    known = next((rank for rank in (*after, *before) if rank.role), after[0])
    return RankPair(known.role, stage_of(known), known.replica, known.rank, tuple(before), tuple(after))


def stage_of(rank: RankSummary) -> str | None:
    """Return the stage or batch kind in a trace's capture ID, or ``None``."""
    match = _CAPTURE.fullmatch(rank.capture or "")
    return match["stage"] if match else None


def names_of(ranks: RankSummaries) -> str:
    """Name what has no counterpart."""
    names = [rank.path for rank in ranks]
    return ", ".join([*names[:3], "..."] if len(names) > 3 else names) or "no trace"  # noqa: PLR2004  # enough to see
