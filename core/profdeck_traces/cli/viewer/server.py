"""Serves one trace, and a user interface for it, on loopback.

Other users and web pages of the same machine must not get at it: the path has a token, the name in ``Host`` must be
one of loopback (a name that a foreign site resolves to 127.0.0.1 is not), no header lets other origins read, and the
policy keeps the user interface from loading or telling anything elsewhere.
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
"""Without this the user interface shows groups of tracks closed."""


@asynccontextmanager
async def serve(trace: Path, title: str, ui: Path | None, *, port: int = 0) -> AsyncIterator[str]:
    """Serve a trace until the block ends; gives the URL to open.

    Args:
        trace: What Perfetto opens.
        title: What to call it.
        ui: A directory with Perfetto's user interface; None: ui.perfetto.dev, which is handed the trace by the browser.
        port: Which port; 0: any that is free.

    Raises:
        OSError: The port is taken.
    """
    token = secrets.token_urlsafe(16)
    app = web.Application(middlewares=[_guarded])
    app.router.add_get(f"/{token}/trace", _file(trace))
    if ui is None:
        page = _hand_over(title)
        app.router.add_get(f"/{token}/", _page(page, _policy(inline_scripts(page), ui=False)))
    else:
        index = (ui / "index.html").read_bytes()
        app.router.add_get(f"/{token}/", _to_ui(token, title))
        for name in ("", "index.html"):
            app.router.add_get(f"/{token}/ui/{name}", _page(index, _policy(inline_scripts(index), ui=True)))
        # It would keep 20 MB in the browser for a server that is gone tomorrow.
        app.router.add_get(f"/{token}/ui/service_worker.js", _absent)
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
async def _guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
    host = request.host.rpartition(":")[0] if ":" in request.host.rpartition("]")[2] else request.host
    if host not in _LOOPBACK:
        return web.Response(status=421, text="Misdirected request: only names of loopback are served.\n")
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(_HEADERS)
        raise
    response.headers.update(_HEADERS)
    return response


def _policy(scripts: str, *, ui: bool) -> str:
    """Return a policy that loads and tells nothing elsewhere; the user interface needs WebAssembly and workers."""
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


def _hand_over(title: str) -> bytes:
    page = resources.files(__package__ or "").joinpath("hand_over.html").read_text(encoding="utf-8")
    return page.replace("TITLE", html.escape(title)).encode()


def _page(page: bytes, policy: str) -> _Handler:
    async def answer(_: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": policy}
        return web.Response(body=page, content_type="text/html", charset="utf-8", headers=headers)

    return answer


def _to_ui(token: str, title: str) -> _Handler:
    async def answer(request: web.Request) -> web.Response:
        # By the name and port that the browser used: a tunnel may have others than ours.
        arguments = {
            "url": f"http://{request.host}/{token}/trace",
            "title": title,
            "hideSidebar": "true",
            "startupCommands": _EXPAND,
        }
        query = urllib.parse.urlencode(arguments, quote_via=urllib.parse.quote)
        return web.Response(status=302, headers={"Location": f"/{token}/ui/#!/?{query}"})

    return answer


def _file(path: Path) -> _Handler:
    async def answer(_: web.Request) -> web.FileResponse:
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    return answer


async def _absent(_: web.Request) -> web.Response:
    return web.Response(status=404)
