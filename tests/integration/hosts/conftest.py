"""Real frameworks on the CPU: tiny models, jobs in processes of their own, Ray clusters that end with them."""

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
    """A model, data and a reward function."""
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Start jobs of verl; ended with the test, if they have not."""
    with Cluster(tmp_path) as started:
        yield started


@pytest.fixture
def job(material: Material, cluster: Cluster) -> Callable[..., VerlJob]:
    """Start a job of verl."""
    return lambda module, *overrides, **environ: cluster.start(material, module, overrides, environ)
