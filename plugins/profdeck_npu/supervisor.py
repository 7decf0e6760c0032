"""The process that analyses what one rank recorded, when the ranks of its host have stopped, and outlives the job.

`profdeck_npu.analysis.request` starts it as ``python -m profdeck_npu.supervisor`` and writes an `Order` to its input.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from profdeck import ProfdeckError
from profdeck.plugin import (
    CaptureError,
    JsonKind,
    Lease,
    LeaseError,
    Manifest,
    acquire_lease,
    describe_error,
    is_manifest,
    read_manifest,
)
from profdeck_npu.analysis import AnalysisUnderWayError, Order, analyse, default_processes, fail
from profdeck_npu.process_group import terminable
from profdeck_npu.traces.analysis_state import read_state

# There is no event that reaches from one process to another by a shared file system.
_POLL_S = 0.5
_NICENESS = 10

_log = logging.getLogger(__name__)
_ORDER = JsonKind(Order)


def main() -> None:
    """Carry out the order in the input, if the starting process gave one before it died."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(process)d %(message)s")
    given = sys.stdin.buffer.read()
    if not given:
        return
    order = _ORDER.decode(given)
    with suppress(OSError):
        os.nice(_NICENESS)  # the job goes on beside it
    with terminable():
        carry_out(order)


def carry_out(order: Order) -> None:
    """Analyse the directories of an order, one after the other, when it is time."""
    left = [Path(directory) for directory in order.directories]
    try:
        wait_for_ranks(Path(order.capture), order.timeout_s)
        with _slot():
            while left:
                if _is_ours(left[0]):
                    _analyse(left[0], order)
                left.pop(0)
    except BaseException as error:
        _log.exception("The analysis ends")
        why = describe_error(error) if isinstance(error, Exception) else "it was interrupted"
        for directory in filter(_is_ours, left):
            fail(directory, why)
        if not isinstance(error, Exception):
            raise


def wait_for_ranks(capture: Path, timeout_s: float) -> None:
    """Wait until no process of this host records into a capture's directory, by the manifests in it.

    Raises:
        CaptureError: One still does, after so many seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    ended: set[Path] = set()  # or of another host: not read again
    said = ""
    while recording := _recording(capture, ended):
        who = ", ".join(f"rank {manifest.rank} (process {manifest.pid})" for manifest in recording)
        if time.monotonic() > deadline_s:
            raise CaptureError(f"it did not begin, as this was still recording after {timeout_s:g} s: {who}")
        if who != said:
            _log.info("Waiting for %s", who)
            said = who
        time.sleep(_POLL_S)


def _recording(capture: Path, ended: set[Path]) -> list[Manifest]:
    found = []
    for file in sorted(capture.glob("*.json")):
        if file in ended or not is_manifest(file):
            continue
        with suppress(ProfdeckError):
            manifest = read_manifest(file)
            if manifest.under_way:
                found.append(manifest)
                continue
        ended.add(file)
    return found


def _is_ours(directory: Path) -> bool:
    """Tell whether a directory still waits for this process: `profdeck npu analyse` may have been faster."""
    try:
        state = read_state(directory)
    except ProfdeckError:
        return False
    return state is not None and state.state == "pending" and state.pid == os.getpid()


def _analyse(directory: Path, order: Order) -> None:
    _log.info("Analysing %s", directory)
    try:
        state = analyse(directory, timeout_s=order.timeout_s)
    except AnalysisUnderWayError as error:
        _log.info("%s: %s", directory, error)
    else:
        _log.info("%s: %s %s", directory, state.state, "; ".join(state.problems))


@contextmanager
def _slot() -> Generator[None, None, None]:
    """Wait until fewer supervisors than half of the cores of this host are analysing, and be one of them."""
    slot = _free_slot()
    if slot is None:
        _log.info("Waiting for one of %d slots", default_processes())
    while slot is None:
        time.sleep(_POLL_S)
        slot = _free_slot()
    try:
        yield
    finally:
        slot.release()


def _free_slot() -> Lease | None:
    for number in range(default_processes()):
        with suppress(LeaseError):
            return acquire_lease([f"analysis-{os.getuid()}-{number}"], holder="analysis")
    return None


if __name__ == "__main__":
    main()
