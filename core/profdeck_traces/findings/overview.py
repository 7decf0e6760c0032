"""Statistics per role for the terminal and the report: stages, device time, kernels and steps.

Times are in microseconds per step, averaged over the ranks of a role and over the devices of a rank. If a role has no
steps, times are per recording. A rank with several captures counts once; its captures are weighted by their number of
steps. Cold steps are excluded if there are other steps.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from profdeck_traces.account.model import NAMELESS, OwnerRowKey, OwnerTime
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.analysis.capture_matching import stage_of
from profdeck_traces.analysis.cold_steps import warm_steps
from profdeck_traces.analysis.formatting import ms, percent, ranges
from profdeck_traces.analysis.host_states import NOT_READ, NOTHING, OUTSIDE_OPERATORS
from profdeck_traces.analysis.model import RunSummary, ServerSummary, StepSummary
from profdeck_traces.analysis.owner_names import function_text, located_name, title_text
from profdeck_traces.analysis.rank_labels import label_of, of_run, runs_of, strangers
from profdeck_traces.analysis.recording_cost import median_ratio
from profdeck_traces.analysis.run_model import Finding
from profdeck_traces.analysis.step_names import ITERATION
from profdeck_traces.attribution.frames import is_user_frame, parse_frame
from profdeck_traces.base.text import plural
from profdeck_traces.findings.finding import is_note
from profdeck_traces.findings.rank_finding import MACHINE_BUSY, WAITED_FOR_CPU
from profdeck_traces.findings.rank_view import RankView, views_of
from profdeck_traces.inputs.facts import ENGINE_ITERATION

OUTSIDE_STAGES = "outside stages"
OUTSIDE = "outside operators"
_PROFILER = OwnerKind.PROFILER.label
_COMBINED = frozenset(kind.label for kind in (OwnerKind.OPERATOR, OwnerKind.PYTHON, OwnerKind.RUNTIME_CALL))
_WAITS = frozenset(kind.label for kind in (OwnerKind.WAIT_FOR_RANK, OwnerKind.WAIT_FOR_ROLE))
_MIN_SHARE = 0.01
"""Owners with a smaller share of the step are combined or omitted in tables."""
_MAX_LISTED = 4
_MOST_FUNCTIONS, _MIN_FUNCTION_SHARE = 3, 0.05
"""Functions in the verdict if no cause was found."""

_LEAST_SIDE = 0.005
_LONGER = 1.005
"""The longest step is reported if it is at least this multiple of the mean."""
_MIN_HEADLINE_RATIO = 1.5
_UNEVEN = 1.5
"""A row's longest time on a rank is reported if it is at least this multiple of the mean."""


@attrs.frozen(kw_only=True)
class StageRow:
    """One stage of the steps of a role, or what no stage or no operator covers."""

    name: str
    is_stage: bool
    """False for rows of time outside operators. The stages also contain this time."""
    mean_us: float
    share: float
    """Of the step on the host."""
    of_ranks_us: tuple[float, ...]
    """Mean time of each rank, in the order of the role's ranks."""
    slowest: str | None
    """Rank with the longest stage; None for a single rank, or if there are only cold steps."""

    @property
    def title(self) -> str:
        """Name for tables."""
        return self.name if self.is_stage else f"whole step: {self.name}"

    @property
    def spread(self) -> float:
        """How much longer the slowest rank takes than the mean, as a fraction."""
        return max(self.of_ranks_us) / self.mean_us - 1 if self.mean_us else 0.0


@attrs.frozen(kw_only=True)
class TimeRow:
    """A part of the time of the devices of a role."""

    name: str
    is_idle: bool
    """Whether nothing ran: the name is the cause then, else the class of what ran."""
    mean_us: float
    share: float
    """Of the step on the device. Work of several streams adds up, so that shares may add up to more than all."""


@attrs.frozen(kw_only=True)
class WorkRow:
    """One kernel or operator, over the ranks of a role."""

    name: str
    category: str
    mean_us: float
    share: float
    """Of all kernels, or of the self time of all operators."""
    calls: float
    """Number of calls per step and rank; for kernels, also per device."""
    max_us: float
    count: int
    """In all ranks."""


