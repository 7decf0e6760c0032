"""HTTP routes that profdeck adds to an engine's FastAPI server.

==============================  ===============================================================================
``GET /profdeck/status``        the state of every process
``POST /profdeck/start``        body: a `profdeck.records.request.CaptureRequest`; all fields are optional
``POST /profdeck/stop``         body: ``{"request": ID}``; answers when the files are complete, or after ``wait_s``
                                seconds
``GET /profdeck/files/PLACE``   a file of a capture, by its path below the output directory; for a directory,
                                the list of its files (see `profdeck.engine.transport.served_files`)
==============================  ===============================================================================

A JSON response has ``server`` (a `profdeck.engine.transport.http_engine.About`) and ``answer`` (a
`profdeck.engines.Answer`, with the files) or ``files``. The response to a command also has ``times`` (a
`profdeck.engines.MessageTimes`), which the client uses to compare clocks. If a request fails, ``error`` has the
message; the status is 504 if the engine did not answer in time. Files have an ``ETag``, and a download can be resumed
with ``Range`` and ``If-Range``.

The engine's ``/metrics`` count the captures that these routes start (`profdeck.engine.server.following`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import socket
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from profdeck.base.blocking import run_in_thread
from profdeck.base.errors import CaptureError, target_error
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import structure, unstructure
from profdeck.engine.control.outcomes import AT_REST
from profdeck.engine.engine import Engine
from profdeck.engine.engine_config import EngineConfig
from profdeck.engine.options import Auth, EngineOptions
from profdeck.engine.server.following import Following
from profdeck.engine.server.metrics import prometheus_metrics
from profdeck.engine.transport.file_transfer import FILE_TYPE
from profdeck.engine.transport.http_engine import About
from profdeck.engine.transport.served_files import NotServedError, ServedFile, find
from profdeck.engine.transport.token import FILE_VARIABLE, TOKEN_VARIABLE, accepted_tokens
from profdeck.records.host_clock import MessageTimes
from profdeck.records.request import Answer, CaptureRequest
from profdeck.records.run_directory import run_name
from profdeck_traces.base.documents import show
from profdeck_traces.base.errors import ConfigError, ProfdeckError, describe_error
from profdeck_traces.base.version import __version__

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

_MAX_BODY_BYTES = 1 << 20
_PART_BYTES = 1 << 20
_LOOK_S = 1.0
_LONGEST_WAIT_S = 86_400
"""How long an answer waits for a file system to say whether it can be written."""
_REST = re.compile(r"bytes=(\d{1,18})-")


class Routes:
    """The routes that profdeck adds to a FastAPI server."""

    def __init__(self, backend: str) -> None:
        """Args:
        backend: the name of the engine's backend, whose role in the config is the server's.
        """
        self.engine: Engine | None = None
        """What the routes control; without one they answer that there is none."""
        self._config: EngineConfig | None = None
        self._problem: str | None = None
        self._look: asyncio.Future[bool | None] | None = None
        """The last look whether the output directory can be written; a second one beside one that hangs would too."""
        self._following = Following()
        try:
            self._config = EngineConfig.load(backend)
        except ProfdeckError as error:
            self._problem = str(error)

    @property
    def options(self) -> EngineOptions:
        """The options of the server's role; the defaults if the config is wrong."""
        return self._config.options if self._config else EngineOptions()

    def attach(self, app: FastAPI) -> None:
        """Add the routes to a server."""
        app.add_api_route("/profdeck/status", self._route("status"), methods=["GET"], include_in_schema=False)
        for command in ("start", "stop"):
            app.add_api_route(f"/profdeck/{command}", self._route(command), methods=["POST"], include_in_schema=False)
        app.add_api_route("/profdeck/files/{place:path}", self._files(), methods=["GET"], include_in_schema=False)
        self._following.observer = prometheus_metrics()

    def _route(self, command: str) -> Any:
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def route(request: Request) -> Response:
            received_ns = time.time_ns()
            try:
                engine, config = self._admit(request)
                body = await _body(request) if command != "status" else {}
                answer = await self._carry_out(engine, config, command, body)
            except ProfdeckError as error:
                return JSONResponse({"error": str(error)}, _status(error))
            refused = " ".join(dict.fromkeys(reply.error for reply in answer.all if reply.error))
            looks = command == "status" and all(reply.state in AT_REST for reply in answer.all)
            writable = await self._writable(config.config.output.absolute()) if looks else None
            times = MessageTimes(received_ns, time.time_ns())
            content = {"server": _about(config, writable=writable), "answer": unstructure(answer)}
            content["times"] = unstructure(times)
            return JSONResponse({**content, "error": refused} if refused else content, 409 if refused else 200)

        # FastAPI reads annotations, which are names of this function here.
        route.__annotations__ = {"request": Request}
        return route

    async def _writable(self, output: Path) -> bool | None:
        look = self._look
        if look is None or look.done():
            look = self._look = asyncio.ensure_future(run_in_thread(_may_write, output))
        done, _ = await asyncio.wait([look], timeout=_LOOK_S)
        return look.result() if done else None

    def _files(self) -> Any:
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def route(request: Request) -> Response:
            try:
                _, config = self._admit(request)
                found = await run_in_thread(find, config.config.output.absolute(), request.path_params["place"])
            except ProfdeckError as error:
                return JSONResponse({"error": str(error)}, _status(error))
            except ValueError:  # a name that no file can have
                return JSONResponse({"error": "This is no name of a file."}, 400)
            if isinstance(found, ServedFile):
                return _sent(found, request)
            files = [{"name": name, "size_bytes": size} for name, size in sorted(found.items())]
            return JSONResponse({"server": _about(config), "files": files})

        route.__annotations__ = {"request": Request}
        return route

    def _admit(self, request: Request) -> tuple[Engine, EngineConfig]:
        config = self._config
        if config is None:
            raise _RefusedError(
                503, f"The config of this server is wrong, so profdeck does nothing here. {self._problem}"
            )
        if config.options.auth is Auth.TOKEN:
            try:
                tokens = accepted_tokens()
            except ConfigError as error:
                raise _RefusedError(503, f"{error} This server lets nobody in until it can.") from None
            if not tokens:
                raise _RefusedError(
                    403,
                    f"This server has no token: set {TOKEN_VARIABLE} or {FILE_VARIABLE} in its environment and in "
                    f"that of its clients, or say 'auth: none' in the options of the role '{config.role}' of its "
                    "config.",
                )
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            known = [hmac.compare_digest(given.encode(), token.encode()) for token in tokens]  # each takes its time
            if scheme.lower() != "bearer" or not any(known):
                raise _RefusedError(
                    401, f"The token is missing or wrong: set {TOKEN_VARIABLE} to what this server has."
                )
        if self.engine is None:
            raise _RefusedError(503, "This server has no engine that profdeck could ask.")
        return self.engine, config

    async def _carry_out(self, engine: Engine, config: EngineConfig, command: str, body: dict[str, Any]) -> Answer:
        if command == "start":
            return await self._following.start(engine, _request(body, config))
        asked_ns = time.time_ns()
        if command == "status":
            answer = await engine.command("status", {})
            self._following.heard(answer, asked_ns)
            return answer
        if not isinstance(body.get("request"), str):
            raise ConfigError('request: the id of the capture is needed, as in {"request": "capture"}.')
        wait_s = body.pop("wait_s", 30)
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= _LONGEST_WAIT_S:
            raise ConfigError(f"wait_s: expected seconds up to {_LONGEST_WAIT_S:,}, got {show(wait_s)}.")
        stop = {key: body[key] for key in ("request", "token", "reason") if isinstance(body.get(key), str)}
        answer = await engine.end(stop, wait_s)
        self._following.heard(answer, asked_ns)
        return answer


