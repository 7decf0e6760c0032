"""Hosts of a test's own: network, mount, UTS and time namespaces with a link between them, and clocks set apart."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

from processes import ending

OTHER_HOST = ["unshare", "--uts", "--mount", "sh", "-c", 'hostname elsewhere; mount -t tmpfs own "$0"; exec "$@"']
"""What a command begins with, with a directory behind it, to run on a host with another name and nothing in that."""
_OWN_NETWORK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
_SWITCH = "ip link set lo up; ip link add switch type bridge; ip link set switch up; echo ready; exec cat"
_HOST = 'hostname "$0"; mount -t tmpfs own "$1"; ip link set lo up; echo ready; exec cat'
_APART_S = 1_000_000
"""By how much the clocks of two hosts differ that nobody sets."""
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

/* Unix time alone is set apart, by AHEAD_NS: what counts durations stays. */
static long long ahead(void) {
    const char *text = getenv("AHEAD_NS");
    return text ? atoll(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, found);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long ns = found->tv_sec * 1000000000LL + found->tv_nsec + ahead();
        found->tv_sec = ns / 1000000000LL;
        found->tv_nsec = ns % 1000000000LL;
    }
    return failed;
}

int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


@attrs.frozen
class Host:
    """A host; its name is ``host-0``, ``host-1`` and so on."""

    name: str
    address: str
    enter: tuple[str, ...]
    """What a command begins with that is to run there."""

    def link(self, *how: str) -> None:
        """Change its link, by words of ``ip link set eth0``."""
        subprocess.run([*self.enter, "ip", "link", "set", "eth0", *how], check=True)

    def limit(self, rate: str | None) -> None:
        """Let it send so much in a second at most, such as ``1mbit``, or as much as there is."""
        shape = ["root", "tbf", "rate", rate, "burst", "16kbit", "latency", "400ms"] if rate else ["root"]
        subprocess.run([*self.enter, "tc", "qdisc", "replace" if rate else "del", "dev", "eth0", *shape], check=True)


def own_network() -> list[str]:
    """Return what a command begins with that is to run in a network namespace of its own, where Ray joins nodes.

    Skips the test where that is not allowed.
    """
    if subprocess.run([*_OWN_NETWORK, "true"], capture_output=True, check=False).returncode:
        pytest.skip("there is no second node: unshare is not allowed to make network namespaces here")
    return _OWN_NETWORK


@contextmanager
def linked_hosts(count: int, own: Path) -> Iterator[list[Host]]:
    """Make hosts that share a network, and all files but those below one directory, which is empty on each.

    Each was started at another time, as its monotonic clock and that since the boot say, where the kernel has
    namespaces of time. Skips the test where other namespaces are not allowed.
    """
    if shutil.which("ip") is None:
        pytest.skip("there are no other hosts: ip(8) of iproute2 is not installed")
    with ending() as started:

        def unshared(*command: str) -> str:
            pipe = subprocess.PIPE
            given = ["unshare", *command]
            started.append(subprocess.Popen(given, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
            stdout = started[-1].stdout
            assert stdout is not None
            if stdout.readline() != "ready\n":
                pytest.skip("there are no other hosts: unshare is not allowed to make namespaces here")
            return str(started[-1].pid)

        switch = unshared("--net", "sh", "-c", _SWITCH)
        hosts = []
        has_time = not subprocess.run(["unshare", "--time", "true"], check=False, stderr=subprocess.DEVNULL).returncode
        for number in range(count):
            name = f"host-{number}"
            since = str(_APART_S * (number + 1))
            time = ["--time", "--monotonic", since, "--boottime", since] if has_time else []
            pid = unshared("--net", "--mount", "--uts", *time, "sh", "-c", _HOST, name, str(own))
            port = ["name", f"port{number}", "netns", switch]
            link = ["ip", "link", "add", "eth0", "netns", pid, "type", "veth", "peer", *port]
            subprocess.run(link, check=True)
            in_switch = ["nsenter", "-t", switch, "--net", "--", "ip", "link", "set", f"port{number}"]
            subprocess.run([*in_switch, "master", "switch", "up"], check=True)
            entered = ["--net", "--mount", "--uts", *(["--time"] if has_time else [])]
            enter = ("nsenter", "-t", pid, *entered, "--")
            address = f"10.77.0.{number + 1}"
            subprocess.run([*enter, "ip", "address", "add", f"{address}/24", "dev", "eth0"], check=True)
            hosts.append(Host(name, address, enter))
            hosts[-1].link("up")
        yield hosts


def clock_that_is_ahead(directory: Path, ahead_ns: int) -> dict[str, str]:
    """Return what programs are to have in their environment so that their Unix time is ahead by so much.

    Skips the test where there is no C compiler.
    """
    if shutil.which("cc") is None:
        pytest.skip("clocks cannot be set apart: there is no C compiler")
    library = directory / "clock.so"
    if not library.exists():
        source = directory / "clock.c"
        source.write_text(_CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "AHEAD_NS": str(ahead_ns)}
