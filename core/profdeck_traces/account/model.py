"""Data model for step accounts in summaries."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

OwnerKey = tuple[str, str | None, str | None, str | None, str | None, str | None, int | None, str | None, str | None]
"""An owner's kind, name, operator, module, annotation, line, rank, awaited kind and peer."""

OwnerRowKey = tuple[str, str, str | None, str | None, str | None]
"""An owner's kind, title, name, line and origin."""

JOINED = frozenset({
    "anomaly detection", "checkpoint", "compilation", "data loading", "garbage collection", "output", "profiler",
    "validation",
})  # fmt: skip
"""Owners of these kinds share one row per function, because many short events explain the time only together."""
NAMELESS = frozenset({"between", "not recorded", "wait for thread", "wait for rank", "wait for role", *JOINED})
"""Kinds whose owners can be unnamed. For any other kind, an unnamed owner is a sum of small owners."""


def key_of_small_owners(key: OwnerKey) -> OwnerKey:
    """Return the key under which small owners of the same kind, rank and peer are summed."""
    return key[0], None, None, None, None, None, key[6], None, key[8]


@attrs.frozen(kw_only=True)
class OwnerIdentity:
    """Identity of an owner on the critical path.

    The names contain no addresses or instance numbers, so that owners can be matched across runs.
    """

    kind: str
    """Owner kind, such as ``operator``, ``kernel`` or ``launch latency``."""
    name: str | None
    """Event name; ``None`` if no event is open, or for the sum of small owners."""
    operator: str | None
    """Operator to which the event belongs."""
    module: str | None
    """Path of the ``nn.Module``, such as ``GPT > Block > Linear``."""
    annotation: str | None
    """Innermost annotation that is not a step."""
    line: str | None
    """Function in user code, as file, first line and name. Requires stacks."""
    rank: int | None = None
    """Rank that arrived last at a collective, if `kind` is ``wait for rank``. The other fields then describe an owner
    on that rank's critical path."""
    awaited: str | None = None
    """Kind of the owner on that rank's critical path, or the activity of `peer`; ``None`` if unknown."""
    peer: str | None = None
    """Role and replica that worked meanwhile, such as ``rollout/1``, if `kind` is ``wait for role``. `awaited` is then
    a batch kind, ``no requests`` or a stage, `name` is the batch size, and the other fields describe this process."""

    @property
    def key(self) -> OwnerKey:
        """The fields as a tuple."""
        return (
            self.kind,
            self.name,
            self.operator,
            self.module,
            self.annotation,
            self.line,
            self.rank,
            self.awaited,
            self.peer,
        )

    @property
    def title(self) -> str:
        """The kind, followed by the awaited rank or role and its activity, as in ``wait for rank 3: operator``."""
        if self.rank is None and self.peer is None:
            return self.kind
        whom = f"{self.kind} {self.rank}" if self.peer is None else f"wait for {self.peer}"
        return f"{whom}: {self.awaited}" if self.awaited else whom

    @classmethod
    def from_key(cls, key: OwnerKey) -> OwnerIdentity:
        """Create an identity from its key."""
        fields = ("kind", "name", "operator", "module", "annotation", "line", "rank", "awaited", "peer")
        return OwnerIdentity(**dict(zip(fields, key, strict=True)))  # type: ignore[arg-type]  # fields of the key

    @property
    def label(self) -> str:
        """Kind and name, such as ``operator aten::mm``."""
        if self.name is None:
            return self.title
        return self.name if self.name.startswith(self.title) else f"{self.title} {self.name}"

    @property
    def row(self) -> OwnerRowKey:
        """Kind, title, name, line and origin. Tables combine owners with the same values in one row."""
        if self.kind == "profiler":  # the profiler's caller doesn't explain the profiler's time
            return self.kind, self.title, None, None, None
        name = None if self.kind in JOINED else self.name
        return self.kind, self.title, name, self.line, self.origin

    @property
    def origin(self) -> str | None:
        """Source of the event: its line if known, otherwise its module, annotation or operator."""
        module = self.module.rpartition(" > ")[2] if self.module else None
        annotation = self.annotation if self.annotation != self.name else None
        return self.line or module or annotation or (self.operator if self.operator != self.name else None)


