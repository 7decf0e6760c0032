"""Tests shared by all engines: captures that a config arms, and the engine's how-to guide.

The test modules of each engine define subclasses.
"""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pages import Shell, blocks
from servers import busy

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


class SelfArmedContract:
    """Tests of engines whose config arms a capture, and of engines with an invalid config."""

    backend: ClassVar[str]
    environment: ClassVar[dict[str, str]] = {}
    """Environment variables of an engine with two ranks."""

    @staticmethod
    def check_trace(path: Path) -> None:
        """Check the engine's own annotations in a trace with three iterations."""

    def test_iterations_of_the_config_are_recorded_automatically(
        self, run_job: Callable[..., Any], tmp_path: Path
    ) -> None:
        config, profiles = tmp_path / "profdeck.yaml", tmp_path / "profiles"
        config.write_text(
            f"output: {profiles}\n"
            f"roles:\n  rollout: {{backend: {self.backend}, ranks: all, iterations: {{first: 7, count: 3}}}}\n"
            "  trainer: {backend: torch}\n"
        )
        environment = {"PROFDECK_CONFIG": str(config), "PROFDECK_REPLICA": "2"}
        job = run_job("self_armed", "2", str(profiles), **environment, **self.environment)
        assert job.results["tokens"] == [6] * 4
        (run,) = profiles.iterdir()  # both ranks use the same name
        report = read_run(run)
        assert report.status is Status.COMPLETE
        (capture,) = report.captures
        assert (capture.id, capture.role, capture.replica) == ("iteration7", "rollout", 2)
        assert [rank.rank for rank in capture.ranks] == [0, 1]
        for rank in capture.ranks:
            path = rank.artifacts[0].path
            text = gzip.decompress(path.read_bytes()).decode()
            assert sorted({int(step) for step in re.findall(r"ProfilerStep#(\d+)", text)}) == [7, 8, 9]
            self.check_trace(path)

    @pytest.mark.long
    def test_engine_runs_with_an_invalid_config(self, run_job: Callable[..., Any], tmp_path: Path) -> None:
        config = tmp_path / "profdeck.yaml"
        config.write_text("outptu: here\n")
        profiles = tmp_path / "profiles"
        job = run_job("self_armed", "1", str(profiles), PROFDECK_CONFIG=str(config))
        assert job.results["tokens"] == [6] * 4
        assert "unknown key 'outptu'" in job.log
        assert not profiles.exists()


def run_commands(page: Path, url: str, skipped: str, shell: Shell, server: Any) -> None:
    """Run the console commands of a documentation page against a busy server.

    Only blocks that other tests skip with the reason `skipped` are run. In their commands, `url` is replaced by the
    server's URL.
    """
    with busy(server):
        for block in blocks(page):
            if block.skipped == skipped and block.language == "console":
                for command, _ in block.commands():
                    shell.run(block, command.replace(url, server.url), [], 0)


class PageContract:
    """Tests for the Python scripts in an engine's how-to guide. `ServerContract` tests the guide's server commands."""

    page: ClassVar[Path]
    plugins: ClassVar[dict[str, str]]
    """The environment variable that selects the engine's plugins, with its value."""
    tiny: ClassVar[str]
    """Python source of the engine arguments for the tiny model, except for its path."""

    def test_scripts_of_the_guide_work(self, model: Path, engine_environment: dict[str, str], tmp_path: Path) -> None:
        shell = Shell(tmp_path)
        shell.environment |= engine_environment | self.plugins | {"PATH": shell.environment["PATH"]}
        files = {block.file: block for block in blocks(self.page) if block.file}
        (shell.directory / "rollout.yaml").write_text(files["rollout.yaml"].text)
        for name in ("rollout.py", "rl.py"):
            shutil.rmtree(shell.directory / "profiles", ignore_errors=True)
            script = files[name].text.replace('"MODEL"', f"{str(model)!r}, {self.tiny}")
            assert script != files[name].text
            (shell.directory / name).write_text(script)
            shell.run(files[name], f"python {name}", [], 0)
            report = read_run(shell.directory / "profiles" / "rl")
            assert {target.first_step for target in report.targets} == {1, 3}
            assert report.status is Status.COMPLETE