@attrs.frozen(kw_only=True)
class OwnerRow:
    """One owner of time on the critical path, averaged over the ranks of a role."""

    kind: str
    title: str
    """The kind. For a wait, also the awaited rank and kind."""
    name: str | None
    """Name of the event; ``None`` if no event is open, or for the sum of several owners."""
    line: str | None
    """Function in the user's code, or ``None`` if unknown."""
    origin: str | None
    """``line`` if known, otherwise the module, annotation or operator of the event."""
    mean_us: float
    """Mean time per step."""
    share: float
    gain_us: float | None
    """Mean time by which each rank's step would shrink without this owner. ``None`` if any rank's gain is unknown."""
    next_limit: str | None
    """Kind of owner that would then take the most time, if it is the same on all ranks."""
    of_ranks_us: tuple[tuple[str, float], ...]
    """Label of each rank, and its mean time per step."""


@attrs.frozen(kw_only=True)
class RankOfLongestStep:
    """The rank whose account has the longest step."""

    label: str
    step_us: float
    """Mean step time of this rank."""
    mean_us: float
    """Mean step time over all ranks."""


@attrs.frozen(kw_only=True)
class StepRow:
    """The steps of one kind and stage, over the ranks of a role."""

    name: str
    count: int
    """Number of steps in all captures of a rank. If ranks differ, this is the maximum."""
    median_us: float
    min_us: float
    max_us: float
    tokens_per_s: float | None
    """Tokens per second of wall time in the fastest capture of any rank."""
    note: str = ""
    """Short text about the cold steps that the row excludes or contains."""

    @property
    def title(self) -> str:
        """Name, followed by the note in parentheses."""
        return f"{self.name} ({self.note})" if self.note else self.name


@attrs.frozen(kw_only=True)
class MfuRow:
    """Mean MFU of a role whose ranks all have the same device and data type."""

    mfu: float
    covered: float
    """Share of kernel time, excluding communication, in operators whose FLOPs are known."""
    device: str
    dtype: str
    is_only_dtype: bool
    """True if all FLOPs use this data type."""
    peak_flops_per_s: float

    @property
    def text(self) -> str:
        """One-line description for the terminal."""
        dtype = self.dtype if self.is_only_dtype else f"mostly {self.dtype}"
        return (
            f"MFU {percent(self.mfu)} of {self.peak_flops_per_s / 1e12:,.0f} TFLOP/s ({self.device}, {dtype}). FLOPs "
            f"are known for {percent(self.covered)} of the kernels' time."
        )


