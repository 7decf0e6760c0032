"""Tests that compare the conversion of times to nanoseconds with `decimal`."""

from __future__ import annotations

from decimal import Decimal, DecimalException

import pytest
from hypothesis import given, strategies as st
from parsers import pack, read_both

from profdeck_traces.reading.fallback import read_time
from profdeck_traces.reading.walking import NO_TIME

DIGITS = st.from_regex(r"[0-9]{0,18}\.?[0-9]{0,5}", fullmatch=True)
TEXTS = DIGITS | st.decimals().map(str) | st.text("0123456789.eE+- ", max_size=20)


def reference(text: str) -> int | None:
    try:
        number = Decimal(text)
        return None if abs(number) >= 2**52 else round(number * 1000)
    except DecimalException:
        return None


def parse(text: str) -> int | None:
    time_ns = read_time(text.encode(), NO_TIME)
    return None if time_ns == NO_TIME else time_ns


@given(TEXTS)
def test_text_is_converted_exactly(text: str) -> None:
    assert parse(text) == reference(text)


@pytest.mark.parametrize(
    ("text", "time_ns"),
    [
        ("1704161511420306.491", 1704161511420306491),
        ("1704161511420306", 1704161511420306000),
        ("4503599627370495.999", 4503599627370495999),
        ("4503599627370496.0", None),
        ("9999999999999999", None),
        ("0.0004", 0),
        ("36.7895", 36790),
        ("5.3495", 5350),
        ("0.0005", 0),
        ("0.0015", 2),
        ("-1.5", -1500),
        (".5", 500),
        ("5.", 5000),
        ("1e3", 1000000),
        (" 7 ", 7000),
        ("", None),
        ("1_000", None),
        ("\u0661.5", None),
        ("soon", None),
    ],
)
def test_times(text: str, time_ns: int | None) -> None:
    assert parse(text) == time_ns


@given(st.lists(TEXTS, min_size=1, max_size=20))
def test_both_parsers_read_times_as_strings_exactly(texts: list[str]) -> None:
    starts_ns = read_both(pack([f'{{"ph": "X", "ts": "{text}"}}' for text in texts]))["columns"]["start_ns"]
    assert starts_ns == [NO_TIME if (time_ns := reference(text)) is None else time_ns for text in texts]


NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,5})?([eE][-+]?[0-9]{1,2})?", fullmatch=True)


@given(st.lists(NUMBERS, min_size=1, max_size=20))
def test_both_parsers_read_times_as_numbers_exactly(texts: list[str]) -> None:
    starts_ns = read_both(pack([f'{{"ph": "X", "ts": {text}}}' for text in texts]))["columns"]["start_ns"]
    assert starts_ns == [NO_TIME if (time_ns := reference(text)) is None else time_ns for text in texts]
