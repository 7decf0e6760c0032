"""Finds the URL of a router on this host, or in log files. The routers of RL jobs listen at random ports.

Each candidate is queried for its workers, without an API key. Only routers reply with a list of workers.
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
from profdeck.replicas.discovery import query_workers
from profdeck.replicas.fan_out import fan_out
from profdeck_traces.base.files import user_path

AUTO = "auto"
"""Value that selects the router on this host, or in the logs of its cluster job."""

_LOG_PATTERNS = ("*.out", "*.err", "*.log")
_SOCKET_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENING = "0A"
_ADDRESS = re.compile(
    r"(?:https?://)?((?:\d{1,3}\.){3}\d{1,3}|\[[0-9a-fA-F:]+\]|[A-Za-z][\w-]*(?:\.[\w-]+)*):(\d{2,5})\b"
)
_TAIL_BYTES = 4 << 20
_MAX_URLS = 500
_QUERY_S = 2.0
_ALL_QUERIES_S = 20.0


def is_search_location(location: str) -> bool:
    """Return whether `find_router` accepts a location. Otherwise, it is treated as the URL of a router."""
    return location == AUTO or ("://" not in location and user_path(location).is_file())


async def find_router(location: str) -> str:
    """Return the URL of the only router at a location.

    Args:
        location: `AUTO`, or the path of a log file that contains the URL.

    Raises:
        CaptureError: no router responds, or several do.
    """
    description, candidates = _candidates(location)
    urls = list(dict.fromkeys(candidates))[:_MAX_URLS]
    replies = await fan_out(_is_router, urls, timeout_s=_ALL_QUERIES_S, each_timeout_s=_QUERY_S)
    routers = _unique_by_port(url for url, reply in zip(urls, replies, strict=True) if reply is True)
    if len(routers) == 1:
        return routers[0]
    problem = f"Several routers respond: {', '.join(routers)}" if routers else f"None of {len(urls)} URLs is a router"
    raise CaptureError(f"{problem}. Searched {description}. To specify the router, use --router URL.")


def _candidates(location: str) -> tuple[str, list[str]]:
    """Return a description of the searched locations, and the URLs found there."""
    if location != AUTO:
        return f"the lines of {location} that mention a router", [*_urls_in_log(user_path(location))]
    description, urls = "the ports of this host", [*_listening_urls()]
    for cluster in installed_clusters():
        if cluster.log_directory is not None:
            description += f" and the logs of its {cluster.title} session"
            for log in [log for pattern in _LOG_PATTERNS for log in cluster.log_directory.glob(pattern)]:
                with contextlib.suppress(CaptureError):  # logs of exited workers can disappear
                    urls += _urls_in_log(log)
    return description, urls


async def _is_router(url: str) -> bool:
    await query_workers(url, None, _QUERY_S)
    return True


def _unique_by_port(urls: Iterable[str]) -> list[str]:
    """Return one URL per port, because a router that listens at all addresses can be found by several addresses."""
    url_by_port: dict[str, str] = {}
    for url in urls:
        url_by_port.setdefault(url.rpartition(":")[2], url)
    return list(url_by_port.values())


def _listening_urls() -> Iterator[str]:
    """Yield the URLs of all listening TCP sockets on this host, from ``/proc/net/tcp`` and ``tcp6`` (proc(5))."""
    for table in _SOCKET_TABLES:
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_ = line.split()
            if state == _LISTENING:
                address, port = local.split(":")
                yield _url(_parse_address(address), int(port, 16))


def _parse_address(text: str) -> str:
    """Parse a hexadecimal address of the kernel, which consists of 32-bit words in native byte order."""
    data = bytes.fromhex(text)
    words = [data[index : index + 4] for index in range(0, len(data), 4)]
    address = ipaddress.ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))
    if address.is_unspecified:
        return "127.0.0.1" if isinstance(address, ipaddress.IPv4Address) else "::1"
    return str(address)


def _urls_in_log(log: Path) -> Iterator[str]:
    """Yield the URLs in lines of a log that mention a router, starting with the last line.

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
            yield from (_url(match[1].strip("[]"), int(match[2])) for match in _ADDRESS.finditer(line))


def _url(host: str, port: int) -> str:
    host = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104  # compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