@attrs.frozen(kw_only=True)
class Team:
    """All ranks of one role, including all replicas and captures."""

    name: str
    """Role name, followed by the run name if there are several runs. Empty if the traces have no role."""
    role: str | None
    views: tuple[RankView, ...]
    """One view per rank and capture."""
    unit: str
    """What times are per: ``step``, ``iteration`` or ``recording``."""
    step_us: float
    """The mean step on the device, or on the host without one."""
    account: tuple[OwnerRow, ...]
    """Owners sorted by time, longest first."""
    longest: RankOfLongestStep | None
    """Rank with the longest step. ``None`` for a single rank, or if the step exceeds the mean by under 0.5 %."""
    borders: tuple[str, ...]
    """Rules that determine the step borders in the accounts."""
    notes: tuple[str, ...]
    """Limitations of the accounts."""
    stages: tuple[StageRow, ...]
    device: tuple[TimeRow, ...]
    """By share: first classes of work, then causes of idle time."""
    kernels: tuple[WorkRow, ...]
    operators: tuple[WorkRow, ...]
    steps: tuple[StepRow, ...]
    servers: tuple[ServerSummary, ...] = ()
    """Servers of the role. Empty if there is only one."""
    mfu: MfuRow | None = None
    """``None`` if a rank with a device has no MFU, or if devices or data types differ."""

    @property
    def rank_labels(self) -> list[str]:
        """Label of each rank, sorted by replica and rank."""
        return [group[0].label for group in _by_rank(self.views)]

    @property
    def headline(self) -> str:
        """Mean step time, and each side's share of the critical path. Empty if there is no account."""
        if not self.account:
            return ""
        shares: dict[str, float] = {}
        for row in self.account:
            side = OwnerKind.from_label(row.kind).side
            shares[side] = shares.get(side, 0.0) + row.share
        parts = [f"{side} {share:.0%}" for side, share in shares.items() if share >= _LEAST_SIDE]
        time = ms(sum(row.mean_us for row in self.account))
        ranks = len(self.rank_labels)
        step = f"mean {self.unit} {time} ms over {ranks} ranks" if ranks > 1 else f"{time} ms per {self.unit}"
        ratio = median_ratio(view.rank for view in self.views) or 1.0
        if ratio >= _MIN_HEADLINE_RATIO:
            step += f", {ratio:.1f} times as long as the steps before the capture"
        return f"{step}; critical path: {', '.join(parts)}"

    def largest_owners(self, most: int) -> tuple[list[OwnerRow], list[OwnerRow]]:
        """Split the account into the rows to display and the rest.

        Small operators, Python functions and runtime calls of the same user function are combined into one row, since
        together they can take as long as a large one.

        Args:
            most: Maximum number of rows to display.
        """
        parts: dict[OwnerRow, list[OwnerRow]] = {}
        of_function: dict[str, list[OwnerRow]] = {}
        for row in self.account:
            if row.share >= _MIN_SHARE:
                if row.name or row.kind in NAMELESS:
                    parts[row] = [row]
            elif row.kind in _COMBINED and row.origin and parse_frame(row.origin):
                of_function.setdefault(row.origin, []).append(row)
        for rows in of_function.values():
            if len(rows) > 1 and sum(row.share for row in rows) >= _MIN_SHARE:
                parts[_sum_of(rows)] = rows
        shown = sorted(parts, key=lambda row: -row.mean_us)[:most]
        represented = {part for row in shown for part in parts[row]}
        return shown, [row for row in self.account if row not in represented]

    def largest_functions(self) -> dict[str, float]:
        """Return up to three user functions with the most time, and their shares of the step."""
        shares: dict[str, float] = {}
        for row in self.account:
            if row.origin and row.kind not in _WAITS and is_user_frame(row.origin):
                shares[row.origin] = shares.get(row.origin, 0.0) + row.share
        largest = sorted(shares, key=lambda frame: -shares[frame])[:_MOST_FUNCTIONS]
        return {frame: shares[frame] for frame in largest if shares[frame] >= _MIN_FUNCTION_SHARE}

    def captions(self, rows: Sequence[OwnerRow]) -> Iterator[str]:
        """Yield the caption sentences for a table of account rows."""
        if any(row.gain_us is not None for row in rows):
            kind = rows[0].next_limit
            limit = f" Without the first row, the next limit is {OwnerKind.from_label(kind).with_side}." if kind else ""
            yield f"gain: time that the {self.unit} would save without that row; blank if unknown.{limit}"
        if self.longest:
            longest, mean = ms(self.longest.step_us), ms(self.longest.mean_us)
            yield f"The longest {self.unit} is on {self.longest.label}: {longest} ms. Mean of the ranks: {mean} ms."
        for index, row in enumerate(rows, 1):
            label, time_us = max(row.of_ranks_us, key=lambda rank: rank[1])
            if time_us >= _UNEVEN * row.mean_us and row.kind not in _WAITS:
                yield f"All rows are means over the ranks. Row {index} takes {ms(time_us)} ms on {label}."
                break


def teams_of(run: RunSummary) -> tuple[Team, ...]:
    """Group the ranks of a run by role. Each unrelated trace is its own group. The role of the verdict comes first."""
    groups: dict[tuple[str | None, ...], list[RankView]] = {}
    unrelated, runs = strangers(run.ranks), runs_of(run.ranks)
    for view in views_of(run):
        key = view.rank.run, view.rank.role, view.rank.path if view.rank.path in unrelated else None
        groups.setdefault(key, []).append(view)
    servers: dict[tuple[str | None, ...], list[ServerSummary]] = {}
    for server in run.servers:
        servers.setdefault((server.run, server.role), []).append(server)
    cause = _cause(run)
    first = cause and cause.where.role
    return tuple(
        _team(
            (views[0].label if path else role or "") + of_run(directory, runs),
            views,
            [] if path else servers.get((directory, role), []),
        )
        for (directory, role, path), views in sorted(groups.items(), key=lambda group: first not in {None, group[0][1]})
    )


