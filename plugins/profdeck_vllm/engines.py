"""vLLM engines as targets: the common interface, and engine objects of this process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from profdeck.engines import Answer, Engine, FrontendRecorder, Reply
from profdeck.plugin import CaptureError, ConfigError, describe_error, structure
from profdeck_vllm.v1_worker import is_installed
from profdeck_vllm.worker import METHOD

_ORIGINAL = "_profdeck_original"
_SAVE_TIMEOUT_S = 20.0
"""Time that a shutdown waits for traces. Supervisors usually kill a process 30 seconds after the termination signal."""


class VllmEngine(Engine):
    """A vLLM engine, including its own profiler."""

    @abstractmethod
    async def start_profile(self, **arguments: Any) -> None:
        """Start vLLM's own profiler.

        Raises:
            CaptureError: the engine rejects the arguments, has no profiler, or does not reply.
        """

    @abstractmethod
    async def stop_profile(self, **arguments: Any) -> None:
        """Stop vLLM's own profiler. `arguments` are the start arguments that the stop also requires."""

    @abstractmethod
    async def read_launch_config(self) -> Mapping[str, Any] | None:
        """Return the launch options of vLLM's profiler, ``{}`` if it is disabled, or None if they are unknown."""

    async def supports_trace_prefix(self) -> bool:
        """Return whether a start request can set the prefix of trace names."""
        return False

    async def is_pipeline(self) -> bool:
        """Return whether this is a vLLM-Omni pipeline with stages."""
        return False

    async def read_device_type(self) -> str | None:
        """Return the torch device type of the workers, or None if it is unknown."""
        return None

    async def read_world_size(self) -> int | None:
        """Return the number of workers of all data-parallel engines, or None if it is unknown."""
        return None


