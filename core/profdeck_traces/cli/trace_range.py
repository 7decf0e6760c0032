"""What commands that take a part of a trace share: their options, and the selection that these mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from profdeck_traces.base.errors import ConfigError
from profdeck_traces.cli import terminal
from profdeck_traces.inputs.facts import run_records

if TYPE_CHECKING:
    from profdeck_traces.base.progress import Progress
    from profdeck_traces.writing.selection import Selection

_NOT_IN_NAMES = re.compile(r"[^\w.-]+")
_NUMBERS = re.compile(r"\s*(\d{1,18})\s*(?:\.\.\s*(\d{1,18})\s*)?", re.ASCII)
_NS_OF = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_TIME = r"(?:(\d+(?:\.\d+)?)\s*(s|ms|us|ns))?"
_TIMES = re.compile(rf"\s*{_TIME}\s*\.\.\s*{_TIME}\s*", re.ASCII)


@attrs.frozen
class TimeRange:
    """A range of time from an origin; ``None``: no bound."""

    begin_ns: int | None
    end_ns: int | None
    text: str
    """For the name of a file."""


def numbers(text: str) -> range:
    """Read ``3`` or ``3..4``.

    Raises:
        typer.BadParameter: It is something else.
    """
    match = _NUMBERS.fullmatch(text)
    if match is None or (first := int(match[1])) > (last := int(match[2] or match[1])):
        raise typer.BadParameter(f"'{text}' is no range. Write 3, or 3..4 for all from the first to the last.")
    return range(first, last + 1)


def _time_range(text: str) -> TimeRange:
    """Read ``1.5s..2s``, ``800ms..`` or ``..2s``.

    Raises:
        typer.BadParameter: It is something else, or empty.
    """
    match = _TIMES.fullmatch(text)
    if match is None or not (match[1] or match[3]):
        raise typer.BadParameter(f"'{text}' is no range of time. Write 1.5s..2s, 800ms.. or ..2s; or us or ns.")
    begin_ns, end_ns = _ns(match[1], match[2]), _ns(match[3], match[4])
    if begin_ns is not None and end_ns is not None and begin_ns >= end_ns:
        raise typer.BadParameter(f"'{text}' is empty: its end is not behind its start.")
    begin, end = (f"{match[1]}{match[2]}" if match[1] else "start"), (f"{match[3]}{match[4]}" if match[3] else "end")
    return TimeRange(begin_ns, end_ns, f"{begin}-{end}")


def _ns(number: str | None, unit: str) -> int | None:
    return None if number is None else int(Decimal(number) * _NS_OF[unit])


Steps = Annotated[
    range | None, typer.Option(metavar="RANGE", parser=numbers, help="Keep these global steps: 3 or 3..4.")
]
Iterations = Annotated[
    range | None,
    typer.Option(
        metavar="RANGE", parser=numbers, help="Keep these iterations of an engine, counted from 0 in a trace."
    ),
]
Time = Annotated[
    TimeRange | None,
    typer.Option(
        metavar="RANGE",
        parser=_time_range,
        help="Keep this time, counted from a trace's earliest complete event: 1.5s..2s, 800ms.. or ..2s.",
    ),
]
Category = Annotated[
    list[str] | None,
    typer.Option(metavar="CAT", help="Keep events of this category, such as kernel; may be given again."),
]


@attrs.frozen
class TracePart:
    """What is to be kept of traces."""

    steps: range | None
    iterations: range | None
    time: TimeRange | None
    categories: tuple[str, ...]

    @classmethod
    def of(
        cls, steps: range | None, iterations: range | None, time: TimeRange | None, category: list[str] | None
    ) -> TracePart:
        """Take the options.

        Raises:
            ConfigError: Two of them say when.
        """
        windows = {"steps": steps, "iterations": iterations, "time": time}
        given = [f"--{name}" for name, window in windows.items() if window is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are given: give one of them.")
        return cls(steps, iterations, time, tuple(category or ()))

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return self == TracePart(None, None, None, ())

    @property
    def text(self) -> str:
        """What is kept, for the name of a file: ``steps3-4-kernel``."""
        parts = [
            f"{name}{numbers.start}" + (f"-{numbers.stop - 1}" if numbers.stop - 1 > numbers.start else "")
            for name, numbers in (("steps", self.steps), ("iterations", self.iterations))
            if numbers is not None
        ]
        parts += [self.time.text] if self.time else []
        return "-".join([*parts, *(_NOT_IN_NAMES.sub("_", category) for category in self.categories)])

    def selection(self, file: Path, on_progress: Progress | None = None) -> Selection:
        """Find out what that is in a trace.

        Raises:
            TraceError: It cannot be read, or has none of it.
        """
        from profdeck_traces.analysis.step_names import StepNames
        from profdeck_traces.writing.selection import Selection
        from profdeck_traces.writing.windows import iteration_window, step_window, time_window

        selection = Selection()
        if self.steps is not None:
            selection = step_window(file, self.steps, on_progress=on_progress)
        elif self.iterations is not None:
            selection = iteration_window(file, self.iterations, StepNames.load(), on_progress=on_progress)
        elif self.time is not None:
            selection = time_window(file, self.time.begin_ns, self.time.end_ns, on_progress=on_progress)
        return attrs.evolve(selection, categories=frozenset(self.categories) or None)


def new_file(destination: Path) -> Path:
    """Check the path of a new trace.

    Raises:
        ConfigError: It exists, has no directory or lies in a run, whose traces others would take it for.
    """
    if destination.exists() or destination.is_symlink():
        raise taken(destination)
    if not destination.parent.is_dir():
        raise ConfigError(f"{destination.parent} is not a directory: create it, or choose another --output.")
    for parent in destination.resolve().parents:
        if run_records().is_run(parent):
            raise ConfigError(
                f"{terminal.short_path(destination.absolute())} is inside the run {parent} and would be read as a "
                "trace of that run. Choose an --output outside of the run."
            )
    return destination


@contextmanager
def writing(destination: Path) -> Iterator[None]:
    """Say what keeps a new trace from being written.

    Raises:
        ConfigError: Something has come to be there, or the file system refuses.
    """
    try:
        yield
    except FileExistsError:
        raise taken(destination) from None
    except OSError as error:
        raise ConfigError(f"{destination} cannot be written: {error.strerror or error}.") from None


def taken(destination: Path) -> ConfigError:
    """Return the error for a path at which there is something."""
    return ConfigError(f"{destination} exists, and is left as it is: choose another --output.")
