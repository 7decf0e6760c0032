"""Short forms of the names of kernels, so that people can tell them apart in one line."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence

_NAMESPACES = re.compile(r"\(anonymous namespace\)::|\b(?:at::native|at::detail|at::cuda|c10|cub::CUB_\w+|std)::")
# What elementwise kernels of torch all have at their end.
_POINTERS = re.compile(r", Array<char ?\*, \d+\w*>(?= ?>)")
_MOST_MANGLED = 4096
_LEAST_APART = 24
# So much of what is common is shown before what differs.
_BEFORE = 4


@functools.lru_cache(maxsize=10_000)
def full_name(name: str) -> str:
    """Demangle a C++ name. Without the compiled reader, names stay mangled."""
    if not name.startswith("_Z") or len(name) > _MOST_MANGLED:
        return name
    from profdeck_traces.reading import compiled  # slow to import, and few traces have mangled names

    library = compiled.load_library()
    return name if library is None else compiled.demangle(library, [name])[0]


def short_kernel(name: str, width: int) -> str:
    """Return the name of a kernel in so many characters: without arguments and usual namespaces, the middle cut."""
    short = _without_arguments(full_name(" ".join(name.split()))).removeprefix("void ")
    return cut_middle(_POINTERS.sub("", _NAMESPACES.sub("", short)) or name, width)


def cut_middle(text: str, width: int) -> str:
    """Return a text in so many characters, with an ellipsis in its middle where it is longer."""
    if len(text) <= width:
        return text
    kept = max(0, width - 1)
    return f"{text[: kept - kept // 3]}…{text[len(text) - kept // 3 :]}" if width > 0 else ""


def cut_apart(texts: Sequence[str], width: int) -> list[str]:
    """Return texts in so many characters each; those that differ only where the middle is cut show what differs."""
    cut = [cut_middle(text, width) for text in texts]
    alike: dict[str, list[int]] = {}
    for place, text in enumerate(cut):
        alike.setdefault(text, []).append(place)
    for places in alike.values():
        differ = {texts[place] for place in places}
        if len(differ) < 2 or width < _LEAST_APART:  # noqa: PLR2004 - one text is told from no other
            continue
        common = len(os.path.commonprefix(list(differ)))  # noqa: RUF071 - of characters is what is meant
        for place in places:
            end = texts[place][common - _BEFORE :]
            shown = f"{texts[place][: max(width // 3, width - 1 - len(end))]}…{end}"
            cut[place] = shown if len(shown) <= width else f"{shown[: width - 1]}…"
    return cut


def _without_arguments(name: str) -> str:
    """Cut off the last pair of parentheses with all in it, if nothing but spaces and ``const`` comes after it."""
    stripped = name.removesuffix(" const").rstrip()
    if not stripped.endswith(")"):
        return name
    depth = 0
    for index in range(len(stripped) - 1, -1, -1):
        depth += (stripped[index] == ")") - (stripped[index] == "(")
        if not depth:
            # Not `operator()` and not `(anonymous namespace)` alone.
            return stripped[:index].rstrip() or name
    return name
