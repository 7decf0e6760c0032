"""Many targets at once: where they are, how they start together, and what came of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profdeck.fleet.fleet import Fleet

__all__ = ["Fleet"]


def __getattr__(name: str) -> Any:
    # Imported when first used: modules of this package are needed where no fleet is.
    if name != "Fleet":
        raise AttributeError(f"module 'profdeck.fleet' has no attribute '{name}'")
    from profdeck.fleet.fleet import Fleet

    return Fleet
