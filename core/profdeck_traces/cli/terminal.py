"""Terminal output, exit codes and path arguments for all commands, including those of plugins."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from profdeck_traces.base import text
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.base.files import user_path
from profdeck_traces.base.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_REFRESH_EVERY_S = 0.1
_FORCES_TERMINAL = {"FORCE_COLOR", "TTY_COMPATIBLE"}
"""Environment variables that make rich treat any stream as a terminal."""
_TRAILING_SPACES = re.compile(" +$", re.MULTILINE)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
"""Type of the ``--json`` option."""


def stdout_console() -> Console:
    """Return a console for stdout that does not interpret markup.

    Each string is escaped and printed as one line. To print several lines, pass a `rich.text.Text`, which is
    not escaped.

    If stdout is a pipe or a file, lines are not wrapped, so that tools such as grep see complete lines, and trailing
    spaces are removed.
    """
    from rich.console import Console

    class Printable(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

        def on_broken_pipe(self) -> None:
            exit_quietly()

    wraps = sys.stdout.isatty() or "COLUMNS" in os.environ
    file = sys.stdout if sys.stdout.isatty() else cast("IO[str]", _Trimmed(sys.stdout))
    return Printable(file=file, markup=False, highlight=False, emoji=False, width=None if wraps else 10_000)


class _Trimmed:
    """Text stream that removes trailing spaces. Each line must be written in one call."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_TRAILING_SPACES.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_json(document: Any) -> None:
    """Print data as JSON."""
    try:
        sys.stdout.write(escape_commands(json.dumps(document, indent=2)) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        exit_quietly()


def escape_commands(document: str) -> str:
    """Escape ``##`` in a JSON document, because CI systems interpret ``##[`` as a command (see `printable`).

    In JSON, ``##`` can only occur inside strings.
    """
    return document.replace("##", "#\\u0023")


def print_line(text: str) -> None:
    """Print text as one line to stdout. Control characters and line breaks are escaped."""
    typer.echo(printable(text))


def print_stderr(text: str) -> None:
    """Print text as one line to stderr. Control characters and line breaks are escaped."""
    typer.echo(printable(text), err=True)


def error_lines(error: ProfdeckError) -> list[str]:
    """Return the messages of an error, each of them escaped to fit on one line."""
    return [printable(str(message)) for message in error.args]


def warn(text: str) -> None:
    """Print a warning to stderr."""
    print_stderr(f"warning: {text}")


def make_table(*columns: str, numbers: tuple[str, ...] = (), **options: Any) -> Table:
    """Create a table without borders. Long cells are wrapped, not truncated.

    Args:
        columns: The column headings.
        numbers: The headings of columns that are right-aligned and never wrapped.
        options: See `rich.table.Table`.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", **options)
    for column in columns:
        number = column in numbers
        table.add_column(column, overflow="fold", no_wrap=number, justify="right" if number else "left")
    return table


@contextmanager
def show_progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr while the block runs, if stderr is a terminal.

    Yields:
        A callback that takes the completed amount and the total. Any thread may call it.
    """
    console = None
    if sys.stderr.isatty() or not _FORCES_TERMINAL.isdisjoint(os.environ):  # rich is slow to import
        from rich.console import Console

        console = Console(stderr=True)
    if console is None or not console.is_terminal:
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    text_column = TextColumn("{task.description}", markup=False)
    # Without a refresh thread, because a process with several threads cannot fork the workers that read traces.
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
"""Default directory of runs, which is also the default of ``output`` in the config."""
LATEST = "latest"


def run_path(text: str | Path) -> Path:
    """Parse the path of a local run. ``latest`` is the newest run in `RUNS`, ``DIR/latest`` the newest run in DIR.

    Raises:
        typer.BadParameter: The argument is a URL, or the directory contains no run.
    """
    if _is_url(text):
        raise typer.BadParameter("This command requires a local path, not a URL.")
    path = user_path(text)
    if path.name != LATEST or path.exists():
        return path
    from profdeck_traces.inputs.facts import run_records

    output = path.parent if len(path.parts) > 1 else RUNS
    run = run_records().newest_run(output)
    if run is None:
        raise typer.BadParameter(f"There is no run in {short_path(output)}, so 'latest' cannot be resolved.")
    return run


def _is_url(text: str | Path) -> bool:
    argument = str(text)  # typer does not convert defaults to strings
    if "://" not in argument:  # skip the import if possible
        return False
    from profdeck_traces.inputs.urls import is_url

    return is_url(argument)


_copies_cached = ContextVar("copies_cached", default=True)


def set_copies_cached(context: typer.Context, value: bool) -> bool:  # noqa: FBT001  # typer's signature
    """Handle ``--no-cache``, which makes `source_path` fetch all files again."""
    token = _copies_cached.set(value)
    context.call_on_close(lambda: _copies_cached.reset(token))
    return value


_url_of_copy: dict[Path, str] = {}
"""URL of each local copy."""


def source_path(text: str | Path) -> Path:
    """Parse a path or URL of an input that is only read. For a URL, fetch the files and return the path of the copy.

    Raises:
        typer.BadParameter: The argument is ``latest``, and the directory contains no run.
        ProfdeckError: The URL cannot be read.
    """
    if not _is_url(text):
        return run_path(text)
    from profdeck_traces.base.credentials import redact_url
    from profdeck_traces.inputs.url_copies import fetch

    url = str(text)
    with show_progress("Fetching") as on_progress, exit_on_signals():
        path = fetch(url, cache=_copies_cached.get(), on_progress=on_progress)
    _url_of_copy[path] = f"{redact_url(url).rstrip('/').rpartition('/')[0]}/{path.name}"
    return path


def short_path(path: Path) -> str:
    """Return a path relative to the current directory if possible. For a copy of a remote file, return its URL."""
    for copy, url in _url_of_copy.items():
        if path.is_relative_to(copy):
            return "/".join([url.rstrip("/"), *path.relative_to(copy).parts])
    return text.short_path(path)


def shell_path(path: Path) -> str:
    """Return `short_path`, quoted for a command that the user can paste into a shell."""
    return text.shell_word(short_path(path))


def size(size_bytes: int) -> str:
    """Format a size in bytes with a decimal unit, such as ``1.5 MB``."""
    if size_bytes < 1000:  # noqa: PLR2004  # factor between units
        return f"{size_bytes} B"
    value = size_bytes / 1000
    for unit in ("kB", "MB", "GB"):
        if value < 1000:  # noqa: PLR2004  # as above
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def exit_quietly() -> NoReturn:
    """Exit after the reader of stdout has closed the pipe.

    stdout is redirected to /dev/null first. Otherwise, the interpreter would print an error when it flushes stdout.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(ExitCode.BROKEN_PIPE)


EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP inside the block to `SystemExit`, so that temporary files are deleted.

    A signal that is already ignored, such as SIGHUP under nohup, stays ignored.
    """

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    replaced = [number for number in EXIT_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    OK = 0
    """Success. If the command checks something, the check passed."""
    INCOMPLETE = 1
    """A capture is partial, missing or failed, or nothing was captured."""
    USAGE = 2
    """The command line or the config is invalid."""
    PLUGIN = 3
    """A plugin cannot be used: it is unknown or broken, or its library is missing or has an unsupported version."""
    UNREADABLE = 4
    """A file or directory cannot be read, or has the wrong type."""
    REGRESSION = 5
    """`profdeck diff --fail-over` or `profdeck baseline check` found a regression."""
    INCONCLUSIVE = 6
    """The result of `profdeck diff`, `baseline check` or `trend` is inconclusive, for example with too few steps."""
    INTERRUPTED = 130
    """Interrupted by Ctrl-C."""
    BROKEN_PIPE = 141
    """The reader of stdout closed the pipe, as in ``profdeck ls RUN | head -1``."""


def write_file(file: Path, content: bytes, *, durable: bool = False) -> None:
    """Write an output file of a command atomically, and create its directory if necessary.

    Args:
        file: Path of the file.
        content: Complete contents of the file.
        durable: If True, sync the file to disk (fsync).

    Raises:
        ProfdeckError: The file cannot be written.
    """
    from profdeck_traces.base.files import replace_file

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(os.path.realpath(file)), content, durable=durable)
    except OSError as error:
        raise ProfdeckError(f"{file} cannot be written: {error.strerror or error}.") from error
