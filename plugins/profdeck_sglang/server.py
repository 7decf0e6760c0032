"""Engines behind SGLang's HTTP server: our own routes when it has them, else SGLang's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from profdeck.base.errors import CaptureError, TargetError
from profdeck.base.outcome import Outcome
from profdeck.engine.transport.http_client import HttpResponse
from profdeck.engine.transport.http_engine import HttpEngine
from profdeck_sglang.engines import SglangEngine


class SglangServer(HttpEngine, SglangEngine):
    """A server of SGLang by URL."""

    async def start_profile(self, **arguments: Any) -> None:
        """Call SGLang's route, which says no more than that it failed."""
        self._native(await self.request("POST", "/start_profile", arguments, starts=True))

    async def stop_profile(self) -> None:
        """Call SGLang's route."""
        self._native(await self.request("POST", "/stop_profile"))

    async def launched_with(self) -> Mapping[str, Any]:
        """Ask the server, which answers with its arguments."""
        info = await self._info()
        if info is None:
            text = f"{self.name}/server_info does not answer as a server of SGLang does."
            raise TargetError(text, Outcome.NOT_ENABLED)
        return info

    async def is_sglang(self) -> bool:
        """Tell whether the server is SGLang's."""
        try:
            return await self._info() is not None
        except CaptureError:
            return False

    async def is_here(self) -> bool:
        """Tell by the address: other names of this host count as other hosts."""
        return self.url.host in {"127.0.0.1", "localhost", "::1"}

    async def environment(self) -> Mapping[str, str]:
        """Return that of the process which listens at the port; empty if that cannot be seen."""
        return await self.call(_environment_of, self.url.port) if await self.is_here() else {}

    async def _info(self) -> dict[str, Any] | None:
        response = await self.request("GET", "/server_info")
        try:
            info = response.json()
        except ValueError:
            return None
        return info if isinstance(info, dict) and {"tp_size", "version", "internal_states"} <= info.keys() else None

    def _native(self, response: HttpResponse) -> None:
        if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
            raise TargetError(
                f"{self.name}: SGLang's {response.path} failed; why is only in the server's log. Is another profile "
                "active, or did this one end by itself?",
                Outcome.REFUSED,
                "See the server's log.",
            )
        self.expect_success(response)


def _environment_of(port: int) -> Mapping[str, str]:
    sockets = {Path(f"socket:[{inode}]") for inode in _listening(port)}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if any(link.readlink() in sockets for link in (process / "fd").iterdir()):
                pairs = (process / "environ").read_text(errors="replace").split("\0")
                return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        except OSError:  # it has ended, or is somebody else's
            continue
    return {}


def _listening(port: int) -> Iterator[str]:
    """Yield the inodes of sockets that listen at a port of this host; see proc_net_tcp in the kernel's docs."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]
