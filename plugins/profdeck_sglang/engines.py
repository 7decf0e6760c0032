"""What the backend controls: an `Engine`, or the tokenizer manager that RL frameworks hold."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import tempfile
import time
from abc import abstractmethod
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
from profdeck_sglang import installed, protocol

T = TypeVar("T")

_ANSWER_S = 30.0
"""How much later than the first rank, which has answered, the others may do so: they took the command with it."""
_POLL_S = 0.01
_SAVE_S = 20.0
_EXIT_POLL_S = 0.1
_TOKENIZER = "tokenizer"

REMEDY = (
    "With profdeck in the engine's processes every capture has its own options: set PROFDECK_CONFIG, or list profdeck "
    "in SGLANG_PLUGINS, in the environment that the engine is started in (SGLang 0.5.11 or newer)."
)
"""What to do about all that SGLang's own profiler cannot do."""


class SglangEngine(Engine):
    """An engine of SGLang, with its own profiler."""

    @abstractmethod
    async def start_profile(self, **arguments: Any) -> None:
        """Start its own profiler, with fields of SGLang's ``ProfileReq``.

        Raises:
            CaptureError: it does not take these arguments, refuses, or does not answer.
        """

    @abstractmethod
    async def stop_profile(self) -> None:
        """Stop its own profiler."""

    @abstractmethod
    async def launched_with(self) -> Mapping[str, Any]:
        """Return what the engine was launched with: the fields of SGLang's ``ServerArgs``."""

    @abstractmethod
    async def is_local(self) -> bool:
        """Tell whether the engine's files are on this host."""

    async def environment(self) -> Mapping[str, str]:
        """Return the environment of its processes; empty where that is not known."""
        return {}


