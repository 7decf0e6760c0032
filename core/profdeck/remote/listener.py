"""The listener ``upload``: sends each capture to a URL when it has ended."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profdeck.backends.hookspecs import hookimpl
from profdeck_traces.base.errors import ConfigError, MissingLibraryError
from profdeck_traces.base.text import plural

URL_VARIABLE = "PROFDECK_UPLOAD"
"""The URL of a directory for runs."""


class UploadListener:
    """Sends to the URL of ``PROFDECK_UPLOAD``, with what an outage left of earlier captures."""

    def __init__(self) -> None:
        """Raises:
        ConfigError: no URL is set.
        MissingLibraryError: fsspec is not installed. It is not imported: recording processes build listeners, too.
        """
        url()
        if importlib.util.find_spec("fsspec") is None:
            raise MissingLibraryError.of("The listener 'upload' needs", "fsspec", "upload")

    @hookimpl
    def capture_finished(self, manifest: Mapping[str, Any]) -> None:
        """Send what has ended of the run and is not there yet."""
        from profdeck.remote.upload import upload

        done = upload(Path(manifest["directory"]).parent, url())
        sys.stdout.write(f"{plural(done.files, 'file')}, {done.size_bytes:,} bytes to {done.place}\n")


def url() -> str:
    """Return where runs are sent.

    Raises:
        ConfigError: that is not set, or is no URL.
    """
    from profdeck_traces.inputs.urls import is_url, shown

    found = os.environ.get(URL_VARIABLE, "")
    if not is_url(found):
        what = f"is {shown(found)!r}, which is no URL" if found else "is not set"
        raise ConfigError(f"{URL_VARIABLE} {what}. Set it to a directory for runs, such as s3://bucket/profiles.")
    return found
