"""Decides which workers may receive the token. Workers that only a router lists must have a trusted host."""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
from collections.abc import Iterable

import attrs
import yarl

from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.config.targets import SOCKET
from profdeck.engine.transport.token import TOKEN_VARIABLE


@attrs.frozen
class WorkerHosts:
    """Hosts that may receive the token."""

    patterns: tuple[str, ...]
    """Names and addresses, in which ``*`` matches any text, and networks."""
    configured_hosts: frozenset[str]
    """Hosts of the URLs in the config."""

    @classmethod
    def from_config(cls, patterns: Iterable[str], urls: Iterable[str]) -> WorkerHosts:
        """Trust hosts that match a pattern, and the hosts of ``urls``."""
        return cls(tuple(pattern.lower() for pattern in patterns), frozenset(map(_host, urls)))

    def check(self, url: str) -> TargetError | None:
        """Return an error if a worker may not receive the token, otherwise None."""
        host = _host(url)
        if host in self.configured_hosts:
            return None
        if host.startswith(SOCKET):
            fix = "If you trust this socket, add it to urls under targets."
            text = f"{url}: only the router lists this socket, so profdeck does not connect to it. {fix}"
            return TargetError(text, Outcome.REFUSED, fix)
        if any(_matches(host, pattern) for pattern in self.patterns):
            return None
        fix = f"If you trust this host, set worker_hosts: [{host or 'HOST'}] or a network such as [10.0.0.0/8]."
        text = f"{url}: only the router lists this worker, so {TOKEN_VARIABLE} is not sent to its host. {fix}"
        return TargetError(text, Outcome.REFUSED, fix)


def _host(url: str) -> str:
    """Return the host of a URL, the complete URL of a Unix socket, or an empty string for an invalid URL.

    All loopback addresses are returned as ``localhost``.
    """
    host = ""
    if url.startswith(SOCKET):
        return url
    with contextlib.suppress(ValueError):
        host = (yarl.URL(url).host or "").lower()
        return "localhost" if ipaddress.ip_address(host).is_loopback else host
    return host


def _matches(host: str, pattern: str) -> bool:
    if "/" not in pattern:
        return fnmatch.fnmatchcase(host, pattern)
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(pattern, strict=False)
    except ValueError:  # a host name, whose address is not resolved
        return False
