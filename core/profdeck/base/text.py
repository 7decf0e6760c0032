"""Words of messages."""

from __future__ import annotations


def sentence(text: str) -> str:
    """Begin with a capital, unless a name comes first, such as a URL or a key; end with a full stop or a question."""
    first = text.partition(" ")[0].rstrip(",.")
    begun = text[:1].upper() + text[1:] if first.isalpha() else text
    return begun if begun.endswith((".", "?", "!")) else f"{begun}."
