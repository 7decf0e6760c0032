"""Executor that reads traces in Ray tasks."""

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
from typing import Any, TypeVar

import attrs

from profdeck import ProfdeckError, __version__
from profdeck.plugin import (
    ConfigError,
    MissingLibraryError,
    Progress,
    ReportResult,
    TraceError,
    TraceFunction,
    TraceJob,
    TraceResult,
    run_item,
)

T = TypeVar("T")
R = TypeVar("R")
_CONNECT_S = 5.0
LOOK_S = 10.0
"""Polling interval while no task reports, in seconds."""
NO_NODE_S = 60.0
"""Maximum time without any CPU in the cluster, in seconds. Failed nodes may be replaced within this time."""
_TRIES = 3


@attrs.frozen
class RayExecutor:
    """Calls a function on many traces, in single-CPU tasks on a running Ray cluster.

    All nodes need the same version of profdeck and its dependencies, and a shared file system with the traces at the
    same paths. This machine must be a node of the cluster; Ray Client (``ray://``) is not supported. If this process
    has already initialised Ray, the executor uses that connection and leaves it open.
    """

    address: str
    """``host:port`` of the head node, or ``auto`` for this machine's cluster."""

    def __call__(
        self,
        function: TraceFunction[T, R],
        items: Sequence[T],
        sizes_bytes: Sequence[int],
        *,
        on_progress: Progress | None = None,
    ) -> list[R | TraceError]:
        """Call the function on each item; see `profdeck.traces.parallel.Executor`.

        Returns:
            The results in the order of the items. An item's result is a TraceError if its worker died, or if
            three nodes died while reading it.

        Raises:
            MissingLibraryError: Ray is not installed.
            ConfigError: The cluster is not running, has a different Ray or Python version, or has lost all its CPUs.
            ProfdeckError: A node does not have profdeck, or has a different version.
            Exception: Any other exception raised by the function.
        """
        try:
            import ray
        except ModuleNotFoundError as error:
            raise MissingLibraryError.of("Reading traces on a Ray cluster needs", "ray") from error
        job: TraceJob[T, R] = TraceJob(items, sizes_bytes, on_progress)
        joins = not ray.is_initialized()
        with redirect_stdout(sys.stderr):  # Ray prints worker failures to stdout, into the command's output
            try:
                if joins:
                    _join_cluster(ray, self.address)
                _run_on_cluster(ray, function, job, cancels=not joins)
            finally:
                if joins:
                    ray.shutdown()  # also stops the tasks
        return job.results()


# Each task is a generator of worker reports. The last report is the result.


def _join_cluster(ray: Any, address: str) -> None:
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or "/" in host:
            raise ConfigError(
                f"'{address}' is not a Ray cluster address. Use host:port of the head node, or auto for this machine's "
                "cluster."
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


def _run_on_cluster(ray: Any, function: TraceFunction[T, R], job: TraceJob[T, R], *, cancels: bool) -> None:
    # Ray must not retry: whatever killed the worker, such as lack of memory, would also kill the next one.
    task = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(_task)
    streams: dict[Any, int] = {}
    lost = Counter[int]()  # node failures by item index
    cpus_seen_s = time.monotonic()
    try:
        while not job.done:
            # Submit two tasks per CPU, so that no CPU is idle and an autoscaler sees pending tasks.
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
        # Ray 2.60 may exit this process if it is shut down while cancelling tasks.
        for stream in streams if cancels else ():
            ray.cancel(stream, force=True)


def _receive(ray: Any, stream: Any, item: T, lost: int) -> ReportResult[R] | None:
    """Return a task's next report, or ``None`` if its node died and the item must be retried.

    Args:
        ray: The ``ray`` module.
        stream: The task's reports.
        item: The item that the task reads.
        lost: Number of nodes that have already died while reading the item.
    """
    try:
        report: ReportResult[R] = ray.get(next(stream))
    except ray.exceptions.RayTaskError as error:
        return ProfdeckError(
            f"The Ray task for {item} failed outside its function: {str(error).splitlines()[-1]}. "
            f"Every node of the cluster needs profdeck {__version__} and its dependencies."
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


def _task(function: TraceFunction[T, R], item: T, reporting: bool, version: str) -> Iterator[ReportResult[R]]:  # noqa: FBT001
    node = platform.node()
    if version != __version__:
        yield ProfdeckError(f"The Ray node {node} has profdeck {__version__}, but this machine has {version}.")
        return
    reports: SimpleQueue[ReportResult[R]] = SimpleQueue()

    def work() -> None:
        report = run_item(function, item, reports.put if reporting else None)
        if isinstance(report, TraceResult) and isinstance(report.value, TraceError):
            report = TraceResult(_located(report.value, node))
        reports.put(report)

    threading.Thread(target=work, daemon=True).start()
    while isinstance(report := reports.get(), int):
        yield report
    yield report


def _located(error: TraceError, node: str) -> TraceError:
    """Add the node's name to a file access error, because the cause may be specific to that node."""
    if not isinstance(error.__cause__, OSError):
        return error
    return TraceError(f"{error} The error occurred on the Ray node {node}. All nodes must be able to read the traces.")
