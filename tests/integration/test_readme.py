"""Executes the examples in the README, the tutorial and the how-to guides. See `pages` for the annotations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import ROOT, Block, Shell, blocks, normalized_lines

pytestmark = pytest.mark.torch

FIRST_PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md"]
PAGES = [*FIRST_PAGES, *sorted((ROOT / "docs" / "how-to").glob("*.md")), ROOT / "docs" / "reference" / "config.md"]

BLOCKS = {page: blocks(page) for page in PAGES}
SKIPPED = [block for page in PAGES for block in BLOCKS[page] if block.skipped]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page in FIRST_PAGES else pytest.mark.slow) for page in PAGES],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_examples_of_the_page_work(page: Path, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    for block in BLOCKS[page]:
        if not block.skipped:
            shell.execute(block)


@pytest.mark.slow
@pytest.mark.parametrize("block", SKIPPED, ids=lambda block: block.location)
def test_skipped_block(block: Block) -> None:
    pytest.skip(block.skipped)


def test_annotations_are_valid() -> None:
    valid = re.compile(r"skip: .+|exit \d+|output varies|")
    for page in PAGES:
        invalid = [block.annotation for block in BLOCKS[page] if not valid.fullmatch(block.annotation)]
        assert invalid == [], page
        assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(BLOCKS[page]), page


def test_only_measured_numbers_may_differ() -> None:
    """Ignoring all numbers let incorrect counts and step numbers go unnoticed."""
    assert normalized_lines("config.yaml: 7 checked") != normalized_lines("config.yaml: 6 checked")
    assert normalized_lines("2 captures, steps 2..5") != normalized_lines("1 capture, steps 2..5")
    measured = (
        "12.7 kB, 286 events, 3 ms, 40%, 2.13.0+cpu",
        "9 kB, 1,118 events, 12.5 ms, 7%, 2.12.1+cu130",
    )
    assert normalized_lines(measured[0]) == normalized_lines(measured[1])
