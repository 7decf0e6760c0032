"""Renders self-contained HTML pages, which load no other files."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from profdeck_traces.base.errors import MissingLibraryError
from profdeck_traces.base.text import CONTROL_CHARACTERS
from profdeck_traces.base.version import __version__

try:
    import jinja2
    from markupsafe import Markup as Markup, escape as escape  # noqa: PLC0414  # re-exported
except ImportError:
    raise MissingLibraryError.for_library("Pages need", "jinja2", "traces") from None

_CONTROL = re.compile(f"[{CONTROL_CHARACTERS}]")


def render(template: str, context: Mapping[str, Any]) -> str:
    """Render a page. All strings of the context except `Markup` are escaped.

    Control characters and bidirectional formatting characters are replaced by the escape sequences of JSON, because
    pages also embed JSON.

    Args:
        template: The name of its file in this package.
        context: What it shows. `style`, `script`, their hashes for the page's policy, and `version` are added.
    """
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    page = environment.get_template(template).render(
        {**_of("style", "page.css"), **_of("script", "page.js"), "version": __version__, **context}
    )
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", page)


@functools.cache
def _of(name: str, file: str) -> dict[str, str]:
    text = _file(file)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {name: Markup(text), f"{name}_hash": f"sha256-{digest}"}  # noqa: S704 - our own file


def _file(name: str) -> str:
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8")
