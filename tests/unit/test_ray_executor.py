"""Tests for the executor of profdeck_ray that need no cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from profdeck import __version__
from profdeck.base.errors import ConfigError, MissingLibraryError
from profdeck_ray import executor
from profdeck_ray.executor import RayExecutor


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent / "traces")
    import parallel_jobs

    return parallel_jobs


def test_ray_that_is_missing_is_named(jobs, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingLibraryError, match=r"needs ray, .* pip install 'profdeck\[ray\]'"):
        RayExecutor("auto")(jobs.obey, ["a"], [1])


@pytest.mark.parametrize("address", ["head", "", ":6379", "head:port", "ray://head:10001", "http://head:80"])
def test_what_is_no_address_of_ray_is_refused(address) -> None:
    with pytest.raises(ConfigError, match=r"is not a Ray cluster address\. Use host:port"):
        executor._join_cluster(None, address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "[::1]:1"])
def test_an_address_where_nothing_answers_is_said_at_once(address) -> None:
    with pytest.raises(ConfigError, match=r"There is no Ray cluster at .* 'ray start --head --port 6379'"):
        executor._join_cluster(None, address)


def test_a_node_with_another_profdeck_is_refused(jobs) -> None:
    (report,) = executor._task(jobs.obey, "a", False, "0.0.1")  # noqa: FBT003
    assert str(report).endswith("but this machine has 0.0.1.")


def test_a_node_that_cannot_open_a_file_is_named(jobs, tmp_path) -> None:
    (report,) = executor._task(jobs.check, tmp_path / "missing", False, __version__)  # noqa: FBT003
    assert f"on the Ray node {executor.platform.node()}. All nodes must be able to read" in str(report.value)
