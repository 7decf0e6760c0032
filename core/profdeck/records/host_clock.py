"""Clock offsets between hosts, estimated from the times of messages."""

from __future__ import annotations

import socket

import attrs

MAX_CLOCK_OFFSET_NS = 10 * 365 * 86_400 * 1_000_000_000
"""Ten years. Larger offsets are treated as invalid data."""


@attrs.frozen(kw_only=True)
class HostClock:
    """Clock offset of a host, relative to the host that compared the clocks."""

    host: str
    reference: str = attrs.field(factory=socket.gethostname)
    """The host that compared the clocks."""
    offset_ns: int
    """Offset in nanoseconds. Add it to a Unix time of `host` to convert the time to the clock of `reference`."""
    error_ns: int
    """Maximum error of the offset in nanoseconds: half of the time that the messages were in transit."""


@attrs.frozen
class MessageTimes:
    """Times at which a host received a message and sent its reply, in Unix nanoseconds on the host's clock."""

    received_ns: int
    sent_ns: int


def compare_clocks(host: str, sent_ns: int, there: MessageTimes, received_ns: int) -> HostClock | None:
    """Estimate the clock offset of a host from a message and its reply. Return None if the times are inconsistent.

    The offset is the NTP offset with the opposite sign. The error is half of the NTP delay (RFC 5905, section 8).

    Args:
        host: the host that replied.
        sent_ns: time at which the message was sent, in Unix nanoseconds on the local clock.
        there: the times that the host reported.
        received_ns: time at which the reply was received, in Unix nanoseconds on the local clock.
    """
    transit_ns = (received_ns - sent_ns) - (there.sent_ns - there.received_ns)
    if there.sent_ns < there.received_ns or transit_ns < 0:
        return None  # a clock was set in the meantime, or the host reported wrong times
    offset_ns = (sent_ns - there.received_ns + received_ns - there.sent_ns) // 2
    if abs(offset_ns) > MAX_CLOCK_OFFSET_NS:
        return None
    return HostClock(host=host, offset_ns=offset_ns, error_ns=(transit_ns + 1) // 2)


def better_clock(one: HostClock | None, other: HostClock | None) -> HostClock | None:
    """Return the more precise of two clock comparisons."""
    if one is None or other is None:
        return one or other
    return other if other.error_ns < one.error_ns else one
