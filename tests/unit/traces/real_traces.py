"""Finds real GPU and NPU traces in the directory PROFDECK_TEST_DATA, by default shared/data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("PROFDECK_TEST_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data")


def each(*patterns: str) -> pytest.MarkDecorator:
    """Parametrize `path` with the traces that match the patterns, or skip the test if there are none."""
    paths = sorted(path for pattern in patterns for path in DATA.glob(pattern))
    skip = pytest.mark.skip(reason=f"no traces in {DATA}; set PROFDECK_TEST_DATA")
    return pytest.mark.parametrize(
        "path", paths or [pytest.param(None, marks=skip)], ids=lambda path: path.name if path else "none"
    )


def named(name: str) -> Path:
    """Return a real trace's path, or skip the test if the trace does not exist."""
    if not (DATA / name).exists():
        pytest.skip(f"no {name} in {DATA}; set PROFDECK_TEST_DATA")
    return DATA / name
