"""Times of traces as nanoseconds, against decimals."""

from __future__ import annotations

from decimal import Decimal, DecimalException

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from profdeck_traces.reading.times import (
    LostDigitsError,
    exact_nanoseconds,
    nanoseconds_of_floats,
    written_nanoseconds,
)


def reference(text: str) -> int | None:
    try:
        number = Decimal(text or 0)
        return None if abs(number) >= 2**52 else round(number * 1000)
    except DecimalException:
        return None


@given(st.from_regex(r"[0-9]{0,18}\.?[0-9]{0,5}", fullmatch=True) | st.decimals().map(str) | st.text(max_size=20))
def test_text_is_converted_exactly(text: str) -> None:
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


@given(st.lists(st.integers(-(2**33) * 10_000, 2**33 * 10_000), min_size=1, max_size=50))
def test_floats_are_rounded_by_their_digits(tenths: list[int]) -> None:
    """Otherwise, 36.7895 us would be 36,789 ns if all times of a batch are floats, and 36,790 ns if not."""
    texts = [f"{value / 10_000:.4f}" for value in tenths]
    nanoseconds, readable = nanoseconds_of_floats(np.array(list(map(float, texts))))
    assert readable.all()
    assert nanoseconds.tolist() == [reference(text) for text in texts]


def test_halves_are_rounded_to_even() -> None:
    nanoseconds, _ = nanoseconds_of_floats(np.array([36.7895, 5.3495, 0.0005, 0.0015, 2.5]))
    assert nanoseconds.tolist() == [36790, 5350, 0, 2, 2500]


PLAIN = st.from_regex(r"(0|[1-9][0-9]{0,14})(\.[0-9]{1,3})?", fullmatch=True)
THREE_DIGITS = st.from_regex(r"(0|[1-9][0-9]{0,14})\.[0-9]{3}", fullmatch=True)
OTHER = st.sampled_from(
    ["1e5", "-3", "null", '"5"', "0.0001", "[]", "{}", "1,2", "4503599627370496", "1" * 40, "", "-1.500", ".500",
     "1.234.567", "1.2345,1", "4503599627370496.000", "9" * 16 + ".999", "9" * 40 + ".999", "\u0661.500"]
)  # fmt: skip


@given(st.lists(PLAIN, min_size=1, max_size=20) | st.lists(THREE_DIGITS, min_size=1, max_size=20))
def test_texts_of_profilers_are_read_to_the_nanosecond(texts: list[str]) -> None:
    nanoseconds = written_nanoseconds([msgspec.Raw(text.encode()) for text in texts])
    assert nanoseconds.tolist() == [int(Decimal(text) * 1000) for text in texts]


@given(st.lists(PLAIN | THREE_DIGITS, max_size=5), OTHER, st.lists(THREE_DIGITS, max_size=5))
def test_texts_of_another_form_are_refused(before: list[str], other: str, after: list[str]) -> None:
    with pytest.raises(LostDigitsError):
        written_nanoseconds([msgspec.Raw(text.encode()) for text in (*before, other, *after)])


def test_floats_of_microseconds_since_1970_are_refused_with_and_without_a_fraction() -> None:
    for time_us in (1712195495521130.028, 1712195495521130.0):
        with pytest.raises(LostDigitsError):
            nanoseconds_of_floats(np.array([1.5, time_us]))
