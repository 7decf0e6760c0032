"""Fuzz test of configs. Each mutated config is either rejected with a message or works in a training loop.

``PROFDECK_FUZZ_CONFIGS`` sets the number of configs. ``PROFDECK_TEST_SEED`` sets the seed of the first config.
"""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from profdeck import Profiler
from profdeck.cli import app
from profdeck_traces.base.errors import ProfdeckError
from seeds import FIRST_SEED

pytestmark = pytest.mark.usefixtures("tally")

CONFIGS = int(os.environ.get("PROFDECK_FUZZ_CONFIGS", "25"))
LIMITS = {"max_capture_s": 60}
BASE: dict[str, Any] = {
    "output": "profiles",
    "run": "job",
    "steps": ["0..1", 3, "every 5"],
    "mode": "continuous",
    "on_error": "warn",
    "final_step": 100,
    "on_demand": True,
    "finish": {"command": "true", "wait_s": 5},
    "roles": {
        "trainer": {
            "backend": "tally",
            "ranks": "all",
            "options": {"record_shapes": True, "with_stack": False, "activities": ["cpu"], **LIMITS},
            "window": {"warmup": 1, "active": 2},
        },
        "rollout": {
            "backend": "vllm",
            "targets": {"urls": ["http://127.0.0.1:1", "http://127.0.0.1:2/prefix"]},
            "iterations": {"count": 3, "skip": 1},
            "batch_kinds": ["decode"],
            "options": {"device_options": {"gzip": True}},
        },
        "reference": {
            "backend": "sglang",
            "targets": {"urls": ["http://[::1]:3"]},
            "batch_kinds": ["prefill", "decode"],
            "ranks": [0, 1],
        },
    },
}
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3.5, 1e308, float("inf"), float("nan"), 10**30, 2**63, "", " ", "x", "all", "none",
    "0..", "..3", "3..1", "1..10**9", "every 0", "every 5 from 3", "010", "10:20", "1e3", "2026-02-30", "\0", "a\0b",
    "\ud800",
    "\x1b[31m", "../../..", "/", "~", "$HOME", "http://", "http://[::1", "http://h:99999999", "ws://x", [], {},
    [[]], [None], ["x", "x"], [1, "1"], {"x": 1}, {"": None}, {"a.b": 1}, [[[[[]]]]], "x" * 5000, ["x"] * 5000,
]  # fmt: skip
TEXTS = [
    "steps: [010]\n", "steps: [2026-02-30]\n", "steps: [!!int x]\n", "run: !!timestamp x\n", "roles: &a {t: *a}\n",
    "? [1, 2]\n: 3\n", "a: &a [x, x]\nb: [*a, *a]\n", "<<: {steps: [1]}\n", "\tsteps: 1\n", "---\n---\n", "%YAML 9.9\n",
    "roles: {a: 1, a: 2}\n", "[" * 3000, "{" * 3000, "x: " + "9" * 5000 + "\n", "\ufeff", "\0", "\x85", "- a\nb: c\n",
    "!!python/object/apply:os.system ['true']\n", "key: |\n  a\n b\n", "'", '"', "*x", "&x", "x: !!binary ////\n",
]  # fmt: skip


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    rows = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in rows:
        found += places(value, (*at, key))
    return found


def mutated(chance: random.Random) -> str:
    """Write a config with some changes to its data, and now and then to its text."""
    data = copy.deepcopy(BASE)
    for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
        *parents, last = chance.choice(places(data))
        inner = data
        for key in parents:
            inner = inner[key]
        change = chance.randrange(4)
        if change == 0:
            del inner[last]
        elif change == 1 and isinstance(inner, dict):
            inner[chance.choice([str(last) + "x", str(last)[1:], "x", "", "options", "steps"])] = inner.pop(last)
        else:
            inner[last] = copy.deepcopy(chance.choice(VALUES))
    text = json.dumps(data, indent=chance.choice([None, 2]))
    if chance.random() < 0.2:
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice(TEXTS) + text[at + chance.choice([0, 0, 1, 5, 100]) :]
    elif chance.random() < 0.1:
        text = chance.choice(TEXTS) + chance.choice(TEXTS)
    return text


def test_a_config_is_refused_with_a_sentence_or_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "profdeck.yaml"
    good = 0
    for seed in range(FIRST_SEED, FIRST_SEED + CONFIGS):
        chance = random.Random(seed)  # noqa: S311 - reproducible input
        path.write_bytes(mutated(chance).encode("utf-8", "surrogatepass"))
        try:
            checked = CliRunner().invoke(app, ["check", str(path)], env={"COLUMNS": "200"})
            is_sentence(checked)
            good += works(path, refused=bool(checked.exit_code))
        except BaseException as error:
            error.add_note(f"seed {seed}: {path.read_bytes()[:2000]!r}")
            raise
    assert 0.1 < good / CONFIGS < 0.9  # else the changes say nothing


def is_sentence(checked: Any) -> None:
    if isinstance(checked.exception, SystemExit) or checked.exception is None:
        assert checked.exit_code == 0 or checked.output.strip(), "it is refused without a word"
        assert "Traceback" not in checked.output
        return
    assert isinstance(checked.exception, ProfdeckError), repr(checked.exception)
    assert str(checked.exception).strip()


def works(path: Path, *, refused: bool) -> bool:
    """Run a loop with it; what `check` passed, a job takes."""
    try:
        profiler = Profiler.from_config(path, role="trainer")
    except ProfdeckError as error:
        if not refused:
            raise
        return not str(error).strip()
    try:
        for step in range(3):
            profiler.step(step)
    finally:
        profiler.close()
    return True
