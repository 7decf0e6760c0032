"""What changed, in words: the verdict in a sentence, with what it rests on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from profdeck_traces.account.model import JOINED, NAMELESS, OwnerRowKey
from profdeck_traces.analysis.diff_model import CALLED_SAME, AccountDiff, Change, RankDiff, RoleDiff
from profdeck_traces.analysis.formatting import ms, relative
from profdeck_traces.analysis.host_states import NOTHING
from profdeck_traces.analysis.owner_names import function_text, located_name, title_text
from profdeck_traces.analysis.short_names import short_kernel

SECTIONS = {"annotations": "stage or annotation", "categories": "class", "kernels": "kernel", "operators": "operator"}
MANY = {
    "annotations": "stages and annotations",
    "categories": "classes",
    "kernels": "kernels",
    "operators": "operators",
}
_UNNAMED = frozenset({"between", "not recorded"})
"""Owner kinds that name no event."""
_PLURALS = {
    "copy": "copies",
    "launch latency": "launch latencies",
    "python": "python functions",
    "wait for rank": "waits for rank",
    "wait for thread": "waits for threads",
}
"""Plurals of owner kinds. Other kinds end with an "s"."""
_LEAST_P = 0.0001
_LONGEST_NAME = 48
_NS_PER_US = 1000
_MOST = 0.5
_LEAST_PART = 0.1
"""Parts up to this fraction of a change are not named."""
_MOST_PARTS = 3
_SLOWER = 1.1
"""A common slowdown of all kernels is reported from this factor on."""
_ALIKE = 0.75
"""Minimum share of kernel time in kernels whose slowdown is 0.5 to 1.5 times the median slowdown."""
_LEAST_MEAN_RATIO = 0.02
"""Means are shown if their relative change differs from that of the medians by at least this much."""


def counted(count: int, section: str) -> str:
    """Write how many of a section there are."""
    return f"{count:,} {(SECTIONS if count == 1 else MANY)[section]}"


def verdict_of(role: RoleDiff, limit: float = CALLED_SAME) -> str:
    """Return the verdict and its reason in one sentence: ``trainer is slower: the global step takes ..., mostly gemm``.

    Args:
        role: The comparison of the role.
        limit: Insignificant changes are reported as "same" up to this fraction, and as "inconclusive" above it.
    """
    decisive = sorted(role.decisive, key=lambda change: -abs(change.impact_us))
    verdict, reasons = role.verdict(limit), role.undecided(limit)
    if not decisive:
        return f"{label_of_role(role)} is inconclusive: {'; '.join(reasons)}."
    main = next((change for change in decisive if change.verdict in {"slower", "faster"}), decisive[0])
    word = "is the same" if verdict == "same" else f"is {verdict}"
    changes = role.changes_over(limit)
    if changes and not any(change in decisive for change in changes):
        main, word = changes[0], f"is {verdict} on {_ranks_of(role, changes)}"
    elif verdict == "same" and main.verdict == "inconclusive":
        word = f"changed by less than {limit * 100:g}%"
    ratio = "" if main.ratio is None else f", {relative(main.ratio)}"
    change = "" if main.verdict == "same" else f", {(main.after_us - main.before_us) / 1000:+,.3f} ms"
    name = main.name if main.name in {"kernels", "operators"} else f"the median {main.name}"
    takes = "take" if name.endswith("s") else "takes"
    if role.recorded_differently:
        word, why = f"{word}, because {'; '.join(role.recorded_differently)}", ""
    elif verdict == "inconclusive":
        why = "; ".join(reasons)
    else:
        why = "; ".join(filter(None, (_why(role, main), role.describe_busy())))
    median = f"{name} {takes} {ms(main.after_us)} ms, before {ms(main.before_us)} ms{change}{ratio} ({_chance(main)})"
    mean = _mean_of(main)
    # If the verdict is based on bursts, the median can move in the opposite direction.
    is_by_mean = mean and main.delta_us * (main.mean_ratio or 0.0) < 0 and main.verdict in {"slower", "faster"}
    times = (mean, why, f"but {median}") if is_by_mean else (median, mean, why)
    return f"{label_of_role(role)} {word}: {'; '.join(filter(None, times))}."


def _ranks_of(role: RoleDiff, changes: Sequence[Change]) -> str:
    """Return on how many ranks the step time changed, such as ``1 of 4 ranks (inconclusive on 2)``.

    A rank is inconclusive if its own verdict is, or if its change is significant only without the correction for the
    number of ranks.
    """
    others = [rank for rank in role.ranks if not any(one.name.endswith(f" of {rank.label}") for one in changes)]
    unknown = sum(any(one.verdict != "same" for one in rank.iterations) for rank in others)
    note = f" (inconclusive on {unknown})" if unknown else ""
    return f"{len(role.ranks) - len(others)} of {len(role.ranks)} ranks{note}"


def _mean_of(change: Change) -> str:
    """Describe the means and the bursts if the mean changed differently from the median."""
    ratio = change.mean_ratio
    least = max(_LEAST_MEAN_RATIO, _LEAST_PART * abs(change.ratio or 0.0))
    if ratio is None or abs(ratio - (change.ratio or 0.0)) < least or change.mean_after_us is None:
        return ""
    before_us = change.mean_before_us or 0.0
    text = f"the mean {ms(change.mean_after_us)} ms, before {ms(before_us)} ms"
    text += f", {(change.mean_after_us - before_us) / 1000:+,.3f} ms, {relative(ratio)}"
    return f"{text}: {change.bursts}" if change.bursts is not None and change.bursts.increase else text


def _why(role: RoleDiff, main: Change) -> str:
    """Name the stage and the owner that explain most of the change in step time.

    A part is called "most of it" only if it accounts for at least half of the change in the mean step. Otherwise, the
    parts that changed are listed. A remainder of more than a tenth is reported as "not explained".
    """
    if main.verdict in {"same", "inconclusive"}:
        inside = _slower_parts(role)
        return f"slower inside: {inside}" if inside else ""
    source: RoleDiff | RankDiff = next((rank for rank in role.ranks if main.name.endswith(f" of {rank.label}")), role)
    is_only = len(source.iterations) == 1 and (source is not role or main in role.iterations)
    parts = source.contributions if is_only else ()
    account = source.account if is_only else None
    total_us = sum(part.delta_us for part in parts) if parts else main.mean_impact_us
    stages = [(part.name, part.delta_us) for part in parts if part.kind == "stage"]
    of_stages = _most_of(stages, total_us)
    names = [*of_stages]
    rest_label = "not explained"
    owners: list[tuple[str, float]] = []
    largest: list[tuple[str, float]] = []
    step_us = shown_us = total_us
    # If the device lags behind the host, its steps change differently from those of the host.
    is_other = False
    if account is not None and account.step_delta_ns * total_us > 0:
        step_us = account.step_delta_ns / _NS_PER_US
        is_other = abs(step_us - total_us) > _LEAST_PART * abs(total_us)
        # The sentence also states the change in the median.
        shown_us = step_us if is_other else max(step_us, main.impact_us, key=abs)
        # The account covers the entire change, so the remainder belongs to owners that are not listed.
        rest_label = "other owners"
        owners = _most_of(_owners(account), shown_us)
        located = _most_of(_owners_by_function(account), shown_us)
        if located and (not owners or abs(located[0][1]) > (1 + _LEAST_PART) * abs(owners[0][1])):
            owners = located
        largest = [change for change in _owners_by_line(account) if abs(change[1]) > _LEAST_PART * abs(step_us)]
        names += owners
    slowdown = _slower_kernels(role, total_us) if source is role and not owners else None
    if slowdown is not None:
        of_stages, names, rest_label = [], [slowdown], "other changes"
    elif not names and any(label not in _UNNAMED for label, _ in largest):
        return _largest_owners(largest, step_us, shown_us)
    if not owners and slowdown is None:
        names += _other_names(role, main, largest, total_us, with_sections=source is role, has_stage=bool(names))
    if names:
        explained_us = max((time_us for _, time_us in owners or names), key=abs)
        listed = f"{_listed(of_stages)}; by owner: {_listed(owners)}" if of_stages and owners else _listed(names)
        rest = _remainder((step_us if owners else total_us) - explained_us, total_us, rest_label)
        path = f"on the critical path, the step changes by {step_us / 1000:+,.3f} ms; " if owners and is_other else ""
        return f"{path}most of it: {listed}{rest}"
    if largest:
        return _largest_owners(largest, step_us, shown_us)
    names = [
        (part.name, part.delta_us)
        for part in parts
        if part.name != NOTHING and abs(part.delta_us) > _LEAST_PART * abs(total_us)
    ][:_MOST_PARTS]
    rest = _remainder(total_us - sum(time_us for _, time_us in names), total_us)
    if not names:
        return rest.removeprefix("; ")
    return f"{'most of it: ' if _is_most(names[0][1], total_us) else ''}{_listed(names)}{rest}"


def _other_names(  # noqa: PLR0913
    role: RoleDiff,
    main: Change,
    largest: Sequence[tuple[str, float]],
    total_us: float,
    *,
    with_sections: bool,
    has_stage: bool,
) -> list[tuple[str, float]]:
    """Return an explanation for most of a change that no owner explains.

    It's an owner whose growth is partly offset by other owners, or a list of table entries.
    """
    first = _main_owner(largest, total_us)
    if first is not None or not with_sections:
        return [first] if first is not None else []
    names = []
    for section in ("categories", "kernels", "operators") if has_stage else SECTIONS:
        changes = [change for change in getattr(role, section) if change.verdict != "same" and change is not main]
        label = (lambda name: short_kernel(name, _LONGEST_NAME)) if section == "kernels" else _cut
        names += _most_of([(label(change.name), change.mean_impact_us) for change in changes], total_us)
    return names


def _slower_kernels(role: RoleDiff, total_us: float) -> tuple[str, float] | None:
    """Describe a similar slowdown of most kernels, and return the change in time. Return None if there is none.

    They must explain most of the total change. A factor is similar if it is close to the median, weighted by time.
    """
    times = [
        (of.mean_before_us, of.mean_after_us)
        for of in role.kernels
        if of.mean_before_us and of.mean_after_us and of.calls_before == of.calls_after
    ]
    if len(times) < _MOST_PARTS:
        return None
    times.sort(key=lambda sides: sides[1] / sides[0])
    after_us = sum(after for _, after in times)
    passed = itertools.accumulate(after for _, after in times)
    before, after = next(sides for sides, until_us in zip(times, passed, strict=True) if 2 * until_us >= after_us)
    median = after / before
    alike = [(before, after) for before, after in times if abs(after / before - median) <= (median - 1) / 2]
    if not alike or sum(after for _, after in alike) < _ALIKE * after_us:
        return None
    change_us = sum(after - before for before, after in alike)
    factor = sum(after for _, after in alike) / sum(before for before, _ in alike)
    if factor < _SLOWER or not _is_most(change_us, total_us):
        return None
    which = "all" if len(alike) == len(role.kernels) else "most"
    return f"{which} kernels {factor:.2f} times as long, as with lower clocks or larger inputs,", change_us


def _main_owner(owners: Sequence[tuple[str, float]], total_us: float) -> tuple[str, float] | None:
    """Return the owner with the largest change if it's at least half the total, even if others partly offset it."""
    if not owners or owners[0][0] in _UNNAMED or owners[0][1] * total_us <= 0:
        return None
    return owners[0] if abs(owners[0][1]) >= _MOST * abs(total_us) else None


