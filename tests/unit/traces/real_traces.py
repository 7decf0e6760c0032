"""Finds real GPU and NPU traces. The environment variable PROFDECK_TEST_DATA contains their directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("PROFDECK_TEST_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data")


def each(*patterns: str) -> pytest.MarkDecorator:
    """Parametrize `path` with the traces that match the patterns. Skip the test if no trace matches."""
    paths = sorted(path for pattern in patterns for path in DATA.glob(pattern))
    skip = pytest.mark.skip(reason=f"no traces in {DATA}; set PROFDECK_TEST_DATA")
    return pytest.mark.parametrize(
        "path", paths or [pytest.param(None, marks=skip)], ids=lambda path: path.name if path else "none"
    )


def named(name: str) -> Path:
    """Return the path of a real trace. Skip the test if the trace does not exist."""
    if not (DATA / name).exists():
        pytest.skip(f"no {name} in {DATA}; set PROFDECK_TEST_DATA")
    return DATA / name
