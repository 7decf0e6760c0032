"""Arrays in memory or, for large traces, in temporary files."""

from __future__ import annotations

import mmap
import tempfile
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Storage:
    """Allocates arrays for one trace.

    When memory is short, the kernel can write the pages of a mapped file to disk, unlike other memory. The files are
    unnamed, so they are deleted when the arrays are freed or the process exits.
    """

    def __init__(self, *, in_files: bool = False) -> None:
        self._in_files = in_files
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def empty(self, count: int, dtype: Any) -> NDArray[Any]:
        """Return an uninitialised array."""
        if not self._in_files or not count:
            return np.empty(count, dtype)
        with tempfile.TemporaryFile() as file:
            array = np.memmap(file, dtype, mode="w+", shape=count)
        base: Any = array.base
        self._maps.add(base)
        return array

    def stored(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values. If the trace is large, copy them to a temporary file."""
        if not self._in_files:
            return values
        stored = self.empty(len(values), values.dtype)
        stored[:] = values
        self.release()
        return stored

    def taken(self, values: NDArray[Any], order: NDArray[Any]) -> NDArray[Any]:
        """Return ``values[order]`` as a new array."""
        taken = self.empty(len(order), values.dtype)
        np.take(values, order, out=taken, mode="clip")
        self.release()
        return taken

    def release(self) -> None:
        """Unmap the pages of all files to limit resident memory. Accessing a page maps it again."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)
