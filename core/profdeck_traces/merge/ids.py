"""Ids of events that no two sources share."""

from __future__ import annotations

import hashlib
import itertools
import re

from profdeck_traces.merge.event_texts import encoded, integer_of, text_of, value_of

FLOW_PHASES = "stf"
ASYNC_PHASES = "bneSTpF"

# JavaScript's numbers hold all integers of so many digits exactly.
_EXACT_DIGITS = 15
_HASHED_ID = 2**63
_HEX_ID = re.compile(r"(?:0[xX])?[0-9a-fA-F]{1,16}")


class Ids:
    """The ids of one source: those that it had, with digits in front that no other source has.

    Args:
        rank: The place of the source among the sources.
        ranks: How many sources there are; all have equally many digits in front.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        width = next(width for width in itertools.count(1) if ranks <= 9 * 10 ** (width - 1))
        self._rank = rank
        self.prefix = b"%d" % (10 ** (width - 1) + rank)
        self.digits = _EXACT_DIGITS - width
        """Numbers of at most so many digits get the prefix, others are hashed."""

    def new(self, text: bytes, *, of_flow: bool = True) -> bytes:
        """Return the new JSON of an id.

        Perfetto drops flows whose id is neither a number nor a string of hexadecimal digits, and takes both for the
        same; of other events it takes any string.
        """
        value = value_of(text)
        if isinstance(value, str):
            number = int(value, 16) if of_flow and _HEX_ID.fullmatch(value) else None
        else:
            number = integer_of(text)
        if number is None or number < 0:
            return encoded(f"{self._rank}/{text_of(text)}")
        if number >= 10**self.digits:  # Ascend's are times in nanoseconds, which leave no room for a prefix
            digest = hashlib.blake2b(b"%d/%d" % (self._rank, number), digest_size=8).digest()
            return b'"0x%x"' % (int.from_bytes(digest) | _HASHED_ID)
        new = b"%b%d" % (self.prefix, number)
        return b'"0x%x"' % int(new) if isinstance(value, str) else new
