"""Backend that replays a capture, for jobs in child processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import python_path

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def replaying_site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH of a job that uses the backend `replaying`."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "replaying-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: replaying\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[profdeck.backends]\nreplaying = replaying_backend:ReplayingBackend\n")
    return python_path(site, TESTS)
