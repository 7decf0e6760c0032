"""Reading of many traces in tasks of a Ray cluster."""

from __future__ import annotations

import logging
import platform
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from queue import SimpleQueue
from typing import Any

import attrs

from profdeck import __version__
from profdeck.base.errors import ConfigError, MissingLibraryError, ProfdeckError, TraceError
from profdeck.base.progress import Progress
from profdeck.traces.parallel import Function, R, ReportResult, T, TraceJob, TraceResult, attempt

_CONNECT_S = 5.0
LOOK_S = 10.0
"""Interval of queries of an idle cluster, in seconds."""
NO_NODE_S = 60.0
"""How long a cluster may be without a CPU, in seconds: dead nodes may be replaced."""
_TRIES = 3


@attrs.frozen
class RayExecutor:
    """Calls a function on many traces, in tasks of one CPU each on a Ray cluster that is already running.

    The nodes need this version of profdeck and its dependencies, and the traces at the same paths as here: in a file
    system that all nodes share. This machine must be a node, too; Ray Client (``ray://``) is not supported. If this
    process has already initialised Ray, that connection is used and stays open.
    """

    address: str
    """``host:port`` of the head node, or ``auto`` for the cluster that this machine is a node of."""

    def __call__(
        self,
        function: Function[T, R],
        items: Sequence[T],
        sizes_bytes: Sequence[int],
        *,
        on_progress: Progress | None = None,
    ) -> list[R | TraceError]:
        """Call the function on each item; see `profdeck.traces.parallel.Executor`.

        Returns:
            The results in the order of the items. The result is a TraceError for an item whose worker died, or for an
            item that was being read on three nodes that died.

        Raises:
            MissingLibraryError: Ray is not installed.
            ConfigError: The cluster does not exist, has another version of Ray or Python, or has lost all its CPUs.
            ProfdeckError: A node has no profdeck, or another version of it.
            Exception: Any other exception of the function.
        """
        try:
            import ray
        except ModuleNotFoundError as error:
            raise MissingLibraryError.of("Reading traces on a Ray cluster needs", "ray") from error
        job: TraceJob[T, R] = TraceJob(items, sizes_bytes, on_progress)
        joins = not ray.is_initialized()
        with redirect_stdout(sys.stderr):  # Ray prints the death of workers there, within a command's output
            try:
                if joins:
                    _join_cluster(ray, self.address)
                _run_on_cluster(ray, function, job, cancels=not joins)
            finally:
                if joins:
                    ray.shutdown()  # also ends the tasks
        return job.results()


# A task is a generator that yields the reports of its worker. The last report is the result.


def _join_cluster(ray: Any, address: str) -> None:
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or "/" in host:
            raise ConfigError(
                f"'{address}' is not the address of a Ray cluster: that is host:port of its head node, or auto for the "
                "cluster that this machine is a node of."
            )
        # Ray itself would retry for a minute and then exit the process.
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address, error) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise _no_cluster(address, error) from error
    except (RuntimeError, ValueError) as error:  # usually another version of Ray or Python
        raise ConfigError(f"Cannot join the Ray cluster at {address}: {error}") from error


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"There is no Ray cluster at {address}: {error}. Start one with 'ray start --head --port 6379', "
        "and 'ray start --address HOST:6379' on the other nodes."
    )


def _run_on_cluster(ray: Any, function: Function[T, R], job: TraceJob[T, R], *, cancels: bool) -> None:
    # No retries by Ray: the cause of a worker's death, such as lack of memory, would kill the next worker, too.
    task = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(_task)
    streams: dict[Any, int] = {}
    lost = Counter[int]()  # number of nodes that died, by item
    cpus_seen_s = time.monotonic()
    try:
        while not job.done:
            # Twice as many tasks as CPUs: no CPU is idle, and an autoscaler sees the queue.
            cpus = int(ray.cluster_resources().get("CPU", 0))
            while job.waiting and len(streams) < 2 * max(1, cpus):
                index = job.waiting.popleft()
                streams[task.remote(function, job.items[index], job.reporting, __version__)] = index
            ready = ray.wait(list(streams), num_returns=1, timeout=LOOK_S)[0]
            cpus_seen_s = time.monotonic() if cpus or ready else cpus_seen_s
            if time.monotonic() - cpus_seen_s > NO_NODE_S:
                raise ConfigError(
                    f"The Ray cluster has had no CPU for {NO_NODE_S:g} s: its nodes died, or were started with "
                    "--num-cpus 0. Start nodes with 'ray start --address HOST:6379'."
                )
            for stream in ready:
                index = streams[stream]
                report: ReportResult[R] | None = _receive(ray, stream, job.items[index], lost[index])
                if report is None:
                    lost[index] += 1
                    job.waiting.appendleft(index)
                if report is None or job.take(index, report):
                    del streams[stream]
    finally:
        # Ray 2.60 may exit this process if it is shut down while it cancels tasks.
        for stream in streams if cancels else ():
            ray.cancel(stream, force=True)


def _receive(ray: Any, stream: Any, item: T, lost: int) -> ReportResult[R] | None:
    """Return the next report of a task, or ``None`` if its node died and another node should read the item.

    Args:
        ray: The module.
        stream: The task's reports.
        item: The item that the task reads.
        lost: Number of nodes that have died while they read the item.
    """
    try:
        report: ReportResult[R] = ray.get(next(stream))
    except ray.exceptions.RayTaskError as error:
        return ProfdeckError(
            f"The Ray task for {item} failed outside of its function: {str(error).splitlines()[-1]}. "
            f"Every node of the cluster needs profdeck {__version__} and what it imports."
        )
    except ray.exceptions.RayError as error:
        again = isinstance(error, ray.exceptions.NodeDiedError) and lost + 1 < _TRIES
        return None if again else TraceResult(_lost(item, error))
    return report


def _lost(item: T, error: Exception) -> TraceError:
    return TraceError(
        f"Cannot read {item}: its Ray worker died ({type(error).__name__}). "
        "If the memory ran out, start that node with fewer CPUs (ray start --num-cpus)."
    )


def _task(function: Function[T, R], item: T, reporting: bool, version: str) -> Iterator[ReportResult[R]]:  # noqa: FBT001
    node = platform.node()
    if version != __version__:
        yield ProfdeckError(f"The Ray node {node} has profdeck {__version__}, and this machine has {version}.")
        return
    reports: SimpleQueue[ReportResult[R]] = SimpleQueue()

    def work() -> None:
        report = attempt(function, item, reports.put if reporting else None)
        if isinstance(report, TraceResult) and isinstance(report.value, TraceError):
            report = TraceResult(_located(report.value, node))
        reports.put(report)

    threading.Thread(target=work, daemon=True).start()
    while isinstance(report := reports.get(), int):
        yield report
    yield report


def _located(error: TraceError, node: str) -> TraceError:
    """Add the node to an error that may depend on it."""
    if not isinstance(error.__cause__, OSError):
        return error
    return TraceError(f"{error} This was on the Ray node {node}; traces have to be where all nodes can read them.")
