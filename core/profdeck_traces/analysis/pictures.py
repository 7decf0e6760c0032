"""Picture resolution: the number of intervals into which a picture divides time."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import Timeline, TimelineLane

FINEST_BUCKETS = 1024
"""Number of intervals in pictures as they are computed and stored."""
MIN_EVENT_BUCKETS = 2
"""Minimum duration of events that are shown individually, as a number of intervals."""
_BUCKETS = {8: FINEST_BUCKETS, 24: 512}
_FEWEST_BUCKETS = 256


def buckets_of(traces: int) -> int:
    """Return the number of intervals per picture for a page with `traces` traces.

    The more traces there are, the fewer intervals are used, which limits the page size.
    """
    return next((buckets for most, buckets in _BUCKETS.items() if traces <= most), _FEWEST_BUCKETS)


def reduced(picture: Timeline, buckets: int) -> Timeline:
    """Reduce a picture to fewer intervals. Remove events that are too short for the new resolution.

    Args:
        picture: The picture.
        buckets: New number of intervals. Must divide the current number of intervals evenly.
    """
    if buckets == picture.buckets:
        return picture
    least_us = MIN_EVENT_BUCKETS * picture.duration_us / buckets
    return attrs.evolve(
        picture,
        buckets=buckets,
        lanes=tuple(_reduced_lane(lane, buckets) for lane in picture.lanes),
        events=tuple(event for event in picture.events if event.duration_us >= least_us),
    )


def check_pictures(pictures: Iterable[Timeline]) -> None:
    """Check that stored pictures can be reduced: each lane must have one share for each class and interval.

    Raises:
        ValueError: A lane is invalid, or a picture does not have `FINEST_BUCKETS` intervals.
    """
    for picture in pictures:
        if picture.buckets != FINEST_BUCKETS:
            raise ValueError("a picture with a different resolution")
        for lane in picture.lanes:
            size = len(lane.classes) * FINEST_BUCKETS
            if len(_unpacked(lane.shares, size)) != size:
                raise ValueError("a lane with missing shares")


def packed_shares(shares: NDArray[np.floating]) -> str:
    """Encode a lane's shares in the format of `TimelineLane`. Rows are classes, and columns are intervals."""
    rounded = np.minimum(255, np.round(shares * 255)).astype(np.uint8)
    return base64.b64encode(zlib.compress(rounded.tobytes(), 9)).decode()


def _unpacked(shares: str, size_bytes: int) -> bytes:
    """Decode the result of `packed_shares`. Stop after `size_bytes` + 1 bytes.

    Raises:
        ValueError: The text is invalid.
    """
    try:
        return zlib.decompressobj().decompress(base64.b64decode(shares), size_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error


def _reduced_lane(lane: TimelineLane, buckets: int) -> TimelineLane:
    shares = np.frombuffer(_unpacked(lane.shares, len(lane.classes) * FINEST_BUCKETS), np.uint8) / 255
    means = shares.reshape(len(lane.classes), buckets, -1).mean(axis=2) if lane.classes else shares
    return attrs.evolve(lane, shares=packed_shares(means))
