"""Where a job and those who ask it for captures leave notes for each other: the run directory, or a store of the job.

A note is a small text with a name, such as ``demand.json`` or ``processes/trainer.rank_0000.json``. What all of it
rests on is `Store.create`: of many who put a note of one name, one succeeds, and all others read what that one wrote.
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
from profdeck.base.json_files import JsonKind, read_whole
from profdeck_traces.base import entry_points
from profdeck_traces.base.errors import ConfigError, describe_error
from profdeck_traces.base.files import replace_file, write_new

GROUP = "profdeck.stores"
ADDRESS_FILE = "on_demand.json"
"""In a run directory: which store the job uses, where that is not the directory itself."""
_ADDRESS = JsonKind(dict[str, str])


class Store(ABC):
    """Shared store of small named texts. If it cannot be reached, all methods raise OSError within a few seconds."""

    remote: bool = True
    """Whether each call asks another process, so that a job may not do so in every step."""
    address: str
    """What `open_store` finds it by."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return a note; None if there is none."""

    @abstractmethod
    def read_all(self, prefix: str) -> Mapping[str, bytes]:
        """Return the notes whose names begin with a directory such as ``processes/``, by name."""

    @abstractmethod
    def create(self, name: str, text: bytes) -> bytes | None:
        """Put a note unless there is one, and return the one that stands.

        Returns:
            None if there is one that cannot be read, which on a file system without links it is for an instant.
        """

    @abstractmethod
    def put(self, name: str, text: bytes) -> None:
        """Put a note in the place of the one that may be there."""

    @abstractmethod
    def remove(self, name: str, text: bytes) -> None:
        """Remove a note if it still is that one."""

    def close(self) -> None:  # noqa: B027  # most keep nothing open
        """Give back what is kept open."""


Connect: TypeAlias = Callable[[str, str | None], Store]
"""What an entry point of `GROUP` offers: the store for a run's name, at an address, or at the one that the job's own
processes know from their environment. It connects with the first call, and raises ConfigError for what is no address,
or where there is none.
"""


class FileStore(Store):
    """The run directory itself, which all processes share. Notes are its files."""

    remote = False

    def __init__(self, run: Path) -> None:
        self._run = run
        self.address = str(run)

    def read(self, name: str) -> bytes | None:
        """See `Store`; a file that is being written is empty, where there are no links."""
        try:
            return read_whole(self._run / name) or None
        except FileNotFoundError:
            return None
        except ValueError as error:  # it is too large
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
        # Taken aside first: it could be another one by now, if somebody removed this by hand.
        aside = f".{name}.{secrets.token_hex(4)}.tmp"
        try:
            (self._run / name).rename(self._run / aside)
        except FileNotFoundError:
            return
        if self.read(aside) in (text, None):
            (self._run / aside).unlink()
        else:
            (self._run / aside).replace(self._run / name)


def store_of_job(chosen: bool | str, run: Path) -> Store:  # noqa: FBT001  # as the config says it
    """Return the store that a process of a job uses.

    Args:
        chosen: ``on_demand`` of the config: the name of a store, or true for the run directory.
        run: the run directory.

    Raises:
        ConfigError: there is no such store, or this process knows no address of it.
        PluginError: it cannot be used.
    """
    if isinstance(chosen, bool):
        return FileStore(run)
    return _connect(chosen)(run.name, None)


def publish_address(store: Store, run: Path) -> None:
    """Leave in the run directory of this host where its job is asked for captures; what an earlier job left goes.

    Raises:
        OSError: it cannot be written.
    """
    if store.remote:
        replace_file(run / ADDRESS_FILE, msgspec.json.encode({"store": store.address}), durable=False)
    else:
        (run / ADDRESS_FILE).unlink(missing_ok=True)


def open_store(run: Path, given: str | None) -> Store:
    """Return the store by which the job of a run is asked.

    Args:
        run: the run directory; its name is that of the run.
        given: ``NAME:ADDRESS``; None if the run directory of this host tells.

    Raises:
        ConfigError: that is no such text, or there is no such store.
        PluginError: it cannot be used.
    """
    if given is None:
        file = run / ADDRESS_FILE
        if not os.access(file, os.F_OK):
            return FileStore(run)
        try:
            given = _ADDRESS.read(file)["store"]
        except (OSError, ValueError, KeyError) as error:
            raise CaptureError(f"{file} cannot be read: {describe_error(error)}") from error
    name, _, address = given.partition(":")
    if not name or not address:
        raise ConfigError(f"--store {given}: expected NAME:ADDRESS, such as tcpstore:10.0.0.1:29500.")
    return _connect(name)(run.name, address)


def _connect(name: str) -> Connect:
    found: Connect = entry_points.load(GROUP, name)
    return found
