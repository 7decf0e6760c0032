"""What takes the events and members that the scanner finds."""

from __future__ import annotations

from typing import Protocol


class TraceHandler(Protocol):
    """Takes what the scanner finds, in the order of the file."""

    wants_text: bool
    """Whether :meth:`event` and :meth:`member` are called; without them nothing is copied."""
    keys: frozenset[str]
    """The keys of the top-level object, other than ``traceEvents``, whose values :meth:`member` gets."""

    def batch(self, text: memoryview) -> int | None:
        """Take a JSON array of whole events and return how many of its objects have a ``ph`` member.

        ``None`` says that ``text`` is not JSON, which is how a wrong cut shows; nothing may have been taken then.
        The memory belongs to the scanner and changes after the call.
        """

    def event(self, text: bytes) -> None:
        """Take one event that was found token by token."""

    def member(self, key: str, text: bytes) -> None:
        """Take the JSON value of one wanted key of the top-level object."""