def _owners(account: AccountDiff) -> list[tuple[str, float]]:
    """Return the owners, combined as in the table, with their changes in microseconds per step. Omit unnamed owners."""
    changes = []
    for (kind, title, name, _, origin), (before_ns, after_ns) in account.rows.items():
        text = located_name(name, origin)
        if text is None and kind in JOINED:
            text = f"{title} in {function_text(origin)}" if origin else title
        elif text is not None and title != kind:
            text = f"{title} {text}"
        if text is not None:
            changes.append((text, (after_ns - before_ns) / _NS_PER_US))
    return changes


def _owners_by_function(account: AccountDiff) -> list[tuple[str, float]]:
    """Return the change for each user function, in microseconds per step. Exclude waits for other ranks."""
    changes: dict[str, float] = {}
    for owner in account.owners:
        if owner.line is not None and owner.rank is None:
            label = function_text(owner.line)
            changes[label] = changes.get(label, 0.0) + owner.delta_ns / _NS_PER_US
    return list(changes.items())


def _owners_by_line(account: AccountDiff) -> list[tuple[str, float]]:
    """Return changes by kind and line in microseconds per step, largest first.

    Many short events of one line can explain a change together. Waits for one rank are summed regardless of the line.
    The label of a sum of several table rows starts with "all", because a row can have the same kind and line.
    """
    changes: dict[str, float] = {}
    rows: dict[str, set[OwnerRowKey]] = {}
    sums: dict[str, str] = {}
    for owner in account.owners:
        if owner.name is None and owner.kind not in NAMELESS:  # a sum of small owners
            continue
        kinds = _PLURALS.get(owner.kind, f"{owner.kind}s")
        if owner.rank is not None:
            label, of_all = f"{owner.kind} {owner.rank}", f"{kinds} {owner.rank}"
        elif line := owner.row[3]:
            place = function_text(line)
            label, of_all = f"{title_text(owner.kind)} in {place}", f"{kinds} in {place}"
        else:
            label, of_all = owner.label, f"{kinds} {owner.name}"
        changes[label] = changes.get(label, 0.0) + owner.delta_ns / _NS_PER_US
        rows.setdefault(label, set()).add(owner.row)
        sums[label] = f"all {of_all}"
    named = [(sums[label] if len(rows[label]) > 1 else label, change_us) for label, change_us in changes.items()]
    return sorted(named, key=lambda change: -abs(change[1]))


