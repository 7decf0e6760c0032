"""Which step is typical: one for all ranks of a program, so that their pictures show the same step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from profdeck_traces.analysis.cold_steps import warm_steps
from profdeck_traces.analysis.detail_model import TimelineMark
from profdeck_traces.analysis.model import RankSummary, StepSummary
from profdeck_traces.analysis.rank_labels import strangers
from profdeck_traces.analysis.step_names import GLOBAL_STEP

# The middle step in time is typical unless it differs from the median of a rank by more.
_NEAR = 0.1


def candidates(rank: RankSummary) -> list[StepSummary]:
    """Return the steps that may be chosen, at most three: the middle one in time, and those half-way to the ends.

    They depend only on the number of steps, so ranks that recorded the same steps have the same candidates. Cold
    steps are not candidates if there are other steps.
    """
    kinds = {step.kind for step in rank.steps}
    kind = GLOBAL_STEP if GLOBAL_STEP in kinds else next(iter(kinds), None)
    steps = warm_steps([step for step in rank.steps if step.kind == kind])
    places = dict.fromkeys(len(steps) * quarters // 4 for quarters in (2, 1, 3))
    return [steps[place] for place in places if steps]


def typical_steps(ranks: Sequence[RankSummary]) -> dict[str, StepSummary]:
    """Return by path a step of about median duration: the same one for all ranks of a role and capture.

    That is the middle one in time or, where it takes some rank 10 % longer or shorter than the median, the candidate
    that differs least on the rank where it differs most. Ranks without a candidate in common have each their own.
    """
    alone = strangers(ranks)
    teams: dict[tuple[object, ...], dict[str, dict[int, StepSummary]]] = {}
    medians: dict[str, float] = {}
    for rank in ranks:
        found = candidates(rank)
        if not found:
            continue
        kind = found[0].kind
        of_kind = warm_steps([step for step in rank.steps if step.kind == kind])
        medians[rank.path] = statistics.median(map(_duration, of_kind))
        own = rank.path if rank.path in alone else None if kind == GLOBAL_STEP else rank.replica
        steps = {place if step.step is None else step.step: step for place, step in enumerate(found)}
        teams.setdefault((rank.run, rank.role, rank.capture, kind, own), {})[rank.path] = steps
    chosen: dict[str, StepSummary] = {}
    for team in teams.values():
        common = set.intersection(*(set(steps) for steps in team.values()))
        for group in [team] if common else [{path: steps} for path, steps in team.items()]:
            choice = _choice(group, medians, common)
            chosen |= {path: steps[choice] for path, steps in group.items()}
    return chosen


def _choice(team: dict[str, dict[int, StepSummary]], medians: dict[str, float], common: set[int]) -> int:
    def differs(key: int) -> float:
        return max(
            abs(_duration(steps[key]) - medians[path]) / max(medians[path], 1e-9) for path, steps in team.items()
        )

    keys = [key for key in next(iter(team.values())) if not common or key in common]
    return keys[0] if differs(keys[0]) <= _NEAR else min(keys, key=differs)


def span_of(step: StepSummary) -> tuple[float, float]:
    """Return when a step begins and ends, on the host and on its devices."""
    begins = [step.start_us, *(of.start_us for of in step.devices)]
    ends = [step.start_us + step.duration_us, *(of.start_us + of.duration_us for of in step.devices)]
    return min(begins), max(ends)


def marks_of(rank: RankSummary) -> Iterator[TimelineMark]:
    """Yield the steps of a trace as marks."""
    for step in rank.steps:
        yield TimelineMark(name=step.name, kind=step.kind, start_us=step.start_us, duration_us=step.duration_us)


def _duration(step: StepSummary) -> float:
    return max([step.duration_us, *(of.duration_us for of in step.devices)])
