"""Measures how much CPU time and memory the account takes on public traces, each repeated to the same size.

python -m benchmarks.traces.account [--megabytes 40] [TRACE...]

All costs of a trace are measured in one process, so the machine's load doesn't affect the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.traces import costs
from benchmarks.traces.generate import DATA

PUBLIC = (
    "tl__traces__b200__eager_trace",
    "tl__traces__h100__Qwen_Qwen1.5-0.5B-Chat__1016005",
    "tl__traces__mi300__Qwen_Qwen1.5-0.5B-Chat__1016005",
    "tl__traces__inference__sglang_decode__sglang_Qwen3-8B_decode",
    "kineto__9d1ce6a2__samples__resnet50_num_workers_0__worker0.1623143089861.pt.trace",
)
GOALS = {"path_us": 1.0, "ratio": 2.5, "bytes": 300.0}
"""CPU time of the path in microseconds per event; CPU time of reading and the account, relative to a summary without
the account; and peak memory of the account in bytes per event."""


def account_costs(path: Path, rounds: int) -> dict[str, float]:
    """Return the costs of one trace. Each is the minimum over all rounds."""
    from profdeck_traces.account import table
    from profdeck_traces.account.idle_periods import NO_PERIODS
    from profdeck_traces.analysis import summary
    from profdeck_traces.analysis.critical_path import path_windows
    from profdeck_traces.reading.reader import read_trace as read

    of_summary = summary._Summary  # noqa: SLF001 - times an internal step of the summary
    account_of = of_summary._account_of  # noqa: SLF001 - times an internal step of the summary
    spent: dict[str, list[float]] = {}
    events = 0

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            begin_s = time.process_time()
            try:
                return call(*args, **options)
            finally:
                spent.setdefault(name, []).append(time.process_time() - begin_s)

        return wrapped

    def path_only(self: Any, names: Any) -> tuple[None, Any, Any]:
        nonlocal events
        events = names.events.complete
        windows = path_windows(self._trace, names, self._trace_steps, self._step_names, self._classes)
        for window in windows:
            table._used_path(window)  # noqa: SLF001 - times an internal step of the summary
        return none(self, names)

    def none(self: Any, _names: Any) -> tuple[None, Any, Any]:
        return None, self._arrivals, NO_PERIODS

    def memory(self: Any, names: Any) -> Any:
        tracemalloc.start()
        try:
            return account_of(self, names)
        finally:
            spent.setdefault("peak", []).append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    def run(method: Callable[..., Any], name: str) -> None:
        with (
            mock.patch.object(of_summary, "_account_of", timed(name, method)),
            mock.patch.object(summary, "read_trace", timed("read", read)),
        ):
            timed(f"{name} summary", summary.summarise_trace)(path)

    for _ in range(rounds):
        run(none, "none")
        run(path_only, "path")
        run(account_of, "account")
        with mock.patch.object(table, "_rows", return_value=[]):
            run(account_of, "not joined")
    run(memory, "memory")
    least = {name: min(values) for name, values in spent.items()}
    return {
        "events": events,
        "read_us": 1e6 * least["read"] / events,
        "path_us": 1e6 * least["path"] / events,
        "account_us": 1e6 * least["account"] / events,
        "ratio": (least["read"] + least["account"]) / least["none summary"],
        "joined": least["account"] / least["not joined"],
        "bytes": least["peak"] / events,
    }


def main(arguments: Sequence[str]) -> None:
    """Print the costs of each trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="measure the trace as it is, and print JSON")
    parser.add_argument("--into", type=Path, help="repeat the trace to --megabytes, and write it to this directory")
    options = parser.parse_args(arguments)
    if options.into:
        from benchmarks.traces.inputs import one_rank

        one_rank(options.into, options.megabytes, options.traces[0])
        print("{}")
        return
    if options.one:
        print(json.dumps(account_costs(options.traces[0], options.rounds)))
        return
    print(f"load {os.getloadavg()[0]:.1f}; goals {GOALS}")
    print(f"{'trace':30} {'events':>9} {'read':>8} {'path':>8} {'account':>8} {'ratio':>6} {'joined':>7} {'bytes':>6}")
    with tempfile.TemporaryDirectory() as directory:
        for base in options.traces or [DATA / "public" / f"{name}.json.gz" for name in PUBLIC]:
            command = costs.python("account", "--one", "--rounds", options.rounds)
            path = Path(directory) / "one.trace.json.gz"
            costs.run(costs.python("account", "--into", directory, "--megabytes", options.megabytes, base))
            cost = costs.run([*command, str(path)]).answer
            print(
                f"{base.name.removesuffix('.json.gz')[-30:]:30} {cost['events']:9,.0f} {cost['read_us']:8.2f} "
                f"{cost['path_us']:8.2f} {cost['account_us']:8.2f} {cost['ratio']:6.2f} {cost['joined']:7.2f} "
                f"{cost['bytes']:6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
