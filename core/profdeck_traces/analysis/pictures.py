"""How fine the pictures of a page are."""

from __future__ import annotations

_BUCKETS = {8: 1024, 24: 512}
"""How many parts pictures have, by the most traces that they may be of."""
_FEWEST_BUCKETS = 256
ALL_BUCKETS = (*_BUCKETS.values(), _FEWEST_BUCKETS)
"""All possible results of `buckets_of`."""


def buckets_of(traces: int) -> int:
    """Return how many parts the pictures of so many traces have, so that the page stays small."""
    return next((buckets for most, buckets in _BUCKETS.items() if traces <= most), _FEWEST_BUCKETS)