def _largest_owners(owners: Sequence[tuple[str, float]], total_us: float, shown_us: float) -> str:
    """List the largest changes in the account. If the other changes exceed 10 % of the total, add their sum.

    Args:
        owners: Changes in microseconds per step, largest first.
        total_us: Change of the account's step.
        shown_us: Change that the sentence states. "Most of it" requires at least half of this change.
    """
    listed = owners[:_MOST_PARTS]
    rest_us = total_us - sum(time_us for _, time_us in listed)
    most = "most of it: " if _is_most(listed[0][1], shown_us) else ""
    others = [("other owners", rest_us)] if abs(rest_us) > _LEAST_PART * abs(total_us) else []
    return f"{most}{_listed([*listed, *others])}"


def _cut(name: str) -> str:
    return name[:_LONGEST_NAME]


def _most_of(changes: Sequence[tuple[str, float]], total_us: float) -> list[tuple[str, float]]:
    """Return a list with the largest change if it accounts for most of the total, otherwise an empty list."""
    largest = max(changes, key=lambda change: abs(change[1]), default=None)
    return [largest] if largest is not None and _is_most(largest[1], total_us) else []


def _is_most(part_us: float, total_us: float) -> bool:
    """Return whether a part accounts for at least half of a change and exceeds it by at most 10 %."""
    return total_us != 0 and _MOST <= part_us / total_us <= 1 + _LEAST_PART


