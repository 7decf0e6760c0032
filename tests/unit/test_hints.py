"""Tests of hints in error messages."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from profdeck import Profiler
from profdeck.cli import app
from profdeck_traces.base.errors import ConfigError

pytestmark = pytest.mark.usefixtures("tally")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainer.options.activities": ["gpu"]}, "Did you mean 'cuda'?"),
        (
            {"trainer.targets": {"budget_gb": 1.0}},
            "unknown key 'budget_gb'. It was removed. Set 'sample' to limit the number of targets that record.",
        ),
        ({"trainer.all_ranks": True}, "unknown key 'all_ranks'. Use ranks: all."),
        ({"trainer.contents": ["cpu"]}, "Use options.activities"),
        ({"trainer.step_start": 3}, "Use steps, such as '3..5'."),
        ({"trainer.profile_continuous_steps": True}, "Use mode: continuous."),
        ({"trainer.rank": [0]}, "Did you mean 'ranks'?"),
    ],
)
def test_keys_of_other_tools(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Profiler.from_config(settings={"steps": [1], "trainer.backend": "tally", **settings})
    assert said in str(caught.value)


def test_unknown_role(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="profdeck"):
        profiler = Profiler.from_config(role="trianer", settings={"steps": [1], "trainer.backend": "tally"})
    assert not profiler.enabled
    assert "no role 'trianer', so this process records nothing. Did you mean 'trainer'?" in caplog.text


def test_file_instead_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.trace.json").write_text("[]")
    result = CliRunner().invoke(app, ["ls", str(tmp_path / "a.trace.json")])
    assert result.exit_code == 4
    assert "Try: profdeck summary " in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("role", "said"),
    [
        (
            {"backend": "vllm", "options": {"device_options": {"gzpi": True}}},
            "unknown key 'gzpi'. Did you mean 'gzip'?",
        ),
        (
            {"backend": "sglang", "options": {"device_options": {"gzip": 3}}},
            "options.device_options.gzip: expected true",
        ),
        ({"backend": "sglang", "options": {"start_step": 5}}, "start_step: requires the role's iterations.count"),
        (
            {"backend": "sglang", "options": {"start_step": 5}, "iterations": {"count": 2, "skip": 1}},
            "iterations.skip also sets the start of the window",
        ),
        (
            {"backend": "sglang", "options": {"start_step": 5}, "iterations": {"count": 2}, "batch_kinds": ["decode"]},
            "cannot be combined with batch_kinds",
        ),
        (
            {"backend": "sglang", "options": {"stage_min_batch_size": 4}},
            "requires profile_by_stage or the role's batch_kinds",
        ),
    ],
)
def test_invalid_engine_options_are_rejected_early(tmp_path: Path, role: dict[str, object], said: str) -> None:
    (tmp_path / "a.yaml").write_text(json.dumps({"roles": {"rollout": role}}))
    result = CliRunner().invoke(app, ["check", str(tmp_path / "a.yaml")], env={"COLUMNS": "300"})
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.output.split())
    with pytest.raises(ConfigError, match=r"roles\.rollout\.options\."):
        Profiler.from_config(tmp_path / "a.yaml", role="rollout", target="http://127.0.0.1:1")


@pytest.mark.parametrize("options", [{"device_options": {"gzip": False}}, {"device_options": {"level": "level1"}}])
def test_options_of_installed_devices_are_accepted(options: dict[str, object]) -> None:
    settings = {"steps": [1], "rollout.backend": "vllm", "rollout.options": options}
    assert Profiler.from_config(role="rollout", settings=settings, target="http://127.0.0.1:1").enabled
