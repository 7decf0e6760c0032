"""HTTP routes that profdeck adds to an engine's FastAPI server.

==============================  ===============================================================================
``GET /profdeck/status``        the state of every process; ``?request=ID`` selects an earlier capture
``POST /profdeck/start``        body: a `profdeck.records.request.CaptureRequest`; all fields are optional
``POST /profdeck/stop``         body: ``{"request": ID}``; answers when the files are complete, or after ``wait_s``
                                seconds
``GET /profdeck/files/PATH``    a file of a capture, by its path below the output directory; for a directory,
                                the list of its files (see `profdeck.engine.transport.served_files`)
==============================  ===============================================================================

A JSON response has ``server`` (a `profdeck.engine.transport.http_engine.ServerInfo`) and ``answer`` (a
`profdeck.engines.Answer`, with the files) or ``files``. The response to a command also has ``times`` (a
`profdeck.engines.MessageTimes`), which the client uses to compare clocks. If a request fails, ``error`` has the
message; the status is 504 if the engine did not answer in time. Files have an ``ETag``, and a download can be resumed
with ``Range`` and ``If-Range``.

The engine's ``/metrics`` count the captures that these routes start (`profdeck.engine.server.capture_tracking`).
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
from profdeck.engine.control.outcomes import INACTIVE
from profdeck.engine.engine import Engine
from profdeck.engine.engine_config import EngineConfig
from profdeck.engine.options import Auth, EngineOptions
from profdeck.engine.server.capture_tracking import CaptureTracker
from profdeck.engine.server.metrics import prometheus_metrics
from profdeck.engine.transport.file_transfer import FILE_TYPE
from profdeck.engine.transport.http_engine import ServerInfo
from profdeck.engine.transport.served_files import NotServedError, ServedFile, open_path
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
_CHUNK_BYTES = 1 << 20
_WRITE_CHECK_S = 1.0
"""Timeout of the check whether the output directory is writable, because a network file system can hang."""
_MAX_WAIT_S = 86_400
"""Maximum ``wait_s`` of a stop request, in seconds."""
_RESUME_RANGE = re.compile(r"bytes=(\d{1,18})-")


class Routes:
    """The routes that profdeck adds to a FastAPI server."""

    def __init__(self, backend: str) -> None:
        """Args:
        backend: the name of the engine's backend, whose role in the config is the server's.
        """
        self.engine: Engine | None = None
        """The engine that the routes control. If it is None, all requests fail with status 503."""
        self._config: EngineConfig | None = None
        self._problem: str | None = None
        self._write_check: asyncio.Future[bool | None] | None = None
        """The last check of the output directory. A hanging check is reused: a second check would hang, too."""
        self._tracker = CaptureTracker()
        try:
            self._config = EngineConfig.load(backend)
        except ProfdeckError as error:
            self._problem = str(error)

    @property
    def options(self) -> EngineOptions:
        """The options of the server's role, or the defaults if the config is invalid."""
        return self._config.options if self._config else EngineOptions()

    def attach(self, app: FastAPI) -> None:
        """Add the routes to a server."""
        app.add_api_route("/profdeck/status", self._route("status"), methods=["GET"], include_in_schema=False)
        for command in ("start", "stop"):
            app.add_api_route(f"/profdeck/{command}", self._route(command), methods=["POST"], include_in_schema=False)
        app.add_api_route("/profdeck/files/{path:path}", self._files(), methods=["GET"], include_in_schema=False)
        self._tracker.observer = prometheus_metrics()

    def _route(self, command: str) -> Any:
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def route(request: Request) -> Response:
            received_ns = time.time_ns()
            try:
                engine, config = self._authorize(request)
                body = await _read_body(request) if command != "status" else dict(request.query_params)
                answer = await self._execute(engine, config, command, body)
            except ProfdeckError as error:
                return JSONResponse({"error": str(error)}, _status(error))
            errors = " ".join(dict.fromkeys(reply.error for reply in answer.all if reply.error))
            is_idle = command == "status" and all(reply.state in INACTIVE for reply in answer.all)
            writable = await self._check_writable(config.config.output.absolute()) if is_idle else None
            times = MessageTimes(received_ns, time.time_ns())
            content = {"server": _server_info(config, writable=writable), "answer": unstructure(answer)}
            content["times"] = unstructure(times)
            return JSONResponse({**content, "error": errors} if errors else content, 409 if errors else 200)

        # FastAPI cannot resolve the string annotations, because Request is a local name.
        route.__annotations__ = {"request": Request}
        return route

    async def _check_writable(self, output: Path) -> bool | None:
        check = self._write_check
        if check is None or check.done():
            check = self._write_check = asyncio.ensure_future(run_in_thread(_is_writable, output))
        done, _ = await asyncio.wait([check], timeout=_WRITE_CHECK_S)
        return check.result() if done else None

    def _files(self) -> Any:
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def route(request: Request) -> Response:
            try:
                _, config = self._authorize(request)
                served = await run_in_thread(open_path, config.config.output.absolute(), request.path_params["path"])
            except ProfdeckError as error:
                return JSONResponse({"error": str(error)}, _status(error))
            except ValueError:  # for example, a name that cannot be encoded
                return JSONResponse({"error": "The path is not a valid file name."}, 400)
            if isinstance(served, ServedFile):
                return _file_response(served, request)
            files = [{"name": name, "size_bytes": size} for name, size in sorted(served.items())]
            return JSONResponse({"server": _server_info(config), "files": files})

        route.__annotations__ = {"request": Request}
        return route

    def _authorize(self, request: Request) -> tuple[Engine, EngineConfig]:
        config = self._config
        if config is None:
            raise _RefusedError(503, f"The config of this server is invalid, so profdeck is inactive. {self._problem}")
        if config.options.auth is Auth.TOKEN:
            try:
                tokens = accepted_tokens()
            except ConfigError as error:
                raise _RefusedError(503, f"{error} The server rejects all requests until it can be read.") from None
            if not tokens:
                raise _RefusedError(
                    403,
                    f"This server has no token. Set {TOKEN_VARIABLE} or {FILE_VARIABLE} in the environments of the "
                    f"server and its clients, or set 'auth: none' in the options of the role '{config.role}' in its "
                    "config.",
                )
            scheme, _, sent_token = request.headers.get("authorization", "").partition(" ")
            # Compare all tokens: an early exit would leak the matching position through the response time.
            matches = [hmac.compare_digest(sent_token.encode(), token.encode()) for token in tokens]
            if scheme.lower() != "bearer" or not any(matches):
                raise _RefusedError(401, f"The token is missing or wrong. Set {TOKEN_VARIABLE} to the server's token.")
        if self.engine is None:
            raise _RefusedError(503, "This server has no engine that profdeck can control.")
        return self.engine, config

    async def _execute(self, engine: Engine, config: EngineConfig, command: str, body: dict[str, Any]) -> Answer:
        if command == "start":
            return await self._tracker.start(engine, _capture_request(body, config))
        sent_ns = time.time_ns()
        if command == "status":
            key: dict[str, Any] = {name: body[name] for name in ("request", "token") if name in body}
            answer = await engine.command("status", key)
            self._tracker.process_answer(answer, sent_ns)
            return answer
        if not isinstance(body.get("request"), str):
            raise ConfigError('request: missing the ID of the capture, as in {"request": "capture"}.')
        wait_s = body.pop("wait_s", 30)
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= _MAX_WAIT_S:
            raise ConfigError(f"wait_s: expected a number of seconds up to {_MAX_WAIT_S:,}, got {show(wait_s)}.")
        stop = {key: body[key] for key in ("request", "token", "reason") if isinstance(body.get(key), str)}
        answer = await engine.end(stop, wait_s)
        self._tracker.process_answer(answer, sent_ns)
        return answer


