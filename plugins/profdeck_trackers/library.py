"""What the listeners share: whether a library is installed, and what a job's process tells the one after a capture."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profdeck import Capture
from profdeck.plugin import MissingLibraryError, replace_file
from profdeck_traces import load


def require(name: str) -> None:
    """Check that a library is installed, without importing it: recording processes build listeners, too.

    Raises:
        MissingLibraryError: it is not.
    """
    if importlib.util.find_spec(name) is None:
        raise MissingLibraryError.for_library(f"The listener '{name}' needs", name)


def note(run: Path | Capture, name: str, about: Mapping[str, str]) -> None:
    """Write a file in a run directory.

    Raises:
        OSError: it cannot be written.
    """
    if isinstance(run, Capture):
        run = run.directory.parents[0 if run.identity.replica is None else 1].parent
    replace_file(run / name, json.dumps(about).encode(), durable=False)


def noted(run: Path, name: str) -> dict[str, str]:
    """Read that file; nothing if there is none."""
    try:
        found: dict[str, str] = json.loads((run / name).read_bytes())
    except FileNotFoundError:
        return {}
    return found


@contextmanager
def page_of(manifest: Mapping[str, Any]) -> Iterator[Path]:
    """Write the page of a capture, as `profdeck report` does, to a file that goes with the block.

    Args:
        manifest: what ``capture_finished`` gets.

    Raises:
        ProfdeckError: there is no trace that could be read.
    """
    with tempfile.TemporaryDirectory() as place:
        directory = Path(manifest["directory"])
        _, hyphen, take = manifest["capture"].partition("-")
        page = Path(place, f"{directory.name}{hyphen}{take}.html")  # step_000050.html: in the order of the steps
        load(directory).report(page)
        yield page


def run_beside(run: Path) -> str:
    """Return the id of the run that a tracker has of a run directory, where it takes metrics from one process only."""
    return f"profdeck-{hashlib.sha256(str(run).encode()).hexdigest()[:16]}"
