"""Generate the images in the docs: the report of `picture_job.py`, and the demo in a terminal and in Perfetto.

Run ``python docs/pictures.py`` in an environment with torch, the extra ``view`` and Chromium. Each picture contains a
digest of the source files that determine its content, and a test fails if the digest is outdated.
"""  # noqa: INP001  # a script, not a package

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
_TRACES = ROOT / "core" / "profdeck_traces"
_TRACKERS = ROOT / "plugins" / "profdeck_trackers"
SOURCES = {
    "report.png": [
        *(_TRACES / "report" / name for name in ("page.css", "page.html.jinja", "page.js")),
        ROOT / "docs" / "picture_job.py",
    ],
    "terminal.png": [_TRACES / "cli" / "summary_screen.py"],
    "perfetto.png": [_TRACES / "writing" / "perfetto.py"],
    # Created by tracker_pictures.py.
    "mlflow.png": [_TRACKERS / "mlflow.py", _TRACES / "trend" / "of_capture.py"],
    "tensorboard.png": [_TRACKERS / "tensorboard.py", _TRACES / "trend" / "of_capture.py"],
}
_KEYWORD = b"Source"


def digest(name: str) -> bytes:
    """Return the digest of the source files of a picture."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES[name])).hexdigest().encode()


def recorded(png: bytes) -> bytes | None:
    """Return the digest that a PNG file contains, or None."""
    offset = 8
    while offset < len(png):
        length, kind = struct.unpack(">I4s", png[offset : offset + 8])
        data = png[offset + 8 : offset + 8 + length]
        if kind == b"tEXt" and data.startswith(_KEYWORD + b"\0"):
            return data.partition(b"\0")[2]
        offset += length + 12
    return None


def with_digest(png: bytes, name: str) -> bytes:
    """Return the PNG file with the digest of its source files added."""
    data = b"tEXt" + _KEYWORD + b"\0" + digest(name)
    chunk = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    return png[:33] + chunk + png[33:]  # after the signature and IHDR


def _profdeck(directory: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "profdeck", *arguments],
        check=True, cwd=directory, env=os.environ | environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout


def _train(directory: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, ROOT / "docs" / "picture_job.py"], check=True, cwd=directory, env=environment)


def _terminal_page(output: str, file: Path) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=100, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.print(Text("$ profdeck summary profiles/demo-1", style="bold"))
    console.print(Text.from_ansi(output))
    page = console.export_html(inline_styles=True).replace("<body>", '<body style="margin:16px;overflow:hidden">')
    # At this size, 100 columns of DejaVu Sans Mono fit the width of the picture.
    file.write_text(page.replace('<pre style="', '<pre style="font-size:14px;', 1), encoding="utf-8")


async def _main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from browsers import browse
    from profdeck_traces.cli.viewer.server import serve
    from profdeck_traces.cli.viewer.ui import find_ui

    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        _profdeck(directory, "demo")
        run = directory / "profiles" / "demo-1"
        output = _profdeck(
            directory, "summary", "profiles/demo-1", "--top", "5", COLUMNS="100", FORCE_COLOR="1", TERM="xterm-256color"
        )
        _train(directory)
        _profdeck(directory, "report", "profiles/finetune")
        _terminal_page(output, directory / "terminal.html")
        trace = directory / "demo.pftrace"
        _profdeck(
            directory, "merge", str(run), "-o", str(trace), "--critical-path",
            "--category", "cpu_op", "--category", "user_annotation",
        )  # fmt: skip
        async with browse("chromium") as browser:
            await browser.open((directory / "finetune.html").as_uri())
            await browser.until("document.getElementById('canvas').dataset.redraw")
            pictures = {"report.png": await browser.screenshot(1180, 980)}
            await browser.open((directory / "terminal.html").as_uri())
            height = await browser.evaluate("document.body.scrollHeight")
            pictures["terminal.png"] = await browser.screenshot(912, height + 32)
            async with serve(trace, "demo-1", find_ui(None)) as url:
                await browser.open(url)
                await browser.until("document.body.innerText.includes('rank 1')", 60)
                pictures["perfetto.png"] = await browser.screenshot(1180, 720)
    for name, png in pictures.items():
        (IMAGES / name).write_bytes(with_digest(png, name))


if __name__ == "__main__":
    asyncio.run(_main())
