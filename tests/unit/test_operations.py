"""Tests of concurrent operations."""

from __future__ import annotations

import pytest

from profdeck.base.operations import Operation, begin, results


def raising(error: BaseException) -> Operation[None]:
    raise error
    yield  # makes this function a generator


def test_interruption_takes_precedence_over_errors() -> None:
    runs = begin([raising(ValueError("first")), raising(KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt):
        results(runs)


def test_first_error_is_raised() -> None:
    runs = begin([raising(ValueError("first")), raising(ValueError("second"))])
    with pytest.raises(ValueError, match="first"):
        results(runs)
