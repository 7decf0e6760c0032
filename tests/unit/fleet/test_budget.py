"""A budget for what a capture of many targets writes, by what one of them wrote before."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from profdeck import Profiler
from profdeck.base.errors import CaptureError
from profdeck.base.outcome import Outcome
from profdeck.cli import _size, app, kit
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.run_directory import step_directories
from simulated_servers import Act, simulated_servers

Build = Callable[..., Profiler]
Read = Callable[..., Manifest]
FOUR = {"rollout.iterations": {"count": 4}}


@pytest.fixture
def captured(build: Build, recording: Callable[..., Any], manifest: Read) -> Callable[..., list[int]]:
    """Capture a step of six servers, each with two ranks, by a config; returns which replicas record."""

    def capture(step: int, own: dict[str, Any], **targets: Any) -> list[int]:
        async def main() -> int:
            async with simulated_servers(6) as servers:
                for server in servers:
                    server.engine = recording(ranks=2)
                urls = [server.url for server in servers]
                async with build(None, {"steps": [step], **own}, urls=urls, **targets).capture(step):
                    for server in servers:
                        server.engine.iterate(8)
                return sum("start" in server.commands() for server in servers)

        asked, records = asyncio.run(asyncio.wait_for(main(), 60)), manifest(step).targets
        assert [one.took_part for one in records] == [True] * asked
        return [one.replica for one in records]

    return capture


def bytes_of_a_target(run: Path) -> float:
    """Return what a target wrote in the last step of a run, by its manifests."""
    found = [*map(read_manifest, filter(is_manifest, step_directories(run)[-1].rglob("replica_*/*.json")))]
    sizes = [sum(artifact.size_bytes for artifact in one.artifacts) for one in found]
    return sum(sizes) / len({one.request_token for one in found})


def test_as_many_record_as_fit(captured: Callable[..., list[int]], manifest: Read, tmp_path: Path) -> None:
    assert captured(1, FOUR, budget_gb=1.0) == [0]
    assert manifest(1).notes[0] == (
        "1 of 6 targets record, by budget_gb: 1, as nothing tells yet how much one of them writes. "
        "The next capture knows."
    )
    each_gb = bytes_of_a_target(tmp_path / "run") / 1e9
    assert captured(2, FOUR, budget_gb=3.5 * each_gb) == [0, 2, 4]
    assert f"each is expected to write {each_gb:.3g} GB, as in {tmp_path / 'run'}." in manifest(2).notes[0]
    assert captured(3, FOUR, budget_gb=6.1 * each_gb) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(CaptureError, match=r"One target is more than budget_gb=.* Record fewer iterations"):
        captured(4, FOUR, budget_gb=0.9 * each_gb)
    eight = {"rollout.iterations": {"count": 8}}
    assert captured(5, eight, budget_gb=4.1 * each_gb) == [0, 3]
    # of captures with other options nothing is known
    assert captured(6, FOUR | {"rollout.options": {"with_stack": True}}, budget_gb=1.0) == [0]


def test_what_is_merged_counts(captured: Callable[..., list[int]], manifest: Read, tmp_path: Path) -> None:
    own = FOUR | {"rollout.options": {"merge": True}}
    assert captured(1, own, budget_gb=1.0) == [0]
    (merged,) = manifest(1, 0).artifacts
    each = bytes_of_a_target(tmp_path / "run")
    assert each > 2 * merged.size_bytes > 0
    assert captured(2, own, budget_gb=2.5 * each / 1e9) == [0, 3]


def test_what_cannot_be_asked_takes_nothing_of_the_budget(build: Build, manifest: Read) -> None:
    async def main() -> None:
        async with simulated_servers(2) as servers:
            router = {"workers": [{"url": server.url, "is_healthy": server is servers[1]} for server in servers]}
            servers[1].acts["workers"] = [Act(content=json.dumps(router).encode())]
            profiler = build(None, {}, budget_gb=1.0, router=servers[1].url)
            with pytest.raises(CaptureError, match="1 of 2 targets did not take part"):
                async with profiler.capture(1):
                    pass

    asyncio.run(main())
    assert sorted((one.took_part, one.outcome) for one in manifest(1).targets) == [
        (False, Outcome.UNREACHABLE),
        (True, Outcome.FLUSHED),
    ]


@pytest.fixture
def checked(tmp_path: Path, simulated: None, recording: Callable[..., Any]) -> Callable[..., dict[str, str]]:
    """Run `profdeck check --connect` of three servers that run iterations all the while, or none."""

    def check(*options: str, busy: bool = True, **of_targets: float) -> dict[str, str]:
        async def main() -> dict[str, str]:
            async with simulated_servers(3) as servers:
                role: dict[str, Any] = {
                    "backend": "simulated",
                    "targets": {"urls": [one.url for one in servers], **of_targets},
                }
                config = tmp_path / "profdeck.yaml"
                config.write_text(
                    json.dumps({"output": str(tmp_path), "roles": {"rollout": role | {"iterations": {"count": 4}}}})
                )
                for server in servers:
                    server.engine = recording(output=tmp_path)
                asked = asyncio.create_task(
                    asyncio.to_thread(CliRunner().invoke, app, ["check", str(config), "--connect", "--json", *options])
                )
                while not asked.done():
                    for server in servers if busy else ():
                        server.engine.iterate(1)
                    await asyncio.sleep(0.01)
                result = await asked
                return {one["what"]: one["detail"] for one in json.loads(result.stdout)["checks"]}

        return asyncio.run(asyncio.wait_for(main(), 60))

    return check


def test_the_size_is_said_before(checked: Callable[..., dict[str, str]]) -> None:
    unknown = "not known before a capture with these options; --measure records one iteration"
    assert checked()["roles.rollout.size"] == unknown
    found = checked("--measure")
    run = re.fullmatch(r"one iteration of a target, in (.*/measured-[0-9-]+)", found["roles.rollout.measure"])
    assert run is not None
    each = round(4 * bytes_of_a_target(Path(run[1])))
    expected = f"{kit.size(3 * each)} for 3 targets of 4 iterations: {kit.size(each)} each, by 1 target in {run[1]}"
    assert found["roles.rollout.size"] == checked()["roles.rollout.size"] == expected
    limited = checked(budget_gb=2.5 * each / 1e9)["roles.rollout.size"]
    assert limited.startswith(f"{expected}; 2 of 3 fit into budget_gb: ")


def test_idle_engines_cannot_be_measured(
    checked: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_size, "_MEASURE_S", 0.2)
    told = checked("--measure", busy=False)["roles.rollout.measure"]
    assert told.startswith("Nothing was measured. ")
    assert told.endswith("It waited 0.2 s at most, and an idle engine has no iterations.")
