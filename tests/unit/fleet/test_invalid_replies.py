"""Test of servers with invalid replies and manifests. They must affect only their own captures."""

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

BuildProfiler = Callable[..., Profiler]
RUNS = itertools.count()
OUTSIDE = "outside"
VALUES: list[Any] = [
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


def iterate_fields(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and key of each value in a JSON document."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from iterate_fields(value[key])


class InvalidServer(SimulatedServer):
    """Server that replaces the value of one field in its responses."""

    valid_responses = 0
    """Number of responses before the first invalid one."""
    field = 0
    """Index of the field."""
    value: Any = None
    responses = 0

    async def answer(self, method: str, path: str, arrival: Arrival, act: Act) -> tuple[int, bytes]:
        status, content = await super().answer(method, path, arrival, act)
        self.responses += 1
        head, end, body = (b"", b"", content) if status else content.partition(b"\r\n\r\n")
        if self.responses <= self.valid_responses or not body.startswith(b"{"):
            return status, content
        document = json.loads(body)
        locations = list(iterate_fields(document))
        container, key = locations[self.field % len(locations)]
        container[key] = self.value
        changed = json.dumps(document).encode()
        if status:
            return status, changed
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
        return 0, b"\r\n".join([*lines, b"Content-Length: %d" % len(changed)]) + end + changed


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])  # each waits for a timeout
@given(st.integers(0, 6), st.integers(0, 500), st.sampled_from(VALUES))
def test_invalid_reply_affects_only_its_server(
    build_profiler: BuildProfiler,
    make_engine: Callable[..., Any],
    tmp_path: Path,
    valid_responses: int,
    field: int,
    value: Any,
) -> None:
    name = f"run{next(RUNS)}"
    remote_output, local_output = tmp_path / "there" / name, tmp_path / "here"
    (outside := tmp_path / OUTSIDE).mkdir(exist_ok=True)
    (tmp_path / "merged").mkdir(exist_ok=True)
    if isinstance(value, str) and value.startswith(f"/{OUTSIDE}"):
        value = f"{tmp_path}{value}"

    async def main() -> None:
        engines = [make_engine(2, output=remote_output / str(replica)) for replica in range(2)]
        valid = SimulatedServer(engines[0], host="elsewhere", output=str(remote_output / "0"))
        invalid = InvalidServer(engines[1], host="elsewhere", output=str(remote_output / "1"))
        invalid.valid_responses, invalid.field, invalid.value = valid_responses, field, value
        valid.served_directory, invalid.served_directory = remote_output / "0", remote_output / "1"
        async with valid, invalid:
            overrides = {"output": str(local_output), "run": name, "rollout.options.flush_timeout_s": 0.5}
            profiler = build_profiler([valid.url, invalid.url], overrides)
            try:
                await profiler.astart(1)
                for engine in engines:
                    engine.iterate(3)
            finally:
                try:
                    await profiler.astop()
                finally:
                    await collect_run(local_output / name, limit_s=1)

    began_s = time.monotonic()
    with contextlib.suppress(CaptureError):
        asyncio.run(main())
    assert time.monotonic() - began_s < 20
    merge = run_command("merge", local_output / name, "-o", tmp_path / "merged" / f"{name}.json")
    assert merge.exception is None or isinstance(merge.exception, SystemExit), merge.exception
    report = read_run(local_output / name)
    valid_captures = [capture for capture in report.captures if capture.replica == 0]
    assert [rank.status for capture in valid_captures for rank in capture.ranks] == [Status.COMPLETE] * 2
    assert list(outside.iterdir()) == []
    expected_paths = {tmp_path / "there", local_output, outside, tmp_path / "merged"}
    assert set(tmp_path.iterdir()) <= expected_paths
