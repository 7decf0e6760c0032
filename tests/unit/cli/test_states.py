"""The summary and `ls` agree on the state of every rank of every capture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Cli = Callable[..., Result]
Record = Callable[..., Path]


def states(cli: Cli, run: Path) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], str]]:
    listed = json.loads(cli("ls", run, "--json").stdout)
    by_ls = {
        (capture["id"], rank["rank"]): rank["status"] for capture in listed["captures"] for rank in capture["ranks"]
    }
    summary = json.loads(cli("summary", run, "--json").stdout)
    by_summary = {(one["capture"], one["rank"]): one["status"] for one in summary["captures"]}
    return by_ls, by_summary


@pytest.mark.parametrize("damage", ["none", "cut", "gone", "empty", "manifest gone", "dead"])
def test_states_agree(cli: Cli, record: Record, damage: str) -> None:
    run = record(3, 5, ranks=(0, 1), world_size=2)
    trace = next(run.rglob("rank_0001*step3.trace.json*"))
    manifest = next(run.rglob("rank_0001*step3.json"))
    match damage:
        case "cut":
            trace.write_bytes(trace.read_bytes()[:-20])
        case "gone":
            trace.unlink()
        case "empty":
            trace.write_bytes(b"")
        case "manifest gone":
            manifest.unlink()
        case "dead":
            document = json.loads(manifest.read_text())
            manifest.write_text(json.dumps(document | {"status": "recording", "artifacts": [], "pid": 2**22 + 1}))
    by_ls, by_summary = states(cli, run)
    assert by_summary == by_ls
    assert (by_ls["step3", 1] == "complete") is (damage == "none")
    assert by_ls["step5", 1] == "complete"
