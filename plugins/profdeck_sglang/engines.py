"""SGLang engines as targets: the common interface, and engine objects of this process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import tempfile
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from profdeck.engines import (
    Answer,
    CaptureRequest,
    Engine,
    FrontendRecorder,
    Outcome,
    Reply,
    RequestState,
    run_without_loop,
)
from profdeck.plugin import CaptureError, ConfigError, TargetError, describe_error, structure
from profdeck_sglang import applied_hooks, protocol

T = TypeVar("T")

_MAX_REQUESTS = 64
_REPLY_TIMEOUT_S = 30.0
"""Timeout for the other ranks after the reply of the first rank. All ranks receive a command at the same time."""
_REPLY_POLL_S = 0.01
_SAVE_TIMEOUT_S = 20.0
_EXIT_POLL_S = 0.1
_TOKENIZER = "tokenizer"

REMEDY = (
    "With profdeck in the engine's processes, every capture has its own options: set PROFDECK_CONFIG, or list profdeck "
    "in SGLANG_PLUGINS, in the environment that starts the engine (SGLang 0.5.11 or newer)."
)
"""Advice for requests that SGLang's own profiler cannot fulfil."""


class SglangEngine(Engine):
    """An SGLang engine, including its own profiler."""

    @abstractmethod
    async def start_profile(self, **arguments: Any) -> None:
        """Start SGLang's own profiler.

        Args:
            arguments: fields of SGLang's ``ProfileReq``.

        Raises:
            CaptureError: the engine rejects the request or does not reply.
        """

    @abstractmethod
    async def stop_profile(self) -> None:
        """Stop SGLang's own profiler."""

    @abstractmethod
    async def read_launch_arguments(self) -> Mapping[str, Any]:
        """Return fields of SGLang's ``ServerArgs``."""

    @abstractmethod
    async def is_local(self) -> bool:
        """Return whether the engine writes its files on this host."""

    async def read_environment(self) -> Mapping[str, str]:
        """Return the environment of the engine's processes, or an empty mapping if it is unknown."""
        return {}


