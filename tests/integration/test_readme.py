"""Executes README, tutorial and how-to pages; `pages` says how blocks are marked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import ROOT, Block, Shell, blocks

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
def test_what_the_page_shows_works(page: Path, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    for block in BLOCKS[page]:
        if not block.skipped:
            shell.execute(block)


@pytest.mark.slow
@pytest.mark.parametrize("block", SKIPPED, ids=lambda block: block.place)
def test_what_cannot_run_here(block: Block) -> None:
    pytest.skip(block.skipped)


def test_marks_are_known() -> None:
    known = re.compile(r"skip: .+|exit \d+|output varies|")
    for page in PAGES:
        wrong = [block.mark for block in BLOCKS[page] if not known.fullmatch(block.mark)]
        assert wrong == [], page
        assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(BLOCKS[page]), page
