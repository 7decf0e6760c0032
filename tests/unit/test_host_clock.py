"""Clock offset between two hosts, computed from the times of one message and its reply."""

from __future__ import annotations

from hypothesis import given, strategies as st

from profdeck.records.host_clock import HostClock, MessageTimes, better_clock, compare_clocks

DELAYS_NS = st.integers(0, 1_000_000_000)


@given(st.integers(-(10**17), 10**17), DELAYS_NS, DELAYS_NS, DELAYS_NS, st.integers(10**18, 2 * 10**18))
def test_the_true_offset_is_within_the_error(
    ahead_ns: int, request_ns: int, processing_ns: int, reply_ns: int, sent_ns: int
) -> None:
    """The remote clock is `ahead_ns` ahead of the local clock."""
    remote_received_ns = sent_ns + request_ns + ahead_ns
    times = MessageTimes(remote_received_ns, remote_received_ns + processing_ns)
    clock = compare_clocks("remote", sent_ns, times, sent_ns + request_ns + processing_ns + reply_ns)
    assert clock is not None
    assert abs(clock.offset_ns + ahead_ns) <= clock.error_ns
    assert abs(clock.error_ns - (request_ns + reply_ns) / 2) < 1


def test_inconsistent_times_are_rejected() -> None:
    assert compare_clocks("remote", 100, MessageTimes(50, 49), 200) is None
    assert compare_clocks("remote", 100, MessageTimes(50, 151), 200) is None
    assert compare_clocks("remote", 100, MessageTimes(50, 150), 200) is not None


def test_offsets_of_more_than_ten_years_are_rejected() -> None:
    eleven_years_ns = 11 * 365 * 86_400 * 10**9
    assert compare_clocks("remote", 0, MessageTimes(eleven_years_ns, eleven_years_ns), 100) is None
    assert compare_clocks("remote", 0, MessageTimes(eleven_years_ns // 2, eleven_years_ns // 2), 100) is not None


def test_the_comparison_with_the_smaller_error_is_better() -> None:
    less_precise, precise = (HostClock(host="remote", offset_ns=error_ns, error_ns=error_ns) for error_ns in (7, 5))
    assert better_clock(None, precise) == better_clock(precise, None) == precise
    assert better_clock(less_precise, precise) == better_clock(precise, less_precise) == precise
    assert better_clock(None, None) is None