def _listed(names: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {time_us / 1000:+,.3f} ms" for name, time_us in names)


def _remainder(rest_us: float, total_us: float, label: str = "not explained") -> str:
    return f"; {label}: {rest_us / 1000:+,.3f} ms" if abs(rest_us) > _LEAST_PART * abs(total_us) else ""


def headline_of(role: RoleDiff, change: Change, limit: float) -> str:
    """Format a change as ``trainer: global step 215.200 ms -> 224.700 ms, +4.4% (p 0.002): slower``.

    Args:
        role: The comparison of the role.
        change: A change in that comparison.
        limit: Insignificant changes are reported as "same" up to this fraction, and as "inconclusive" above it.
    """
    times = f"{ms(change.before_us)} ms -> {ms(change.after_us)} ms"
    ratio = "" if change.ratio is None else f", {relative(change.ratio)}"
    verdict: str = change.verdict
    if verdict == "inconclusive":
        verdict = f"within {limit * 100:g}%"
    elif verdict == "same":
        inside = _slower_parts(role)
        verdict = "same in all" if inside else "same"
        verdict += f"; slower inside: {inside}" if inside else ""
    if role.corrupt or change.undecided(limit):
        verdict = "inconclusive"
    return f"{label_of_role(role)}: {change.name} {times}{ratio} ({_chance(change)}): {verdict}"


def _slower_parts(role: RoleDiff) -> str:
    """Count what got slower, as a step may be the same while they are not."""
    counts = {name: sum(one.verdict == "slower" for one in getattr(role, name)) for name in SECTIONS}
    return ", ".join(f"{count} of {len(getattr(role, name))} {MANY[name]}" for name, count in counts.items() if count)


def _chance(change: Change) -> str:
    """Say what decided: how likely chance is, where there are enough steps, else the noise."""
    if change.p_value is None:
        return f"noise {noise_of(change)}"
    return "p < 0.0001" if change.p_value < _LEAST_P else f"p {change.p_value:.2g}"


def label_of_role(role: RoleDiff) -> str:
    """Return what to call a role: with its stage, or the trace or run where it has no name."""
    parts = [part for part in (role.role, role.stage) if part]
    if not parts:
        parts = ["the trace" if len(role.ranks) == 1 else "the run"]
    return ", ".join(parts)


def basis_of(role: RoleDiff) -> str:
    """Return a caption with the unit and the statistic of the times in the tables."""
    ranks = "" if len(role.ranks) == 1 else f", averaged over {len(role.ranks)} ranks"
    if role.basis == "total":
        return f"Times are totals{ranks}, because not all traces have steps."
    steps = f"{spaced(role.basis)} ({role.steps_before} before, {role.steps_after} after)"
    kinds = "medians" if role.account is None else "means on the critical path, otherwise medians"
    return f"Times are per {steps}{ranks}: {kinds}."


def noise_of(change: Change) -> str:
    """Return the noise in percent of the time before."""
    if change.noise_us is None:
        return "unknown"
    return f"{change.noise_us / (change.before_us or change.after_us or 1):.1%}"


def spaced(word: str) -> str:
    """Return a word of code as people write it."""
    return word.replace("_", " ")
