"""Chrome traces as profilers write them: read, check, pack and summarise, in one pass and bounded memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profdeck.traces.run import Run


def load(
    *paths: str | os.PathLike[str],
    devices_only: bool = False,
    rules: str | os.PathLike[str] | None = None,
    processes: int = 1,
    cache: bool = True,
) -> Run:
    """Read all traces below some paths, for tables and notebooks.

    Args:
        paths: Runs, captures, directories of traces, or traces.
        devices_only: Read devices and annotations only: three times as fast, no operators.
        rules: A file with classes of kernels of your own.
        processes: How many traces to read at once.
        cache: Keep what is read, and read again only what changed since.

    Raises:
        TraceError: There is no trace below a directory, or none can be read.
        ConfigError: The rules are wrong.
    """
    from profdeck.traces.run import Run

    return Run.load(
        [Path(path) for path in paths],
        devices_only=devices_only,
        rules=None if rules is None else Path(rules),
        processes=processes,
        cache=cache,
    )
