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


def list_paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in nested dicts and lists."""
    paths = [path] if path else []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        paths += list_paths(value, (*path, key))
    return paths


def mutate_config(rng: random.Random) -> str:
    """Return the base config as JSON with random changes to its values and, sometimes, to its text."""
    data = copy.deepcopy(BASE)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        *parents, last = rng.choice(list_paths(data))
        parent = data
        for key in parents:
            parent = parent[key]
        mutation = rng.randrange(4)
        if mutation == 0:
            del parent[last]
        elif mutation == 1 and isinstance(parent, dict):
            parent[rng.choice([str(last) + "x", str(last)[1:], "x", "", "options", "steps"])] = parent.pop(last)
        else:
            parent[last] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(data, indent=rng.choice([None, 2]))
    if rng.random() < 0.2:
        position = rng.randrange(len(text) + 1)
        text = text[:position] + rng.choice(TEXTS) + text[position + rng.choice([0, 0, 1, 5, 100]) :]
    elif rng.random() < 0.1:
        text = rng.choice(TEXTS) + rng.choice(TEXTS)
    return text


def test_config_is_rejected_with_a_message_or_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "profdeck.yaml"
    accepted = 0
    for seed in range(FIRST_SEED, FIRST_SEED + CONFIGS):
        rng = random.Random(seed)  # noqa: S311 - reproducible input
        path.write_bytes(mutate_config(rng).encode("utf-8", "surrogatepass"))
        try:
            result = CliRunner().invoke(app, ["check", str(path)], env={"COLUMNS": "200"})
            check_output(result)
            accepted += run_job(path, rejected=bool(result.exit_code))
        except BaseException as error:
            error.add_note(f"seed {seed}: {path.read_bytes()[:2000]!r}")
            raise
    assert 0.1 < accepted / CONFIGS < 0.9  # otherwise, the mutations are too strong or too weak


def check_output(result: Any) -> None:
    """Check that `profdeck check` accepts the config or prints an error message without a traceback."""
    if isinstance(result.exception, SystemExit) or result.exception is None:
        assert result.exit_code == 0 or result.output.strip(), "the config was rejected without a message"
        assert "Traceback" not in result.output
        return
    assert isinstance(result.exception, ProfdeckError), repr(result.exception)
    assert str(result.exception).strip()


def run_job(path: Path, *, rejected: bool) -> bool:
    """Run a training loop with a config. Return True if the config was accepted.

    Args:
        path: path of the config.
        rejected: whether `profdeck check` rejected the config. If not, the profiler must accept the config.
    """
    try:
        profiler = Profiler.from_config(path, role="trainer")
    except ProfdeckError as error:
        if not rejected:
            raise
        if not str(error).strip():
            raise AssertionError("The error has no message.") from error
        return False
    try:
        for step in range(3):
            profiler.step(step)
    finally:
        profiler.close()
    return True