def _cause(run: RunSummary) -> Finding | None:
    return next((finding for finding in run.findings if not is_note(finding)), None)


def verdict_of(run: RunSummary, teams: Sequence[Team]) -> str:
    """Return the first finding that isn't a note. If there is none, describe where the longest step spends its time."""
    if (finding := _cause(run)) is not None:
        return finding.text
    team = max((team for team in teams if team.account), key=lambda team: team.step_us, default=None)
    owners = team.largest_owners(len(team.account))[0] if team else []
    owner = next((row for row in owners if row.kind != _PROFILER), None)
    if team is None or owner is None:
        return "No cause stands out."
    whose = f" of {team.name}" if len(teams) > 1 and team.name else ""
    time = ms(sum(row.mean_us for row in team.account))
    if functions := team.largest_functions():
        places = ", ".join(f"{share:.0%} in {function_text(frame)}" for frame, share in functions.items())
        return f"No cause stands out: the {team.unit}{whose} takes {time} ms: {places}."
    part = owner_text(owner.title, located_name(owner.name, owner.origin))
    if owner.name is None and owner.origin:
        part += f" in {function_text(owner.origin)}"
    return (
        f"No cause stands out: the {team.unit}{whose} takes {time} ms; its largest part, {owner.share:.0%}, is {part}."
    )


def sentence_of(advice: str) -> str:
    """Format a finding's advice as a sentence."""
    return f"{advice[:1].upper()}{advice[1:]}."


def notes_of(run: RunSummary, *, advice: bool) -> list[str]:
    """Return the notes, and a sentence about the causes that weren't judged because ranks waited for a CPU."""
    notes = [note.text + (f" {sentence_of(note.do)}" if advice else "") for note in run.findings if is_note(note)]
    for reason in (MACHINE_BUSY, WAITED_FOR_CPU):
        unknown = [cause.cause for cause in run.causes if (cause.reason or "").startswith(reason)]
        notes += [f"Not judged, because {reason}: {', '.join(unknown)}."] if unknown else []
    return notes


def owner_text(title: str, name: str | None) -> str:
    """Join the title and the name of an owner, such as ``operator aten::mm``."""
    title = title_text(title)
    if name is None:
        return title
    if title == OUTSIDE:
        return f"{title} in {name}"
    *_, kind = title.rpartition(": ")
    return f"{title.removesuffix(kind)}{name}" if name.startswith(kind) else f"{title} {name}"


def headlines_of(teams: Sequence[Team]) -> list[str]:
    """Return one headline per role, and include the role's name if there are several roles."""
    named = len(teams) > 1
    return [f"{team.name or 'trace'}: {team.headline}" if named else team.headline for team in teams if team.headline]


def first_of(teams: Sequence[Team], most: int) -> list[Team]:
    """Return all roles, and so many of the traces that belong to none: of those there may be any number."""
    places = [place for place, team in enumerate(teams) if team.role is None]
    left_out = {*places[most:]}
    return [team for place, team in enumerate(teams) if place not in left_out]


def _team(name: str, views: Sequence[RankView], servers: Sequence[ServerSummary]) -> Team:
    kinds = {view.kind for view in views}
    unit = "recording" if None in kinds else "iteration" if kinds == {ITERATION} else "step"
    warm = _without_cold(views)
    return Team(
        name=name,
        role=views[0].rank.role,
        views=tuple(views),
        unit=unit,
        step_us=_mean(warm, lambda view: view.step_us),
        account=_account(warm),
        longest=_rank_of_longest_step(warm),
        borders=tuple(dict.fromkeys(view.rank.account.border for view in warm if view.rank.account)),
        notes=tuple(_notes(warm)),
        stages=_stages(warm),
        device=_device(warm),
        kernels=_work([view for view in warm if view.rank.devices], _kernels),
        operators=_work(warm, _operators, _steps_on_host),
        steps=_step_rows(views),
        servers=tuple(servers) if len(servers) > 1 else (),
        mfu=_mfu(warm),
    )


