"""Find an installed distribution's direct and indirect requirements."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(name: str) -> set[str]:
    """Return the names of a distribution's direct and indirect requirements, excluding its extras.

    If a requirement is not installed, its own requirements are unknown and omitted.
    """
    closure: set[str] = set()
    pending = [(name, "")]
    visited: set[tuple[str, str]] = set()
    while pending:
        item = current, extra = pending.pop()
        if item in visited:
            continue
        visited.add(item)
        try:
            texts = metadata.requires(current) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, texts):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                required_name = canonicalize_name(requirement.name)
                closure.add(required_name)
                pending += [(required_name, required_extra) for required_extra in ("", *requirement.extras)]
    return closure
