"""Adds to the times of whole batches at once, where all of them have the same number of digits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from profdeck_traces.base.byte_search import stringzilla

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NS_PER_US = 1000
_FIRST = re.compile(rb'("ts"[ \t\n\r]*:[ \t\n\r]*"?)([0-9]{1,15})(\.[0-9]{3})?[ \t\n\r,}"]')
_RADIX, _ZERO = 10, ord("0")
_QUOTED_ENDS, _ENDS = (np.isin(np.arange(256), list(ends)) for ends in (b'"', b" \t\n\r,}"))


def moved(data: bytes, count: int, shift_ns: int) -> bytes | None:
    """Return the text with other times; ``None``: they differ in form, or would have more or fewer digits.

    Args:
        data: A JSON array of events.
        count: How many times there are; each ``"ts"`` is the key of one.
        shift_ns: What to add.
    """
    first = _FIRST.search(data)
    if first is None or (not first[3] and shift_ns % _NS_PER_US):
        return None
    key, whole, fraction = first.groups(default=b"")
    lengths = np.fromiter(map(len, stringzilla.split_iter(data, key)), np.int64)
    begins = np.cumsum(lengths[:-1] + len(key))
    width = len(whole + fraction)
    text = np.frombuffer(bytearray(data), np.uint8)
    if len(begins) != count or begins[-1] + width >= len(text):
        return None
    is_end = _QUOTED_ENDS if key.endswith(b'"') else _ENDS
    if not is_end[text[begins + width]].all() or (fraction and (text[begins + len(whole)] != ord(".")).any()):
        return None
    places = [place for place in range(width) if place != len(whole)]
    least = _RADIX ** (len(places) - 1) if len(whole) > 1 else 0  # a smaller one would have a zero in front
    fits = _add(text, begins, places, shift_ns if fraction else shift_ns // _NS_PER_US, least)
    return text.tobytes() if fits else None


def _add(text: NDArray[np.uint8], begins: NDArray[np.int64], places: list[int], summand: int, least: int) -> bool:
    """Add to the numbers that begin at some places, in place; ``False``: one is none, or would need other digits.

    Args:
        text: Characters.
        begins: Where the numbers begin.
        places: Where their digits are, from there.
        summand: What to add.
        least: The smallest sum.
    """
    numbers = np.zeros(len(begins), np.int64)
    for place in places:
        digits = text[begins + place] - np.uint8(_ZERO)  # others become large
        if (digits >= _RADIX).any():
            return False
        numbers = numbers * _RADIX + digits
    numbers += summand
    if numbers.min() < least or numbers.max() >= _RADIX ** len(places):
        return False
    for place in reversed(places):
        numbers, digits = np.divmod(numbers, _RADIX)
        text[begins + place] = digits + _ZERO
    return True
