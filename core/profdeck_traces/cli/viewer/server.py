"""Serves one trace, and the Perfetto UI, on the loopback interface.

Other users of the host and other web pages must not access the trace:

- URLs contain a random token.
- The ``Host`` header must be a loopback name, which prevents DNS rebinding.
- No CORS header allows other origins to read the responses.
- The content security policy prevents the UI from loading or sending data elsewhere.
"""

from __future__ import annotations

import asyncio
import html
import json
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

from aiohttp import web

from profdeck_traces.cli.viewer.ui import inline_scripts

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_EXPAND = json.dumps([{"id": "dev.perfetto.ExpandTracksByRegex", "args": [".*"]}])
"""Startup command that expands all track groups, which the UI collapses by default."""


@asynccontextmanager
async def serve(trace: Path, title: str, ui: Path | None, *, port: int = 0) -> AsyncIterator[str]:
    """Serve a trace until the block ends, and yield the URL to open.

    Args:
        trace: Path of a trace in a format that Perfetto reads.
        title: Title of the trace in the UI.
        ui: Directory with a build of the Perfetto UI. ``None`` to use ui.perfetto.dev: a page opens it and passes the
            trace to it inside the browser.
        port: Port to listen on; 0 for any free port.

    Raises:
        OSError: The port is in use.
    """
    token = secrets.token_urlsafe(16)
    app = web.Application(middlewares=[_check_host])
    app.router.add_get(f"/{token}/trace", _file(trace))
    if ui is None:
        page = _hand_over_page(title)
        app.router.add_get(f"/{token}/", _page(page, _policy(inline_scripts(page), ui=False)))
    else:
        index = (ui / "index.html").read_bytes()
        app.router.add_get(f"/{token}/", _redirect_to_ui(token, title))
        for name in ("", "index.html"):
            app.router.add_get(f"/{token}/ui/{name}", _page(index, _policy(inline_scripts(index), ui=True)))
        # The service worker would cache 20 MB in the browser for a server that exists only for minutes.
        app.router.add_get(f"/{token}/ui/service_worker.js", _not_found)
        app.router.add_static(f"/{token}/ui/", ui)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        host, number = runner.addresses[0][:2]
        yield f"http://{host}:{number}/{token}/"
    finally:
        await asyncio.shield(runner.cleanup())


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _check_host(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Reject requests with other host names, and add the security headers to all responses."""
    host = request.host.rpartition(":")[0] if ":" in request.host.rpartition("]")[2] else request.host
    if host not in _LOOPBACK:
        return web.Response(status=421, text="Misdirected request: the host name must be a loopback name.\n")
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(_HEADERS)
        raise
    response.headers.update(_HEADERS)
    return response


def _policy(scripts: str, *, ui: bool) -> str:
    """Return a content security policy without access to other origins.

    Args:
        scripts: Allowed inline scripts, see `inline_scripts`.
        ui: True for the UI, which needs WebAssembly and workers.
    """
    parts = {
        "default-src": "'none'",
        "script-src": f"'self' 'wasm-unsafe-eval' {scripts}" if ui else scripts,
        "style-src": "'self' 'unsafe-inline'",
        "img-src": "'self' data: blob:",
        "font-src": "'self' data:",
        "connect-src": "'self' data: blob:",
        "worker-src": "'self' blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _hand_over_page(title: str) -> bytes:
    page = resources.files(__package__ or "").joinpath("hand_over.html").read_text(encoding="utf-8")
    return page.replace("TITLE", html.escape(title)).encode()


def _page(page: bytes, policy: str) -> _Handler:
    async def respond(_: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": policy}
        return web.Response(body=page, content_type="text/html", charset="utf-8", headers=headers)

    return respond


def _redirect_to_ui(token: str, title: str) -> _Handler:
    async def respond(request: web.Request) -> web.Response:
        # Use the host and port from the request, which differ from the server's behind an SSH tunnel.
        arguments = {
            "url": f"http://{request.host}/{token}/trace",
            "title": title,
            "hideSidebar": "true",
            "startupCommands": _EXPAND,
        }
        query = urllib.parse.urlencode(arguments, quote_via=urllib.parse.quote)
        return web.Response(status=302, headers={"Location": f"/{token}/ui/#!/?{query}"})

    return respond


def _file(path: Path) -> _Handler:
    async def respond(_: web.Request) -> web.FileResponse:
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    return respond


async def _not_found(_: web.Request) -> web.Response:
    return web.Response(status=404)
