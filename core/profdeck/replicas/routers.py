"""Finds a router whose URL nobody knows: those of RL jobs listen at random ports, and say them in a log.

Every server that might be one is asked for its workers, without any key. Routers are told by their answer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from profdeck.base.errors import CaptureError
from profdeck.engine.clusters import installed_clusters
from profdeck.replicas.discovery import workers_of
from profdeck.replicas.fan_out import fan_out

AUTO = "auto"
"""Value to use instead of a URL, to find the router of this host or of its cluster job."""

_LOGS = ("*.out", "*.err", "*.log")
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENING = "0A"
_MENTION = re.compile(
    r"(?:https?://)?((?:\d{1,3}\.){3}\d{1,3}|\[[0-9a-fA-F:]+\]|[A-Za-z][\w-]*(?:\.[\w-]+)*):(\d{2,5})\b"
)
_TAIL_BYTES = 4 << 20
_MOST = 500
_ASK_S = 2.0
_ALL_S = 20.0


def is_search_location(where: str) -> bool:
    """Tell what `find_router` takes from the URL of a router."""
    return where == AUTO or Path(where).is_file()


async def find_router(where: str) -> str:
    """Return the URL of the one router that is found.

    Args:
        where: `AUTO`, or the path of a log that mentions it.

    Raises:
        CaptureError: none is found, or several are.
    """
    places, candidates = _candidates(where)
    urls = list(dict.fromkeys(candidates))[:_MOST]
    answers = await fan_out(_is_router, urls, timeout_s=_ALL_S, each_timeout_s=_ASK_S)
    found = _distinct(url for url, answer in zip(urls, answers, strict=True) if answer is True)
    if len(found) == 1:
        return found[0]
    what = f"Several routers answer: {', '.join(found)}" if found else f"No router answers at {len(urls)} places"
    raise CaptureError(f"{what}; looked at {places}. Name it: --router URL.")


def _candidates(where: str) -> tuple[str, list[str]]:
    """Return a description of the searched places, and the URLs found there."""
    if where != AUTO:
        return f"the lines of {where} that mention a router", [*_mentioned(Path(where))]
    places, urls = "the ports of this host", [*_ports()]
    for cluster in installed_clusters():
        if cluster.log_directory is not None:
            places += f" and the logs of its {cluster.title} session"
            for log in [log for pattern in _LOGS for log in cluster.log_directory.glob(pattern)]:
                with contextlib.suppress(CaptureError):  # logs of exited workers can disappear
                    urls += _mentioned(log)
    return places, urls


async def _is_router(url: str) -> bool:
    await workers_of(url, None, _ASK_S)
    return True


def _distinct(urls: Iterable[str]) -> list[str]:
    """Return each router once: it may be mentioned by its host's address, and listen at all of them."""
    found: dict[str, str] = {}
    for url in urls:
        found.setdefault(url.rpartition(":")[2], url)
    return list(found.values())


def _ports() -> Iterator[str]:
    """Yield the URLs at which something on this host listens. Source: ``/proc/net/tcp`` (proc(5))."""
    for table in _TABLES:
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_ = line.split()
            if state == _LISTENING:
                address, port = local.split(":")
                yield _url(_address(address), int(port, 16))


def _address(text: str) -> str:
    """Read an address as the kernel writes it: in words of the machine's own order."""
    written = bytes.fromhex(text)
    words = [written[index : index + 4] for index in range(0, len(written), 4)]
    address = ipaddress.ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))
    if address.is_unspecified:
        return "127.0.0.1" if isinstance(address, ipaddress.IPv4Address) else "::1"
    return str(address)


def _mentioned(log: Path) -> Iterator[str]:
    """Yield the URLs in the lines of a log that mention a router, from the last line to the first.

    Raises:
        CaptureError: The log cannot be read.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        raise CaptureError(f"{log}: cannot be read: {error.strerror}.") from None
    for line in reversed(lines):
        if "router" in line.lower():
            yield from (_url(found[1].strip("[]"), int(found[2])) for found in _MENTION.finditer(line))


def _url(host: str, port: int) -> str:
    host = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104  # of a server here
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
