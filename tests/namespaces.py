"""Simulated hosts: linked network, mount, UTS and time namespaces, and Unix clocks with an offset."""

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
"""Command prefix, followed by a directory: run the command with another host name and with the directory empty."""
_OWN_NETWORK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
_SWITCH = "ip link set lo up; ip link add switch type bridge; ip link set switch up; echo ready; exec cat"
_HOST = 'hostname "$0"; mount -t tmpfs own "$1"; ip link set lo up; echo ready; exec cat'
_CLOCK_OFFSET_S = 1_000_000
"""Offset between the monotonic clocks of two hosts."""
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

/* Only Unix time is ahead, by AHEAD_NS. Monotonic clocks are unchanged. */
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
    """A simulated host, named ``host-0``, ``host-1`` and so on."""

    name: str
    address: str
    enter: tuple[str, ...]
    """Command prefix that runs a command on this host."""

    def link(self, *arguments: str) -> None:
        """Run ``ip link set eth0`` with the given arguments."""
        subprocess.run([*self.enter, "ip", "link", "set", "eth0", *arguments], check=True)

    def limit(self, rate: str | None) -> None:
        """Limit the host's send rate, such as to ``1mbit``. None removes the limit."""
        shape = ["root", "tbf", "rate", rate, "burst", "16kbit", "latency", "400ms"] if rate else ["root"]
        subprocess.run([*self.enter, "tc", "qdisc", "replace" if rate else "del", "dev", "eth0", *shape], check=True)


def own_network() -> list[str]:
    """Return a command prefix that runs a command in a new network namespace.

    The test is skipped if the process may not create network namespaces.
    """
    if subprocess.run([*_OWN_NETWORK, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a second node is unavailable: unshare is not allowed to create network namespaces")
    return _OWN_NETWORK


@contextmanager
def linked_hosts(count: int, own: Path) -> Iterator[list[Host]]:
    """Create hosts that share a network and all files, except that each has its own empty directory `own`.

    If the kernel has time namespaces, the hosts have different monotonic and boot clocks. The test is skipped if the
    process may not create the other namespaces.
    """
    if shutil.which("ip") is None:
        pytest.skip("other hosts are unavailable: ip(8) of iproute2 is not installed")
    with ending() as started:

        def start_in_namespaces(*command: str) -> str:
            pipe = subprocess.PIPE
            process = subprocess.Popen(["unshare", *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            started.append(process)
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                pytest.skip("other hosts are unavailable: unshare is not allowed to create namespaces")
            return str(process.pid)

        switch = start_in_namespaces("--net", "sh", "-c", _SWITCH)
        hosts = []
        has_time_namespaces = not subprocess.run(
            ["unshare", "--time", "true"], check=False, stderr=subprocess.DEVNULL
        ).returncode
        for number in range(count):
            name = f"host-{number}"
            offset_s = str(_CLOCK_OFFSET_S * (number + 1))
            time = ["--time", "--monotonic", offset_s, "--boottime", offset_s] if has_time_namespaces else []
            pid = start_in_namespaces("--net", "--mount", "--uts", *time, "sh", "-c", _HOST, name, str(own))
            port = ["name", f"port{number}", "netns", switch]
            link = ["ip", "link", "add", "eth0", "netns", pid, "type", "veth", "peer", *port]
            subprocess.run(link, check=True)
            set_port = ["nsenter", "-t", switch, "--net", "--", "ip", "link", "set", f"port{number}"]
            subprocess.run([*set_port, "master", "switch", "up"], check=True)
            namespaces = ["--net", "--mount", "--uts", *(["--time"] if has_time_namespaces else [])]
            enter = ("nsenter", "-t", pid, *namespaces, "--")
            address = f"10.77.0.{number + 1}"
            subprocess.run([*enter, "ip", "address", "add", f"{address}/24", "dev", "eth0"], check=True)
            hosts.append(Host(name, address, enter))
            hosts[-1].link("up")
        yield hosts


def clock_that_is_ahead(directory: Path, ahead_ns: int) -> dict[str, str]:
    """Return environment variables that set a program's Unix time ahead by `ahead_ns`.

    The test is skipped if there is no C compiler.
    """
    if shutil.which("cc") is None:
        pytest.skip("clocks cannot be set ahead: there is no C compiler")
    library = directory / "clock.so"
    if not library.exists():
        source = directory / "clock.c"
        source.write_text(_CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "AHEAD_NS": str(ahead_ns)}