def _server_info(config: EngineConfig, *, writable: bool | None = None) -> Any:
    output = str(config.config.output.absolute())
    info = ServerInfo(host=socket.gethostname(), output=output, profdeck=__version__, writable=writable)
    return unstructure(info)


def _is_writable(output: Path) -> bool | None:
    """Return whether this process has permission to write in a directory or to create it; None if unknown."""
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
    """Return the HTTP status for an error."""
    if isinstance(error, _RefusedError | NotServedError):
        return error.status
    if isinstance(error, ConfigError):
        return HTTPStatus.BAD_REQUEST
    timed_out = target_error(error).outcome is Outcome.TIMED_OUT
    return HTTPStatus.GATEWAY_TIMEOUT if timed_out else HTTPStatus.CONFLICT


def _file_response(served: ServedFile, request: Request) -> Response:
    """Stream a file in chunks, starting at the offset in the ``Range`` header if the file is unchanged."""
    from fastapi.responses import StreamingResponse
    from starlette.concurrency import run_in_threadpool

    size, start, status = served.size_bytes, 0, HTTPStatus.OK
    headers = {"ETag": served.tag, "Accept-Ranges": "bytes"}
    resume_range = _RESUME_RANGE.fullmatch(request.headers.get("range", ""))
    if resume_range and request.headers.get("if-range", served.tag) == served.tag and int(resume_range[1]) < size:
        start, status = int(resume_range[1]), HTTPStatus.PARTIAL_CONTENT
        headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
    headers["Content-Length"] = str(size - start)

    async def chunks() -> AsyncIterator[bytes]:
        try:
            offset = start
            # If the file was truncated meanwhile, the response is shorter than Content-Length and the client fails.
            while chunk := await run_in_threadpool(served.read, offset, min(_CHUNK_BYTES, size - offset)):
                yield chunk
                offset += len(chunk)
        finally:
            served.close()

    return StreamingResponse(chunks(), status, headers, FILE_TYPE)


class _RefusedError(CaptureError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def _read_body(request: Request) -> dict[str, Any]:
    import json

    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise _RefusedError(413, f"The request body has more than {_MAX_BODY_BYTES:,} bytes.")
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise ConfigError("The request body is not valid JSON.") from None
    if not isinstance(body, dict):
        raise ConfigError("The request body is not a JSON object.")
    return body


def _capture_request(body: dict[str, Any], config: EngineConfig) -> CaptureRequest:
    """Complete a start request with the server's defaults. Reject outputs outside the server's output directory."""
    root = config.config.output.absolute()
    defaults = config.options.complete(
        CaptureRequest(
            id="capture", output=root, run=run_name(config.config.run), role=config.role, ranks=config.role_config.ranks
        )
    )
    data = {**unstructure(defaults), **body}
    if isinstance(data["options"], dict):
        data["options"] = {**defaults.options, **data["options"]}
    output = Path(data["output"]) if isinstance(data["output"], str) else root
    try:
        resolved = (root / output).resolve()
        is_below = resolved.is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # for example, a NUL character or a loop of links
        raise ConfigError(f"output: {str(output)!r} is not a valid path: {describe_error(error)}") from None
    if not is_below:
        raise ConfigError(f"output: {output} is not below {root}, the output directory of this server.")
    request = structure(data, CaptureRequest, where="")
    if request.iterations and request.iterations.first is not None:
        raise ConfigError("iterations.first: the engine is already running. Use skip, which counts from the start.")
    return attrs.evolve(request, output=resolved)
