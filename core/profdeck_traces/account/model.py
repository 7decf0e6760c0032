"""Data model of the account in summaries."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class OwnerIdentity:
    """Identity of an owner on the critical path.

    The texts contain no addresses or instance numbers, so that owners can be matched between runs.
    """

    kind: str
    """Kind of the owner, such as ``operator``, ``kernel`` or ``launch latency``."""
    name: str | None
    """Name of the event. ``None`` if no event is open, or for the sum of small owners."""
    operator: str | None
    """Operator that the event belongs to."""
    module: str | None
    """Path of the ``nn.Module``, such as ``GPT > Block > Linear``."""
    annotation: str | None
    """Innermost annotation that is not a step."""
    line: str | None
    """Function of user code: file, first line of the function, and name. Requires stacks."""

    @property
    def origin(self) -> str | None:
        """Line, or else the module, annotation or operator of the event."""
        module = self.module.rpartition(" > ")[2] if self.module else None
        annotation = self.annotation if self.annotation != self.name else None
        return self.line or module or annotation or (self.operator if self.operator != self.name else None)


@attrs.frozen(kw_only=True)
class OwnerTime(OwnerIdentity):
    """Time of one owner on the critical path."""

    count: int
    """Number of intervals on the path."""
    time_us: float
    """Sum over all steps of the account."""
    share: float
    """Share of the account's time."""
    gain_us: float | None = None
    """Time by which the steps of the account would get shorter if the owner took no time, on the path or not.

    ``None`` if it is not computed (only the largest owners have a gain) or unknown, as for waits.
    """
    next_limit: str | None = None
    """Kind of owner that would then have the most time on the critical path."""


@attrs.frozen(kw_only=True)
class Account:
    """Partition of the time of the steps among the owners on the critical path.

    The times of the owners add up to ``time_us``.
    """

    basis: str
    """Kind of the steps: ``global_step``, ``iteration``, or ``recording`` for the entire recording."""
    border: str
    """Border rule of the steps: ``host`` (from the begin of an annotation to the begin of the next one), ``device`` (a
    step ends when its device work ends), or ``recording``."""
    steps: int
    """Number of steps. Cold steps are excluded."""
    time_us: float
    """Time of all steps."""
    owners: tuple[OwnerTime, ...]
    """Owners by time, longest first. Owners beyond the 300th are summed by kind, without a name."""
    notes: tuple[str, ...]
    """Limits of this account: causes that the trace does not record."""
