"""Functions that all tracker listeners use.

A listener logs a capture from another process than the job's. The job's process therefore writes the tracker run that
the job uses to a JSON file in the run directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profdeck import Capture, ProfdeckError
from profdeck.plugin import MissingLibraryError, replace_file
from profdeck_traces import load

HEADLINE = "profdeck/headline"
"""Name under which trackers log the text returned by `headline_of`."""


def require_library(name: str) -> None:
    """Check that a library is installed. Does not import it, because recording processes also create listeners.

    Raises:
        MissingLibraryError: the library is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise MissingLibraryError.for_library(f"The listener '{name}' needs", name)


def run_directory(capture: Capture) -> Path:
    """Return the run directory of a capture."""
    return capture.directory.parents[0 if capture.identity.replica is None else 1].parent


def write_tracker_run(run: Path, name: str, tracker_run: Mapping[str, str]) -> None:
    """Write a tracker run to a JSON file in the run directory.

    Raises:
        OSError: the file cannot be written.
    """
    replace_file(run / name, json.dumps(tracker_run).encode(), durable=False)


def read_tracker_run(run: Path, name: str) -> dict[str, str]:
    """Read a file that `write_tracker_run` wrote. Return an empty dict if the file does not exist."""
    try:
        tracker_run: dict[str, str] = json.loads((run / name).read_bytes())
    except FileNotFoundError:
        return {}
    return tracker_run


def headline_of(manifest: Mapping[str, Any]) -> str:
    """Return the first sentences of `profdeck summary` for a capture: the verdict and the headline of each role.

    Args:
        manifest: the argument of the hook ``capture_finished``.
    """
    try:
        summary = load(Path(manifest["directory"])).summary
    except ProfdeckError:
        return "No trace can be read."
    return " ".join([summary.verdict, *(f"{text}." for text in summary.headlines)])


@contextmanager
def temporary_report(manifest: Mapping[str, Any]) -> Iterator[Path]:
    """Write the report of a capture, as `profdeck report` does, to a file that is deleted after the block.

    Args:
        manifest: the argument of the hook ``capture_finished``.

    Raises:
        ProfdeckError: the capture has no readable trace.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(manifest["directory"])
        _, hyphen, attempt = manifest["capture"].partition("-")
        page = Path(temporary, f"{directory.name}{hyphen}{attempt}.html")  # step_000050.html: sorts by step
        load(directory).report(page)
        yield page


def profdeck_run_id(run: Path) -> str:
    """Return the tracker run ID for a run directory. Used if a tracker accepts metrics from only one process per run.

    All processes that log captures of the run directory get the same ID.
    """
    return f"profdeck-{hashlib.sha256(str(run).encode()).hexdigest()[:16]}"
