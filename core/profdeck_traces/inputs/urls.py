"""Reads and writes runs at URLs such as ``s3://bucket/profiles/job``, using fsspec.

Error messages omit any secrets in the URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from profdeck_traces.base.credentials import redact, redact_url
from profdeck_traces.base.errors import ConfigError, MissingLibraryError, ProfdeckError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"(?:[a-zA-Z][a-zA-Z0-9+.-]*::)*[a-zA-Z][a-zA-Z0-9+.-]*://")
_BATCH = 8
_Item = TypeVar("_Item")


class RemoteError(ProfdeckError):
    """A remote file or directory cannot be read or written."""


@attrs.frozen
class RemotePath:
    """A remote file or directory."""

    url: str = attrs.field(repr=redact_url)
    files: AbstractFileSystem = attrs.field(repr=False)
    path: str = attrs.field(repr=False)
    """Path in `files`."""

    @classmethod
    def from_url(cls, url: str) -> RemotePath:
        """Create a remote path from a URL. Most file systems do not connect before the first request.

        Raises:
            MissingLibraryError: fsspec, or its library for this protocol, is not installed.
            ConfigError: the protocol is unknown.
            RemoteError: the URL cannot be opened.
        """
        try:
            from fsspec.core import url_to_fs

            from profdeck_traces.inputs.remote_limits import http_options
        except ImportError:
            raise MissingLibraryError.for_library(f"{redact_url(url)}: URLs need", "fsspec", "upload") from None
        # Only local files need this. Other file systems create parent directories automatically or have no directories.
        options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        try:
            files, path = url_to_fs(url, **options, **http_options(url))
        except ImportError as error:
            raise MissingLibraryError(f"{redact_url(url)}: {_message(error, url)}") from None
        except ValueError as error:
            raise ConfigError(f"{redact_url(url)} is not a URL that fsspec supports: {_message(error, url)}") from None
        except Exception as error:  # noqa: BLE001  # each file system has its own exceptions, which may quote the URL
            raise RemoteError(f"{redact_url(url)} cannot be opened: {_message(error, url)}") from None
        return cls(url.rstrip("/"), files, path.rstrip("/"))

    def __truediv__(self, name: str) -> RemotePath:
        """Return a path below this directory. `name` may contain slashes."""
        return RemotePath(f"{self.url}/{name}", self.files, f"{self.path}/{name}")

    def __str__(self) -> str:
        """Return the URL without secrets."""
        return redact_url(self.url)

    def error(self, problem: str, cause: BaseException, advice: str = "") -> RemoteError:
        """Return a `RemoteError` that describes an exception from the file system.

        Args:
            problem: the predicate of the message, such as ``cannot be read``. The subject is this URL.
            cause: the exception.
            advice: sentences that suggest a solution.
        """
        text = f"{self} {problem}: {_message(cause, self.url)}"
        return RemoteError(f"{text.rstrip('.')}. {advice}" if advice else text)

    def read(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call one of the file system's read-only methods.

        Raises:
            FileNotFoundError: the file or directory does not exist.
            RemoteError: the request fails.
        """
        try:
            return getattr(self.files, method)(*arguments, **options)
        except FileNotFoundError:
            raise
        except Exception as error:  # noqa: BLE001  # as above
            raise self.error("cannot be read", error) from None


def is_url(text: str) -> bool:
    """Return True for a URL, including chained URLs such as ``simplecache::s3://bucket``, and False for local paths."""
    return _URL.match(text) is not None


def batches(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Split the items to transfer into batches of `_BATCH` items.

    Asynchronous file systems transfer all files of one call in parallel, so batches limit the parallelism.
    """
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


def _message(error: BaseException, url: str) -> str:
    """Return an error's message without the credentials in `url`."""
    return redact(f"{type(error).__name__}: {error}".rstrip(": "), url)