class SglangObject(SglangEngine):
    """An `Engine` or a tokenizer manager in this process."""

    def __init__(self, engine: Any, *, timeout_s: float) -> None:
        """Args:
            engine: the object.
            timeout_s: how long the schedulers may take for an answer; SGLang itself waits for ever.

        Raises:
            ConfigError: it is no engine of SGLang.
        """
        kind = type(engine)
        self.name = f"{kind.__module__}.{kind.__qualname__}"
        manager = getattr(engine, "tokenizer_manager", engine)
        if not hasattr(manager, "profile_communicator"):
            raise ConfigError(
                f"target: {self.name} is no engine of SGLang (it has no tokenizer manager with a profiler). Pass the "
                "Engine or its tokenizer_manager, or the URL of a server."
            )
        self._engine = engine
        self._manager = manager
        self._timeout_s = timeout_s
        self._answer_s = min(_ANSWER_S, timeout_s)
        self._asked: CaptureRequest | None = None
        self._tried: CaptureRequest | None = None
        """The last request, which may have been refused after some processes had taken it."""
        self._over = True
        """Whether all that was asked for is written."""
        self._left: Answer | None = None
        """What the processes said last of a capture that has ended; an engine that was shut down says no more."""
        self._tokenizer = FrontendRecorder(_TOKENIZER)
        self._guardian: Future[None] | None = None

    @property
    def blocking(self) -> bool:  # type: ignore[override]  # it depends on who runs the engine's loop
        """Whether calls block: an `Engine` whose event loop nobody runs is driven call by call."""
        loop = self._loop
        return _running_loop() is None and (loop is None or not loop.is_running())

    @property
    def _loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that SGLang's answers come to; its first request decides that."""
        decided: asyncio.AbstractEventLoop | None = getattr(self._manager, "event_loop", None)
        if decided is not None:
            return decided
        # An Engine that was made before the host's loop has one of its own, which SGLang then leaves alone.
        own: asyncio.AbstractEventLoop | None = getattr(self._engine, "loop", None)
        return own if own is not None and own.is_running() else _running_loop() or own

    async def has_profdeck(self) -> bool:
        """Tell by this process, whose environment and code the schedulers have."""
        return installed.applied()

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send the command to all schedulers and collect what they leave."""
        if isinstance(shutdown := vars(self._engine).get("shutdown"), _Shutdown) and shutdown.over:
            if self._left is None or command == "start":
                raise CaptureError("The engine was shut down.")
            return self._left
        request, sent = self._asked, dict(payload)
        if command == "start":
            if not (installed.detokenizer_applied() and self._has_detokenizer):
                sent["engine"] = {**sent.get("engine", {}), protocol.DETOKENIZER: False}
            request = self._tried = structure(sent, CaptureRequest, where="")
        elif self._tried is not None and sent.get("token") == self._tried.token:
            request = self._tried  # a start that is taken back, as some process has refused it
        replies = None if request is None else self._new_directory(request)
        try:
            answer = await self._exchange(command, sent, request, replies)
        finally:
            if replies is not None:
                _remove(replies)
        if command == "start" and not any(reply.error for reply in answer.all):
            self._asked, self._over, self._left = request, False, None
            self._save_at_shutdown()
        elif all(reply.state in {RequestState.IDLE, RequestState.ENDED} for reply in answer.all):
            self._over, self._left = True, answer
        return answer

    async def _exchange(
        self, command: str, payload: Mapping[str, Any], request: CaptureRequest | None, replies: Path | None
    ) -> Answer:
        answers = await self._ask(protocol.pack(command, payload, replies))
        first = [reply for answer in answers if (reply := protocol.unpack_reply(answer.message))]
        if len(first) < len(answers):
            others = {str(answer.message) for answer in answers if not protocol.unpack_reply(answer.message)}
            raise CaptureError(f"Schedulers without profdeck answered: {' '.join(sorted(others))} {REMEDY}")
        ranks = {reply.rank: reply for reply in first}
        if request is not None and replies is not None and not any(reply.error for reply in first):
            ranks = await self._collect(command, replies, request, ranks)
        frontends: dict[str, Reply] = {}
        if command != "start" or not any(reply.error for reply in ranks.values()):
            frontends = await self._frontends(command, payload, replies, request, ranks)
        return Answer(ranks=tuple(reply for _, reply in sorted(ranks.items())), frontends=frontends)

    @property
    def _has_detokenizer(self) -> bool:
        return not getattr(self._manager.server_args, "skip_tokenizer_init", False)

    def _new_directory(self, request: CaptureRequest) -> Path | None:
        """Make the directory of replies beside the captures; None where nobody can write, as the ranks will say."""
        directory = request.output / request.run
        try:
            directory.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=".replies-", dir=directory))
        except OSError:
            return None

    async def _ask(self, request: Any) -> Sequence[Any]:
        """Send a request to the schedulers; returns the answers of the first rank of every replica."""

        async def ask() -> Sequence[Any]:
            self._manager.auto_create_handle_loop()
            answers: Sequence[Any] = await self._manager.profile_communicator(request)
            return answers

        try:
            return await self._run(ask())
        except TimeoutError:
            raise TargetError(
                f"The schedulers did not answer within rpc_timeout_s={self._timeout_s:g} seconds. Is one of them dead, "
                "or in a forward pass that takes longer?",
                Outcome.TIMED_OUT,
            ) from None
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"The engine does not answer: {describe_error(error)}") from error

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run what belongs to the engine's event loop, with the time limit."""

        async def limited() -> T:
            # Not cancelled: SGLang would take a late answer for that to the next request.
            return await asyncio.wait_for(asyncio.shield(work), self._timeout_s)

        loop = self._loop
        if self.blocking and loop is not None:
            return loop.run_until_complete(limited())
        if loop is _running_loop() and loop is not None:
            return await limited()
        if loop is not None and loop.is_running():  # another thread runs it
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(limited(), loop))
        work.close()
        raise CaptureError(
            "Nobody runs the event loop that the answers of this engine come to. Pass the Engine itself, or await "
            "profiler.astart and astop in the loop that its requests run in."
        )

    async def _collect(
        self, command: str, replies: Path, request: CaptureRequest, first: Mapping[int, Reply]
    ) -> dict[int, Reply]:
        """Wait for the replies of the other ranks that record, whose answers SGLang does not bring."""
        found = dict(first)
        world_size = max(reply.world_size for reply in first.values())
        awaited = {rank for rank in range(world_size) if request.selects(rank)} - found.keys()
        deadline = time.monotonic() + self._answer_s
        while awaited and time.monotonic() < deadline:
            for rank in sorted(awaited):
                if (reply := protocol.take_reply(replies, protocol.rank_name(rank))) is not None:
                    found[rank] = reply
            awaited -= set(found)
            if awaited:
                await self.sleep(_POLL_S)
        return found | {rank: self._silent(rank, world_size, request, command) for rank in awaited}

    async def _frontends(
        self,
        command: str,
        payload: Mapping[str, Any],
        replies: Path | None,
        request: CaptureRequest | None,
        ranks: Mapping[int, Reply],
    ) -> dict[str, Reply]:
        own = self._tokenizer.command(command, payload)
        found = {_TOKENIZER: own} if own else {}
        if request is None or replies is None or not request.engine.get(protocol.DETOKENIZER):
            return found
        deadline = time.monotonic() + self._answer_s
        passed_on = 0 in ranks and ranks[0].token == request.token  # by rank 0, unless it has refused the request
        while passed_on and protocol.DETOKENIZER not in found:
            if (reply := protocol.take_reply(replies, protocol.DETOKENIZER)) is not None:
                found[protocol.DETOKENIZER] = reply
            elif time.monotonic() >= deadline:
                found[protocol.DETOKENIZER] = self._silent(0, 1, request, command)
            else:
                await self.sleep(_POLL_S)
        return found

    def _silent(self, rank: int, world_size: int, request: CaptureRequest, command: str) -> Reply:
        """Make up the reply of a process that has not answered."""
        text = f"It did not answer within {self._answer_s:g} seconds."
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

    # Ends that nobody called for.

    def _save_at_shutdown(self) -> None:
        """Let the traces be written when the engine ends: SGLang kills its processes then."""
        if hasattr(self._engine, "shutdown"):
            _Shutdown.of(self._engine).save = self._save_before_shutdown
        if not self.blocking and self._loop is not None and (self._guardian is None or self._guardian.done()):
            self._guardian = asyncio.run_coroutine_threadsafe(self._save_before_exit(), self._loop)

    def _save_before_shutdown(self) -> None:
        if self.blocking:
            run_without_loop(self._save())
        elif self._loop is not None and self._loop is not _running_loop():
            asyncio.run_coroutine_threadsafe(self._save(), self._loop).result(_SAVE_S)
        # On the loop's own thread nothing can be waited for: await the stop of a capture before such a shutdown.

    async def _save_before_exit(self) -> None:
        """Watch for a server that is asked to end: SGLang looks every five seconds and waits for its schedulers."""
        while not self._over:
            if self._manager.gracefully_exit:
                with contextlib.suppress(Exception):
                    await self._save()
                return
            await asyncio.sleep(_EXIT_POLL_S)

    async def _save(self) -> None:
        asked = self._asked
        if asked is None or self._over:
            return
        stop = {"request": asked.id, "token": asked.token, "reason": "the engine was shut down in mid-capture"}
        await self.end(stop, _SAVE_S)

    # SGLang's own profiler.

    async def start_profile(self, **arguments: Any) -> None:
        """Call the engine's method of this name, in the style of its release."""
        own = self._manager.start_profile
        parameters = inspect.signature(own).parameters
        if "req" in parameters:  # since 0.5.15
            from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

            self._refuse_unknown(arguments, set(inspect.signature(ProfileReq).parameters))
            await self._native(own(ProfileReq(req_type=ProfileReqType.START_PROFILE, **arguments)))
        else:
            arguments.pop("profile_id", None)  # these releases take the time
            self._refuse_unknown(arguments, set(parameters))
            await self._native(own(**arguments))

    async def stop_profile(self) -> None:
        """Call the engine's method of this name."""
        await self._native(self._manager.stop_profile())

    def _refuse_unknown(self, arguments: Mapping[str, Any], known: set[str]) -> None:
        if unknown := sorted(set(arguments) - known):
            raise CaptureError(f"start_profile of this SGLang does not take {', '.join(unknown)}. {REMEDY}")

    async def _native(self, call: Coroutine[Any, Any, Any]) -> None:
        try:
            await self._run(call)
        except TimeoutError:
            text = f"SGLang's profiler did not answer within {self._timeout_s:g} seconds."
            raise TargetError(text, Outcome.TIMED_OUT) from None
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"SGLang's profiler: {describe_error(error)}") from error

    async def launched_with(self) -> Mapping[str, Any]:
        """Read the engine's arguments."""
        names = ("device", "tp_size", "pp_size", "dp_size", "enable_dp_attention")
        return {name: getattr(self._manager.server_args, name, None) for name in names}

    async def is_local(self) -> bool:
        """It is in this process."""
        return True

    async def environment(self) -> Mapping[str, str]:
        """Return that of this process, which the schedulers were started with."""
        return dict(os.environ)


def _remove(replies: Path) -> None:
    """Remove a directory of replies, in which a process may be leaving one that nobody waits for."""
    with contextlib.suppress(OSError):
        replies = replies.rename(replies.with_name(f"{replies.name}.over"))
    shutil.rmtree(replies, ignore_errors=True)


class _Shutdown:
    """Stands where an Engine has its method of this name, and lets the traces be written first."""

    def __init__(self, engine: Any) -> None:
        self._shutdown: Callable[..., Any] = engine.shutdown
        self.save: Callable[[], None] | None = None
        """Ends the last capture that was started, if that has not ended."""
        self.over = False

    @classmethod
    def of(cls, engine: Any) -> _Shutdown:
        """Return that of an Engine, which many profilers may control one after the other."""
        if not isinstance(vars(engine).get("shutdown"), cls):
            engine.shutdown = cls(engine)
        shutdown: _Shutdown = engine.shutdown
        return shutdown

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.save is not None and not self.over:
            with contextlib.suppress(Exception):
                self.save()
        self.over = True
        return self._shutdown(*arguments, **keywords)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
