"""Real browsers without windows, driven over their own protocols: Chromium's DevTools, and WebDriver BiDi of Firefox.

Each tells what it loaded and what went wrong on the page, and evaluates expressions in it.
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
        """The URLs that it asked for, its own included."""
        self.errors: list[str] = []

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page, as JSON."""
        return json.loads(
            await self._send("evaluate", f"JSON.stringify((await (async () => ({expression}))()) ?? null)")
        )

    async def until(self, expression: str, timeout_s: float = 20) -> Any:
        """Return the value of an expression as soon as it is true."""
        async with asyncio.timeout(timeout_s):
            while not (value := await self.evaluate(expression)):  # noqa: ASYNC110 - a page tells nobody
                await asyncio.sleep(0.05)
        return value

    async def press(self, key: str) -> None:
        """Press a key in the page."""
        await self._send("press", key)

    async def screenshot(self, width: int, height: int) -> bytes:
        """Return a PNG of the page in a window of this size; of Chromium only."""
        return base64.b64decode(await self._send("screenshot", f"{width} {height}"))

    async def open(self, url: str) -> None:
        """Open another page, and wait until it is loaded."""
        await self._send("open", url)


@contextlib.asynccontextmanager
async def browse(browser: str, *, dark: bool = False, scripts: bool = True) -> AsyncIterator[Page]:
    """Start a browser and open an empty page in it.

    Args:
        browser: ``chromium`` or ``firefox``; a test that asks for one that is not installed is skipped.
        dark: whether the page is told to be dark.
        scripts: whether pages may run scripts.
    """
    names, connect = {"chromium": (CHROMIUM, _chromium), "firefox": (FIREFOX, _firefox)}[browser]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"{browser} is not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        async with aiohttp.ClientSession() as session, connect(session, path, Path(profile), dark, scripts) as page:
            yield page


class _Connection:
    """Commands with answers, and events, over a websocket."""

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, on_event: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._socket, self._on_event = socket, on_event
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(waiting, START_S)
        assert "error" not in answer, answer
        return answer["result"]

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if waiting := self._waiting.pop(found.get("id"), None):
                waiting.set_result(found)
            elif "method" in found:
                self._on_event(found["method"], found["params"])


@contextlib.asynccontextmanager
async def _process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process, pattern: str) -> str:
    """Return what a pattern finds in the first line of stderr that has it."""
    assert process.stderr is not None
    async with asyncio.timeout(START_S):
        async for line in process.stderr:
            if found := re.search(pattern, line.decode(errors="replace")):
                return found[1]
    raise AssertionError(f"the browser ended without saying {pattern}")


def _note_of_chromium(page: Page, method: str, params: dict[str, Any]) -> None:
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
    async with _process(path, *options, f"--user-data-dir={profile}", "about:blank") as process:
        url = await _line(process, r"DevTools listening on ws://([\d.:]+)/")
        async with session.get(f"http://{url}/json/list") as answer:
            target = next(one for one in await answer.json() if one["type"] == "page")
        loaded = asyncio.Event()

        def on_event(method: str, params: dict[str, Any]) -> None:
            if method == "Page.loadEventFired":
                loaded.set()
            _note_of_chromium(page, method, params)

        connection = _Connection(await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0), on_event)

        async def send(what: str, value: str) -> Any:
            if what == "open":
                loaded.clear()
                await connection.call("Page.navigate", url=value)
                await asyncio.wait_for(loaded.wait(), START_S)
            elif what == "screenshot":
                width, height = map(int, value.split())
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                await connection.call("Emulation.setDeviceMetricsOverride", **size)
                await asyncio.sleep(1)  # until what is drawn at leisure is there
                return (await connection.call("Page.captureScreenshot"))["data"]
            elif what == "press":
                event = {"key": value, "text": value if len(value) == 1 else ""}
                await connection.call("Input.dispatchKeyEvent", type="keyDown", **event)
                await connection.call("Input.dispatchKeyEvent", type="keyUp", key=value)
            else:
                answer = await connection.call(
                    "Runtime.evaluate", expression=f"(async () => {value})()", awaitPromise=True, returnByValue=True
                )
                assert "exceptionDetails" not in answer, answer
                return answer["result"]["value"]
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
    async with _process(
        path, "--headless", "--remote-debugging-port", "0", "--profile", str(profile), "about:blank"
    ) as process:
        url = await _line(process, r"BiDi listening on (ws://[\d.:]+)")

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

        async def send(what: str, value: str) -> Any:
            if what == "open":
                await connection.call("browsingContext.navigate", context=context, url=value, wait="complete")
            elif what == "press":
                keys = {"ArrowRight": "\ue014", "ArrowLeft": "\ue012"}
                actions = [{"type": kind, "value": keys.get(value, value)} for kind in ("keyDown", "keyUp")]
                source = {"type": "key", "id": "keyboard", "actions": actions}
                await connection.call("input.performActions", context=context, actions=[source])
            else:
                answer = await connection.call(
                    "script.evaluate",
                    expression=f"(async () => {value})()",
                    target={"context": context},
                    awaitPromise=True,
                )
                assert answer["type"] == "success", answer
                return answer["result"]["value"]
            return None

        page = Page(send)
        try:
            yield page
        finally:
            await connection.close()
