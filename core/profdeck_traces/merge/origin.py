"""Finds times that viewers cannot hold: Perfetto reads microseconds as doubles, which have 53 bits.

Traces without ``baseTimeNanoseconds`` count from 1970. There a double steps by 250 ns: events that lie in each other
come to overlap, and Perfetto drops those (``slice_drop_overlapping_complete_event``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from profdeck_traces.merge.source import MergeSource

_TIME_US = re.compile(rb'"ts"[ \t\n\r]*:[ \t\n\r]*"?([0-9]{1,18})')
# From here on a double of microseconds steps by more than a nanosecond.
_LARGE_US = 2**53 // 1000
_UNIT_US = 10**9


def far_origin_ns(sources: Sequence[MergeSource]) -> int:
    """Return what to take off all times so that doubles hold them; 0 unless the times of all sources are too large.

    It is a whole number of 1,000 seconds, some before the first times that the sources begin with.
    """
    first_us = [_first_large_us(source) for source in sources]
    known = [time_us for time_us in first_us if time_us is not None]
    if len(known) < len(first_us) or not known:
        return 0
    return (min(known) // _UNIT_US - 1) * _UNIT_US * 1000


def _first_large_us(source: MergeSource) -> int | None:
    times_us = [time_us for time_us in map(int, _TIME_US.findall(source.head())) if time_us >= _LARGE_US]
    return min(times_us, default=None)
