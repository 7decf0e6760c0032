"""Tests of the rollout function for slime: finding the original function and the router."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from profdeck_slime.rollouts import VARIABLE, find_rollout_function, generate_rollout, router_url
from profdeck_traces.base.errors import ConfigError


@pytest.mark.parametrize(
    ("args", "url"),
    [
        ({"sglang_router_ip": "10.0.0.1", "sglang_router_port": 3456}, "http://10.0.0.1:3456"),
        ({"vllm_router_ip": "fe80::1", "vllm_router_port": 3456}, "http://[fe80::1]:3456"),
        ({"sglang_router_ip": None, "sglang_router_port": None}, ""),
    ],
)
def test_router_url_is_built_from_the_arguments(args: dict[str, object], url: str) -> None:
    assert router_url(SimpleNamespace(**args)) == url


def test_custom_rollout_function_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rollouts.py").write_text(
        "def generate(args, rollout_id, data, evaluation): return rollout_id, data"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "my_rollouts.generate")
    try:
        assert generate_rollout(SimpleNamespace(), 7, ["a"]) == (7, ["a"])  # without a role nothing is captured
    finally:
        sys.modules.pop("my_rollouts", None)


def test_missing_rollout_function_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no_such_package.generate")
    with pytest.raises(ConfigError, match=r"tried no_such_package.generate \(ModuleNotFoundError: No module named"):
        find_rollout_function()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(
        ConfigError, match=f"tried slime and vime. Set {VARIABLE} to its import path, such as package.module"
    ):
        find_rollout_function()
