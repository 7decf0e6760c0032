"""Writes the manifests of many targets together, beside the event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from profdeck.base.blocking import run_in_threads, wait_for
from profdeck_traces.base.files import replace_file

_GATHER_S = 0.5
"""How long a manifest waits for those that follow: what many targets answer at once is read first, as threads that
write meanwhile take more from the event loop than they gain."""


class ManifestBatch:
    """Manifests on their way to files, each in the place of an earlier one.

    They do not wait for targets that take longer, and no target waits for them. The event loop that calls `put` has to
    go on until they are `written`.

    Nobody waits until the disk has them: a thousand waits would be longer than most stops. The manifest of the fleet
    tells what came of each target, is written after all of these, and does outlast a power failure (fsync); what
    journaling file systems such as ext4 have taken before is then on disk as well.
    """

    def __init__(self) -> None:
        self._waiting: dict[Path, bytes] = {}
        self._problems: dict[Path, OSError] = {}
        self._writing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    def put(self, path: Path, content: bytes) -> None:
        """Take a manifest; of several for one path the last one counts."""
        self._waiting[path] = content
        if self._writing is None:
            self._hurry = asyncio.Event()  # of this loop: the next capture may have another one
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def written(self) -> dict[Path, OSError]:
        """Write all that has been put; returns why some could not be, by path."""
        if self._writing is not None:
            self._hurry.set()
            await asyncio.shield(self._writing)
        problems, self._problems = self._problems, {}
        return problems

    async def _write(self) -> None:
        try:
            while self._waiting:
                await wait_for(self._hurry, _GATHER_S)
                some, self._waiting = self._waiting, {}
                await run_in_threads(self._replace, some.items())
        finally:
            self._writing = None

    def _replace(self, manifest: tuple[Path, bytes]) -> None:
        path, content = manifest
        try:
            replace_file(path, content, durable=False)
        except OSError as error:
            self._problems[path] = error
