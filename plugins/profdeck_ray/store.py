"""Store for on-demand requests in a named Ray actor, for jobs whose processes are Ray actors or tasks.

The first process of the job creates the actor. The actor reserves no CPU. It exits if it receives no calls for a while,
because every running process polls for requests twice a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from profdeck.plugin import ConfigError, Store
from profdeck_ray.actors import require

_NAMESPACE = "profdeck"
_CALL_TIMEOUT_S = 10.0
_IDLE_LIMIT_S = 20.0


def connect(run: str, address: str | None) -> RayStore:
    """Connect to a job's store.

    Args:
        run: Name of the run.
        address: Cluster address for `ray.init`. ``None`` in a process of the job.

    Raises:
        ConfigError: This process does not belong to a Ray job.
        MissingLibraryError: Ray is not installed.
    """
    require("The store 'ray' needs")
    import ray

    if address is not None:
        return RayStore(run, address, is_of_job=False)
    if not ray.is_initialized():
        raise ConfigError(
            "on_demand: ray requires an actor, task or driver of a Ray job, but this process has not joined one. Call "
            "ray.init() before building the Profiler, or set on_demand: true if all processes share the run directory."
        )
    return RayStore(run, ray.get_runtime_context().gcs_address, is_of_job=True)


class Notes:
    """Actor that stores notes by name; see `Store`."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}
        self._last_call_s = time.monotonic()
        threading.Thread(target=self._exit_when_idle, daemon=True).start()

    def read(self, name: str) -> bytes | None:
        """Return a note."""
        self._last_call_s = time.monotonic()
        return self._notes.get(name)

    def read_all(self, prefix: str) -> dict[str, bytes]:
        """Return the notes whose names start with a prefix."""
        self._last_call_s = time.monotonic()
        return {name: text for name, text in self._notes.items() if name.startswith(prefix)}

    def create(self, name: str, text: bytes) -> bytes:
        """Write a note unless one exists, and return the stored note."""
        self._last_call_s = time.monotonic()
        return self._notes.setdefault(name, text)

    def put(self, name: str, text: bytes) -> None:
        """Store a note. An existing note with the same name is replaced."""
        self._last_call_s = time.monotonic()
        self._notes[name] = text

    def remove(self, name: str, text: bytes) -> None:
        """Remove a note if its text has not changed."""
        self._last_call_s = time.monotonic()
        if self._notes.get(name) == text:
            del self._notes[name]

    def _exit_when_idle(self) -> None:
        import ray

        while (remaining_s := self._last_call_s + _IDLE_LIMIT_S - time.monotonic()) > 0:
            time.sleep(remaining_s)
        ray.kill(ray.get_runtime_context().current_actor)


class RayStore(Store):
    """Client of the actor that stores a run's notes."""

    def __init__(self, run: str, address: str, *, is_of_job: bool) -> None:
        self.address = f"ray:{address}"
        self._cluster = address
        self._run = run
        self._name = f"profdeck-{run}"
        self._is_of_job = is_of_job
        """True if this process belongs to the job and may therefore create the actor."""
        self._actor: Any = None
        self._joined = False

    def read(self, name: str) -> bytes | None:
        """See `Store`."""
        note: bytes | None = self._call("read", name)
        return note

    def read_all(self, prefix: str) -> Mapping[str, bytes]:
        """See `Store`."""
        notes: dict[str, bytes] = self._call("read_all", prefix)
        return notes

    def create(self, name: str, text: bytes) -> bytes | None:
        """See `Store`."""
        stored_note: bytes = self._call("create", name, text)
        return stored_note

    def put(self, name: str, text: bytes) -> None:
        """See `Store`."""
        self._call("put", name, text)

    def remove(self, name: str, text: bytes) -> None:
        """See `Store`."""
        self._call("remove", name, text)

    def close(self) -> None:
        """See `Store`."""
        self._actor = None
        if self._joined:
            import ray

            self._joined = False
            ray.shutdown()

    def _call(self, method: str, *arguments: object) -> Any:
        """Call the actor.

        Raises:
            OSError: The actor cannot be reached.
        """
        import ray

        try:
            if self._actor is None:
                self._actor = self._find_actor(ray)
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=_CALL_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"{self.address} did not respond within {_CALL_TIMEOUT_S:g} seconds") from None
        except (ray.exceptions.RayError, RuntimeError, ValueError, ConnectionError) as error:
            self._actor = None  # the next call searches for it again
            raise ConnectionError(f"{self.address}: {str(error).partition(chr(10))[0]}") from None

    def _find_actor(self, ray: Any) -> Any:
        if not ray.is_initialized():
            ray.init(address=self._cluster, log_to_driver=False, logging_level="ERROR")
            self._joined = True
        if self._is_of_job:
            options = {"name": self._name, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True}
            return ray.remote(Notes).options(num_cpus=0, **options).remote()
        with suppress(ValueError):
            return ray.get_actor(self._name, namespace=_NAMESPACE)
        raise ConnectionError(f"no job of the run '{self._run}' is running")
