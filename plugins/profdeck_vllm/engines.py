"""How the processes of an engine are reached: through the engine object, or through its HTTP server."""

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
from profdeck_vllm.v1_worker import installed
from profdeck_vllm.worker import METHOD

_ORIGINAL = "_profdeck_original"
_SAVE_S = 20.0
"""How long a shutdown waits for traces; supervisors kill after 30 seconds, usually."""


class VllmEngine(Engine):
    """An engine of vLLM, with its own profiler."""

    @abstractmethod
    async def start_profile(self, **arguments: Any) -> None:
        """Start its own profiler.

        Raises:
            CaptureError: it does not take these arguments, has no profiler, or does not answer.
        """

    @abstractmethod
    async def stop_profile(self, **arguments: Any) -> None:
        """Stop its own profiler; the arguments are those of the start that the stop takes, too."""

    @abstractmethod
    async def launched_with(self) -> Mapping[str, Any] | None:
        """Return the profiler config that it was launched with, ``{}`` for none; None where that cannot be known."""

    async def names_traces(self) -> bool:
        """Tell whether the names of its traces begin with the prefix that a start gives."""
        return False

    async def is_pipeline(self) -> bool:
        """Tell whether it is one of vLLM-Omni, of stages."""
        return False

    async def device_type(self) -> str | None:
        """Return what its workers run on, in torch's words; None where that cannot be known."""
        return None

    async def world(self) -> int | None:
        """Return how many workers there are over all data-parallel engines; None where that cannot be known."""
        return None