def _notes(views: Sequence[RankView]) -> Iterator[str]:
    """Yield the notes of the ranks' accounts. Notes that do not apply to all ranks start with the rank numbers."""
    ranks: dict[str, list[int | None]] = {}
    accounts = [(view.rank.rank, view.rank.account) for view in views if view.rank.account]
    for rank, account in accounts:
        for note in dict.fromkeys(account.notes):
            ranks.setdefault(note, []).append(rank)
    for note, of_note in ranks.items():
        numbers = sorted({rank for rank in of_note if rank is not None})
        is_partial = len(of_note) < len(accounts) and None not in of_note
        yield f"{'Rank' if len(numbers) == 1 else 'Ranks'} {ranges(numbers)}: {note}" if is_partial else note


def about(run: RunSummary, teams: Sequence[Team]) -> str:
    """Return a one-line summary of the captures, ranks, steps and events of a run."""
    runs = runs_of(run.ranks)
    captures = {(rank.run, rank.capture) for rank in run.ranks if rank.capture}
    parts = [plural(len(runs), "run")] if len(runs) > 1 else []
    parts += [plural(len(captures), "capture")] if captures else []
    ranked = any(rank.rank is not None for rank in run.ranks) and not strangers(run.ranks)
    count = sum(len(team.rank_labels) for team in teams)
    parts.append(plural(count, "rank" if ranked else "trace") + _of_roles(teams))
    if numbers := [step.step for rank in run.ranks for step in rank.steps if step.step is not None]:
        parts.append(f"step{'s' if len(set(numbers)) > 1 else ''} {ranges(numbers)}")
    events = [rank.events for rank in run.ranks if rank.events is not None]
    parts.append(f"{sum(events):,} events" if events else "devices only")
    if run.unread:
        parts.append(f"{plural(len(run.unread), 'path')} not readable")
    elif all(rank.whole for rank in run.ranks) and not not_complete(run):
        parts.append("all whole")
    elif not any(rank.whole or rank.problem for rank in run.ranks):
        parts.append("not proved whole")
    return ", ".join(parts)


def _of_roles(teams: Sequence[Team]) -> str:
    ranks: Counter[str] = Counter()
    for team in teams:
        if team.role:
            ranks[team.role] += len(team.rank_labels)
    if len(ranks) < 2:
        return "".join(f" of {name}" for name in ranks)
    return f" ({', '.join(f'{count} {name}' for name, count in ranks.items())})"


def not_complete(run: RunSummary) -> list[tuple[str, str]]:
    """Return the status and a line about each role, or trace, that is not complete."""
    poor: dict[tuple[str, str], list[str]] = {}
    runs = runs_of(run.captures)
    for capture in run.captures:
        if capture.status != "complete":
            who = label_of(capture.role, capture.replica, None, "")
            who += of_run(capture.run, runs)
            what = "" if capture.rank is None else f" rank {capture.rank}"
            poor.setdefault((capture.status, who), []).append(f"step {capture.first_step}{what}")
    lines = []
    for (status, who), which in poor.items():
        more = f" and {len(which) - _MAX_LISTED} more" if len(which) > _MAX_LISTED else ""
        lines.append((status, f"{status}: {who} {', '.join(which[:_MAX_LISTED])}{more}"))
    lines += [("missing", f"missing: {role}, which recorded nothing") for role in run.silent_roles]
    if not run.captures:
        lines += [("partial", f"damaged: {rank.path}") for rank in run.ranks if rank.problem][:_MAX_LISTED]
        lines += [("failed", f"not readable: {path}") for path in run.unread[:_MAX_LISTED]]
    return lines


def _by_rank(views: Iterable[RankView]) -> list[list[RankView]]:
    """Group views by rank, sorted by replica and rank.

    A rank has one view per trace: one per capture, or one per cycle of a window.
    """
    groups: dict[tuple[str, int], list[RankView]] = {}
    unnumbered: Counter[tuple[str, str | None]] = Counter()
    for view in views:
        index = 0
        if view.rank.rank is None:
            # Traces without a rank can have the same label within a capture. Treat them as different ranks.
            index = unnumbered[view.label, view.rank.capture]
            unnumbered[view.label, view.rank.capture] += 1
        groups.setdefault((view.label, index), []).append(view)
    return sorted(groups.values(), key=lambda group: (group[0].rank.replica or 0, group[0].rank.rank or 0))


