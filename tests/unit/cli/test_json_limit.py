"""Tests for `--max-bytes`, which limits the size of JSON documents."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from typer.testing import Result

from captured_runs import write_run
from gpu_job import GpuJob
from profdeck_traces.base.errors import ConfigError
from profdeck_traces.cli.json_limit import fit

Cli = Callable[..., Result]

DOCUMENT = {
    "name": "ä##[x]",
    "first": [{"id": number, "inner": [*range(20)]} for number in range(5)],
    "second": [*range(100)],
    "other": ["text"] * 50,
}


def shortened(max_bytes: int) -> dict[str, Any]:
    text = fit(DOCUMENT, max_bytes, ["first", "first[].inner", "second"])
    assert len(text.encode()) <= max_bytes
    document: dict[str, Any] = json.loads(text)
    assert list(document) == [*DOCUMENT, "truncated"]
    return document


def test_least_important_lists_are_shortened_first() -> None:
    assert shortened(5000) == DOCUMENT | {"truncated": {}}
    document = shortened(900)
    assert document["truncated"] == {"other": 50 - len(document["other"])}
    assert 0 < len(document["other"]) < 50
    document = shortened(700)
    assert document["truncated"] == {"other": 50, "second": 100 - len(document["second"])}
    assert document["first"] == DOCUMENT["first"]
    document = shortened(350)
    assert [len(item["inner"]) for item in document["first"]] == [len(document["first"][0]["inner"])] * 5
    assert document["truncated"]["first[].inner"] == 100 - 5 * len(document["first"][0]["inner"])


def test_limit_below_the_shortest_document_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^--max-bytes 20 is too small: the shortest result has (\d+) bytes") as info:
        shortened(20)
    (least,) = map(int, re.findall(r"has (\d+) bytes", str(info.value)))
    assert shortened(least)["first"] == []
    with pytest.raises(ConfigError):
        shortened(least - 1)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=3), values, max_size=3),
)


@given(st.dictionaries(st.sampled_from("abc"), _VALUES), st.integers(1, 300))
def test_any_document_fits_or_is_rejected(document: dict[str, Any], max_bytes: int) -> None:
    try:
        text = fit(document, max_bytes, ["b"])
    except ConfigError:
        return
    assert len(text.encode()) <= max_bytes
    result = json.loads(text)
    if not result.pop("truncated"):
        assert result == json.loads(json.dumps(document))


def test_commands_print_documents_within_the_limit(cli: Cli, record: Callable[..., Path], tmp_path: Path) -> None:
    for name, product_us in (("a", 400.0), ("b", 500.0)):
        write_run(tmp_path / name, 2, lambda _, us=product_us: GpuJob(ranks=2, steps=5, product_us=us))  # type: ignore[misc]
    assert cli("baseline", "save", "main", "a").exit_code == 0
    commands: list[tuple[object, ...]] = [("summary", "a"), ("diff", "a", "b"), ("trend", "a")]
    for arguments in (*commands, ("baseline", "check", "main", "b"), ("ls", record(3, 4))):
        complete = cli(*arguments, "--json")
        refused = cli(*arguments, "--json", "--max-bytes", "1")
        assert refused.exit_code == 2, refused.stderr
        (least,) = map(int, re.findall(r"the shortest result has (\d+) bytes", refused.stderr))
        size = max(least, len(complete.stdout) // 4)
        result = cli(*arguments, "--json", "--max-bytes", size)
        assert (len(result.stdout) <= size, result.exit_code) == (True, complete.exit_code)
        document = json.loads(result.stdout)
        assert document.pop("truncated")
        assert document.keys() == json.loads(complete.stdout).keys()
        assert cli(*arguments, "--max-bytes", size).exit_code == 2
    document = json.loads(cli("diff", "a", "b", "--json", "--max-bytes", 3500).stdout)
    assert document["roles"][0]["headline"].startswith("trainer is slower: the median global step")
