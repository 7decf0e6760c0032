"""Real traces of GPUs and NPUs: files below the folder that PROFDECK_TEST_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("PROFDECK_TEST_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data")


def each(*patterns: str) -> pytest.MarkDecorator:
    """Parametrize `path` by the traces that match a pattern. Without any, the test is skipped with the reason."""
    paths = sorted(path for pattern in patterns for path in DATA.glob(pattern))
    skip = pytest.mark.skip(reason=f"no traces in {DATA}; set PROFDECK_TEST_DATA")
    return pytest.mark.parametrize(
        "path", paths or [pytest.param(None, marks=skip)], ids=lambda path: path.name if path else "none"
    )


def named(name: str) -> Path:
    """Return a real trace. Without it, the test is skipped with the reason."""
    if not (DATA / name).exists():
        pytest.skip(f"no {name} in {DATA}; set PROFDECK_TEST_DATA")
    return DATA / name
