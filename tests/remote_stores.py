"""An fsspec file system for upload and copy tests."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class RecordingStore(MemoryFileSystem):
    """An in-memory file system that records transfers and can simulate failures. Its URLs start with ``recording://``."""

    protocol = ("recording",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    transfers: ClassVar[list[str]] = []
    """Paths of the transferred files, in order."""
    transfers_left: ClassVar[float] = float("inf")
    """Number of remaining transfers before the store fails."""
    extra_files: ClassVar[dict[str, dict[str, Any]]] = {}
    """Additional files in the listings."""

    @classmethod
    def empty(cls) -> Self:
        """Register the ``recording://`` protocol, reset the class variables and return a store without files."""
        fsspec.register_implementation("recording", cls, clobber=True)
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.transfers, cls.extra_files, cls.transfers_left = [], {}, float("inf")
        return cls()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("recording://", "memory://", 1))

    def put_file(self, lpath: str, rpath: str, *arguments: Any, **options: Any) -> None:
        self._transfer(rpath)
        super().put_file(lpath, rpath, *arguments, **options)

    def get_file(self, rpath: str, lpath: str, *arguments: Any, **options: Any) -> None:
        self._transfer(rpath)
        super().get_file(rpath, lpath, *arguments, **options)

    def find(self, path: str, *arguments: Any, **options: Any) -> Any:
        return super().find(path, *arguments, **options) | self.extra_files

    def _transfer(self, path: str) -> None:
        cls = type(self)
        if cls.transfers_left < 1:
            raise ConnectionResetError("The store does not reply.")
        cls.transfers_left -= 1
        cls.transfers.append(self._strip_protocol(path))