class SglangObject(SglangEngine):
    """An `Engine` or a tokenizer manager in this process. RL frameworks hold tokenizer managers."""

    def __init__(self, engine: Any, *, timeout_s: float) -> None:
        """Args:
            engine: the object.
            timeout_s: timeout for replies of the schedulers. SGLang itself has no timeout.

        Raises:
            ConfigError: the object is not an SGLang engine.
        """
        kind = type(engine)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        manager = getattr(engine, "tokenizer_manager", engine)
        if not hasattr(manager, "profile_communicator"):
            raise ConfigError(
                f"target: {self.name} is not an SGLang engine (it has no tokenizer manager with a profiler). Pass an "
                "Engine, its tokenizer_manager, or the URL of a server."
            )
        self._engine = engine
        self._manager = manager
        self._timeout_s = timeout_s
        self._reply_timeout_s = min(_REPLY_TIMEOUT_S, timeout_s)
        self._active_request: CaptureRequest | None = None
        """The last request that all processes accepted."""
        self._requests: deque[CaptureRequest] = deque(maxlen=_MAX_REQUESTS)
        """The most recent start requests. If one process rejected a request, others may have accepted it."""
        self._is_finished = True
        """True if the captures of the active request are complete."""
        self._final_answer: Answer | None = None
        """The last replies about a finished capture. An engine that was shut down sends no more replies."""
        self._tokenizer = FrontendRecorder(_TOKENIZER)
        self._exit_watcher: Future[None] | None = None

    @property
    def blocking(self) -> bool:  # type: ignore[override]  # depends on the state of the engine's event loop
        """True if no thread runs the engine's event loop. Each call then runs the loop until it completes."""
        loop = self._loop
        return _running_loop() is None and (loop is None or not loop.is_running())

    @property
    def _loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that receives SGLang's replies. SGLang's first request determines it."""
        manager_loop: asyncio.AbstractEventLoop | None = getattr(self._manager, "event_loop", None)
        if manager_loop is not None:
            return manager_loop
        # An Engine that was created before the host's loop has its own loop, which SGLang then does not use.
        engine_loop: asyncio.AbstractEventLoop | None = getattr(self._engine, "loop", None)
        if engine_loop is not None and engine_loop.is_running():
            return engine_loop
        return _running_loop() or engine_loop

    async def has_profdeck(self) -> bool:
        """Return whether profdeck's hooks are applied in this process, and therefore also in the schedulers."""
        return applied_hooks.are_scheduler_hooks_applied()

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send a command to all schedulers and collect the replies of all processes."""
        if isinstance(shutdown := vars(self._engine).get("shutdown"), _Shutdown) and shutdown.is_shut_down:
            if self._final_answer is None or command == "start":
                raise CaptureError("The engine was shut down.")
            return self._final_answer
        request, content = self._active_request, dict(payload)
        if command == "start":
            if not (applied_hooks.is_detokenizer_hook_applied() and self._has_detokenizer):
                content["engine"] = {**content.get("engine", {}), protocol.DETOKENIZER: False}
            request = structure(content, CaptureRequest, where="")
            self._requests.append(request)
        elif "token" in content:  # the token of an earlier capture, or of a rejected start to roll back
            request = next((sent for sent in self._requests if sent.token == content["token"]), request)
        replies = None if request is None else self._create_reply_directory(request)
        try:
            answer = await self._exchange(command, content, request, replies)
        finally:
            if replies is not None:
                _remove(replies)
        if command == "start" and not any(reply.error for reply in answer.all):
            self._active_request, self._is_finished, self._final_answer = request, False, None
            self._save_at_shutdown()
        elif request is self._active_request and all(
            reply.state in {RequestState.IDLE, RequestState.ENDED} for reply in answer.all
        ):
            self._is_finished, self._final_answer = True, answer
        return answer

    async def _exchange(
        self, command: str, payload: Mapping[str, Any], request: CaptureRequest | None, replies: Path | None
    ) -> Answer:
        outputs = await self._send(protocol.pack(command, payload, replies))
        first_replies = [reply for output in outputs if (reply := protocol.unpack_reply(output.message))]
        if len(first_replies) < len(outputs):
            messages = {str(output.message) for output in outputs if not protocol.unpack_reply(output.message)}
            raise CaptureError(f"Schedulers without profdeck replied: {' '.join(sorted(messages))} {REMEDY}")
        ranks = {reply.rank: reply for reply in first_replies}
        if request is not None and replies is not None and not any(reply.error for reply in first_replies):
            ranks = await self._collect_ranks(command, replies, request, ranks)
        frontends: dict[str, Reply] = {}
        if command != "start" or not any(reply.error for reply in ranks.values()):
            frontends = await self._collect_frontends(command, payload, replies, request, ranks)
        return Answer(ranks=tuple(reply for _, reply in sorted(ranks.items())), frontends=frontends)

    @property
    def _has_detokenizer(self) -> bool:
        return not getattr(self._manager.server_args, "skip_tokenizer_init", False)

    def _create_reply_directory(self, request: CaptureRequest) -> Path | None:
        """Create a reply directory in the run; None if the run is not writable, which the ranks report themselves."""
        directory = request.output / request.run
        try:
            directory.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=".replies-", dir=directory))
        except OSError:
            return None

    async def _send(self, request: Any) -> Sequence[Any]:
        """Send a request to the schedulers. Returns the ``ProfileReqOutput`` of the first rank of every replica."""

        async def send() -> Sequence[Any]:
            self._manager.auto_create_handle_loop()
            outputs: Sequence[Any] = await self._manager.profile_communicator(request)
            return outputs

        try:
            return await self._run(send())
        except TimeoutError:
            raise TargetError(
                f"The schedulers did not reply within rpc_timeout_s={self._timeout_s:g} seconds. Check whether a "
                "scheduler has died, or increase rpc_timeout_s if a forward pass takes longer.",
                Outcome.TIMED_OUT,
            ) from None
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"The engine is not responding: {describe_error(error)}") from error

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's event loop.

        Raises:
            TimeoutError: the coroutine takes longer than the timeout.
            CaptureError: no thread runs the event loop.
        """

        async def run_with_timeout() -> T:
            # Do not cancel the coroutine: SGLang would treat a late reply as the reply to the next request.
            return await asyncio.wait_for(asyncio.shield(work), self._timeout_s)

        loop = self._loop
        if self.blocking and loop is not None:
            return loop.run_until_complete(run_with_timeout())
        if loop is _running_loop() and loop is not None:
            return await run_with_timeout()
        if loop is not None and loop.is_running():  # in another thread
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run_with_timeout(), loop))
        work.close()
        raise CaptureError(
            "The event loop that receives this engine's replies is not running. Pass the Engine itself, or await "
            "profiler.astart and profiler.astop in the loop that runs the engine's requests."
        )

    async def _collect_ranks(
        self, command: str, replies: Path, request: CaptureRequest, first_replies: Mapping[int, Reply]
    ) -> dict[int, Reply]:
        """Wait for the reply files of the other selected ranks. SGLang returns only the replies of first ranks."""
        rank_replies = dict(first_replies)
        world_size = max(reply.world_size for reply in first_replies.values())
        missing_ranks = {rank for rank in range(world_size) if request.selects(rank)} - rank_replies.keys()
        deadline = time.monotonic() + self._reply_timeout_s
        while missing_ranks and time.monotonic() < deadline:
            for rank in sorted(missing_ranks):
                if (reply := protocol.read_reply(replies, protocol.rank_reply_name(rank))) is not None:
                    rank_replies[rank] = reply
            missing_ranks -= set(rank_replies)
            if missing_ranks:
                await self.sleep(_REPLY_POLL_S)
        timeouts = {rank: self._create_timeout_reply(rank, world_size, request, command) for rank in missing_ranks}
        return rank_replies | timeouts

    async def _collect_frontends(
        self,
        command: str,
        payload: Mapping[str, Any],
        replies: Path | None,
        request: CaptureRequest | None,
        ranks: Mapping[int, Reply],
    ) -> dict[str, Reply]:
        tokenizer_reply = self._tokenizer.command(command, payload)
        frontends = {_TOKENIZER: tokenizer_reply} if tokenizer_reply else {}
        if request is None or replies is None or not request.engine.get(protocol.DETOKENIZER):
            return frontends
        deadline = time.monotonic() + self._reply_timeout_s
        # Rank 0 forwards commands to the detokenizer, unless it has rejected the request.
        is_forwarded = 0 in ranks and ranks[0].token == request.token
        while is_forwarded and protocol.DETOKENIZER not in frontends:
            if (reply := protocol.read_reply(replies, protocol.DETOKENIZER)) is not None:
                frontends[protocol.DETOKENIZER] = reply
            elif time.monotonic() >= deadline:
                frontends[protocol.DETOKENIZER] = self._create_timeout_reply(0, 1, request, command)
            else:
                await self.sleep(_REPLY_POLL_S)
        return frontends

    def _create_timeout_reply(self, rank: int, world_size: int, request: CaptureRequest, command: str) -> Reply:
        """Return a substitute for the reply of a process that did not reply in time."""
        text = f"No reply within {self._reply_timeout_s:g} seconds."
        return Reply(
            rank=rank,
            world_size=world_size,
            host="",
            pid=0,
            state=RequestState.ENDED,
            request=request.id,
            token=request.token,
            problems=(text,),
            error=text if command == "start" else None,
            refusal=Outcome.TIMED_OUT if command == "start" else None,
        )

    # Shutdown of the engine during a capture.

    def _save_at_shutdown(self) -> None:
        """Save the traces before a shutdown or exit of the engine, because SGLang then kills its processes."""
        if hasattr(self._engine, "shutdown"):
            _Shutdown.patch(self._engine).save = self._save_before_shutdown
        if not self.blocking and self._loop is not None and (self._exit_watcher is None or self._exit_watcher.done()):
            self._exit_watcher = asyncio.run_coroutine_threadsafe(self._save_before_exit(), self._loop)

    def _save_before_shutdown(self) -> None:
        if self.blocking:
            run_without_loop(self._save())
        elif self._loop is not None and self._loop is not _running_loop():
            asyncio.run_coroutine_threadsafe(self._save(), self._loop).result(_SAVE_TIMEOUT_S)
        # The event loop's thread cannot wait for the loop. Hosts must await `astop` before they shut down the engine.

    async def _save_before_exit(self) -> None:
        """Poll for a graceful exit of the server, which SGLang itself checks only every five seconds."""
        while not self._is_finished:
            if self._manager.gracefully_exit:
                with contextlib.suppress(Exception):
                    await self._save()
                return
            await asyncio.sleep(_EXIT_POLL_S)

    async def _save(self) -> None:
        request = self._active_request
        if request is None or self._is_finished:
            return
        stop = {"request": request.id, "token": request.token, "reason": "the engine was shut down during the capture"}
        await self.end(stop, _SAVE_TIMEOUT_S)

    # SGLang's own profiler.

    async def start_profile(self, **arguments: Any) -> None:
        """Call the manager's ``start_profile`` with a ``ProfileReq`` or, before SGLang 0.5.15, keyword arguments."""
        start_profile = self._manager.start_profile
        parameters = inspect.signature(start_profile).parameters
        if "req" in parameters:  # since 0.5.15
            from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

            self._check_arguments(arguments, set(inspect.signature(ProfileReq).parameters))
            await self._call_profiler(start_profile(ProfileReq(req_type=ProfileReqType.START_PROFILE, **arguments)))
        else:
            arguments.pop("profile_id", None)  # These releases use the current time as ID.
            self._check_arguments(arguments, set(parameters))
            await self._call_profiler(start_profile(**arguments))

    async def stop_profile(self) -> None:
        """Call the manager's ``stop_profile``."""
        await self._call_profiler(self._manager.stop_profile())

    def _check_arguments(self, arguments: Mapping[str, Any], supported: set[str]) -> None:
        if unsupported := sorted(set(arguments) - supported):
            raise CaptureError(
                f"start_profile of this SGLang version does not accept {', '.join(unsupported)}. {REMEDY}"
            )

    async def _call_profiler(self, call: Coroutine[Any, Any, Any]) -> None:
        try:
            await self._run(call)
        except TimeoutError:
            message = f"SGLang's profiler did not reply within {self._timeout_s:g} seconds."
            raise TargetError(message, Outcome.TIMED_OUT) from None
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"SGLang's profiler: {describe_error(error)}") from error

    async def read_launch_arguments(self) -> Mapping[str, Any]:
        """Return the launch arguments that `SglangCapture` reads."""
        names = ("device", "tp_size", "pp_size", "dp_size", "enable_dp_attention")
        return {name: getattr(self._manager.server_args, name, None) for name in names}

    async def is_local(self) -> bool:
        """Return True."""
        return True

    async def read_environment(self) -> Mapping[str, str]:
        """Return the environment of this process, which the schedulers inherit."""
        return dict(os.environ)


def _remove(replies: Path) -> None:
    """Remove a reply directory. Renames it first, because a late process may still write to it."""
    with contextlib.suppress(OSError):
        replies = replies.rename(replies.with_name(f"{replies.name}.over"))
    shutil.rmtree(replies, ignore_errors=True)


class _Shutdown:
    """Replacement of an Engine's ``shutdown`` method that first saves the traces."""

    def __init__(self, engine: Any) -> None:
        self._original_shutdown: Callable[..., Any] = engine.shutdown
        self.save: Callable[[], None] | None = None
        """Stops the last capture, unless it is finished."""
        self.is_shut_down = False

    @classmethod
    def patch(cls, engine: Any) -> _Shutdown:
        """Patch an Engine once, and return its patch. Several profilers may use the Engine in succession."""
        if not isinstance(vars(engine).get("shutdown"), cls):
            engine.shutdown = cls(engine)
        shutdown: _Shutdown = engine.shutdown
        return shutdown

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.save is not None and not self.is_shut_down:
            with contextlib.suppress(Exception):
                self.save()
        self.is_shut_down = True
        return self._original_shutdown(*arguments, **keywords)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
