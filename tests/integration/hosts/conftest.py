"""Fixtures for real frameworks on the CPU: tiny models, jobs in child processes, and their Ray clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from verl_jobs import Cluster, Material, VerlJob, make_material

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("hosts")


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A model, data sets and a reward function for verl jobs."""
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Start verl jobs. Running jobs are stopped after the test."""
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def job(material: Material, cluster: Cluster) -> Callable[..., VerlJob]:
    """Return a function that starts a verl job."""
    return lambda module, *overrides, **environ: cluster.start(material, module, overrides, environ)
