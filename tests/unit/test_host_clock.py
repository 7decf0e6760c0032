"""Clock offset between two hosts, computed from the times of one message and its reply."""

from __future__ import annotations

from hypothesis import given, strategies as st

from profdeck.records.host_clock import HostClock, MessageTimes, better_clock, compare_clocks

SECOND_NS = 1_000_000_000
WAYS = st.integers(0, SECOND_NS)


@given(st.integers(-(10**17), 10**17), WAYS, WAYS, WAYS, st.integers(10**18, 2 * 10**18))
def test_the_truth_is_within_the_error(ahead_ns: int, there_ns: int, works_ns: int, back_ns: int, sent_ns: int) -> None:
    received_there_ns = sent_ns + there_ns + ahead_ns
    times = MessageTimes(received_there_ns, received_there_ns + works_ns)
    found = compare_clocks("there", sent_ns, times, sent_ns + there_ns + works_ns + back_ns)
    assert found is not None
    assert abs(found.offset_ns + ahead_ns) <= found.error_ns
    assert abs(found.error_ns - (there_ns + back_ns) / 2) < 1


def test_times_that_cannot_be_true_tell_nothing() -> None:
    assert compare_clocks("there", 100, MessageTimes(50, 49), 200) is None
    assert compare_clocks("there", 100, MessageTimes(50, 151), 200) is None
    assert compare_clocks("there", 100, MessageTimes(50, 150), 200) is not None


def test_clocks_that_are_ten_years_apart_are_not_believed() -> None:
    eleven_years_ns = 11 * 365 * 86_400 * 10**9
    assert compare_clocks("there", 0, MessageTimes(eleven_years_ns, eleven_years_ns), 100) is None
    assert compare_clocks("there", 0, MessageTimes(eleven_years_ns // 2, eleven_years_ns // 2), 100) is not None


def test_what_was_under_way_for_the_shortest_time_counts() -> None:
    one, other = (HostClock(host="there", offset_ns=error_ns, error_ns=error_ns) for error_ns in (7, 5))
    assert better_clock(None, one) == better_clock(one, None) == one
    assert better_clock(one, other) == better_clock(other, one) == other
    assert better_clock(None, None) is None
