"""A child process that is ended with all that it started: at a deadline, when it is cancelled, or with its parent.

The child leads a process group of its own, in a session of its own, so that Ctrl-C in a terminal reaches the parent
only. Two pipes connect them:

- the lifeline, of which the parent holds the writing end until the group has ended. The child kills its group when it
  closes, which it does even if the parent is killed;
- the news, of which the child holds the writing end. A byte in it says that the child has begun, and its end that the
  child has ended. What it leaves of its group is ended then.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Literal

import attrs

from profdeck.plugin import has_ended, process_stat

TERM_GRACE_S = 5.0
_KILL_GRACE_S = 10.0
_POLL_S = 0.02
_LOOK_S = 1.0
"""How long a signal may wait that comes between Python's last look for one and the wait, which it does not end."""


@attrs.frozen
class Ended:
    """How a child ended."""

    returncode: int
    """Its exit code, or minus the signal that ended it."""
    because: Literal["itself", "timeout", "cancelled"]
    begun: bool
    """Whether it said that it had begun."""


class Cancellation:
    """Ends the children that other threads run, from any thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._lock = threading.Lock()
        self._cancelled = False

    def fileno(self) -> int:
        """Return what becomes readable when they are to end."""
        return self._read

    def cancel(self) -> None:
        """End them; a second call does nothing."""
        with self._lock:
            if not self._cancelled:
                self._cancelled = True
                os.close(self._write)

    def close(self) -> None:
        """Release it, when nobody uses it any more."""
        self.cancel()
        os.close(self._read)


def run_group(
    command: Sequence[str], *, output: BinaryIO, timeout_s: float, cancellation: Cancellation | None = None
) -> Ended:
    """Run a child to its end, with an empty input, end what it leaves of its process group, and return after that.

    Args:
        command: What to run. Two arguments are added, for `attach`.
        output: Where its output goes.
        timeout_s: After so many seconds the group is ended.
        cancellation: Ends the group, from another thread.

    Raises:
        OSError: It cannot be started.
        BaseException: What a signal handler raised meanwhile, such as KeyboardInterrupt, after the group has ended.
    """
    deadline_s = time.monotonic() + timeout_s
    lifeline, life = os.pipe()
    news, telling = os.pipe()
    # Closed last: until then the child lives.
    with os.fdopen(life, "wb", buffering=0), os.fdopen(news, "rb", buffering=0) as reader:
        try:
            child = subprocess.Popen(
                [*command, str(lifeline), str(telling)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(lifeline, telling),
                start_new_session=True,
            )
        finally:
            os.close(lifeline)
            os.close(telling)
        try:
            begun, because = _watch(reader, deadline_s, cancellation)
        finally:
            _end_group(child.pid)
            child.wait()
    return Ended(child.returncode, because, begun)


def attach(lifeline: int, news: int) -> None:
    """In the child: end with the parent from now on, and say that it has begun."""
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    os.write(news, b"+")
    held = [news]

    def drop() -> None:  # once: in what a fork forks, the number may be another file's
        while held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=drop)


@contextmanager
def terminable() -> Generator[None, None, None]:
    """Turn a SIGTERM to this process into SystemExit, until the block ends, so that it can tidy up.

    In another than the main thread, which alone may handle signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _terminate(number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the tidying up
    raise SystemExit(128 + number)


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(0, signal.SIGKILL)  # the whole group, this process as well


def _watch(
    reader: BinaryIO, deadline_s: float, cancellation: Cancellation | None
) -> tuple[bool, Literal["itself", "timeout", "cancelled"]]:
    begun = False
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    if cancellation:
        poll.register(cancellation, select.POLLIN)
    while (left_s := deadline_s - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in poll.poll(min(left_s, _LOOK_S) * 1000)}
        if cancellation and cancellation.fileno() in ready:
            return begun, "cancelled"
        if reader.fileno() in ready:
            if not reader.read(1):
                return begun, "itself"
            begun = True
    return begun, "timeout"


def _end_group(group: int) -> None:
    """End what is left of a group, whose leader has not been waited for: so its number cannot be another's yet."""
    for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        if not _members(group):
            return
        with suppress(ProcessLookupError):
            os.killpg(group, number)
        # There is no event for the end of processes that are not our children.
        deadline_s = time.monotonic() + grace_s
        while _members(group) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)


def _members(group: int) -> list[int]:
    """List the processes of a group that have not ended. Source: field 5 of ``/proc/<pid>/stat`` (proc(5))."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        pid = int(path.parent.name)
        fields = process_stat(pid)
        if fields and int(fields[2]) == group and not has_ended(fields):
            found.append(pid)
    return found
