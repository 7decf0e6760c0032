"""URLs of runs, such as ``s3://bucket/profiles/job``, opened with fsspec. What is secret in one is never shown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs

from profdeck_traces.base.errors import ConfigError, MissingLibraryError, ProfdeckError, describe_error

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_SECRETS = re.compile(r"(?<=://)[^/@]*@|[?#].*$")


class RemoteError(ProfdeckError):
    """A place at a URL cannot be read or written."""


@attrs.frozen
class Place:
    """A directory or file at a URL."""

    url: str
    files: AbstractFileSystem
    path: str
    """As `files` calls it."""

    @classmethod
    def of(cls, url: str) -> Place:
        """Open a URL; nothing is asked of its host yet, by most file systems.

        Raises:
            MissingLibraryError: fsspec, or what it needs for this kind of URL, is not installed.
            ConfigError: there is no such kind of URL.
            RemoteError: it cannot be opened.
        """
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise MissingLibraryError.of(f"{shown(url)}: URLs need", "fsspec", "upload") from None
        try:
            files, path = url_to_fs(url)
        except ImportError as error:
            raise MissingLibraryError(f"{shown(url)}: {describe_error(error)}") from None
        except ValueError as error:
            raise ConfigError(f"{shown(url)} is no URL that fsspec knows: {_without_secrets(error, url)}") from None
        except Exception as error:
            raise RemoteError(f"{shown(url)} cannot be opened: {_without_secrets(error, url)}") from error
        return cls(url, files, path.rstrip("/"))

    def __truediv__(self, name: str) -> Place:
        """Return a place below, by a path with slashes."""
        bare, mark, query = self.url.partition("?")
        return Place(f"{bare.rstrip('/')}/{name}{mark}{query}", self.files, f"{self.path}/{name}")

    def __str__(self) -> str:
        """Write it without what is secret."""
        return shown(self.url)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Place:
        """The directory that it is in."""
        bare, mark, query = self.url.partition("?")
        above = bare.rstrip("/").rpartition("/")[0]
        return Place(f"{above}{mark}{query}", self.files, self.path.rpartition("/")[0])

    def failed(self, what: str, error: BaseException, advice: str = "") -> RemoteError:
        """Return the error to raise for one of the file system's.

        Args:
            what: what cannot be done, as in ``cannot be read``.
            error: why.
            advice: what to do, in sentences.
        """
        text = f"{self} {what}: {_without_secrets(error, self.url)}"
        return RemoteError(f"{text.rstrip('.')}. {advice}" if advice else text)

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the file system that reads.

        Raises:
            FileNotFoundError: nothing is there.
            RemoteError: it does not answer, or refuses.
        """
        try:
            return getattr(self.files, method)(*arguments, **options)
        except FileNotFoundError:
            raise
        except Exception as error:  # libraries of all kinds have errors of their own
            raise self.failed("cannot be read", error) from error


def is_url(text: str) -> bool:
    """Tell a URL from a path."""
    return _URL.match(text) is not None


def shown(url: str) -> str:
    """Return a URL as it may be shown and recorded: without a user, a password and a query."""
    return _SECRETS.sub("", url)


def _without_secrets(error: BaseException, url: str) -> str:
    text = describe_error(error).replace(url, shown(url))
    for secret in _SECRETS.findall(url):
        for part in re.split(r"[?#@&:=]", secret):
            if len(part) > 3:  # noqa: PLR2004  # less is no secret, and part of many words
                text = text.replace(part, "***")
    return text