def _without_cold(views: Sequence[RankView]) -> list[RankView]:
    """Remove the views with only a cold step if the role has other views."""
    return [view for view in views if not view.is_cold] or [*views]


def _steps(view: RankView) -> int:
    return view.count


def _weighted(views: Sequence[RankView], steps: Callable[[RankView], int] = _steps) -> Iterator[tuple[RankView, float]]:
    """Yield each view with its weight. Each rank has the same total weight. Captures are weighted by steps."""
    ranks = _by_rank(views)
    for captures in ranks:
        total = sum(map(steps, captures)) * len(ranks)
        yield from ((view, steps(view) / total) for view in captures)


def _mean(
    views: Sequence[RankView], value: Callable[[RankView], float], steps: Callable[[RankView], int] = _steps
) -> float:
    return sum(value(view) * weight for view, weight in _weighted(views, steps))


def _sum_of(rows: Sequence[OwnerRow]) -> OwnerRow:
    return attrs.evolve(
        rows[0],
        title=plural(len(rows), "other"),
        name=None,
        mean_us=sum(row.mean_us for row in rows),
        share=sum(row.share for row in rows),
        gain_us=None,
        next_limit=None,
        of_ranks_us=tuple(
            (ranks[0][0], sum(time_us for _, time_us in ranks))
            for ranks in zip(*(row.of_ranks_us for row in rows), strict=True)
        ),
    )


def _account(views: Sequence[RankView]) -> tuple[OwnerRow, ...]:
    rows: dict[OwnerRowKey, dict[str, tuple[float, list[OwnerTime]]]] = {}
    accounts = {view.rank.path: view.rank.account for view in views if view.rank.account}
    with_account = [view for view in views if view.rank.path in accounts]
    for view, weight in _weighted(with_account, lambda view: accounts[view.rank.path].steps):
        account = accounts[view.rank.path]
        for owner in account.owners:
            of_rank = rows.setdefault(owner.row, {}).setdefault(view.rank.path, (weight / account.steps, []))
            of_rank[1].append(owner)
    traces = {
        row: {path: weight * sum(owner.time_us for owner in owners) for path, (weight, owners) in ranks.items()}
        for row, ranks in rows.items()
    }
    times = {row: sum(of_traces.values()) for row, of_traces in traces.items()}
    total_us = sum(times.values())
    by_rank = _by_rank(with_account)
    result = []
    for row, time_us in sorted(times.items(), key=lambda item: -item[1]):
        kind, title, name, line, origin = row
        gains = [(weight, *accounts[path].row_gain(owners)) for path, (weight, owners) in rows[row].items()]
        # The awaited rank never waits for itself, and some other ranks might not wait for it either.
        has_gain = (kind in _WAITS or len(gains) == len(accounts)) and all(
            gain_us is not None for _, gain_us, _ in gains
        )
        limits = {limit for _, _, limit in gains}
        result.append(
            OwnerRow(
                kind=kind,
                title=title,
                name=name,
                line=line,
                origin=origin,
                mean_us=time_us,
                share=time_us / total_us,
                gain_us=sum(weight * (gain_us or 0.0) for weight, gain_us, _ in gains) if has_gain else None,
                next_limit=limits.pop() if has_gain and len(limits) == 1 else None,
                # A trace's weight contains the number of ranks.
                of_ranks_us=tuple(
                    (of_rank[0].label, len(by_rank) * sum(traces[row].get(view.rank.path, 0.0) for view in of_rank))
                    for of_rank in by_rank
                ),
            )
        )
    return tuple(result)


def _rank_of_longest_step(views: Sequence[RankView]) -> RankOfLongestStep | None:
    ranks: list[tuple[float, str]] = []
    for captures in _by_rank([view for view in views if view.rank.account]):
        accounts = [view.rank.account for view in captures if view.rank.account]
        step_us = sum(account.time_us for account in accounts) / sum(account.steps for account in accounts)
        ranks.append((step_us, captures[0].label))
    if len(ranks) < 2:
        return None
    mean_us = sum(step_us for step_us, _ in ranks) / len(ranks)
    step_us, label = max(ranks, key=lambda rank: rank[0])
    return RankOfLongestStep(label=label, step_us=step_us, mean_us=mean_us) if step_us >= _LONGER * mean_us else None


