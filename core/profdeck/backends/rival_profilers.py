"""Tells a backend that another profiler is about to begin in its process, by what that one's library calls for it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self


class RivalWatch:
    """Context manager that detects other profilers that start during a capture."""

    def __init__(self, beginnings: Mapping[str, Sequence[str]], begins: Callable[[str], None]) -> None:
        """Args:
        beginnings: what profilers call to begin, by the module, or ``module:Class``, in which it is looked up. What a
            release lacks is passed over.
        begins: called with that module in the thread of the other profiler, before it begins. What it raises is
            let go, as the other profiler is the host's.
        """
        self._beginnings = beginnings
        self._begins = begins
        self._own: int | None = None
        self._originals: list[tuple[object, str, Callable[..., Any], Callable[..., Any]]] = []

    def __enter__(self) -> Self:
        for place, names in self._beginnings.items():
            module, _, cls = place.partition(":")
            owner: object = sys.modules.get(module)
            owner = getattr(owner, cls, None) if cls else owner
            for name in names:
                original = getattr(owner, name, None)
                if original is not None:
                    ours = self._announced(module, original)
                    self._originals.append((owner, name, original, ours))
                    setattr(owner, name, ours)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original, ours in self._originals:
            if getattr(owner, name) is ours:  # else somebody put something of theirs around it
                setattr(owner, name, original)
        self._originals.clear()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Begin and end profilers of our own inside."""
        self._own = threading.get_ident()
        try:
            yield
        finally:
            self._own = None

    def _announced(self, module: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def begin(*arguments: Any, **options: Any) -> Any:
            if self._originals and self._own != threading.get_ident():
                with suppress(Exception):  # an error must not stop the other profiler
                    self._begins(module)
            return original(*arguments, **options)

        return begin
