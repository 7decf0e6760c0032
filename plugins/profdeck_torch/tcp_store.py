"""Captures on demand through the store that the ranks of a torch.distributed job meet by.

With torchrun the agent of the first host serves it for as long as the job runs; else rank 0 does, from the moment when
its process group is made. Each process has a connection of its own, so that nothing waits for calls of the job's.

Source of the keys' behaviour: torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp: ``compare_set`` with nothing
expected sets a key that does not exist, and returns what stands. An empty value stands for no note here.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from profdeck.base.errors import ConfigError, MissingLibraryError
from profdeck.on_demand.stores import Store

T = TypeVar("T")

_ANSWER = timedelta(seconds=5)
_HIGHEST_PORT = (1 << 16) - 1


def connect(run: str, address: str | None) -> TcpStore:
    """Return the store of a job.

    Args:
        run: the name of the run.
        address: ``HOST:PORT``; None in a process of the job, where ``MASTER_ADDR`` and ``MASTER_PORT`` say it.

    Raises:
        ConfigError: that is no address, or no launcher has set one.
        MissingLibraryError: torch is not installed.
    """
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        raise MissingLibraryError(
            "The store 'tcpstore' needs torch, which is not installed. Install it with: pip install 'profdeck[torch]'"
        )
    if address is None:
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not host or not port:
            raise ConfigError(
                "on_demand: tcpstore needs MASTER_ADDR and MASTER_PORT, as torchrun sets them, and this process has "
                "none. Set them, or choose on_demand: true where all processes share the run directory."
            )
        address = f"{host}:{port}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _HIGHEST_PORT:
        raise ConfigError(f"The address of a tcpstore is HOST:PORT, such as 10.0.0.1:29500, not {address!r}.")
    return TcpStore(run, host.strip("[]"), int(port))


class TcpStore(Store):
    """Notes in a ``torch.distributed.TCPStore``."""

    def __init__(self, run: str, host: str, port: int) -> None:
        self.address = f"tcpstore:{host}:{port}"
        self._prefix = f"profdeck/{run}/"
        self._where = host, port
        self._client: Any = None
        self._mutex = threading.Lock()
        self._listed: set[str] = set()

    def read(self, name: str) -> bytes | None:
        """See `Store`."""
        return self.create(name, b"")

    def read_all(self, prefix: str) -> Mapping[str, bytes]:
        """See `Store`."""
        names = list(dict.fromkeys((self.read(prefix) or b"").decode().split()))

        def found(client: Any) -> Mapping[str, bytes]:
            values = client.multi_get([self._key(name) for name in names]) if names else []
            return {name: bytes(value) for name, value in zip(names, values, strict=True) if value}

        return self._call(found)

    def create(self, name: str, text: bytes) -> bytes | None:
        """See `Store`."""
        return self._call(lambda client: bytes(client.compare_set(self._key(name), "", text.decode()))) or None

    def put(self, name: str, text: bytes) -> None:
        """See `Store`."""
        directory, slash, _ = name.rpartition("/")

        def put(client: Any) -> None:
            client.set(self._key(name), text)
            if slash and name not in self._listed:
                client.append(self._key(f"{directory}/"), f"{name}\n")
                self._listed.add(name)

        self._call(put)

    def remove(self, name: str, text: bytes) -> None:
        """See `Store`."""
        self._call(lambda client: client.compare_set(self._key(name), text.decode(), ""))

    def close(self) -> None:
        """See `Store`."""
        self._client = None

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _reach(self) -> None:
        try:
            socket.create_connection(self._where, _ANSWER.total_seconds()).close()
        except OSError as error:
            raise ConnectionError(f"Nothing answers at {self.address}: {error.strerror or error}") from None

    def _call(self, call: Callable[[Any], T]) -> T:
        """Call the store.

        Raises:
            OSError: it cannot be reached.
        """
        from torch.distributed import TCPStore

        host, port = self._where
        try:
            with self._mutex:
                if self._client is None:
                    # Asked first, as torch writes pages to stderr when nobody listens.
                    self._reach()
                    self._client = TCPStore(host, port, is_master=False, timeout=_ANSWER, wait_for_workers=False)
                client = self._client
            return call(client)
        except RuntimeError as error:  # DistStoreError and DistNetworkError are
            self._client = None  # the next call connects again
            text = str(error).partition("\n")[0]
            raise ConnectionError(f"The store of the job at {host}:{port} does not answer: {text}") from None
