"""Tests for the measurement of free memory on hosts, in containers and in processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from profdeck.base.memory import MemoryGrowth, free_bytes

MB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory with the files in which a host reports 1000 MB of free memory."""
    write(
        tmp_path, "proc/meminfo", f"MemTotal: 4096000 kB\nMemAvailable:   {1000 << 10} kB\nHugePages_Total:       0\n"
    )
    write(tmp_path, "proc/self/statm", "1000 100 50 1 0 500 0\n")
    return tmp_path


def write(root: Path, name: str, content: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}", encoding="utf-8")


def test_host_without_cgroups(root: Path) -> None:
    assert free_bytes(root) == 1000 * MB


def test_unknown_memory_is_infinite(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) == float("inf")


@pytest.mark.parametrize("limit", ["memory.max", "memory.high"])
def test_limits_of_cgroups_v2_and_of_their_parents(root: Path, limit: str) -> None:
    write(root, "proc/self/cgroup", "0::/job/step\n")
    write(root, "sys/fs/cgroup/job/step/memory.max", "max\n")
    write(root, "sys/fs/cgroup/job/step/memory.current", 10 * MB)
    write(root, f"sys/fs/cgroup/job/{limit}", 500 * MB)
    write(root, "sys/fs/cgroup/job/memory.current", 300 * MB)
    assert free_bytes(root) == 200 * MB
    write(root, "sys/fs/cgroup/job/memory.stat", f"anon 1\ninactive_file {50 * MB}\nactive_file {20 * MB}\n")
    assert free_bytes(root) == 270 * MB


def test_limits_of_cgroups_v1_in_a_container(root: Path) -> None:
    """A container mounts its own cgroup as the root, but /proc/self/cgroup shows the path on the host."""
    write(root, "proc/self/cgroup", "9:name=systemd:/\n4:cpuset,memory:/docker/0123\n0::/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 400 * MB)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", 150 * MB)
    write(root, "sys/fs/cgroup/memory/memory.stat", f"inactive_file 5\ntotal_inactive_file {10 * MB}\n")
    assert free_bytes(root) == 260 * MB


def test_unlimited_cgroup_v1(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", 150 * MB)
    assert free_bytes(root) == 1000 * MB


def test_growth_of_mapped_files_is_ignored(root: Path) -> None:
    growth = MemoryGrowth(root)
    pages = 500 * MB >> 12
    write(root, "proc/self/statm", f"100000 {100 + pages} {50 + pages} 1 0 500 0\n")
    assert growth.describe_excess(0.1) is None


def test_growth_is_compared_with_the_free_memory(root: Path) -> None:
    growth = MemoryGrowth(root)
    assert growth.describe_excess(0.1) is None
    write(root, "proc/self/statm", f"100000 {100 + (99 * MB >> 12)} 50 1 0 500 0\n")
    assert growth.describe_excess(0.1) is None
    write(root, "proc/self/statm", f"100000 {100 + (101 * MB >> 12)} 50 1 0 500 0\n")
    assert growth.describe_excess(0.1) == (
        "the process grew by 106 MB during the capture, more than max_memory_share=0.1 of the 1,049 MB of free memory"
    )
