"""Tests of concurrent operations."""

from __future__ import annotations

import pytest

from profdeck.base.operations import Operation, begin, results


def failing_operation(error: BaseException) -> Operation[None]:
    raise error
    yield  # makes this function a generator


def test_interruption_takes_precedence_over_errors() -> None:
    operations = begin([failing_operation(ValueError("first")), failing_operation(KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt):
        results(operations)


def test_first_error_is_raised() -> None:
    operations = begin([failing_operation(ValueError("first")), failing_operation(ValueError("second"))])
    with pytest.raises(ValueError, match="first"):
        results(operations)
