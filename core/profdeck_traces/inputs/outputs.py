"""Prevents commands from overwriting other files with their output."""

from __future__ import annotations

import os
import re
from pathlib import Path

from profdeck_traces.base.errors import ConfigError
from profdeck_traces.inputs.facts import run_records

HTML = re.compile(
    rb'\s*<!doctype html>[^"]*"en">\s*<head>\s*<meta charset="utf-8">\s*<meta name="generator" content="profdeck">'
)
"""Start of the HTML pages that profdeck writes."""
_HEAD_BYTES = 4096
_TRACES = (".json", ".json.gz", ".pftrace", ".pftrace.gz")


def check_output(path: Path, replaced: re.Pattern[bytes] | None = None) -> None:
    """Check that a command can write its output to `path` without overwriting another kind of file.

    Only files written by the same command are replaced; they are recognised by their contents. Other files, such as
    inputs, manifests, ``run.json`` and traces, start differently, even if `path` reaches them through a link.

    Args:
        path: Path of the output.
        replaced: Pattern for the start of files that the output may replace. By default, no file is replaced.

    Raises:
        ConfigError: `path` is another kind of file, or it is inside a run and would be read as one of its traces.
    """
    run = next((parent for parent in Path(os.path.realpath(path)).parents if run_records().is_run(parent)), None)
    if run is not None and (replaced is None or path.name.lower().endswith(_TRACES)):
        raise ConfigError(
            f"{path} is inside the run {run} and would be read as a trace of that run. Choose a path outside of it."
        )
    try:
        if replaced is None:
            is_other = os.path.lexists(path)
        elif path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            is_new = not head and run is None  # mktemp creates an empty file
            is_other = not is_new and replaced.match(head) is None
        else:
            is_other = path.exists() and not path.is_dir()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
    if is_other:
        reason = " and is not an output of this command" if replaced else ""
        raise ConfigError(f"{path} already exists{reason}. Choose another path.")