def _about(config: EngineConfig, *, writable: bool | None = None) -> Any:
    output = str(config.config.output.absolute())
    about = About(host=socket.gethostname(), output=output, profdeck=__version__, writable=writable)
    return unstructure(about)


def _may_write(output: Path) -> bool | None:
    """Tell whether this process may write below a directory, or make it if it is not there; None if that is unknown."""
    try:
        while True:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                output.lstat()
                return output.is_dir() and os.access(output, os.W_OK | os.X_OK)
            output = output.parent
    except PermissionError:
        return False
    except (OSError, ValueError):
        return None


def _status(error: ProfdeckError) -> int:
    """Return the status of an answer that says what was wrong with a request."""
    if isinstance(error, _RefusedError | NotServedError):
        return error.status
    if isinstance(error, ConfigError):
        return HTTPStatus.BAD_REQUEST
    late = target_error(error).outcome is Outcome.TIMED_OUT
    return HTTPStatus.GATEWAY_TIMEOUT if late else HTTPStatus.CONFLICT


def _sent(served: ServedFile, request: Request) -> Response:
    """Answer with a file, or with the rest of it if that is what is asked for, a part after the other."""
    from fastapi.responses import StreamingResponse
    from starlette.concurrency import run_in_threadpool

    size, first, status = served.size_bytes, 0, HTTPStatus.OK
    headers = {"ETag": served.tag, "Accept-Ranges": "bytes"}
    rest = _REST.fullmatch(request.headers.get("range", ""))
    if rest and request.headers.get("if-range", served.tag) == served.tag and int(rest[1]) < size:
        first, status = int(rest[1]), HTTPStatus.PARTIAL_CONTENT
        headers["Content-Range"] = f"bytes {first}-{size - 1}/{size}"
    headers["Content-Length"] = str(size - first)

    async def parts() -> AsyncIterator[bytes]:
        try:
            at = first
            # A file that was cut off ends too early, which breaks the connection: the client knows the length.
            while part := await run_in_threadpool(served.read, at, min(_PART_BYTES, size - at)):
                yield part
                at += len(part)
        finally:
            served.close()

    return StreamingResponse(parts(), status, headers, FILE_TYPE)


class _RefusedError(CaptureError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def _body(request: Request) -> dict[str, Any]:
    import json

    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise _RefusedError(413, f"The body has more than {_MAX_BODY_BYTES:,} bytes.")
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise ConfigError("The body is not JSON.") from None
    if not isinstance(body, dict):
        raise ConfigError("The body is not a JSON object.")
    return body


def _request(body: dict[str, Any], config: EngineConfig) -> CaptureRequest:
    """Check a request and complete it with the server's defaults; it can only write below the server's output."""
    root = config.config.output.absolute()
    defaults = config.options.complete(
        CaptureRequest(
            id="capture", output=root, run=run_name(config.config.run), role=config.role, ranks=config.chosen.ranks
        )
    )
    given = {**unstructure(defaults), **body}
    if isinstance(given["options"], dict):
        given["options"] = {**defaults.options, **given["options"]}
    output = Path(given["output"]) if isinstance(given["output"], str) else root
    try:
        below = (place := (root / output).resolve()).is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a NUL; links that lead back to themselves
        raise ConfigError(f"output: {str(output)!r} is not a path: {describe_error(error)}") from None
    if not below:
        raise ConfigError(f"output: {output} is not below {root}, the output directory of this server.")
    request = structure(given, CaptureRequest, where="")
    if request.iterations and request.iterations.first is not None:
        raise ConfigError("iterations.first: the engine is running already; say skip, which counts from the start.")
    return attrs.evolve(request, output=place)
