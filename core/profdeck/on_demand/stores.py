"""Stores, in which requesters and the processes of a job exchange notes: the run directory, or a store of the job.

A note is a short named text, such as ``demand.json`` or ``processes/trainer.rank_0000.json``. The protocol relies on
`Store.create` being atomic. If several processes create the same note, one succeeds, and the others receive its text.
"""

from __future__ import annotations

import errno
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from profdeck.base.errors import CaptureError
from profdeck.base.json_files import JsonKind, read_regular_file
from profdeck_traces.base import entry_points
from profdeck_traces.base.errors import ConfigError, describe_error
from profdeck_traces.base.files import replace_file, write_new

GROUP = "profdeck.stores"
ADDRESS_FILE = "on_demand.json"
"""File in the run directory that contains the address of the job's remote store."""
_ADDRESS = JsonKind(dict[str, str])


class Store(ABC):
    """Shared store of small named texts. If it cannot be reached, all methods raise OSError within a few seconds."""

    remote: bool = True
    """True if each call needs another process. The job then does not access the store in every step."""
    address: str
    """Address that `open_store` accepts."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the text of a note, or None if the note does not exist."""

    @abstractmethod
    def read_all(self, prefix: str) -> Mapping[str, bytes]:
        """Return the texts of all notes in a directory, such as ``processes/``, by name."""

    @abstractmethod
    def create(self, name: str, text: bytes) -> bytes | None:
        """Create a note atomically unless it exists, and return the stored text.

        Returns:
            None if the stored note is not readable yet. On file systems without hard links, this can happen while
            another process is writing the note.
        """

    @abstractmethod
    def put(self, name: str, text: bytes) -> None:
        """Create or replace a note."""

    @abstractmethod
    def remove(self, name: str, text: bytes) -> None:
        """Remove a note if its text is unchanged."""

    def close(self) -> None:  # noqa: B027  # optional
        """Release connections and other resources."""


Connect: TypeAlias = Callable[[str, str | None], Store]
"""Type of the entry points in `GROUP`: a function that returns the store of a run.

Its arguments are the name of the run and the store's address. If the address is None, the function reads it from the
environment of the job's process. The store connects on its first call. The function raises ConfigError if the address
is invalid or missing.
"""


class FileStore(Store):
    """Store in a run directory that all processes share. Each note is a file."""

    remote = False

    def __init__(self, run: Path) -> None:
        self._run = run
        self.address = str(run)

    def read(self, name: str) -> bytes | None:
        """See `Store`. On file systems without hard links, a file is empty while it is being written."""
        try:
            return read_regular_file(self._run / name) or None
        except FileNotFoundError:
            return None
        except ValueError as error:  # the file is too large
            raise OSError(errno.EFBIG, str(error), str(self._run / name)) from None

    def read_all(self, prefix: str) -> Mapping[str, bytes]:
        """See `Store`."""
        names = (f"{prefix}{file.name}" for file in sorted((self._run / prefix).glob("*.json")))
        return {name: text for name in names if (text := self.read(name))}

    def create(self, name: str, text: bytes) -> bytes | None:
        """See `Store`."""
        try:
            write_new(self._run / name, text)
        except FileExistsError:
            return self.read(name)
        return text

    def put(self, name: str, text: bytes) -> None:
        """See `Store`."""
        path = self._run / name
        path.parent.mkdir(exist_ok=True)
        replace_file(path, text, durable=False)

    def remove(self, name: str, text: bytes) -> None:
        """See `Store`."""
        # Rename the file before comparing its text, because another process could replace it after the comparison.
        renamed = f".{name}.{secrets.token_hex(4)}.tmp"
        try:
            (self._run / name).rename(self._run / renamed)
        except FileNotFoundError:
            return
        if self.read(renamed) in (text, None):
            (self._run / renamed).unlink()
        else:
            (self._run / renamed).replace(self._run / name)


def store_of_job(on_demand: bool | str, run: Path) -> Store:  # noqa: FBT001  # a config value
    """Return the store that the processes of a job use.

    Args:
        on_demand: value of the config key ``on_demand``: the name of a store, or true for the run directory.
        run: the run directory.

    Raises:
        ConfigError: the store is unknown, or its address is not in the environment.
        PluginError: the store's plugin cannot be used.
    """
    if isinstance(on_demand, bool):
        return FileStore(run)
    return _load_connect(on_demand)(run.name, None)


def publish_address(store: Store, run: Path) -> None:
    """Write the address of a remote store to the run directory of this host. Remove an earlier job's address.

    Raises:
        OSError: the file cannot be written or removed.
    """
    if store.remote:
        replace_file(run / ADDRESS_FILE, msgspec.json.encode({"store": store.address}), durable=False)
    else:
        (run / ADDRESS_FILE).unlink(missing_ok=True)


def open_store(run: Path, location: str | None) -> Store:
    """Return the store for requests to a job.

    Args:
        run: the run directory, which has the name of the run.
        location: ``NAME:ADDRESS`` of the store. Default: the location in `ADDRESS_FILE`, or else the run directory.

    Raises:
        CaptureError: `ADDRESS_FILE` cannot be read.
        ConfigError: the location is invalid, or the store is unknown.
        PluginError: the store's plugin cannot be used.
    """
    if location is None:
        file = run / ADDRESS_FILE
        if not os.access(file, os.F_OK):
            return FileStore(run)
        try:
            location = _ADDRESS.read(file)["store"]
        except (OSError, ValueError, KeyError) as error:
            raise CaptureError(f"{file} cannot be read: {describe_error(error)}") from error
    name, _, address = location.partition(":")
    if not name or not address:
        raise ConfigError(f"--store {location}: expected NAME:ADDRESS, such as tcpstore:10.0.0.1:29500.")
    return _load_connect(name)(run.name, address)


def _load_connect(name: str) -> Connect:
    connect: Connect = entry_points.load(GROUP, name)
    return connect
