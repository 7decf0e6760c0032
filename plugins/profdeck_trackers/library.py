"""What the listeners share: whether a library is installed, and what a job's process tells the one after a capture."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from profdeck import Capture
from profdeck.base.errors import MissingLibraryError
from profdeck.base.files import replace


def require(name: str) -> None:
    """Check that a library is installed, without importing it: recording processes build listeners, too.

    Raises:
        MissingLibraryError: it is not.
    """
    if importlib.util.find_spec(name) is None:
        raise MissingLibraryError(
            f"The listener '{name}' needs {name}, which is not installed. Install it with: pip install "
            f"'profdeck[{name}]'"
        )


def note(run: Path | Capture, name: str, about: Mapping[str, str]) -> None:
    """Write a file in a run directory.

    Raises:
        OSError: it cannot be written.
    """
    if isinstance(run, Capture):
        run = run.directory.parents[0 if run.identity.replica is None else 1].parent
    replace(run / name, json.dumps(about).encode(), durable=False)


def noted(run: Path, name: str) -> dict[str, str]:
    """Read that file; nothing if there is none."""
    try:
        found: dict[str, str] = json.loads((run / name).read_bytes())
    except FileNotFoundError:
        return {}
    return found


@contextmanager
def one_at_a_time(run: Path) -> Iterator[None]:
    """Wait for the listeners of other captures of a run, as far as its file system has locks."""
    directory = os.open(run, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)
