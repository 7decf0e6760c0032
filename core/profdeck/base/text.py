"""Text helpers for messages."""

from __future__ import annotations


def sentence(text: str) -> str:
    """Capitalize the first word and end the text with a full stop, unless it ends with other punctuation.

    A first word that is a name, such as a URL or a config key, is not changed.
    """
    first = text.partition(" ")[0].rstrip(",.")
    capitalized = text[:1].upper() + text[1:] if first.isalpha() else text
    return capitalized if capitalized.endswith((".", "?", "!")) else f"{capitalized}."
