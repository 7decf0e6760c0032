"""`profdeck capture start` and `profdeck capture stop`: a process of its own holds the capture in between.

The holder is started by the first command, which returns when the servers record, and asked by the second one, through
the directory of the run::

    held.json     the process that holds the capture, and the servers; gone when all is written
    held.stop     asks it to stop
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from profdeck.after_run import start as finishes
from profdeck.base import ctrl_c
from profdeck.base.errors import CaptureError, ConfigError, ProfdeckError, describe_error
from profdeck.base.files import replace_file
from profdeck.base.json_files import JSON_OBJECT
from profdeck.base.processes import ProcessId, start_detached
from profdeck.base.structuring import structure, unstructure
from profdeck.cli import _capture_servers, kit
from profdeck.cli._capture_servers import ServerCapture, ServerOptions

_FILE, _STOP = "held.json", "held.stop"
_NEWS = "\x1e"
"""How the line begins with which the holder says that it records, or why it does not."""
_POLL_S = 0.1


def start(given: ServerOptions) -> dict[str, Any]:
    """Start a capture of servers, and leave it to a process of its own.

    Returns:
        Where it is, all of its servers, and how many record: ``run``, ``servers``, ``recording``.

    Raises:
        CaptureError: it has not started.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as asked, os.fdopen(reading, encoding="utf-8", errors="replace") as said:
        asked.write(json.dumps(unstructure(given)).encode())
        asked.seek(0)
        with os.fdopen(writing, "wb") as voice:
            holder = start_detached(__name__, stdin=asked.fileno(), stderr=voice)
        try:
            for line in said:
                if line.startswith(_NEWS):
                    return _told(json.loads(line[len(_NEWS) :]))
                sys.stderr.write(line)
        except KeyboardInterrupt:  # nobody would know of what goes on
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGINT)
            raise
    raise CaptureError("The process that was to hold the capture has ended.")


def _told(news: dict[str, Any]) -> dict[str, Any]:
    if "error" in news:
        raise (ConfigError if news["wrong"] else CaptureError)(news["error"])
    return news


@attrs.frozen(kw_only=True)
class _Held:
    """What the holder says in the run directory."""

    process: ProcessId
    servers: tuple[Mapping[str, Any], ...]


def stop(run: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Stop a capture that another process holds, and wait until its files are there.

    Returns:
        Its servers.

    Raises:
        ConfigError: nothing is held there.
        CaptureError: its process has ended before, or does not end in time.
    """
    try:
        held = structure(JSON_OBJECT.read(run / _FILE), _Held, where=str(run / _FILE))
    except FileNotFoundError:
        raise ConfigError(f"{kit.short_path(run)}: no capture is held there, as by 'profdeck capture start'.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run / _FILE} cannot be read: {error}.") from None
    replace_file(run / _STOP, b"", durable=False)
    until = time.monotonic() + timeout_s
    with kit.show_progress("Stopping"):
        while (run / _FILE).exists():
            if held.process.alive is False:
                (run / _FILE).unlink(missing_ok=True)
                raise CaptureError(
                    f"The capture was held by {held.process}, which has ended: the servers stop by themselves, after "
                    f"max_capture_s, or when they are asked for another capture. See profdeck ls {kit.short_path(run)}"
                )
            if time.monotonic() > until:
                raise CaptureError(f"{held.process} has not stopped the capture in {timeout_s:g} seconds; try again.")
            time.sleep(_POLL_S)  # there is no event to await in a directory that hosts share
    return [dict(server) for server in held.servers]


class Holder:
    """What the holder tells, and how it is asked to stop."""

    def __init__(self) -> None:
        self._run: Path | None = None

    async def until_stopped(self, run: Path, servers: list[dict[str, Any]], recording: int) -> None:
        """Say that some servers record, and wait until somebody wants them to stop."""
        held = _Held(process=ProcessId(), servers=tuple(servers))
        (run / _STOP).unlink(missing_ok=True)
        replace_file(run / _FILE, json.dumps(unstructure(held)).encode(), durable=False)
        self._run = run
        _say({"run": str(run), "servers": servers, "recording": recording})
        while not (run / _STOP).exists():  # noqa: ASYNC110  # there is no event in a directory that hosts share
            await asyncio.sleep(_POLL_S)

    def end(self) -> None:
        """Say that all is written."""
        if self._run is not None:
            (self._run / _STOP).unlink(missing_ok=True)
            (self._run / _FILE).unlink(missing_ok=True)


def _say(news: Mapping[str, Any]) -> None:
    """Tell the command that waits, and nobody from then on."""
    sys.stderr.write(_NEWS + json.dumps(news) + "\n")
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def main() -> None:
    """Hold a capture: the entry point of the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what they start in the background ignore it
    given = structure(json.load(sys.stdin), ServerOptions, where="")
    holder = Holder()
    try:
        with asyncio.Runner() as runner:
            captured: ServerCapture = ctrl_c.run(runner, _capture_servers.capture(given, holder.until_stopped))
        if captured.error is not None:
            raise captured.error
        finishes.await_own()
    except ProfdeckError as error:
        _say({"error": describe_error(error), "wrong": isinstance(error, ConfigError)})
    finally:
        holder.end()


if __name__ == "__main__":
    main()
