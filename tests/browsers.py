"""Headless browsers for page tests: Chromium over the DevTools protocol and Firefox over WebDriver BiDi.

A page records its requests and errors, and evaluates JavaScript expressions.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

START_S = 60
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FIREFOX = ("firefox-esr", "firefox")


class Page:
    """A page in a browser."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send = send
        self.requests: list[str] = []
        """URLs that the page requested, including its own URL."""
        self.errors: list[str] = []

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which must be serializable as JSON."""
        return json.loads(
            await self._send("evaluate", f"JSON.stringify((await (async () => ({expression}))()) ?? null)")
        )

    async def until(self, expression: str, timeout_s: float = 20) -> Any:
        """Wait until a JavaScript expression is truthy, and return its value."""
        async with asyncio.timeout(timeout_s):
            while not (value := await self.evaluate(expression)):  # noqa: ASYNC110 - a page sends no event for this
                await asyncio.sleep(0.05)
        return value

    async def press(self, key: str) -> None:
        """Press and release a key."""
        await self._send("press", key)

    async def screenshot(self, width: int, height: int) -> bytes:
        """Return a PNG of the page at this window size. Only Chromium supports this."""
        return base64.b64decode(await self._send("screenshot", f"{width} {height}"))

    async def open(self, url: str) -> None:
        """Navigate to a URL and wait until the page is loaded."""
        await self._send("open", url)


@contextlib.asynccontextmanager
async def browse(browser: str, *, dark: bool = False, scripts: bool = True) -> AsyncIterator[Page]:
    """Start a browser and open an empty page in it.

    Args:
        browser: ``chromium`` or ``firefox``. If the browser is not installed, the test is skipped.
        dark: the value of ``prefers-color-scheme``: dark if True, light if False.
        scripts: True if pages may run scripts.
    """
    names, connect = {"chromium": (CHROMIUM, _chromium), "firefox": (FIREFOX, _firefox)}[browser]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"{browser} is not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        async with aiohttp.ClientSession() as session, connect(session, path, Path(profile), dark, scripts) as page:
            yield page


class _Connection:
    """A websocket that sends commands, receives their replies, and passes events to a callback."""

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, on_event: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._socket, self._on_event = socket, on_event
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> Any:
        command_id = next(self._ids)
        future = self._pending[command_id] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": command_id, "method": method, "params": params})
        reply = await asyncio.wait_for(future, START_S)
        assert "error" not in reply, reply
        return reply["result"]

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            content = json.loads(message.data)
            if future := self._pending.pop(content.get("id"), None):
                future.set_result(content)
            elif "method" in content:
                self._on_event(content["method"], content["params"])


@contextlib.asynccontextmanager
async def _run_browser(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _read_match(process: asyncio.subprocess.Process, pattern: str) -> str:
    """Return the first group of a pattern in the first line of stderr that matches it."""
    assert process.stderr is not None
    async with asyncio.timeout(START_S):
        async for line in process.stderr:
            if match := re.search(pattern, line.decode(errors="replace")):
                return match[1]
    raise AssertionError(f"the browser exited before it printed {pattern}")


def _record_event(page: Page, method: str, params: dict[str, Any]) -> None:
    if method == "Network.requestWillBeSent":
        page.requests.append(params["request"]["url"])
    elif method == "Runtime.exceptionThrown":
        page.errors.append(json.dumps(params["exceptionDetails"])[:500])
    elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
        page.errors.append(params["entry"]["text"])


@contextlib.asynccontextmanager
async def _chromium(
    session: aiohttp.ClientSession, path: str, profile: Path, dark: bool, scripts: bool
) -> AsyncIterator[Page]:
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")
    async with _run_browser(path, *options, f"--user-data-dir={profile}", "about:blank") as process:
        url = await _read_match(process, r"DevTools listening on ws://([\d.:]+)/")
        async with session.get(f"http://{url}/json/list") as response:
            target = next(target for target in await response.json() if target["type"] == "page")
        loaded = asyncio.Event()

        def on_event(method: str, params: dict[str, Any]) -> None:
            if method == "Page.loadEventFired":
                loaded.set()
            _record_event(page, method, params)

        connection = _Connection(await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0), on_event)

        async def send(command: str, value: str) -> Any:
            if command == "open":
                loaded.clear()
                await connection.call("Page.navigate", url=value)
                await asyncio.wait_for(loaded.wait(), START_S)
            elif command == "screenshot":
                width, height = map(int, value.split())
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                await connection.call("Emulation.setDeviceMetricsOverride", **size)
                await asyncio.sleep(1)  # the page draws some content when it is idle
                return (await connection.call("Page.captureScreenshot"))["data"]
            elif command == "press":
                event = {"key": value, "text": value if len(value) == 1 else ""}
                await connection.call("Input.dispatchKeyEvent", type="keyDown", **event)
                await connection.call("Input.dispatchKeyEvent", type="keyUp", key=value)
            else:
                reply = await connection.call(
                    "Runtime.evaluate", expression=f"(async () => {value})()", awaitPromise=True, returnByValue=True
                )
                assert "exceptionDetails" not in reply, reply
                return reply["result"]["value"]
            return None

        page = Page(send)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await connection.call(f"{domain}.enable")
        await connection.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await connection.call("Emulation.setEmulatedMedia", features=[scheme])
        try:
            yield page
        finally:
            await connection.close()


@contextlib.asynccontextmanager
async def _firefox(
    session: aiohttp.ClientSession, path: str, profile: Path, dark: bool, scripts: bool
) -> AsyncIterator[Page]:
    settings = {
        "layout.css.prefers-color-scheme.content-override": 0 if dark else 1,
        "javascript.enabled": scripts,
        "remote.active-protocols": 1,
        "browser.shell.checkDefaultBrowser": False,
        "datareporting.policy.dataSubmissionEnabled": False,
        "network.captive-portal-service.enabled": False,
    }
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in settings.items()]
    (profile / "user.js").write_text("\n".join(lines))
    async with _run_browser(
        path, "--headless", "--remote-debugging-port", "0", "--profile", str(profile), "about:blank"
    ) as process:
        url = await _read_match(process, r"BiDi listening on (ws://[\d.:]+)")

        def on_event(method: str, params: dict[str, Any]) -> None:
            if method == "network.beforeRequestSent":
                page.requests.append(params["request"]["url"])
            elif method == "log.entryAdded" and params["level"] == "error":
                page.errors.append(str(params["text"]))

        connection = _Connection(await session.ws_connect(f"{url}/session", max_msg_size=0), on_event)
        await connection.call("session.new", capabilities={})
        await connection.call("session.subscribe", events=["network.beforeRequestSent", "log.entryAdded"])
        tree = await connection.call("browsingContext.getTree")
        context = tree["contexts"][0]["context"]

        async def send(command: str, value: str) -> Any:
            if command == "open":
                await connection.call("browsingContext.navigate", context=context, url=value, wait="complete")
            elif command == "press":
                keys = {"ArrowRight": "\ue014", "ArrowLeft": "\ue012"}
                actions = [{"type": kind, "value": keys.get(value, value)} for kind in ("keyDown", "keyUp")]
                source = {"type": "key", "id": "keyboard", "actions": actions}
                await connection.call("input.performActions", context=context, actions=[source])
            else:
                reply = await connection.call(
                    "script.evaluate",
                    expression=f"(async () => {value})()",
                    target={"context": context},
                    awaitPromise=True,
                )
                assert reply["type"] == "success", reply
                return reply["result"]["value"]
            return None

        page = Page(send)
        try:
            yield page
        finally:
            await connection.close()
