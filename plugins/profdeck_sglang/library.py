"""The versions of SGLang that this plugin supports."""

from __future__ import annotations

from profdeck import Library

LIBRARY = Library(("sglang",), ">=0.5.10,<0.6")