class VllmObject(VllmEngine):
    """An `LLM` or `AsyncLLM` in this process. Base class for objects of vLLM-Omni."""

    cancels_late_calls = False

    def __init__(self, engine: Any) -> None:
        """Raises:
        ConfigError: the object is not a vLLM engine.
        """
        kind = type(engine)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        if not (callable(getattr(engine, "start_profile", None)) and callable(getattr(engine, "stop_profile", None))):
            raise ConfigError(
                f"target: {self.name} is not a vLLM engine (it lacks start_profile or stop_profile). Pass an LLM, "
                "AsyncLLM, Omni or AsyncOmni object, or the URL of a server."
            )
        self._engine = engine
        self.blocking = not inspect.iscoroutinefunction(engine.start_profile)
        self._frontend = FrontendRecorder("frontend")
        self._request: dict[str, Any] = {}

    async def has_profdeck(self) -> bool:
        """Return whether profdeck is loaded in this process, whose environment the workers inherit."""
        # A query to workers without the RPC method would leave unread replies in vLLM's queues.
        return is_installed() and self.rpc is not None

    @property
    def rpc(self) -> Any:
        """The engine's ``collective_rpc`` method. In `Omni`, the wrapped engine has the method."""
        method = getattr(self._engine, "collective_rpc", None)
        return method or getattr(getattr(self._engine, "engine", None), "collective_rpc", None)

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel engines."""
        return int(getattr(getattr(self._config, "parallel_config", None), "data_parallel_size", 1))

    @property
    def _config(self) -> Any:
        inner = getattr(self._engine, "llm_engine", self._engine)
        return getattr(inner, "vllm_config", None)

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send a command to all workers and to the frontend recorder of this process."""
        request = await self.complete_request(payload) if command == "start" else dict(payload)
        if command == "stop" and self._has_finished_requests:
            request["idle"] = True
        ranks = tuple(structure(reply, Reply, where="reply") for reply in await self.call_workers(command, request))
        if any(rank.error for rank in ranks):
            return Answer(ranks=ranks)
        if command == "start":
            self._request = {"request": payload["id"], "token": payload.get("token")}
            self._save_before_shutdown()
        frontend = self._frontend.command(command, request)
        frontends = {"frontend": frontend} if frontend else {}
        return Answer(ranks=ranks, frontends=frontends, recording=self.recording_ranks)

    @property
    def _has_finished_requests(self) -> bool:
        """True if the engine runs in this process and has no unfinished requests.

        Such an engine does not run an empty batch after its last request, so its workers cannot detect that it is idle.
        """
        has_unfinished_requests = getattr(getattr(self._engine, "llm_engine", None), "has_unfinished_requests", None)
        return callable(has_unfinished_requests) and not has_unfinished_requests()

    @property
    def recording_ranks(self) -> tuple[int, ...] | None:
        """The selected ranks, if the engine selects them; see `profdeck.records.request.Answer`."""
        return None

    async def complete_request(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Add engine properties that the workers do not know to a start request.

        Raises:
            CaptureError: the engine cannot fulfil the request.
        """
        engine = payload.get("engine", {})
        if engine.get("stages") is not None:
            raise CaptureError("options.stages requires a vLLM-Omni pipeline, and this engine has no stages.")
        return {**payload, "engine": {**engine, "data_parallel_size": self.data_parallel_size}}

    async def call_workers(self, *arguments: Any) -> list[Any]:
        """Call the RPC method in all workers and return their replies.

        Raises:
            CaptureError: the engine does not reply.
        """
        try:
            replies = self.send_rpc(*arguments)
            if inspect.isawaitable(replies):
                replies = await replies
        except Exception as error:
            raise CaptureError(f"The engine is not responding: {describe_error(error)}") from error
        return flatten(replies)

    def send_rpc(self, *arguments: Any) -> Any:
        """Call the RPC method in the workers of all data-parallel engines; may return an awaitable.

        With several engines, `collective_rpc` calls all of them but returns only the reply of the first.
        """
        client: Any = getattr(self._engine, "engine_core", None)
        engines = getattr(client, "core_engines", ())
        if len(engines) < 2 or self.blocking:  # noqa: PLR2004  # several
            return self.rpc(METHOD, args=arguments)
        call = client._call_utility_async  # noqa: SLF001  # called by `collective_rpc` for each engine
        return asyncio.gather(
            *(call("collective_rpc", METHOD, None, arguments, None, engine=engine) for engine in engines)
        )

    def _save_before_shutdown(self) -> None:
        """Patch the engine's shutdown to wait for the traces, because vLLM's server then kills its workers at once."""
        if self.blocking:
            return
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        # If an earlier capture has already patched the method, replace that patch.
        original_shutdown = getattr(self._engine.shutdown, _ORIGINAL, self._engine.shutdown)

        async def save() -> None:
            await self.end({**self._request, "reason": "the engine was shut down during the capture"}, _SAVE_TIMEOUT_S)

        def shutdown(*arguments: Any, **keywords: Any) -> Any:
            vars(self._engine).pop("shutdown", None)
            if threading.get_ident() != thread:  # The event loop's thread cannot wait for the loop.
                with contextlib.suppress(Exception):
                    asyncio.run_coroutine_threadsafe(save(), loop).result(_SAVE_TIMEOUT_S)
            return original_shutdown(*arguments, **keywords)

        setattr(shutdown, _ORIGINAL, original_shutdown)
        self._engine.shutdown = shutdown

    async def supports_trace_prefix(self) -> bool:
        """Return whether ``start_profile`` has the parameter ``profile_prefix``."""
        return "profile_prefix" in inspect.signature(self._engine.start_profile).parameters

    async def start_profile(self, **arguments: Any) -> None:
        """Call the engine's ``start_profile``."""
        await self._call_profiler(self._engine.start_profile, arguments)

    async def stop_profile(self, **arguments: Any) -> None:
        """Call the engine's ``stop_profile``."""
        await self._call_profiler(self._engine.stop_profile, arguments)

    async def _call_profiler(self, method: Any, arguments: dict[str, Any]) -> None:
        parameters = inspect.signature(method).parameters
        if unsupported := sorted(set(arguments) - set(parameters)):
            raise CaptureError(
                f"{self.name}.{method.__name__} of this vLLM version does not accept {', '.join(unsupported)} "
                f"(it accepts: {', '.join(parameters) or 'no parameters'}). {REMEDY}"
            )
        try:
            result = method(**arguments)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            raise CaptureError(f"{self.name}.{method.__name__}: {describe_error(error)}") from error
        # vLLM-Omni returns the errors of its stages instead of raising them.
        errors = [
            str(item.get("error")) for item in flatten(result or ()) if isinstance(item, dict) and item.get("error")
        ]
        if errors:
            raise CaptureError(f"{self.name}.{method.__name__}: {'; '.join(errors)}")

    async def read_launch_config(self) -> Mapping[str, Any] | None:
        """Return the profiler options of the engine's config; None for `Omni`, which has a config per stage."""
        if self._config is None:
            return None
        profiler_config = getattr(self._config, "profiler_config", None)
        if profiler_config is None or profiler_config.profiler is None:
            return {}
        return {name: value for name, value in vars(profiler_config).items() if not name.startswith("_")}

    async def read_device_type(self) -> str | None:
        """Return the device type of the engine's config."""
        device = getattr(self._config, "device_config", None)
        return None if device is None else str(device.device_type)

    async def read_world_size(self) -> int | None:
        """Return the number of workers of the engine's config."""
        parallel = getattr(self._config, "parallel_config", None)
        return None if parallel is None else parallel.world_size * self.data_parallel_size


REMEDY = (
    "With profdeck in the engine's workers, every capture has its own options: set PROFDECK_CONFIG or "
    "VLLM_PLUGINS=profdeck in the environment that starts the engine."
)
"""Advice for requests that vLLM's own profiler cannot fulfil."""


def flatten(replies: Any) -> list[Any]:
    """Return a flat list of worker replies, which vLLM-Omni groups by stage."""
    if isinstance(replies, list | tuple):
        return [item for reply in replies for item in flatten(reply)]
    return [replies]
