"""The memory available to this process, and how much its memory usage has grown."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from profdeck.base.cgroups import cgroup_directories

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ROOT = Path("/")
_V1_FILES = ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
_V2_FILES = ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")


def free_bytes(root: Path = _ROOT) -> float:
    """Return how much memory this process can still allocate, in bytes.

    This is the smallest amount that is free on the host, in the process's cgroups and under RLIMIT_AS. Values that
    cannot be read are ignored. If none can be read, the result is infinite.

    Args:
        root: directory that contains ``proc`` and ``sys``.
    """
    available = [limit - used for limit, used in _cgroups(root)]
    with contextlib.suppress(OSError, ValueError, KeyError):
        available.append(_fields(root / "proc/meminfo")["MemAvailable:"] * 1024)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError):
            available.append(limit - _own_bytes(root, 0))
    return max(0, min(available, default=math.inf))


class MemoryGrowth:
    """Growth of this process's private resident memory since the creation of this object.

    Mapped files and shared memory are excluded: the kernel can reclaim the pages of a mapped dataset or checkpoint, and
    recorders do not use shared memory.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        """Args:
        root: directory that contains ``proc`` and ``sys``.
        """
        self._root = root
        self._initial_bytes = self._resident_bytes()

    def describe_excess(self, max_share: float) -> str | None:
        """Return a message if the growth exceeds the given share of the free memory, otherwise None."""
        growth, free = self._resident_bytes() - self._initial_bytes, free_bytes(self._root)
        if growth <= max_share * free:
            return None
        return (
            f"the process grew by {growth / 1e6:,.0f} MB during the capture, more than max_memory_share={max_share:g} "
            f"of the {free / 1e6:,.0f} MB of free memory"
        )

    def _resident_bytes(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return _own_bytes(self._root, 1) - _own_bytes(self._root, 2)
        return 0


def _own_bytes(root: Path, field: int) -> int:
    """Return a field of ``/proc/self/statm``: 0 is the address space, 1 the resident memory, 2 its shared part."""
    return int((root / "proc/self/statm").read_text(encoding="ascii").split()[field]) * _PAGE_BYTES


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and usage in bytes of each memory cgroup of this process."""
    for directory, is_v1 in cgroup_directories("memory", root):
        limit_names, usage_name, cache_names = _V1_FILES if is_v1 else _V2_FILES
        limits = [limit for name in limit_names if (limit := _read_number(directory / name)) is not None]
        usage = _read_number(directory / usage_name)
        if limits and usage is not None:
            with contextlib.suppress(OSError, ValueError):
                statistics = _fields(directory / "memory.stat")
                # Exclude the page cache, which the kernel can reclaim.
                usage -= sum(statistics.get(name, 0) for name in cache_names)
            yield min(limits), usage


def _read_number(path: Path) -> int | None:
    """Return the number in a file, or None if the file is missing or contains ``max``."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """Map the first word of each line to the number that follows it."""
    rows = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
