"""Captures on demand through the store that the ranks of a torch.distributed job meet by.

With torchrun the agent of the first host serves it for as long as the job runs; else rank 0 does, from the moment when
its process group is made. Each process has a connection of its own, so that nothing waits for calls of the job's.

Source of the keys' behaviour: torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp: ``compare_set`` with nothing
expected sets a key that does not exist, and returns what stands. An empty value stands for no note here.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from profdeck.base.errors import ConfigError, MissingLibraryError
from profdeck.on_demand.stores import Store

T = TypeVar("T")

_ANSWER = timedelta(seconds=5)
_GIVE_UP_S = 10.0
_CLOSE_S = 1.0
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
        raise MissingLibraryError.of("The store 'tcpstore' needs", "torch")
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
    import torch.distributed  # noqa: F401  # it takes seconds, which no call may be charged for

    return TcpStore(run, host.strip("[]"), int(port))


class TcpStore(Store):
    """Notes in a ``torch.distributed.TCPStore``."""

    def __init__(self, run: str, host: str, port: int) -> None:
        self.address = f"tcpstore:{host}:{port}"
        self._prefix = f"profdeck/{run}/"
        self._where = host, port
        self._worker: _Worker | None = None
        self._closed = False
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
        """See `Store`; what is no text, and so none of ours, goes in any case."""
        try:
            expected = text.decode()
        except UnicodeDecodeError:
            self.put(name, b"")
        else:
            self._call(lambda client: client.compare_set(self._key(name), expected, ""))

    def close(self) -> None:
        """See `Store`."""
        with self._mutex:
            self._closed, worker = True, self._worker
        if worker is not None:
            self._drop(worker)
            # The interpreter ends threads that come back from torch meanwhile, and that ends the process.
            worker.thread.join(_CLOSE_S)

    def _drop(self, worker: _Worker) -> None:
        """Let a connection end as soon as it does not hang; the next call makes another."""
        worker.calls.put(None)
        with self._mutex:
            if self._worker is worker:
                self._worker = None

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _call(self, call: Callable[[Any], T]) -> T:
        """Call the store, which another thread does: its client waits without end for a server that does not answer.

        Raises:
            OSError: it cannot be reached.
        """
        with self._mutex:
            if self._closed:
                raise ConnectionError(f"{self.address} is closed here")
            worker = self._worker = self._worker or _Worker(self._connect)
        result: Future[T] = Future()
        worker.calls.put((call, result))
        try:
            return result.result(_GIVE_UP_S)
        except OSError as error:  # TimeoutError is one
            self._drop(worker)
            if str(error):
                raise
            raise TimeoutError(f"{self.address} has not answered for {_GIVE_UP_S:g} seconds") from None
        except RuntimeError as error:  # DistStoreError and DistNetworkError are
            self._drop(worker)
            text = str(error).partition("\n")[0]
            raise ConnectionError(f"{self.address} does not answer: {text}") from None

    def _connect(self) -> Any:
        from torch.distributed import TCPStore

        host, port = self._where
        try:  # first, as torch writes pages to stderr when nobody listens
            socket.create_connection(self._where, _ANSWER.total_seconds()).close()
        except OSError as error:
            raise ConnectionError(f"Nothing answers at {self.address}: {error.strerror or error}") from None
        return TCPStore(host, port, is_master=False, timeout=_ANSWER, wait_for_workers=False)


class _Worker:
    """A connection and the thread that uses it, which is left behind if it hangs."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self.calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, args=(connect,), name="profdeck store", daemon=True)
        self.thread.start()

    def _work(self, connect: Callable[[], Any]) -> None:
        client = None
        while (given := self.calls.get()) is not None:
            call, result = given
            try:
                client = client or connect()
                result.set_result(call(client))
            except Exception as error:  # noqa: BLE001  # the caller gets it
                result.set_exception(error)