class VllmObject(VllmEngine):
    """An `LLM` or `AsyncLLM` in this process; what they share with those of vLLM-Omni."""

    cancels_late_calls = False

    def __init__(self, engine: Any) -> None:
        """Raises:
        ConfigError: it is no engine of vLLM.
        """
        kind = type(engine)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        if not (callable(getattr(engine, "start_profile", None)) and callable(getattr(engine, "stop_profile", None))):
            raise ConfigError(
                f"target: {self.name} is no engine of vLLM (it has no start_profile and stop_profile). Pass the LLM, "
                "AsyncLLM, Omni or AsyncOmni object, or the URL of a server."
            )
        self._engine = engine
        self.blocking = not inspect.iscoroutinefunction(engine.start_profile)
        self._frontend = FrontendRecorder("frontend")
        self._request: dict[str, Any] = {}

    async def has_profdeck(self) -> bool:
        """Tell by this process, in whose environment the workers were started."""
        # Asking a worker that lacks the method would leave unread answers in vLLM's queues.
        return installed() and self.rpc is not None

    @property
    def rpc(self) -> Any:
        """The engine's collective_rpc; Omni has it on the engine that it holds."""
        own = getattr(self._engine, "collective_rpc", None)
        return own or getattr(getattr(self._engine, "engine", None), "collective_rpc", None)

    @property
    def data_parallel_size(self) -> int:
        """How many data-parallel engines there are."""
        return int(getattr(getattr(self._config, "parallel_config", None), "data_parallel_size", 1))

    @property
    def _config(self) -> Any:
        inner = getattr(self._engine, "llm_engine", self._engine)
        return getattr(inner, "vllm_config", None)

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Call the method of all workers, and the recorder of this process, which is the frontend's."""
        sent = await self.prepared(payload) if command == "start" else dict(payload)
        ranks = tuple(structure(answer, Reply, where="reply") for answer in await self.ask(command, sent))
        if any(rank.error for rank in ranks):
            return Answer(ranks=ranks)
        if command == "start":
            self._request = {"request": payload["id"], "token": payload.get("token")}
            self._save_before_shutdown()
        frontend = self._frontend.command(command, sent)
        return Answer(ranks=ranks, frontends={"frontend": frontend} if frontend else {}, recording=self.recording)

    @property
    def recording(self) -> tuple[int, ...] | None:
        """The ranks that record, where they are chosen here; see `profdeck.records.request.Answer`."""
        return None

    async def prepared(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Add to a request what the workers do not know of their engine.

        Raises:
            CaptureError: the engine has not what it asks for.
        """
        engine = payload.get("engine", {})
        if engine.get("stages") is not None:
            raise CaptureError("options.stages choose the stages of a vLLM-Omni pipeline, and this engine has none.")
        return {**payload, "engine": {**engine, "data_parallel_size": self.data_parallel_size}}

    async def ask(self, *arguments: Any) -> list[Any]:
        """Call our method in all workers and return their answers.

        Raises:
            CaptureError: the engine does not answer.
        """
        try:
            answers = self.call_workers(*arguments)
            if inspect.isawaitable(answers):
                answers = await answers
        except Exception as error:
            raise CaptureError(f"The engine does not answer: {describe_error(error)}") from error
        return flat(answers)

    def call_workers(self, *arguments: Any) -> Any:
        """Call our method in the workers of all data-parallel engines.

        vLLM's own `collective_rpc` asks them all, too, and returns what the first has answered.
        """
        client: Any = getattr(self._engine, "engine_core", None)
        engines = getattr(client, "core_engines", ())
        if len(engines) < 2 or self.blocking:  # noqa: PLR2004  # several
            return self.rpc(METHOD, args=arguments)
        ask = client._call_utility_async  # noqa: SLF001  # what `collective_rpc` calls for each
        return asyncio.gather(*(ask("collective_rpc", METHOD, None, arguments, None, engine=one) for one in engines))

    def _save_before_shutdown(self) -> None:
        """Make the engine's shutdown wait for the traces: vLLM's server kills its workers as soon as it is ended."""
        if self.blocking:
            return
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        # Not the one of an earlier profiler of this engine, whose captures have ended.
        shutdown = getattr(self._engine.shutdown, _ORIGINAL, self._engine.shutdown)

        async def save() -> None:
            await self.end({**self._request, "reason": "the engine was shut down in mid-capture"}, _SAVE_S)

        def shut_down(*arguments: Any, **keywords: Any) -> Any:
            vars(self._engine).pop("shutdown", None)
            if threading.get_ident() != thread:  # on the loop's own thread nothing can be waited for
                with contextlib.suppress(Exception):
                    asyncio.run_coroutine_threadsafe(save(), loop).result(_SAVE_S)
            return shutdown(*arguments, **keywords)

        setattr(shut_down, _ORIGINAL, shutdown)
        self._engine.shutdown = shut_down

    async def names_traces(self) -> bool:
        """Tell it by the signature."""
        return "profile_prefix" in inspect.signature(self._engine.start_profile).parameters

    async def start_profile(self, **arguments: Any) -> None:
        """Call the engine's method of this name, with what its signature takes."""
        await self._native(self._engine.start_profile, arguments)

    async def stop_profile(self, **arguments: Any) -> None:
        """Call the engine's method of this name."""
        await self._native(self._engine.stop_profile, arguments)

    async def _native(self, method: Any, arguments: dict[str, Any]) -> None:
        parameters = inspect.signature(method).parameters
        if unknown := sorted(set(arguments) - set(parameters)):
            raise CaptureError(
                f"{self.name}.{method.__name__} of this vLLM does not take {', '.join(unknown)} "
                f"(it takes: {', '.join(parameters) or 'nothing'}). {REMEDY}"
            )
        try:
            result = method(**arguments)
            if inspect.isawaitable(result):
                result = await result
        except Exception as error:
            raise CaptureError(f"{self.name}.{method.__name__}: {describe_error(error)}") from error
        # vLLM-Omni returns failures of its stages.
        failed = [str(item.get("error")) for item in flat(result or ()) if isinstance(item, dict) and item.get("error")]
        if failed:
            raise CaptureError(f"{self.name}.{method.__name__}: {'; '.join(failed)}")

    async def launched_with(self) -> Mapping[str, Any] | None:
        """Read the engine's config."""
        if self._config is None:  # Omni holds a config per stage
            return None
        own = getattr(self._config, "profiler_config", None)
        if own is None or own.profiler is None:
            return {}
        return {name: getattr(own, name) for name in vars(own) if not name.startswith("_")}

    async def device_type(self) -> str | None:
        """Read the engine's config."""
        device = getattr(self._config, "device_config", None)
        return None if device is None else str(device.device_type)

    async def world(self) -> int | None:
        """Read the engine's config."""
        parallel = getattr(self._config, "parallel_config", None)
        return None if parallel is None else parallel.world_size * self.data_parallel_size


REMEDY = (
    "With profdeck in the engine's workers every capture has its own options: set PROFDECK_CONFIG, or "
    "VLLM_PLUGINS=profdeck, in the environment that the engine is started in."
)
"""What to do about all that vLLM's own profiler cannot do."""


def flat(answers: Any) -> list[Any]:
    """Return the answers of all workers, which vLLM-Omni groups by stage."""
    if isinstance(answers, list | tuple):
        return [item for answer in answers for item in (flat(answer) if isinstance(answer, list | tuple) else [answer])]
    return [answers]
