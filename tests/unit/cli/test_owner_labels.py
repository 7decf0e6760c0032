"""Table cells of owners and locations in narrow terminals."""

from __future__ import annotations

import pytest

from profdeck_traces.cli.owner_labels import location, owner_columns

DEEP = "benchmarks/jobs/of/the/team/long_training_job.py(1127): train_one_epoch"


@pytest.mark.parametrize("width", range(20, 60))
def test_location_keeps_the_line_and_fits(width: int) -> None:
    text = location(DEEP, width)
    assert len(text) <= width
    assert text.endswith("y:1127)")
    assert "train_one_epoch" in text or width < 31


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        (("operator", "aten::mm", DEEP), ("operator aten::mm", "train_one_epoch (long_training_job.py:1127)")),
        (("python", DEEP, DEEP), ("python", "train_one_epoch (long_training_job.py:1127)")),
        (("between", "net", None), ("outside operators in net", "-")),
        (
            ("wait for rank 0: python", DEEP, None),
            ("wait for rank 0: python train_one_epoch (long_training_job.py:1127)", "-"),
        ),
    ],
)
def test_cells(row: tuple[str, str | None, str | None], cells: tuple[str, str]) -> None:
    assert owner_columns([row], 200, full=False) == [cells]


def test_owner_is_shortened_before_its_location() -> None:
    ((owner, place),) = owner_columns(
        [("operator", "autograd::engine::evaluate_function: AddmmBackward0", DEEP)], 90, full=False
    )
    assert place == "train_one_epoch (long_training_job.py:1127)"
    assert owner.startswith("operator auto")
    assert len(owner) + 2 + len(place) <= 90
