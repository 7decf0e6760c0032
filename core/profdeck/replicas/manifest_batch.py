"""Writes the manifests of many targets in batches, on background threads."""

from __future__ import annotations

import asyncio
from pathlib import Path

from profdeck.base.blocking import run_in_threads, wait_for
from profdeck_traces.base.files import replace_file

_GATHER_S = 0.5
"""Time to gather manifests before a batch is written. Many targets reply at about the same time, and threads that write
files would slow down the event loop while it reads these replies."""


class ManifestBatch:
    """Pending manifests, which are written without blocking the event loop.

    The event loop that calls `add` must run until `flush` returns.

    The files are not synced to disk, because a thousand syncs would take longer than most stops. The fleet's manifest
    contains the result of each target, is written last and is synced. Journaling file systems such as ext4 then have
    also stored the earlier files.
    """

    def __init__(self) -> None:
        self._pending: dict[Path, bytes] = {}
        self._errors: dict[Path, OSError] = {}
        self._task: asyncio.Task[None] | None = None
        self._flush_requested = asyncio.Event()

    def add(self, path: Path, content: bytes) -> None:
        """Schedule a manifest to be written. It replaces a pending manifest with the same path."""
        self._pending[path] = content
        if self._task is None:
            self._flush_requested = asyncio.Event()  # the next capture may use a different event loop
            self._task = asyncio.get_running_loop().create_task(self._write())

    async def flush(self) -> dict[Path, OSError]:
        """Write all pending manifests. Return the errors since the last call, by path."""
        if self._task is not None:
            self._flush_requested.set()
            await asyncio.shield(self._task)
        errors, self._errors = self._errors, {}
        return errors

    async def _write(self) -> None:
        try:
            while self._pending:
                await wait_for(self._flush_requested, _GATHER_S)
                batch, self._pending = self._pending, {}
                await run_in_threads(self._replace, batch.items())
        finally:
            self._task = None

    def _replace(self, manifest: tuple[Path, bytes]) -> None:
        path, content = manifest
        try:
            replace_file(path, content, durable=False)
        except OSError as error:
            self._errors[path] = error
