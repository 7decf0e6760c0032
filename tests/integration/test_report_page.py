"""Tests of the report page in real browsers: drawing, requests, escaping, accessibility and speed."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from browsers import Page, browse
from captured_runs import write_run
from gpu_job import GpuJob
from profdeck_traces import load
from profdeck_traces.analysis.pictures import buckets_of
from profdeck_traces.inputs.sources import find_sources
from profdeck_traces.loading import summarise
from profdeck_traces.report.page import write_page
from profdeck_traces.report.trend_page import write_trend_page
from profdeck_traces.trend.points import points_of
from profdeck_traces.trend.trend import trend_of

pytestmark = pytest.mark.timeout(180)

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{7*7}}"
NOT_BLANK = """(() => {
  const c = document.getElementById("canvas"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  return new Set(new Uint32Array(d.buffer)).size;
})()"""

# Takes PLAIN_MS on an idle machine.
PLAIN_DRAWING = """(() => {
  const c = document.createElement("canvas"), began = performance.now(); c.width = 1000; c.height = 500;
  const d = c.getContext("2d");
  for (let i = 0; i < 20000; i++) { d.fillStyle = i % 2 ? "#123" : "#456"; d.fillRect(i % 990, i % 480, 3, 10); }
  return performance.now() - began;
})()"""
PLAIN_MS = 10


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(body())


def page_of(directory: Path, *runs: Path) -> Path:
    page = directory / "report.html"
    buckets = buckets_of(sum(len([*run.iterdir()]) for run in runs))
    results = [summarise([run], buckets=buckets) for run in runs]
    assert [errors for _, errors in results] == [[]] * len(runs)
    page.write_text(write_page([summary for summary, _ in results], list(map(str, runs))), encoding="utf-8")
    return page


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("job")
    return GpuJob(ranks=2, slow_rank=1, name=f"gemm {HOSTILE}").write(directory / "run")


async def open_report(page: Page, file: Path) -> None:
    await page.open(file.as_uri())
    await page.until("document.getElementById('canvas').dataset.ready")
    await page.until("document.getElementById('canvas').dataset.redraw")


def assert_no_errors_or_requests(page: Page) -> None:
    assert page.errors == []
    foreign = [url for url in page.requests if not re.match(r"(file|data|blob|about|chrome|resource):", url)]
    assert foreign == []


@pytest.mark.parametrize("browser", ["chromium", "firefox"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_timeline_is_drawn_without_requests(tmp_path: Path, job: Path, browser: str, *, dark: bool) -> None:
    async def body() -> None:
        async with browse(browser, dark=dark) as page:
            await open_report(page, page_of(tmp_path, job))
            assert await page.evaluate(NOT_BLANK) > 10
            background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 300) is dark
            assert await page.evaluate("document.title") == str(job)
            assert await page.evaluate("document.querySelectorAll('img').length") == 0
            assert "onerror=" in await page.evaluate("document.getElementById('role0-kernels').textContent")
            assert_no_errors_or_requests(page)

    run(body)


@pytest.mark.parametrize("browser", ["chromium", "firefox"])
def test_keys_links_sorting_and_filters_work(tmp_path: Path, job: Path, browser: str) -> None:
    async def body() -> None:
        async with browse(browser) as page:
            await open_report(page, page_of(tmp_path, job))
            view = "document.getElementById('canvas').dataset.view"
            await page.evaluate("document.getElementById('canvas').focus()")
            full_view = await page.evaluate(view)
            await page.press("+")
            zoomed_view = await page.until(f"{view} !== {json.dumps(full_view)} && {view}")
            await page.press("ArrowRight")
            moved_view = await page.until(f"{view} !== {json.dumps(zoomed_view)} && {view}")
            assert float(moved_view.split()[0]) > float(zoomed_view.split()[0])
            await page.press("0")
            await page.until(f"{view} === {json.dumps(full_view)}")
            await page.press("r")
            await page.until("document.querySelector('[data-mode=whole]').getAttribute('aria-pressed') === 'true'")
            link = "document.querySelector('a[data-start]')"
            await page.evaluate(f"{link}.click()")
            await page.until(f"{view} !== {json.dumps(full_view)}")
            first = "document.getElementById('role0-kernels').tBodies[0].rows[0].textContent"
            before = await page.evaluate(first)
            button = "document.querySelector('#role0-kernels th button')"
            await page.evaluate(f"({button}.click(), {button}.click())")
            assert await page.evaluate(first) != before
            assert_no_errors_or_requests(page)

    run(body)


@pytest.mark.parametrize("browser", ["chromium", "firefox"])
def test_page_without_scripts_lacks_only_the_timeline(tmp_path: Path, job: Path, browser: str) -> None:
    text = page_of(tmp_path, job).read_text(encoding="utf-8")
    for phrase in ("for rank 1, where data_loading takes", "ncclDevKernel_AllReduce", "<noscript>"):
        assert phrase in text.replace("&#39;", "'")

    async def body() -> None:
        async with browse(browser, scripts=False) as page:
            await page.open((tmp_path / "report.html").as_uri())
            assert_no_errors_or_requests(page)

    run(body)


def test_page_is_accessible(tmp_path: Path, job: Path) -> None:
    axe = os.environ.get("PROFDECK_TEST_AXE")
    if not axe:
        pytest.skip("PROFDECK_TEST_AXE is not set to the path of axe.min.js (npm pack axe-core)")

    script = Path(axe).read_text(encoding="utf-8")
    captured = write_run(tmp_path / "captured", 10, lambda _: GpuJob(ranks=2))
    trend = tmp_path / "trend.html"
    points = points_of([summarise([captured])[0]], find_sources([captured]))
    trend.write_text(write_trend_page(trend_of(points), ["run"]), encoding="utf-8")
    load(captured, cache=False).report(over_time := tmp_path / "over_time.html")

    async def body() -> None:
        for file, dark in itertools.product((page_of(tmp_path, job), over_time, trend), (False, True)):
            async with browse("chromium", dark=dark) as page:
                await (page.open(file.as_uri()) if file == trend else open_report(page, file))
                await page.evaluate(f"(() => {{ {script}; return true }})()")
                violations: list[dict[str, Any]] = (await page.evaluate("axe.run()"))["violations"]
                assert [(rule["id"], [node["html"][:200] for node in rule["nodes"]][:3]) for rule in violations] == []

    run(body)


def test_two_runs_are_compared(tmp_path: Path) -> None:
    before = GpuJob(ranks=2, steps=8).write(tmp_path / "before")
    after = GpuJob(ranks=2, steps=8, product_us=500).write(tmp_path / "after")

    async def body() -> None:
        async with browse("chromium") as page:
            await open_report(page, page_of(tmp_path, before, after))
            verdict = await page.evaluate("document.getElementById('verdict').textContent")
            assert "is slower: the median global step takes" in verdict
            assert await page.evaluate("JSON.parse(document.getElementById('data').textContent).ranks.length") == 4
            assert_no_errors_or_requests(page)

    run(body)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "limit_ms"), [(1, 500), (8, 500), (64, 1500)])
def test_pages_are_small_and_fast(tmp_path: Path, ranks: int, limit_ms: int) -> None:
    job = GpuJob(ranks=ranks, steps=6, products=200, small=300, launch_us=40, product_us=60).write(tmp_path / "run")
    file = page_of(tmp_path, job)
    assert file.stat().st_size <= min(1_500_000, 150_000 + 30_000 * ranks)

    async def body() -> None:
        async with browse("chromium") as page:
            await open_report(page, file)
            dataset = "document.getElementById('canvas').dataset"
            ready = float(await page.evaluate(f"{dataset}.ready"))
            await page.evaluate("document.getElementById('canvas').focus()")
            redraws, plain = [], []
            for key in "+0" * 4:
                view = json.dumps(await page.evaluate(f"{dataset}.view"))
                await page.press(key)
                await page.until(f"{dataset}.view !== {view}")
                redraws.append(float(await page.evaluate(f"{dataset}.redraw")))
                plain.append(float(await page.evaluate(PLAIN_DRAWING)))
            # The limits apply to an idle machine.
            slowdown = min(3.0, max(1.0, statistics.median(plain) / PLAIN_MS))
            assert ready < limit_ms * slowdown, (ready, plain)
            assert statistics.median(redraws) < 16 * slowdown, (redraws, plain)
            assert_no_errors_or_requests(page)

    run(body)
