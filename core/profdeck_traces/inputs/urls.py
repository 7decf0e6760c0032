"""Access to runs at URLs, such as ``s3://bucket/profiles/job``, with fsspec.

Error messages do not contain the secrets in a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import attrs

from profdeck_traces.base.errors import ConfigError, MissingLibraryError, ProfdeckError, describe_error

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_SECRETS = re.compile(r"(?<=://)[^/@]*@|[?#].*$")
_BATCH = 8
_Item = TypeVar("_Item")


class RemoteError(ProfdeckError):
    """A file or directory at a URL cannot be read or written."""


@attrs.frozen
class RemotePath:
    """A file or directory at a URL."""

    url: str
    files: AbstractFileSystem
    path: str
    """Path in `files`."""

    @classmethod
    def from_url(cls, url: str) -> RemotePath:
        """Create the file system for a URL. Most file systems connect at the first request.

        Raises:
            MissingLibraryError: fsspec, or its library for this protocol, is not installed.
            ConfigError: the protocol is unknown.
            RemoteError: the URL cannot be opened.
        """
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise MissingLibraryError.of(f"{redact(url)}: URLs need", "fsspec", "upload") from None
        # Only set for local files. Other file systems create parent directories automatically or do not have them.
        options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
        try:
            files, path = url_to_fs(url, **options)
        except ImportError as error:
            raise MissingLibraryError(f"{redact(url)}: {describe_error(error)}") from None
        except ValueError as error:
            raise ConfigError(f"{redact(url)} is not a URL that fsspec supports: {_message(error, url)}") from None
        except Exception as error:
            raise RemoteError(f"{redact(url)} cannot be opened: {_message(error, url)}") from error
        return cls(url.rstrip("/"), files, path.rstrip("/"))

    def __truediv__(self, name: str) -> RemotePath:
        """Return a path below this directory. `name` may contain slashes."""
        return RemotePath(f"{self.url}/{name}", self.files, f"{self.path}/{name}")

    def __str__(self) -> str:
        """Return the URL without secrets."""
        return redact(self.url)

    def error(self, problem: str, cause: BaseException, advice: str = "") -> RemoteError:
        """Return the `RemoteError` for an exception that the file system raised.

        Args:
            problem: the predicate of the message, such as ``cannot be read``. The subject is this URL.
            cause: the exception.
            advice: sentences that suggest a solution.
        """
        text = f"{self} {problem}: {_message(cause, self.url)}"
        return RemoteError(f"{text.rstrip('.')}. {advice}" if advice else text)

    def read(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a read-only method of the file system.

        Raises:
            FileNotFoundError: the file or directory does not exist.
            RemoteError: the request fails.
        """
        try:
            return getattr(self.files, method)(*arguments, **options)
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system has its own exceptions
            raise self.error("cannot be read", error) from error


def is_url(text: str) -> bool:
    """Return True if a text starts with a URL scheme. Otherwise the text is a local path."""
    return _URL.match(text) is not None


def redact(url: str) -> str:
    """Remove the user, password, query and fragment from a URL."""
    return _SECRETS.sub("", url)


def batches(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Split the items of a transfer into batches of `_BATCH`.

    Asynchronous file systems transfer all files of one call in parallel, so a batch limits the number of transfers.
    """
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


def _message(error: BaseException, url: str) -> str:
    """Return the message of an error, with the secrets of a URL removed."""
    text = describe_error(error).replace(url, redact(url))
    for secret in _SECRETS.findall(url):
        for part in re.split(r"[?#@&:=]", secret):
            if len(part) > 3:  # noqa: PLR2004  # shorter parts occur in ordinary words
                text = text.replace(part, "***").replace(unquote(part), "***")
    return text
