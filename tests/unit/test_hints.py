"""What somebody meant who wrote something else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from profdeck import Profiler
from profdeck.base.errors import ConfigError
from profdeck.cli import app

pytestmark = pytest.mark.usefixtures("tally")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainer.options.activities": ["gpu"]}, "Did you mean 'cuda'?"),
        ({"trainer.all_ranks": True}, "unknown key 'all_ranks'. Here that is ranks: all."),
        ({"trainer.contents": ["cpu"]}, "Here that is options.activities"),
        ({"trainer.step_start": 3}, "Here that is steps, such as '3..5'."),
        ({"trainer.profile_continuous_steps": True}, "Here that is mode: continuous."),
        ({"trainer.rank": [0]}, "Did you mean 'ranks'?"),
    ],
)
def test_words_of_others(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Profiler.from_config(settings={"steps": [1], "trainer.backend": "tally", **settings})
    assert said in str(caught.value)


def test_a_role_that_the_config_lacks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="profdeck"):
        profiler = Profiler.from_config(role="trianer", settings={"steps": [1], "trainer.backend": "tally"})
    assert not profiler.enabled
    assert "no role 'trianer', so this process records nothing. Did you mean 'trainer'?" in caplog.text


def test_a_file_where_a_run_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "a.trace.json").write_text("[]")
    result = CliRunner().invoke(app, ["ls", str(tmp_path / "a.trace.json")])
    assert result.exit_code == 4
    assert "Try: profdeck summary " in " ".join(result.stderr.split())
