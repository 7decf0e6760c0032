"""Backends, listeners and a store of a third-party distribution. The backend `Paper` writes traces."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import attrs
from attrs import validators

from profdeck import Artifact, Backend, Capture, CommonOptions, Library, hookimpl
from profdeck.on_demand.stores import FileStore, Store
from profdeck_traces.base.errors import ConfigError

KERNEL = "void [press]<int, 2>(float*)"


@attrs.frozen(kw_only=True)
class PaperOptions(CommonOptions):
    sheets: int = attrs.field(default=3, validator=validators.ge(1))
    """Operators per trace. Default: 3. More give larger ``.trace.json`` files."""

    torn: bool = False
    """Leave the trace without its end. Default: off."""

    jammed: bool = False
    """Refuse to record on any machine. Default: off."""


class Board(FileStore):
    """A remote store in a directory. It creates a file when a process reads all entries."""

    remote = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.address = f"paper-board:{directory}"
        self._directory = directory

    def read_all(self, prefix: str) -> Mapping[str, bytes]:
        """See `Store`."""
        entries = super().read_all(prefix)
        (self._directory / "read").touch()
        return entries


def board(_: str, address: str | None) -> Store:
    """Return the store at an address, or the job's store."""
    return Board(Path(address or os.environ["PAPER_BOARD"]))


@attrs.define
class Paper(Backend):
    """Writes traces of invented operators."""

    name: ClassVar[str] = "paper"
    Options: ClassVar[type[PaperOptions]] = PaperOptions
    libraries: ClassVar[tuple[Library, ...]] = (Library(("paper",), ">=1,<2"),)

    @property
    def _own(self) -> PaperOptions:
        return cast("PaperOptions", self.options)

    def preflight(self) -> None:
        if self._own.jammed:
            raise ConfigError("The paper is jammed. Open the tray.")

    @hookimpl
    def profile_start(self, capture: Capture) -> None:
        pass

    @hookimpl
    def profile_stop(self, capture: Capture) -> Sequence[Artifact]:
        events = [
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": f"paper::fold{n}",
                "pid": 1,
                "tid": 1,
                "ts": 1000.0 * n,
                "dur": 10.0 + n,
            }
            for n in range(self._own.sheets)
        ]
        step = f"ProfilerStep#{capture.first_step}"
        events += [
            {"ph": "X", "cat": "kernel", "name": KERNEL, "pid": 0, "tid": 7, "ts": 5.0, "dur": 2.0},
            {"ph": "X", "cat": "user_annotation", "name": step, "pid": 1, "tid": 1, "ts": 0.0, "dur": 4000.0},
        ]
        text = json.dumps({"distributedInfo": {"rank": 6}, "traceEvents": events})
        path = capture.artifact_path(".trace.json")
        path.write_text(text[:-3] if self._own.torn else text, encoding="utf-8")
        return [Artifact(path=path, size_bytes=path.stat().st_size, events=len(events))]


class Absent(Paper):
    """Requires a library that is not installed."""

    name: ClassVar[str] = "paper-absent"
    libraries: ClassVar[tuple[Library, ...]] = (Library(("papyrus",), ">=3"),)


class Old(Paper):
    """Requires an earlier version of a library."""

    name: ClassVar[str] = "paper-old"
    libraries: ClassVar[tuple[Library, ...]] = (Library(("paper",), "<1"),)


class Log:
    @hookimpl
    def profile_stop(self, capture: Capture) -> None:
        pass


class Wrong:
    @hookimpl
    def profile_stop(self, paper: Capture) -> None:
        pass


@attrs.frozen
class TimerOptions:
    unit: Literal["s", "ms"] = "s"
    """Unit of the times. Default: s."""


class Timer:
    """Measures starts."""

    Options = TimerOptions

    def __init__(self, options: TimerOptions) -> None:
        self.options = options

    @hookimpl(wrapper=True)
    def profile_start(self) -> Generator[None, Any, Any]:
        return (yield)
