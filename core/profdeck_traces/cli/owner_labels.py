"""Table labels for owners on the critical path."""

from __future__ import annotations

from profdeck_traces.analysis.short_names import cut_middle, full_name, short_kernel
from profdeck_traces.base.text import printable

_ON_DEVICE = frozenset({"kernel", "collective", "launch latency", "device gap", "device held"})


def owner_label(title: str, name: str | None, width: int, *, full: bool) -> str:
    """Return a label with the kind and name of an owner.

    Args:
        title: The owner's title, as in `profdeck_traces.account.model.OwnerIdentity`.
        name: The event's name, if an event is open.
        width: Maximum length of the label if `full` is False.
        full: If True, do not shorten the name.
    """
    if name is None:
        return title
    *_, kind = title.rpartition(": ")
    prefix = title.removesuffix(kind) if name.startswith(kind) else f"{title} "
    return prefix + printable(short_event(name, width - len(prefix), is_kernel=kind in _ON_DEVICE, full=full))


def short_event(name: str, width: int, *, is_kernel: bool, full: bool) -> str:
    """Shorten an event name to `width` characters, unless `full` is True."""
    if full:
        return full_name(name)
    return short_kernel(name, width) if is_kernel else cut_middle(name, width)


def origin_label(origin: str | None, line: str | None, width: int) -> str:
    """Return the line, shortened and without directories, or else the module, annotation or operator."""
    if line is None:
        return origin or "-"
    file, bracket, function = printable(line).partition("(")
    text = file.rpartition("/")[2] + bracket + function
    return text if len(text) <= width else text[: width - 1] + "…"
