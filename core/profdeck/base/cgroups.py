"""Directories of the cgroups that contain this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cgroup_directories(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the directory of each of a controller's cgroups, innermost first, and whether it belongs to cgroups v1.

    In a container, ``/proc/self/cgroup`` may contain the cgroup's path on the host. In that case, the container's own
    cgroup is at the root of the cgroup mount, and some of the directories do not exist.

    Args:
        controller: name of the controller, such as ``memory``.
        root: directory that contains ``proc`` and ``sys``.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / (f"sys/fs/cgroup/{controller}" if controllers else "sys/fs/cgroup")
        group = mount / path.lstrip("/")
        for directory in (group, *group.parents):
            yield directory, bool(controllers)
            if directory == mount:
                break
