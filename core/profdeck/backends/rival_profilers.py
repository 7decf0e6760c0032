"""Detection of other profilers that start in the same process during a capture."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self


class RivalWatch:
    """Context manager that detects other profilers that start during a capture."""

    def __init__(self, start_functions: Mapping[str, Sequence[str]], on_start: Callable[[str], None]) -> None:
        """Args:
        start_functions: names of the functions that start a profiler, by ``module`` or ``module:Class``. Functions that
            the installed version lacks are ignored.
        on_start: called with the module's name before another profiler starts, in the thread of that profiler. Its
            exceptions are suppressed, because the other profiler belongs to the host.
        """
        self._start_functions = start_functions
        self._on_start = on_start
        self._own_thread: int | None = None
        """The thread that is inside `ours`."""
        self._patches: list[tuple[object, str, Callable[..., Any], Callable[..., Any]]] = []
        """Owner, name, original function and replacement of each patched function."""

    def __enter__(self) -> Self:
        for path, names in self._start_functions.items():
            module, _, cls = path.partition(":")
            owner: object = sys.modules.get(module)
            owner = getattr(owner, cls, None) if cls else owner
            for name in names:
                original = getattr(owner, name, None)
                if original is not None:
                    replacement = self._reported(module, original)
                    self._patches.append((owner, name, original, replacement))
                    setattr(owner, name, replacement)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original, replacement in self._patches:
            if getattr(owner, name) is replacement:  # otherwise, another library has patched the function too
                setattr(owner, name, original)
        self._patches.clear()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Ignore profilers that this thread starts inside the ``with`` block."""
        self._own_thread = threading.get_ident()
        try:
            yield
        finally:
            self._own_thread = None

    def _reported(self, module: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that reports the start of a profiler and then calls the original function."""

        @functools.wraps(original)
        def start(*arguments: Any, **options: Any) -> Any:
            if self._patches and self._own_thread != threading.get_ident():
                with suppress(Exception):  # an error must not stop the other profiler
                    self._on_start(module)
            return original(*arguments, **options)

        return start
