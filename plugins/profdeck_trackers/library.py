"""Whether the library of a tracker is installed, without importing it: recording processes build listeners, too."""

from __future__ import annotations

import importlib.util

from profdeck.base.errors import MissingLibraryError


def require(name: str) -> None:
    """Check that it is installed.

    Raises:
        MissingLibraryError: it is not.
    """
    if importlib.util.find_spec(name) is None:
        raise MissingLibraryError(
            f"The listener '{name}' needs {name}, which is not installed. Install it with: pip install "
            f"'profdeck[{name}]'"
        )
