"""Times of traces as whole nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, DecimalException

import msgspec
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.intervals import Int

Time = float | str | Decimal | None
"""A time in microseconds, as a trace may write it."""

_NS_PER_US = 1000
_MAX_TIME_US = 2**52  # 142 years; beyond it a float has no fraction and nanoseconds leave 64 bits
_MAX_EXACT_US = 2**43  # from here on floats are 2 ns apart
_MAX_SHARP_US, _NEAR_HALF = 2**33, 1e-3  # below it floats are 0.001 ns apart
_DIGITS, _MAX_DIGITS = 3, 16  # behind the point, and in front of it below _MAX_TIME_US
_NUMBERS, _COMMA, _POINT = b"0123456789.,", *b",."


class LostDigitsError(Exception):
    """Times have more digits than the way in which they were decoded can tell."""


def nanoseconds_of_floats(times_us: NDArray[np.float64]) -> tuple[Int, NDArray[np.bool_]]:
    """Return integers and which of them could be read; the others are 0.

    Numbers are rounded to the nanosecond, which is what profilers write; whole microseconds are split off first
    because a product with 1000 would round again.

    Raises:
        LostDigitsError: A number is too large to tell whether it had a fraction.
    """
    readable = np.abs(times_us) < _MAX_TIME_US  # False for NaN
    times = times_us if readable.all() else np.where(readable, times_us, 0.0)
    whole = np.floor(times)
    fraction = times - whole
    if (np.abs(times) >= _MAX_EXACT_US).any():
        raise LostDigitsError
    of_fraction = fraction * _NS_PER_US
    rounded = np.rint(of_fraction)
    found = whole.astype(np.int64) * _NS_PER_US + rounded.astype(np.int64)
    # Half a nanosecond in the text may be a little less as a float.
    halves = np.flatnonzero((np.abs(np.abs(of_fraction - rounded) - 0.5) < _NEAR_HALF) & (times < _MAX_SHARP_US))
    if len(halves):
        found[halves] = [exact_nanoseconds(time_us) for time_us in times[halves].tolist()]
    return found, readable


def written_nanoseconds(times_us: Sequence[msgspec.Raw]) -> Int:
    """Return the integers that the texts of numbers mean, by all digits.

    Raises:
        LostDigitsError: One is not as profilers write times: digits, with up to three behind a point.
    """
    text = b",".join(times_us)
    if not _have_three_digits(text, len(times_us)):
        return np.array([_plain(time_us) for time_us in times_us], dtype=np.int64)
    # What is beyond 64 bits comes as the largest number of 64 bits.
    found = np.fromstring(text.translate(None, b"."), dtype=np.int64, sep=",")
    if (found >= _MAX_TIME_US * _NS_PER_US).any():
        raise LostDigitsError
    return found


def _have_three_digits(text: bytes, count: int) -> bool:
    """Tell whether a text is of so many numbers, each of digits, a point and three digits."""
    if text.translate(None, _NUMBERS):
        return False
    characters = np.frombuffer(text, dtype=np.uint8)
    ends, points = (np.flatnonzero(characters == character) for character in (_COMMA, _POINT))
    if not count == len(points) == len(ends) + 1:
        return False
    begins, ends = np.append(0, ends + 1), np.append(ends, len(text))
    return bool((points == ends - _DIGITS - 1).all() and (points > begins).all())


def _plain(time_us: msgspec.Raw) -> int:
    time_ns = _plain_nanoseconds(bytes(time_us).decode("ascii", "replace"))
    if time_ns is None:
        raise LostDigitsError
    return time_ns


def nanoseconds(times_us: Sequence[Time]) -> tuple[Int, NDArray[np.bool_]]:
    """Do the same for times of any type.

    Raises:
        LostDigitsError: As there.
    """
    if set(map(type, times_us)) <= {float}:
        return nanoseconds_of_floats(np.array(times_us, dtype=np.float64))
    exact = [exact_nanoseconds(time_us) for time_us in times_us]
    return np.array([value or 0 for value in exact]), np.array([value is not None for value in exact])


def exact_nanoseconds(time_us: Time) -> int | None:
    """Return the nearest whole nanosecond, by all digits; ``None``: it is no time."""
    if isinstance(time_us, str) and (plain_ns := _plain_nanoseconds(time_us)) is not None:
        return plain_ns
    try:
        # repr has the fewest digits that mean this float, which are those of the file if it had no more than 15.
        number = Decimal(repr(time_us) if isinstance(time_us, float) else time_us or 0)
        if time_us is None or abs(number) >= _MAX_TIME_US:
            return None
        return round(number * _NS_PER_US)
    except DecimalException:  # no number, or one with an exponent beyond all bounds
        return None


def _plain_nanoseconds(time_us: str) -> int | None:
    """Read what profilers write, digits with up to three behind a point, in a fourth of the time of a decimal."""
    whole, _, fraction = time_us.partition(".")
    if len(fraction) > _DIGITS or len(whole) > _MAX_DIGITS or not whole or not (whole + fraction).isdecimal():
        return None
    number = int(whole)
    return number * _NS_PER_US + int(fraction.ljust(_DIGITS, "0")) if number < _MAX_TIME_US else None
