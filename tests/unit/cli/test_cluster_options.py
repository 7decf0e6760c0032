"""Tests for cluster plugins: command options, and errors if a plugin or its library is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import Result

from distributions import install
from profdeck import Profiler
from profdeck.engine.clusters import CLUSTERS, installed_clusters
from profdeck_traces.base.errors import ConfigError, UnknownPluginError

Cli = Callable[..., Result]
YARD = """
from profdeck.engine.clusters import Cluster

def capture(*, yard: bool = False, crane: str = "c1") -> tuple[str, ...] | None:
    \"\"\"Select a crane.\"\"\"
    return (crane,) if yard else None

class Yard(Cluster):
    name = "yard"
    title = "Yard"
    command_options = {"capture servers": capture}

    def require(self, purpose): pass
    def as_target(self, target, attribute): return None
    async def find_actors(self, config, ask): return [], [f"asked for {config.actors[0]}"]
    async def find_namespace(self, names, ask): return "north", ["The south is closed."]
    def join(self, until): print("joined")

YARD, WRONG = Yard(), Yard
"""
ACTORS = {"steps": [1], "rollout.backend": "vllm", "rollout.targets.actors": ["a"]}


@pytest.fixture(autouse=True)
def clear_cache() -> Iterator[None]:
    installed_clusters.cache_clear()
    yield
    installed_clusters.cache_clear()


def entry_points_except(**attributes: str) -> metadata.EntryPoints:
    """Return all entry points that do not match the given attributes."""
    points = (point for distribution in metadata.distributions() for point in distribution.entry_points)
    return metadata.EntryPoints(point for point in points if not point.matches(**attributes))


@pytest.fixture
def hide_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all installed cluster plugins."""
    monkeypatch.setattr(metadata, "entry_points", lambda: entry_points_except(group=CLUSTERS))


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with the cluster `yard` and an invalid entry point."""
    (tmp_path / "yard_cluster.py").write_text(YARD)
    install(tmp_path, "yard", f"[{CLUSTERS}]\nyard = yard_cluster:YARD\nwrong = yard_cluster:WRONG\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_help_lists_cluster_options_after_server_options(cli: Cli) -> None:
    help_text = cli("capture", "servers", "--help").stdout
    assert help_text.index("--targets") < help_text.index("--ray") < help_text.index("--config")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--actor", "rollout_*"], "--actor was removed. Specify actor names with the option of their cluster"),
        (["--ray-namespace", "jobs"], "--ray-namespace was removed. Use --set server.targets.actor_namespace=NAME."),
        ([], "Use --url, --router, --targets, --ray or --config."),
    ],
)
def test_removed_or_missing_options_are_rejected(cli: Cli, arguments: list[str], message: str) -> None:
    result = cli("capture", "servers", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_missing_library_error_has_the_install_command(cli: Cli) -> None:
    result = cli("capture", "servers", "--ray", "*")
    assert result.exit_code != 0
    assert "ray, which is not installed. Install it with: pip install 'profdeck[ray]'" in result.stderr


@pytest.mark.usefixtures("hide_clusters")
def test_actors_are_rejected_without_cluster_plugins(cli: Cli) -> None:
    assert "No such option: --ray" in cli("capture", "servers", "--ray", "*").stderr
    assert "Use --url, --router, --targets or --config." in cli("capture", "servers").stderr
    with pytest.raises(UnknownPluginError, match=r"targets\.actors: no cluster plugin is installed .*Install a"):
        Profiler.from_config(role="rollout", settings=ACTORS)


@pytest.mark.usefixtures("yard")
def test_plugin_adds_its_options_to_the_command(cli: Cli, caplog: pytest.LogCaptureFixture) -> None:
    help_text = cli("capture", "servers", "--help").stdout
    assert "--crane" in help_text
    assert f"'wrong' in {CLUSTERS} must be an instance of " in caplog.text
    with pytest.raises(ConfigError, match=r"several cluster plugins are installed: ray, yard\."):
        Profiler.from_config(role="rollout", settings=ACTORS)


def test_selected_actors_become_targets(
    cli: Cli, yard: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda: entry_points_except(group=CLUSTERS, name="ray"))
    result = cli("capture", "servers", "--yard", "--crane", "c7")
    assert result.stdout.startswith("joined")
    assert "The south is closed." in result.stderr
    assert "There is no target (none found). Searched: c7. asked for c7" in " ".join(result.stderr.split())
