"""Tells which workers may have the token: those that a router alone names do not."""

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
    """The hosts that a user trusts with the token."""

    patterns: tuple[str, ...]
    """Names and addresses, in which ``*`` stands for anything, and networks."""
    named: frozenset[str]
    """Hosts of URLs that the user gave."""

    @classmethod
    def of(cls, patterns: Iterable[str], urls: Iterable[str]) -> WorkerHosts:
        """Trust what fits a pattern, and the hosts of some URLs."""
        return cls(tuple(pattern.lower() for pattern in patterns), frozenset(map(_host, urls)))

    def refusal(self, url: str) -> TargetError | None:
        """Return why a worker may not have the token; None if it may."""
        host = _host(url)
        if host in self.named:
            return None
        if host.startswith(SOCKET):
            fix = "If it is one, give it in urls of its role's targets."
            return TargetError(
                f"{url}: only its router names it, and this socket may be anything. {fix}", Outcome.REFUSED, fix
            )
        if any(_fits(host, pattern) for pattern in self.patterns):
            return None
        fix = f"If it may have it, say so in its role's targets: worker_hosts: [{host or 'HOST'}], or [10.0.0.0/8]."
        text = f"{url}: only its router names it, and {TOKEN_VARIABLE} goes to no host that you have not named. {fix}"
        return TargetError(text, Outcome.REFUSED, fix)


def _host(url: str) -> str:
    """Return a URL's host, with one name for this host, or all of it for a Unix socket; empty if it is no URL."""
    host = ""
    if url.startswith(SOCKET):
        return url
    with contextlib.suppress(ValueError):
        host = (yarl.URL(url).host or "").lower()
        return "localhost" if ipaddress.ip_address(host).is_loopback else host
    return host


def _fits(host: str, pattern: str) -> bool:
    if "/" not in pattern:
        return fnmatch.fnmatchcase(host, pattern)
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(pattern, strict=False)
    except ValueError:  # a name: it says nothing of the address that it will have
        return False
