"""Options that select a part of a trace, and checks of output paths, for `trim`, `merge` and `view`."""

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
from profdeck_traces.inputs.outputs import check_output

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
    """Time range, counted from the earliest complete event of a trace. ``None`` means unbounded."""

    begin_ns: int | None
    end_ns: int | None
    text: str
    """Description for file names, such as ``1.5s-2s``."""


def parse_range(text: str) -> range:
    """Parse a number or an inclusive range, such as ``3`` or ``3..4``.

    Raises:
        typer.BadParameter: The text has another format, or the range is empty.
    """
    match = _NUMBERS.fullmatch(text)
    if match is None or (first := int(match[1])) > (last := int(match[2] or match[1])):
        raise typer.BadParameter(
            f"'{text}' is not a valid range. Write one number, such as 3, or a first and last number, such as 3..4."
        )
    return range(first, last + 1)


def _time_range(text: str) -> TimeRange:
    """Parse a time range, such as ``1.5s..2s``, ``800ms..`` or ``..2s``.

    Raises:
        typer.BadParameter: The text has another format, or the range is empty.
    """
    match = _TIMES.fullmatch(text)
    if match is None or not (match[1] or match[3]):
        raise typer.BadParameter(
            f"'{text}' is not a time range, such as 1.5s..2s, 800ms.. or ..2s. Units: s, ms, us, ns."
        )
    begin_ns, end_ns = _ns(match[1], match[2]), _ns(match[3], match[4])
    if begin_ns is not None and end_ns is not None and begin_ns >= end_ns:
        raise typer.BadParameter(f"'{text}' is an empty range. The end must be after the start.")
    begin, end = (f"{match[1]}{match[2]}" if match[1] else "start"), (f"{match[3]}{match[4]}" if match[3] else "end")
    return TimeRange(begin_ns, end_ns, f"{begin}-{end}")


def _ns(number: str | None, unit: str) -> int | None:
    return None if number is None else int(Decimal(number) * _NS_OF[unit])


Steps = Annotated[
    range | None,
    typer.Option(
        metavar="RANGE",
        parser=parse_range,
        help="Keep these global steps, such as 3 or 3..4. Engine iterations: --iterations.",
    ),
]
Iterations = Annotated[
    range | None,
    typer.Option(
        metavar="RANGE", parser=parse_range, help="Keep these engine iterations, counted from 0 in each trace."
    ),
]
Time = Annotated[
    TimeRange | None,
    typer.Option(
        metavar="RANGE",
        parser=_time_range,
        help="Keep this time range, counted from the earliest complete event of a trace: 1.5s..2s, 800ms.. or ..2s.",
    ),
]
Category = Annotated[
    list[str] | None,
    typer.Option(metavar="CAT", help="Keep events of this category, such as kernel. Repeatable."),
]


@attrs.frozen
class TracePart:
    """Part of a trace to keep. ``None`` and an empty tuple mean no restriction."""

    steps: range | None
    iterations: range | None
    time: TimeRange | None
    categories: tuple[str, ...]

    @classmethod
    def from_options(
        cls, steps: range | None, iterations: range | None, time: TimeRange | None, category: list[str] | None
    ) -> TracePart:
        """Create the part from the values of the options.

        Raises:
            ConfigError: More than one of steps, iterations and time is specified.
        """
        windows = {"steps": steps, "iterations": iterations, "time": time}
        options = [f"--{name}" for name, window in windows.items() if window is not None]
        if len(options) > 1:
            raise ConfigError(f"{' and '.join(options)} cannot be combined. Use only one of them.")
        return cls(steps, iterations, time, tuple(category or ()))

    @property
    def is_all(self) -> bool:
        """True if the complete trace is kept."""
        return self == TracePart(None, None, None, ())

    @property
    def text(self) -> str:
        """Description for file names, such as ``steps3-4-kernel``."""
        parts = [
            f"{name}{numbers.start}" + (f"-{numbers.stop - 1}" if numbers.stop - 1 > numbers.start else "")
            for name, numbers in (("steps", self.steps), ("iterations", self.iterations))
            if numbers is not None
        ]
        parts += [self.time.text] if self.time else []
        return "-".join([*parts, *(_NOT_IN_NAMES.sub("_", category) for category in self.categories)])

    def selection(self, file: Path, on_progress: Progress | None = None) -> Selection:
        """Find the part in a trace, and return it as a selection of events.

        Args:
            file: Path of the trace.
            on_progress: Called with the number of bytes read so far and the total.

        Raises:
            TraceError: The trace cannot be read, or does not contain the part.
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


def check_new_file(destination: Path) -> None:
    """Check that a new trace can be written to `destination`.

    Raises:
        ConfigError: The path exists or is inside a run, or its directory does not exist.
    """
    check_output(destination)
    if not destination.parent.is_dir():
        raise ConfigError(f"{destination.parent} is not a directory. Create it, or choose another --output.")


@contextmanager
def write_errors(destination: Path) -> Iterator[None]:
    """Convert an ``OSError`` raised inside the block to a `ConfigError` that names the new trace, `destination`.

    SIGTERM and SIGHUP delete the temporary files.
    """
    try:
        with terminal.exit_on_signals():
            yield
    except FileExistsError:
        raise ConfigError(f"{destination} already exists. Choose another path.") from None
    except OSError as error:
        raise ConfigError(f"{destination} cannot be written: {error.strerror or error}.") from None
