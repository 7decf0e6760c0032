"""Owner names for use in sentences."""

from __future__ import annotations

from profdeck_traces.account.model import OwnerIdentity
from profdeck_traces.analysis.short_names import cut_middle

_LONGEST_NAME = 48


def name_of_owner(owner: OwnerIdentity) -> str | None:
    """Return the name and origin, such as ``aten::mm in train.py(3): step``, or ``None`` if there is no name."""
    if owner.name is None:
        return None
    name = cut_middle(owner.name, _LONGEST_NAME)
    return name if owner.origin is None else f"{name} in {owner.origin}"
