"""The account in summaries."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class OwnerTime:
    """Time that one owner has on the critical path.

    The owner is identified by all text fields. They have no addresses or instance numbers, so that runs can be
    compared.
    """

    kind: str
    """Kind of the owner, such as ``operator``, ``kernel`` or ``launch latency``."""
    name: str | None
    """Name of the event that has the time, or that waits. ``None`` if no event is open, or for the sum of small
    owners."""
    operator: str | None
    """Operator that the event belongs to."""
    module: str | None
    """Path of the ``nn.Module``, such as ``GPT > Block > Linear``."""
    annotation: str | None
    """Innermost annotation that is not a step."""
    line: str | None
    """Function of user code: file, first line of the function, and name. Requires stacks."""
    count: int
    """Number of intervals on the path."""
    time_us: float
    """Sum over all steps of the account."""
    share: float
    """Share of the account's time."""


@attrs.frozen(kw_only=True)
class Account:
    """Partition of the time of the steps among the owners on the critical path.

    The times of the owners add up to ``time_us``.
    """

    basis: str
    """Kind of the steps: ``global_step``, ``iteration``, or ``recording`` for the entire recording."""
    border: str
    """Border of the steps: ``host`` from one annotation's begin to the next one's, ``device`` if a step ends with its
    device work, or ``recording``."""
    steps: int
    """Number of steps, without excluded cold steps."""
    time_us: float
    """Time of all steps."""
    owners: tuple[OwnerTime, ...]
    """Owners by time, longest first. Owners beyond the 300th are summed by kind, without a name."""
    notes: tuple[str, ...]
    """Limits of this account: causes that the trace does not record."""
