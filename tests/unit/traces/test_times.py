"""Times of traces as nanoseconds, against decimals."""

from __future__ import annotations

from decimal import Decimal, DecimalException

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profdeck.traces.reading.times import exact_nanoseconds


def reference(text: str) -> int | None:
    try:
        number = Decimal(text or 0)
        return None if abs(number) >= 2**52 else round(number * 1000)
    except DecimalException:
        return None


@given(st.from_regex(r"[0-9]{0,18}\.?[0-9]{0,5}", fullmatch=True) | st.decimals().map(str) | st.text(max_size=20))
def test_a_text_is_the_time_that_its_digits_say(text: str) -> None:
    assert exact_nanoseconds(text) == reference(text)


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        ("1704161511420306.491", 1704161511420306491),
        ("1704161511420306", 1704161511420306000),
        ("4503599627370495.999", 4503599627370495999),
        ("4503599627370496.0", None),
        ("9999999999999999", None),
        ("0.0004", 0),
        ("-1.5", -1500),
        (".5", 500),
        ("5.", 5000),
        ("1e3", 1000000),
        (" 7 ", 7000),
        ("", 0),
        ("\u0661.5", 1500),
        ("soon", None),
    ],
)
def test_times(text: str, time_ns: int | None) -> None:
    assert exact_nanoseconds(text) == time_ns