def _stages(views: Sequence[RankView]) -> tuple[StageRow, ...]:
    timed = [view for view in views if view.rank.host_times is not None and view.host_step_us]
    if not timed:
        return ()
    names = dict.fromkeys(stage.name for view in timed for stage in view.stages)

    ranks = _by_rank(timed)
    is_judged = len(ranks) > 1 and any(not view.is_cold or stage_of(view.rank) for view in timed)
    step_us = _mean(timed, lambda view: view.host_step_us, _steps_on_host)

    def row(name: str, value: Callable[[RankView], float], *, is_stage: bool) -> StageRow:
        of_ranks = tuple(_mean(captures, value, _steps_on_host) for captures in ranks)
        mean_us = statistics.fmean(of_ranks)
        slowest = ranks[of_ranks.index(max(of_ranks))][0].rank
        return StageRow(
            name=name,
            is_stage=is_stage,
            mean_us=mean_us,
            share=mean_us / step_us,
            of_ranks_us=of_ranks,
            slowest=label_of(slowest.role, slowest.replica, slowest.rank, slowest.path) if is_judged else None,
        )

    rows = [row(name, lambda view, name=name: view.stage_us.get(name, 0.0), is_stage=True) for name in names]  # type: ignore[misc]  # bound
    rows.sort(key=lambda one: -one.mean_us)
    if rows:
        rows.append(row(OUTSIDE_STAGES, lambda view: view.host_step_us - sum(view.stage_us.values()), is_stage=True))
    if any(view.rank.host_times and view.rank.host_times.states for view in timed):
        rows.append(row(OUTSIDE, lambda view: _of_states(view, OUTSIDE_OPERATORS - {NOTHING}), is_stage=False))
        rows.append(row(NOTHING, lambda view: _of_states(view, {NOTHING}), is_stage=False))
    return tuple(one for one in rows if one.mean_us > 0)


def _of_states(view: RankView, states: Iterable[str]) -> float:
    times = view.rank.host_times
    found = times.states if times else ()
    return sum(state.time_us for state in found if state.state in states) / view.host_steps


def _steps_on_host(view: RankView) -> int:
    return view.host_steps


def _device(views: Sequence[RankView]) -> tuple[TimeRow, ...]:
    with_device = [view for view in views if view.rank.devices]
    if not with_device:
        return ()
    step_us = _mean(with_device, lambda view: view.step_us)
    work: dict[str, float] = {}
    idle: dict[str, float] = {}
    for view, weight in _weighted(with_device):
        for of in view.rank.categories:
            work[of.category] = work.get(of.category, 0.0) + view.per_step(of.total_us) * weight
        causes = view.idle or {NOT_READ: view.idle_us}
        for cause, idle_us in causes.items():
            idle[cause] = idle.get(cause, 0.0) + idle_us * weight
    rows = [
        TimeRow(name=name, is_idle=is_idle, mean_us=time_us, share=time_us / step_us if step_us else 0.0)
        for is_idle, of_kind in ((False, work), (True, idle))
        for name, time_us in sorted(of_kind.items(), key=lambda item: -item[1])
    ]
    return tuple(row for row in rows if row.mean_us > 0)


def _mfu(views: Sequence[RankView]) -> MfuRow | None:
    with_device = [view for view in views if view.rank.devices]
    found = [view.rank.utilization for view in with_device]
    known = [one for one in found if one is not None and one.mfu is not None]
    models = {(one.device, one.dtype, one.peak_flops_per_s) for one in known}
    if len(known) < len(found) or len(models) != 1:
        return None
    device, dtype, peak = models.pop()
    if device is None or dtype is None or peak is None:
        return None
    return MfuRow(
        mfu=_mean(with_device, lambda view: (view.rank.utilization and view.rank.utilization.mfu) or 0.0),
        covered=_mean(with_device, lambda view: view.rank.utilization.covered if view.rank.utilization else 0.0),
        device=device,
        dtype=dtype,
        is_only_dtype=all(one.dtype_share == 1 for one in known),
        peak_flops_per_s=peak,
    )


