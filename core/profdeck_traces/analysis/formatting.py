"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_PERCENTAGE = 10  # a change of 1000 %


def ms(time_us: float) -> str:
    """Write a time in milliseconds with four digits that matter, at most three after the point."""
    value = time_us / 1000
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0  # noqa: PLR2004
    return f"{value:,.{digits}f}"


def percent(share: float) -> str:
    """Write a share with a digit after the point; what is less than that with a sign."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"  # noqa: PLR2004 - a half of the last digit


def relative(ratio: float) -> str:
    """Format a relative change as ``+66.3%``, or as ``x215`` if the value has become more than ten times as large."""
    return f"{ratio:+.1%}" if ratio < _MAX_PERCENTAGE else f"x{ratio + 1:,.0f}"


def ranges(numbers: Sequence[int]) -> str:
    """Write numbers as ``3..5, 9``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{first}..{last}" if last > first else f"{first}" for first, last in parts)
