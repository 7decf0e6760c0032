"""What commands share, and those of plugins may use: output, exit codes, and options of several commands."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from profdeck_traces.base import text
from profdeck_traces.base.errors import ProfdeckError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_REFRESH_EVERY_S = 0.1
_ENDS = re.compile(" +$", re.MULTILINE)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
"""Type of the ``--json`` option."""


_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text of anybody as a terminal may show it: what would control that, or cannot be written, is escaped."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def stdout_console() -> Console:
    """Return a console for stdout that does not interpret markup.

    If stdout is a pipe or a file, lines are not wrapped, so that tools such as grep see complete lines, and trailing
    spaces are removed.
    """
    from rich.console import Console

    class Printable(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

        def on_broken_pipe(self) -> None:
            _leave()

    folded = sys.stdout.isatty() or "COLUMNS" in os.environ
    file = sys.stdout if sys.stdout.isatty() else cast("IO[str]", _Trimmed(sys.stdout))
    return Printable(file=file, markup=False, highlight=False, emoji=False, width=None if folded else 10_000)


class _Trimmed:
    """A stream that leaves the spaces at the ends of lines out; each line comes as a whole."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_ENDS.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_json(document: Any) -> None:
    """Print data as JSON."""
    try:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _leave()


def print_stderr(text: str) -> None:
    """Print a line to stderr."""
    typer.echo(printable(text), err=True)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    print_stderr(f"warning: {text}")


def make_table(*columns: str, numbers: tuple[str, ...] = (), **options: Any) -> Table:
    """Create a table without borders. Long cells are wrapped, not truncated.

    Args:
        columns: the column headings.
        numbers: the headings of columns that are right-aligned and never wrapped.
        options: see `rich.table.Table`.
    """
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", **options)
    for column in columns:
        number = column in numbers
        made.add_column(column, overflow="fold", no_wrap=number, justify="right" if number else "left")
    return made


@contextmanager
def show_progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr while the block runs, if stderr is a terminal.

    Yields:
        A callback that takes the completed amount and the total. Any thread may call it.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    text_column = TextColumn("{task.description}", markup=False)
    # Without a thread that refreshes it: a process of several threads cannot fork the workers that read traces.
    bar = Progress(text_column, BarColumn(), TimeRemainingColumn(), console=console, transient=True, auto_refresh=False)
    due_s = 0.0

    def show(done: int, total: int) -> None:
        nonlocal due_s
        now_s = time.monotonic()
        due = now_s >= due_s
        if due:
            due_s = now_s + _REFRESH_EVERY_S
        bar.update(task, completed=done, total=total, refresh=due)

    with bar:
        task = bar.add_task(text, total=None)
        yield show


RUNS = Path("profiles")
"""Where runs are, unless something else is said: the default of the config's ``output``."""
LATEST = "latest"


def run_path(text: str | Path) -> Path:
    """Turn a word of the command line into a path: ``latest`` is the newest run, of `RUNS` or of ``DIR/latest``.

    Raises:
        typer.BadParameter: There is no run, or it is at a URL.
    """
    if _is_url(text):
        raise typer.BadParameter("This command takes what is on this host, not a URL.")
    path = Path(text)
    if path.name != LATEST or path.exists():
        return path
    from profdeck_traces.inputs.facts import run_records

    output = path.parent if len(path.parts) > 1 else RUNS
    run = run_records().newest_run(output)
    if run is None:
        raise typer.BadParameter(f"There is no run in {short_path(output)}, so 'latest' cannot be resolved.")
    return run


def _is_url(text: str | Path) -> bool:
    word = str(text)  # typer hands a default over as it is
    if "://" not in word:  # most commands start without what URLs need
        return False
    from profdeck_traces.inputs.urls import is_url

    return is_url(word)


_copied: dict[Path, str] = {}
"""Where copies of what is at URLs come from."""


def source_path(text: str | Path) -> Path:
    """Turn a word of the command line into the path of what is only read: that of a copy, if it is a URL.

    Raises:
        typer.BadParameter: There is no run.
        ProfdeckError: the URL cannot be read.
    """
    if not _is_url(text):
        return run_path(text)
    from profdeck_traces.inputs.url_copies import fetch
    from profdeck_traces.inputs.urls import redact

    url = str(text)
    with show_progress("Fetching") as on_progress:
        path = fetch(url, on_progress=on_progress)
    _copied[path] = f"{redact(url).rstrip('/').rpartition('/')[0]}/{path.name}"
    return path


def short_path(path: Path) -> str:
    """Return a path relative to the current directory if possible. For a copy of a remote file, return its URL."""
    for copy, url in _copied.items():
        if path.is_relative_to(copy):
            return "/".join([url.rstrip("/"), *path.relative_to(copy).parts])
    return text.short_path(path)


def size(size_bytes: int) -> str:
    """Write a size in bytes with a decimal unit."""
    if size_bytes < 1000:  # noqa: PLR2004  # the step between two units
        return f"{size_bytes} B"
    value = size_bytes / 1000
    for unit in ("kB", "MB", "GB"):
        if value < 1000:  # noqa: PLR2004  # as above
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _leave() -> NoReturn:
    """End quietly: nobody reads stdout any more, and the interpreter must not flush it into the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(ExitCode.BROKEN_PIPE)


class ExitCode(IntEnum):
    """The exit codes of all commands."""

    OK = 0
    """The command did what was asked, and the answer is yes, if it was a question."""
    INCOMPLETE = 1
    """A recording is not complete: `profdeck ls` found something partial, missing or failed, or none was made."""
    USAGE = 2
    """The command line or the config is wrong."""
    PLUGIN = 3
    """A plugin cannot be used: it is unknown, broken, or its library is missing or of an unsupported version."""
    UNREADABLE = 4
    """A file or directory cannot be read, or is not what the command reads."""
    REGRESSION = 5
    """`profdeck diff --fail-over` found that something got slower."""
    INTERRUPTED = 130
    """Ended by Ctrl-C."""
    BROKEN_PIPE = 141
    """The reader of the output went away, as in ``profdeck ls RUN | head -1``."""


def write_file(file: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file that a command makes, with the directory that it goes to.

    Raises:
        ProfdeckError: It cannot be written.
    """
    from profdeck_traces.base.files import replace_file

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content, durable=durable)
    except OSError as error:
        raise ProfdeckError(f"{file} cannot be written: {error.strerror or error}.") from error
