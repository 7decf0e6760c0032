"""A server that lies in any field of its answers and manifests costs its own outcome, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings, strategies as st
from typer.testing import CliRunner, Result

from profdeck import Profiler
from profdeck.base.errors import CaptureError
from profdeck.cli import app
from profdeck.records.status import Status
from profdeck.replicas.late_collection import collect_run
from profdeck.verification.run_report import read_run
from simulated_servers import Act, Arrival, SimulatedServer

Build = Callable[..., Profiler]
RUNS = itertools.count()
OUTSIDE = "outside"
LIES: list[Any] = [
    *(
        None,
        True,
        -1,
        2**63 - 1,
        -(2**63),
        2**70,
        1e308,
        "",
        "\0",
        "x" * 100_000,
        [],
        {},
        [[[[]]]],
        ["rank_0000.step1.json"] * 1000,
    ),
    *(f"/{OUTSIDE}/evil.json", f"../../../{OUTSIDE}/evil.json", "..", "/", f"a/../../{OUTSIDE}"),
    *("rank_0000.step1.json", "target.step1.json", "recording", "complete", "writing", "ended"),
]


def fields(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place in a JSON document: what holds it, and its key there."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from fields(value[key])


class Liar(SimulatedServer):
    """Changes one field of one of its answers, and of all that follow."""

    lie: tuple[int, int, Any] = (0, 0, None)
    """From which answer on, which of its fields, and what is there instead."""
    answers = 0

    async def answer(self, method: str, path: str, arrival: Arrival, act: Act) -> tuple[int, bytes]:
        status, content = await super().answer(method, path, arrival, act)
        self.answers += 1
        head, end, body = (b"", b"", content) if status else content.partition(b"\r\n\r\n")
        if self.answers <= self.lie[0] or not body.startswith(b"{"):
            return status, content
        document = json.loads(body)
        places = list(fields(document))
        holder, key = places[self.lie[1] % len(places)]
        holder[key] = self.lie[2]
        changed = json.dumps(document).encode()
        if status:
            return status, changed
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
        return 0, b"\r\n".join([*lines, b"Content-Length: %d" % len(changed)]) + end + changed


def app_result(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])  # each waits for a timeout
@given(st.integers(0, 6), st.integers(0, 500), st.sampled_from(LIES))
def test_a_lie_costs_the_liar_only(
    build: Build, recording: Callable[..., Any], tmp_path: Path, after: int, field: int, lie: Any
) -> None:
    name = f"run{next(RUNS)}"
    there, here = tmp_path / "there" / name, tmp_path / "here"
    (outside := tmp_path / OUTSIDE).mkdir(exist_ok=True)
    (tmp_path / "merged").mkdir(exist_ok=True)
    if isinstance(lie, str) and lie.startswith(f"/{OUTSIDE}"):
        lie = f"{tmp_path}{lie}"

    async def main() -> None:
        engines = [recording(2, output=there / str(replica)) for replica in range(2)]
        honest = SimulatedServer(engines[0], host="elsewhere", output=str(there / "0"))
        liar = Liar(engines[1], host="elsewhere", output=str(there / "1"))
        liar.lie = (after, field, lie)
        honest.gives, liar.gives = there / "0", there / "1"
        async with honest, liar:
            own = {"output": str(here), "run": name, "rollout.options.flush_timeout_s": 0.5}
            profiler = build([honest.url, liar.url], own)
            try:
                await profiler.astart(1)
                for engine in engines:
                    engine.iterate(3)
            finally:
                try:
                    await profiler.astop()
                finally:
                    await collect_run(here / name, limit_s=1)

    began_s = time.monotonic()
    with contextlib.suppress(CaptureError):
        asyncio.run(main())
    assert time.monotonic() - began_s < 20
    merge = app_result("merge", here / name, "-o", tmp_path / "merged" / f"{name}.json")
    assert merge.exception is None or isinstance(merge.exception, SystemExit), merge.exception
    report = read_run(here / name)
    of_honest = [one for one in report.captures if one.replica == 0]
    assert [rank.status for one in of_honest for rank in one.ranks] == [Status.COMPLETE] * 2
    assert list(outside.iterdir()) == []
    inside = {tmp_path / "there", here, outside, tmp_path / "merged"}
    assert set(tmp_path.iterdir()) <= inside