@attrs.frozen(kw_only=True)
class OwnerTime(OwnerIdentity):
    """Time of one owner on the critical path."""

    count: int
    """Number of intervals on the path."""
    time_us: float
    """Total over all steps in the account."""
    share: float
    """Fraction of the account's total time."""
    gain_us: float | None = None
    """Time that the account's steps would save if the owner took no time anywhere, on or off the critical path.

    The gain from a wait for a rank is limited by the rank that arrived second to last. ``None`` if not computed, as for
    all but the largest owners, or if unknown, as for waits for threads.
    """
    next_limit: str | None = None
    """Owner kind that would then have the most time on the critical path."""
    steps_us: tuple[float, ...] = ()
    """Time in each step of the account. Empty for small owners, and if there are more than 1,000 steps."""


@attrs.frozen
class JoinedGain:
    """Combined gain of owners that differ only in their operators, modules or annotations.

    It can differ from the sum of the individual gains, because several owners can shorten the same path.
    """

    kind: str
    title: str
    name: str | None
    line: str | None
    origin: str | None
    gain_us: float
    """Time saved in the account's steps if these owners took no time."""
    next_limit: str
    """Owner kind that would then have the most time on the critical path."""

    @property
    def row(self) -> OwnerRowKey:
        """The fields that all of the owners share."""
        return self.kind, self.title, self.name, self.line, self.origin


@attrs.frozen(kw_only=True)
class CauseTime:
    """Critical-path time with a common cause and place. Only GIL contention and synchronisations can overlap."""

    cause: str
    """Cause, such as ``garbage-collection``."""
    name: str | None
    """Name of the event, operator or kernel with the most time."""
    calls: int
    """Number of calls to ``name`` on the path."""
    line: str | None
    """Function in user code, as in `OwnerIdentity`."""
    module: str | None
    """Path of the ``nn.Module`` with the most time."""
    annotation: str | None
    """Innermost annotation with the most time."""
    time_us: float
    """Total over all steps in the account."""
    gain_us: float | None = None
    """Time that the steps would save without these events; ``None`` if not computed or unknown.

    The gain of a synchronisation or collective excludes the rank's waits for other ranks, because these waits remain.
    """
    next_limit: str | None = None
    """Owner kind that would then have the most time on the critical path."""
    steps_us: tuple[float, ...] = ()
    """Time in each step of the account. Empty if there are more than 1,000 steps."""


@attrs.frozen(kw_only=True)
class UnassignedWaits:
    """Waits for other roles that are not, or not all, assigned to these roles."""

    roles: tuple[str, ...]
    reason: str

    @property
    def note(self) -> str:
        """The roles and the reason, as a sentence."""
        return f"Waits for {' and '.join(self.roles)} are not assigned: {self.reason}."


@attrs.frozen(kw_only=True)
class Account:
    """Step time, divided among the owners on the critical path.

    The owners' times add up to ``time_us``.
    """

    basis: str
    """Kind of step: ``global_step``, ``iteration``, or ``recording`` for the entire recording."""
    border: str
    """Rule for step borders.

    ``host``: a step lasts from the start of its annotation to the start of the next one. ``device``: a step ends when
    its device work ends. ``recording``: the entire recording is one step.
    """
    steps: int
    """Number of steps, excluding cold steps."""
    time_us: float
    """Total time of all steps."""
    owners: tuple[OwnerTime, ...]
    """Owners sorted by time, longest first. Owners after the 300th are merged by kind and have no name."""
    notes: tuple[str, ...]
    """Limitations of this account, such as causes that are missing from the trace."""
    causes: tuple[CauseTime, ...] = ()
    """Causes sorted by time, longest first. Causes with less than 0.5 % of the time are omitted."""
    step_us: tuple[float, ...] = ()
    """Duration of each step. Empty if there are more than 1,000 steps."""
    step_flops: tuple[float, ...] = ()
    """FLOPs of the counted operators that start in each step. Empty if shapes are missing or ``step_us`` is empty."""
    has_stacks: bool = False
    """True if Python stacks were recorded."""
    unassigned_waits: tuple[UnassignedWaits, ...] = ()
    """Roles that this process may have waited for. `notes` contains a sentence for each entry."""
    joined_gains: tuple[JoinedGain, ...] = ()
    """Gains of the largest groups of owners with the same kind, name, line and origin."""

    def row_gain(self, owners: Sequence[OwnerTime]) -> tuple[float | None, str | None]:
        """Return the gain and next limit for owners combined in one table row; ``None`` if unknown."""
        if len(owners) == 1:
            return owners[0].gain_us, owners[0].next_limit
        if owners[0].rank is not None:
            gains = [owner.gain_us for owner in owners if owner.gain_us is not None]
            return (sum(gains) if len(gains) == len(owners) else None), None
        joined = next((gain for gain in self.joined_gains if gain.row == owners[0].row), None)
        return (None, None) if joined is None else (joined.gain_us, joined.next_limit)