_Work = tuple[str, str, float, float, int, float]
"""Name, class, microseconds per step, calls per step, number of calls, and longest call in microseconds."""


def _kernels(view: RankView) -> list[_Work]:
    steps = (view.count + len(view.excluded)) * view.device_count
    return [
        (of.name, of.category, view.per_step(of.total_us), of.count / steps, of.count, of.max_us)
        for of in view.rank.kernels
    ]


def _operators(view: RankView) -> list[_Work]:
    steps = _steps_on_host(view)
    calls = steps + len(view.excluded)
    return [
        (of.name, "", ((of.self_us or 0.0) - of.cold_us) / steps, of.count / calls, of.count, of.max_us)
        for of in view.rank.operators
    ]


def _work(
    views: Sequence[RankView],
    work: Callable[[RankView], Iterable[_Work]],
    steps: Callable[[RankView], int] = _steps,
) -> tuple[WorkRow, ...]:
    per_step: dict[str, list[float]] = {}
    categories: dict[str, str] = {}
    for view, weight in _weighted(views, steps):
        for name, category, of_step_us, calls, count, max_us in work(view):
            sums = per_step.setdefault(name, [0.0, 0.0, 0.0, 0.0])
            categories[name] = category
            sums[0] += of_step_us * weight
            sums[1] += calls * weight
            sums[2] = max(sums[2], max_us)
            sums[3] += count
    all_us = sum(sums[0] for sums in per_step.values())
    found = [
        WorkRow(
            name=name,
            category=categories[name],
            mean_us=mean_us,
            share=mean_us / all_us if all_us else 0.0,
            calls=calls,
            max_us=max_us,
            count=int(count),
        )
        for name, (mean_us, calls, max_us, count) in per_step.items()
    ]
    return tuple(sorted(found, key=lambda row: (-row.mean_us, row.name)))


def _step_rows(views: Sequence[RankView]) -> tuple[StepRow, ...]:
    found: dict[tuple[str, str | None], list[list[StepSummary]]] = {}
    for captures in _by_rank(views):
        of_rank: dict[tuple[str, str | None], list[StepSummary]] = {}
        for view in captures:
            for step in view.rank.steps:
                of_rank.setdefault((_name(view, step.kind), step.stage), []).append(step)
        for key, steps in of_rank.items():
            found.setdefault(key, []).append(steps)
    rows = []
    for (kind, stage), recorded in found.items():
        all_steps = [step for steps in recorded for step in steps]
        used = warm_steps(all_steps)
        is_all = len(used) == len(all_steps)
        of_ranks = [[step for step in steps if is_all or not step.cold] for steps in recorded]
        every = [step.duration_us for step in used]
        tokens = [
            found.tokens_per_wall_s
            for view in views
            for found in view.rank.iterations
            if (_name(view, found.kind), found.stage) == (kind, stage) and found.tokens_per_wall_s is not None
        ]
        rows.append(
            StepRow(
                name=" ".join(filter(None, [stage, kind])),
                count=max(map(len, of_ranks)),
                median_us=statistics.median(every),
                min_us=min(every),
                max_us=max(every),
                # The ranks of one engine have the same batch.
                tokens_per_s=max(tokens, default=None),
                note=_note(all_steps, used),
            )
        )
    return tuple(rows)


def _note(recorded: Sequence[StepSummary], used: Sequence[StepSummary]) -> str:
    cold = [step for step in recorded if step.cold]
    if not cold:
        return ""
    if len(used) == len(recorded):
        return "cold"
    numbers = sorted({step.step for step in cold if step.step is not None})
    if len(numbers) == 1:
        return f"without cold step {numbers[0]}"
    return f"without {plural(len(numbers) or len(cold), 'cold step')}"


def _name(view: RankView, kind: str) -> str:
    """Return the display name of a step kind. Steps of the recorder are named after the unit that they record."""
    if kind == "global_step" and view.rank.unit:
        kind = "profiler step" if view.rank.unit == ENGINE_ITERATION else view.rank.unit
    return kind.replace("_", " ")
