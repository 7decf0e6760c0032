"""What of a run is still at work: who looks after old captures must leave it alone."""

from __future__ import annotations

import socket
from pathlib import Path

from profdeck.after_run.record import read_record
from profdeck.records.manifest import Manifest
from profdeck.records.status import Status
from profdeck_traces.base.errors import ProfdeckError, TraceError, describe_error
from profdeck_traces.inputs.artifact_kinds import kind_of


def may_record(manifest: Manifest) -> bool:
    """Tell whether a process may still record; of one on another host nobody knows."""
    is_elsewhere = manifest.host != socket.gethostname()
    return manifest.status is Status.RECORDING and (is_elsewhere or manifest.under_way)


def is_record_of_finish(file: Path) -> bool:
    """Tell the record of a finish from other files, by its name."""
    return file.name.startswith("finish.") and file.name.endswith(".json") and not file.name.endswith(".input.json")


def finish_at_work(file: Path) -> str | None:
    """Say what keeps a finish, from its record; None if it is over."""
    try:
        record = read_record(file)
    except (OSError, ProfdeckError) as error:
        return describe_error(error)
    return f"its finish is {record.state}" if not record.over and record.by.alive is not False else None


def artifact_at_work(file: Path) -> str | None:
    """Say what is still being made of an artifact, or why that cannot be told; None if nothing is."""
    kind = kind_of(file)
    try:
        work = None if kind is None else kind.pending(file)
    except TraceError as error:
        return str(error)
    return f"{file.name} is being analysed" if work is not None and work.alive else None
